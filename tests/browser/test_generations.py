"""The generations of the console of two instances: rebuild, compare, switch, switch back and drop."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import expect

from balance_service.client import Client
from tests.browser.chromium import DESKTOP, PHONE, SCREENSHOTS, viewed
from tests.support.commands import run
from tests.support.service import application, new_instance, on, running, wait_until_spread
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Browser, Locator

    from balance_service.devtools.local.stack import LocalInstance, LocalStack
    from tests.browser.chromium import View

    Pair = tuple[LocalInstance, LocalInstance]

_CUSTOMERS = 300
_SERVES = r"All 2 read models serve; nothing needs you\."
_POINTS = """
from dataclasses import dataclass

from balance_service import Event, ReadModel, Stream


@dataclass
class Earned:
    customerId: str
    points: int


class Points(ReadModel):
    name = "points"
    source = Stream("balance", "FundsAdded")
    key = "customerId"
    state = Earned

    def fold(self, state: Earned | None, event: Event) -> Earned:
        return Earned(event["customerId"], (state.points if state else 0) + {a_point})
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A read model whose code the test may change."""
    file = tmp_path_factory.mktemp("models") / "points.py"
    file.write_text(_POINTS.replace("{a_point}", "1"))
    return file


@pytest.fixture(scope="module")
def settings(module: Path) -> dict[str, str]:
    path = os.pathsep.join([str(module.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    return application(BALANCE_MODELS="balance,points:Points", PYTHONPATH=path)


@pytest.fixture(scope="module")
def pair(stack: LocalStack, settings: dict[str, str]) -> Iterator[Pair]:
    loaded = run(on(stack, settings), "load", "--events", "20000", "--customers", str(_CUSTOMERS), seconds=120)
    assert loaded.code == 0, loaded
    first, second = new_instance(stack, settings), new_instance(stack, settings)
    with running(first, second):
        wait_until_spread((first, second))
        yield first, second


@pytest.fixture
def view(browser: Browser, pair: Pair) -> Iterator[View]:
    """The generations of the balance in the console of the first instance. Nothing else may be reported about it."""
    with viewed(browser, f"{pair[0].url}/#at=generations&generationsModel=balance") as view:
        yield view
        # On a machine that stalls, an instance may not answer for a moment.
        assert view.unexpected(503) == []


def row(view: View, generation: int, model: str = "balance") -> Locator:
    return view.page.locator(f'#generations-table tr[data-key="{model} {generation}"]')


def decide(view: View, name: str, reason: str, *, sure: bool = False) -> Locator:
    """Fills the open dialog and sends it; returns the dialog."""
    dialog = view.page.get_by_role("dialog", name=name)
    do = view.page.locator("#decision-do")
    expect(do).to_be_disabled()
    dialog.get_by_label("Reason, which is stored").fill(reason)
    if sure:
        expect(do).to_be_disabled()
        dialog.get_by_role("checkbox").check()
    do.click()
    return dialog


def test_a_rebuild_is_watched_to_its_switch(view: View, pair: Pair) -> None:
    page = view.page
    expect(row(view, 1)).to_contain_text(re.compile(r"serving.*2 of 2", re.DOTALL))
    expect(page.locator("#generations-table tbody tr")).to_have_count(1)
    view.wait_for_text("needs", _SERVES)
    page.evaluate(
        """() => {
            window.headlines = new Set();
            const keep = () => window.headlines.add(document.getElementById("needs").innerText);
            new MutationObserver(keep).observe(document.getElementById("needs"), {childList: true, subtree: true});
        }"""
    )

    row(view, 1).get_by_role("button", name="Rebuild …").click()
    dialog = page.get_by_role("dialog", name="Rebuild balance")
    expect(dialog).to_contain_text("replays the topic from its beginning")
    dialog.get_by_label("Events per second that each instance replays at most").fill("1000")
    dialog.get_by_label("Reason, which is stored").fill("a test")
    expect(dialog.locator(".command code")).to_have_text(
        "balance-service rebuild balance --switch when-equal --keep-old 86400 --max-rate 1000 --reason 'a test' "
        f"--detach --url {pair[0].url}"
    )
    dialog.get_by_role("button", name="Rebuild", exact=True).click()
    expect(dialog).to_contain_text("Accepted. The instances carry it out")
    dialog.get_by_role("button", name="Close").click()
    # The button that opened the dialog is gone: no second rebuild is possible now.
    expect(page.locator("#generations-title")).to_be_focused()
    expect(row(view, 1).get_by_role("button")).to_have_count(0)

    expect(row(view, 1)).to_contain_text("Last step: rebuild, by 127.0.0.1: a test")
    building = row(view, 2)
    expect(building).to_contain_text("It serves once it has caught up, if all states are equal.")
    expect(building).to_contain_text(re.compile(r"building.* \d+ %, about \d+ s left.*2 of 2.*\d/s", re.DOTALL))
    view.open("Read models")
    expect(page.locator("#models-table")).to_contain_text(re.compile(r"generation 2 building \d+ %, about"))
    view.open("Partitions")
    expect(page.locator("#partitions-table")).to_contain_text("balance.g2_1 building")
    view.open("Generations")
    assert page.evaluate("[...window.headlines].filter((text) => !/All 2 read models serve; no/.test(text))") == []
    view.wait_for_text("needs", r"Generation 2 of balance is being built; generation 1 answers\. Since \d")
    view.keep("generations-building")

    expect(row(view, 2)).to_contain_text("serving")
    expect(row(view, 1)).to_contain_text(re.compile(r"kept.*to be dropped in (23 h 59 min|24 h|1 d)\.", re.DOTALL))
    assert page.evaluate("[...window.headlines].filter((text) => !/All 2 read models serve; no/.test(text))") == []
    # The key box follows the switch.
    view.open("Keys")
    page.locator("#keys-model").select_option("balance")
    page.locator("#key").fill("customer-1")
    page.get_by_role("button", name="Look up").click()
    expect(page.locator("#key-result dd").nth(4)).to_have_text("2")


def test_a_switch_back_and_a_drop_are_done_by_keyboard(view: View, pair: Pair) -> None:
    page, keys = view.page, view.page.keyboard
    with Client(pair[0].url) as client:
        eventually(lambda: client.generations("balance")["action"] == "settle", "the switch is settled")
    view.open("Keys")
    page.locator("#keys-model").select_option("balance")
    page.locator("#key").fill("customer-1")
    page.get_by_role("button", name="Look up").click()
    expect(page.locator("#key-result dd").nth(4)).to_have_text("2")
    page.locator("h1").click()

    view.tab_to('nav [data-panel="generations"]')
    keys.press("Enter")
    view.tab_to('tr[data-key="balance 1"] [data-key="Switch back …"]')
    keys.press("Enter")
    dialog = page.get_by_role("dialog", name="Switch balance to generation 1")
    expect(dialog).to_contain_text("Generation 1 serves from now on. Generation 2 is kept")
    keys.type("it was right")
    view.tab_to("#decision-do")
    keys.press("Enter")
    expect(dialog).to_contain_text("Accepted.")
    keys.press("Enter")
    expect(dialog).to_be_hidden()
    expect(row(view, 1)).to_contain_text("serving")
    expect(row(view, 1)).to_contain_text("Last step: settle, by the service")
    # The box shows the generation that answers now.
    view.open("Keys")
    expect(page.locator("#key-result dd").nth(4)).to_have_text("1")
    view.open("Generations")

    view.tab_to('tr[data-key="balance 2"] [data-key="Drop …"]')
    keys.press("Enter")
    dialog = page.get_by_role("dialog", name="Drop generation 2 of balance")
    expect(dialog).to_contain_text("There is no way to switch back to it afterwards.")
    keys.type("no way back is needed")
    view.tab_to("#decision-sure")
    keys.press("Space")
    view.tab_to("#decision-do")
    keys.press("Enter")
    expect(dialog).to_contain_text("Accepted.")
    keys.press("Enter")
    expect(row(view, 2)).to_have_count(0)
    expect(row(view, 1)).to_contain_text("Last step: drop, by 127.0.0.1: no way back is needed")
    expect(row(view, 1).get_by_role("button")).to_have_text("Rebuild …")


def test_a_refusal_is_shown_in_the_words_of_the_api(browser: Browser, pair: Pair) -> None:
    with (
        viewed(browser, f"{pair[0].url}/#at=generations&generationsModel=balance") as view,
        Client(pair[1].url) as other,
    ):
        page = view.page
        row(view, 1).get_by_role("button", name="Rebuild …").click()
        dialog = page.get_by_role("dialog", name="Rebuild balance")
        expect(dialog).to_be_visible()
        begun = other.rebuild("balance", switch="never", reason="another operator was faster")
        new = begun["generations"][-1]["generation"]
        decide(view, "Rebuild balance", "too late")
        expect(dialog.get_by_role("alert")).to_have_text(
            f"Generation {new} of 'balance' is being built: wait for it, or drop it first."
        )
        dialog.get_by_role("button", name="Close").click()

        # It waits for an operator: the first line says so.
        view.wait_for_text("needs", f"Generation {new} of balance is ready and needs you")
        counted = re.compile(rf"Keys equal\s+{_CUSTOMERS}\s+Different\s+0\s")
        expect(row(view, new)).to_contain_text(counted, use_inner_text=True)
        row(view, new).get_by_role("button", name="Drop …").click()
        dialog = decide(view, f"Drop generation {new} of balance", "it is not needed", sure=True)
        expect(dialog).to_contain_text("Accepted.")
        expect(row(view, new)).to_have_count(0)
        view.wait_for_text("needs", _SERVES)
        assert view.unexpected(409, 503) == []


def test_the_page_asks_for_generations_only_while_they_are_seen(browser: Browser, pair: Pair) -> None:
    with viewed(browser, pair[0].url) as view:
        page = view.page
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url) if "generations" in request.url else None)
        page.wait_for_timeout(12_000)
        assert asked == []

        view.open("Generations")
        expect(row(view, 1, "points")).to_contain_text("2 of 2")
        assert sorted(url.split("/")[-2] for url in asked) == ["balance", "points"]

        page.get_by_role("button", name="Pause").click()
        view.wait_for_text("state", "paused")
        del asked[:]
        page.wait_for_timeout(12_000)
        assert asked == []
        expect(page.locator("#generations-table")).to_contain_text(re.compile(r"points: As of \d+ s ago"))
        assert view.unexpected(503) == []


def test_the_differences_of_a_corrected_fold_are_shown_and_confirmed_before_the_switch(
    browser: Browser, module: Path, pair: Pair
) -> None:
    for instance in pair:
        instance.stop()
    module.write_text(_POINTS.replace("{a_point}", "10"))
    for instance in pair:
        instance.launch()
    for instance in pair:
        instance.wait_ready()
    wait_until_spread(pair)
    with Client(pair[1].url) as client:
        client.rebuild("points", switch="when_equal", reason="a point counts ten")
    url = f"{pair[0].url}/#at=generations&generationsModel=points"
    with viewed(browser, url) as view:
        page = view.page
        view.wait_for_text("needs", "Generation 2 of points is ready and needs you")
        counted = re.compile(rf"Keys equal\s+0\s+Different\s+{_CUSTOMERS}\s")
        expect(row(view, 2, "points")).to_contain_text(counted, use_inner_text=True)
        row(view, 2, "points").get_by_role("button", name="Show the first differences").click()
        shown = page.locator("#differences")
        expect(shown.locator("tbody tr").first).to_contain_text('"points"')
        expect(shown.locator(".command code")).to_have_text(f"curl -i {pair[0].url}/api/models/points/differences")
        for line in shown.locator("tbody tr").all():
            key, before, after = line.locator("th, td").all_inner_texts()
            earned = [int(re.findall(r'"points": (\d+)', text)[0]) for text in (before, after)]
            assert (earned[1], key.startswith("customer-")) == (10 * earned[0], True)

        # They are in the page's address.
        page.reload()
        expect(shown.locator("tbody tr").first).to_contain_text('"points"')
        assert view.unexpected(503) == []

    for width, dark in ((PHONE, True), (PHONE, False), (768, False), (DESKTOP, False), (DESKTOP, True)):
        with viewed(browser, f"{url}&differences=points", width=width, dark=dark) as view:
            page = view.page
            expect(page.locator("#differences tbody tr").first).to_contain_text('"points"')
            name = f"{width}-{'dark' if dark else 'light'}"
            view.keep(f"generations-{name}")
            assert view.accessibility_findings() == []
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            row(view, 2, "points").get_by_role("button", name="Switch …").click()
            expect(page.get_by_role("dialog")).to_contain_text("I have looked at the differences")
            page.screenshot(path=SCREENSHOTS / f"switch-{name}.png")
            assert view.accessibility_findings() == []
            assert view.unexpected(503) == []

    with viewed(browser, url) as view:
        row(view, 2, "points").get_by_role("button", name="Switch …").click()
        dialog = decide(view, "Switch points to generation 2", "ten is right", sure=True)
        expect(dialog).to_contain_text("Accepted.")
        expect(row(view, 2, "points")).to_contain_text("serving")
        expect(row(view, 1, "points")).to_contain_text("kept")
        expect(view.page.locator("#differences")).to_be_empty()
        assert view.unexpected(503) == []


def test_a_read_model_is_judged_by_the_generation_that_serves_and_by_its_earlier_stages(view: View) -> None:
    usual = {"role": "active", "epoch": 1, "position": 5, "lagSeconds": 0, "lagSecondsIsLeast": False, "partition": 0}
    usual |= {"state": "RUNNING", "reason": "", "deadLetters": [], "restored": 0, "toRestore": 0, "secondsLeft": None}

    def judged(statuses: dict[str, str], lags: dict[str, int], told: list[str]) -> dict[str, list[Any]]:
        """How the page shows generations, of the lags of stages, and of a cause of some tasks."""
        kept = {"source": "t", "partitions": 1, "standbyReplicas": 0, "model": "m"}
        tasks = [
            {**usual, "task": f"{stage}_0", "readModel": "m" if stage == "m-by-x" else stage, "lag": lag}
            for stage, lag in lags.items()
        ]
        cause = {"kind": "halted", "urgency": "now", "what": "it is halted", "tasks": told}
        status = {
            "applicationServer": "b:1",
            "causes": [cause] if told else [],
            "partitions": 1,
            "models": [{"name": name, "status": status, **kept} for name, status in statuses.items()],
            "tasks": tasks,
            "unhosted": [],
            "applicationServers": [
                {"applicationServer": "b:1", "suspect": False, "shared": False, "models": [*statuses], "tasks": []}
            ],
        }
        judge = """async (status) => {
            const {modelsOf} = await import('/console/judge.js');
            const [model] = modelsOf(status);
            const others = model.others.map(({stage, status, part}) => [stage, status, part]);
            return {model: [model.name, model.stage, model.lag, model.verdict.word], others};
        }"""
        found: dict[str, list[Any]] = view.page.evaluate(judge, status)
        return found

    assert judged({"m": "serving", "m.g2": "building"}, {"m": 1, "m.g2": 15}, ["m.g2_0"]) == {
        "model": ["m", "m", 1, "serves"],
        "others": [["m.g2", "building", 0.25]],
    }
    assert judged({"m": "kept", "m.g2": "serving"}, {"m": 0, "m.g2": 5}, ["m.g2_0"]) == {
        "model": ["m", "m.g2", 5, "halted"],
        "others": [["m", "kept", 1]],
    }
    # An earlier stage names the read model, whose first generation is gone.
    assert judged({"m.g2": "serving"}, {"m.g2": 5, "m-by-x": 2}, []) == {
        "model": ["m", "m.g2", 7, "serves"],
        "others": [],
    }
