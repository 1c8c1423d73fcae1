"""Causes in the console: their urgency, the read models that they concern, and what follows from them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import expect

if TYPE_CHECKING:
    from collections.abc import Sequence

    from balance_service.devtools.local.stack import LocalInstance
    from tests.browser.chromium import View

    Pair = tuple[LocalInstance, LocalInstance]


def judged(
    view: View, causes: Sequence[dict[str, object]], *, partitions: int = 3, answers: bool = True
) -> dict[str, Any]:
    """How the page shows the causes that an instance tells about its only read model, whose partitions it owns."""
    figures = {"position": 5, "lag": 0, "lagSeconds": 0, "lagSecondsIsLeast": False, "reason": "", "deadLetters": []}
    of_each = {"readModel": "m", "role": "active", "epoch": 1, "restored": 0, "toRestore": 0}
    of_each |= {"state": "RUNNING", "answers": answers}
    tasks = [{**of_each, **figures, "task": f"m_{n}", "partition": n, "secondsLeft": None} for n in range(partitions)]
    server = {"applicationServer": "b:1", "suspect": True, "shared": False, "models": ["m"], "tasks": []}
    status = {
        "applicationServer": "b:1",
        "causes": [
            {"since": None, "action": "", "heals": False, "section": "", "servers": [], "follows": [], **one}
            for one in causes
        ],
        "partitions": partitions,
        "models": [{"name": "m", "model": "m", "status": "serving", "partitions": partitions, "standbyReplicas": 0}],
        "tasks": tasks,
        "unhosted": [],
        "applicationServers": [server],
    }
    judge = """async (status) => {
        const {modelsOf, troubleOf} = await import('/console/judge.js');
        const {needsOf} = await import('/console/causes.js');
        const [{verdict}] = modelsOf(status);
        const {kind, text} = needsOf(status);
        const {kind: of, word, partitions} = verdict;
        const troubles = ["1:7", "9:7", ""].map((at) => troubleOf(status, "m", at));
        return {verdict: [of, word, partitions], needs: [kind, text], troubles};
    }"""
    found: dict[str, Any] = view.page.evaluate(judge, status)
    return found


@pytest.mark.parametrize(
    ("causes", "verdict", "needs"),
    [
        ([], ["ok", "serves", []], ["ok", "The read model serves; nothing needs you."]),
        (
            [{"kind": "unowned", "urgency": "none", "what": "it moves", "tasks": ["m_1"]}],
            ["info", "no owner", [1]],
            ["ok", "The read model serves; nothing needs you."],
        ),
        (
            [{"kind": "behind", "urgency": "soon", "what": "it lags", "tasks": ["m_0", "m_2"]}],
            ["warn", "behind", [0, 2]],
            ["warn", "The read model serves, but:"],
        ),
        (
            [
                {"kind": "stands-still", "urgency": "now", "what": "it stands still", "tasks": ["m_1"]},
                {"kind": "letters", "urgency": "soon", "what": "3 dead letters need you", "tasks": []},
            ],
            ["bad", "stands still", [1]],
            ["bad", "The read model serves, but:"],
        ),
        (
            [{"kind": "broker", "urgency": "now", "what": "it is away", "tasks": ["m_0", "m_1", "m_2"]}],
            ["bad", "no broker", [0, 1, 2]],
            ["bad", "0 of 1 read model serves:"],
        ),
    ],
)
def test_a_read_model_is_as_bad_as_the_worst_cause_of_its_partitions(
    view: View, causes: Sequence[dict[str, object]], verdict: Sequence[object], needs: Sequence[str]
) -> None:
    is_away = bool(causes) and causes[0]["kind"] == "broker"
    found = judged(view, causes, answers=not is_away)

    assert (found["verdict"], found["needs"]) == (verdict, needs)
    assert found["troubles"] == ["it is away." if is_away else "", "", ""]


def test_a_read_model_serves_without_a_broker_as_long_as_its_owners_answer(view: View) -> None:
    away: dict[str, object] = {"kind": "broker", "urgency": "now", "what": "it is away", "tasks": ["m_0"]}

    assert judged(view, [away], partitions=1)["needs"] == ["bad", "The read model serves, but:"]


def test_a_cause_at_one_instance_leads_to_that_instance(view: View) -> None:
    page = view.page
    show = """async () => {
        const {live} = await import('/console/live.js');
        const {showCauses} = await import('/console/causes.js');
        const what = {kind: "halted", urgency: "now", what: "m_0 is halted", since: null, action: "Correct it",
            heals: false, section: "", tasks: ["m_0"], servers: ["b:1"], follows: []};
        live.status = {...live.status, causes: [what]};
        showCauses();
    }"""
    page.get_by_role("button", name="Pause").click()
    page.evaluate(show)

    link = page.locator("#needs .causes a", has_text="Show")
    expect(link).to_have_attribute("href", re.compile(r"at=instances&instance=b%3A1"))


def test_a_connection_that_is_lost_is_red_once_that_lasts(view: View) -> None:
    kind = """async (seconds) => {
        const {live} = await import('/console/live.js');
        const {showCauses} = await import('/console/causes.js');
        Object.assign(live, {state: "lost", problem: "", lostAt: new Date(Date.now() - seconds * 1000)});
        showCauses();
        return document.getElementById("icon").getAttribute("href");
    }"""
    view.page.get_by_role("button", name="Pause").click()

    icons = [view.page.evaluate(kind, seconds) for seconds in (2, 11)]

    assert icons == ["console/icon-soon.svg", "console/icon-now.svg"]


@pytest.mark.parametrize(
    ("state", "said"), [("connecting", "Asking this instance for its status"), ("refused", "Give a token")]
)
def test_an_old_status_is_not_shown_as_that_of_now(view: View, state: str, said: str) -> None:
    show = """async (state) => {
        const {live} = await import('/console/live.js');
        const {showCauses} = await import('/console/causes.js');
        const what = {kind: "broker", urgency: "now", what: "Kafka does not answer", since: null, action: "Restore it",
            heals: false, section: "", tasks: [], servers: [], follows: []};
        Object.assign(live, {state, problem: "", status: {...live.status, causes: [what]}});
        showCauses();
        return [document.getElementById("icon").getAttribute("href"), document.getElementById("needs").innerText];
    }"""
    view.page.get_by_role("button", name="Pause").click()

    icon, text = view.page.evaluate(show, state)

    assert icon == "console/icon.svg"
    assert text.startswith(said)
    assert "As last heard: " in text


def test_what_follows_from_a_cause_is_folded_away_and_stays_open_once_it_is_opened(view: View, pair: Pair) -> None:
    page = view.page
    show = """async () => {
        const {live} = await import('/console/live.js');
        const {showCauses} = await import('/console/causes.js');
        const what = {kind: "broker", urgency: "now", what: "Kafka does not answer", since: null, action: "Restore it",
            heals: false, section: "BalanceNotReady", tasks: [], servers: [], follows: ["one", "other"]};
        live.status = {...live.status, causes: [what]};
        showCauses();
        live.status = structuredClone(live.status);
    }"""
    page.get_by_role("button", name="Pause").click()
    page.evaluate(show)
    item = page.locator("#needs .causes > li")
    expect(item).to_have_count(1)
    expect(item).to_contain_text("Kafka does not answer. Restore it.")
    expect(item.get_by_text("other")).to_be_hidden()

    item.get_by_text("2 things follow from it").click()
    page.wait_for_timeout(1500)
    expect(item.get_by_text("other")).to_be_visible()
    assert page.title().startswith("■ 1 ")
    expect(page.locator("#icon")).to_have_attribute("href", "console/icon-now.svg")
