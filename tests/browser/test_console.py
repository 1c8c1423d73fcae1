"""The console of two instances: what it shows, what can be done with it, and a kill and a rebuild while it is open."""

from __future__ import annotations

import re
import socket
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import expect

from balance_service.devtools.local.processes import HOST
from tests.browser.chromium import DESKTOP, PHONE, SCREENSHOTS, viewed
from tests.e2e.dead_letters import PoisonWriter, customer_in, decide, letter, wait_for
from tests.support.commands import run
from tests.support.service import (
    add,
    address,
    amount_of,
    application,
    ask_again,
    new_instance,
    on,
    owned,
    running,
    wait_until_spread,
    warm_up,
)
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from playwright.sync_api import Browser, Page

    from balance_service.devtools.local.processes import Server
    from balance_service.devtools.local.stack import LocalInstance, LocalStack
    from tests.browser.chromium import View

    Pair = tuple[LocalInstance, LocalInstance]

LOTS = "9007199254740993.01"
"""An amount that a binary float cannot hold."""
RETRIES_SECONDS = 5.0
"""Within this time, a page without an answer asks again."""
SERVES = r"^\W*All 2 read models serve"


@pytest.fixture(scope="module")
def settings() -> dict[str, str]:
    return application(BALANCE_MODELS="balance,activity", BALANCE_NUM_STANDBY_REPLICAS="1")


@pytest.fixture(scope="module")
def pair(stack: LocalStack, settings: dict[str, str]) -> Iterator[Pair]:
    first, second = new_instance(stack, settings), new_instance(stack, settings)
    with running(first, second):
        wait_until_spread((first, second))
        warm_up(first.url)
        yield first, second


@pytest.fixture(scope="module")
def poison(stack: LocalStack, settings: dict[str, str], pair: Pair) -> Iterator[PoisonWriter]:
    with PoisonWriter(stack, settings) as writer:
        yield writer


@pytest.fixture
def view(browser: Browser, pair: Pair) -> Iterator[View]:
    """The console of the first instance. Nothing may be reported about it."""
    with viewed(browser, pair[0].url) as view:
        yield view
        # On a machine that stalls, an instance may not answer for a moment.
        assert view.unexpected(503) == []


def test_each_tab_shows_one_panel_and_is_in_the_address(view: View) -> None:
    page = view.page
    expect(page.locator("main > section:visible")).to_have_count(1)
    for link in page.locator("nav a").all():
        link.click()
        panel = link.get_attribute("data-panel")
        expect(page.locator("main > section:visible")).to_have_attribute("id", str(panel))
        expect(link).to_have_attribute("aria-current", "page")
        expect(page.locator(f"#{panel}-title")).to_be_focused()
        assert f"at={panel}" in page.url
    page.reload()
    expect(page.locator("main > section:visible")).to_have_attribute("id", "flow")


def test_each_partition_shows_its_owner_and_its_standby(view: View, pair: Pair) -> None:
    view.open("Partitions")
    table = view.page.locator("#partitions-table")
    expect(table.locator("tbody tr")).to_have_count(4)
    for row in table.locator("tbody tr").all():
        expect(row).to_contain_text(re.compile("owner RUNNING"))
        expect(row).to_contain_text(re.compile("standby TAILING"))
    for instance in pair:
        expect(table.locator("thead")).to_contain_text(address(instance))


def look_up(page: Page, customer: str) -> None:
    page.locator("nav").get_by_role("link", name="Keys", exact=True).click()
    page.locator("#keys-model").select_option("balance")
    page.locator("#key").fill(customer)
    page.get_by_role("button", name="Look up").click()


@pytest.mark.parametrize("partition", [0, 1])
def test_a_key_is_shown_digit_for_digit_and_follows_its_changes(view: View, pair: Pair, partition: int) -> None:
    customer = customer_in(partition)
    ask_again(pair[0].url, customer, add(pair[0].url, customer, LOTS))

    look_up(view.page, customer)
    result = view.page.locator("#key-result")
    expect(result).to_contain_text(LOTS)
    expect(result).to_contain_text("live")
    expect(result.locator("dd").nth(2)).to_have_text("active")
    expect(result.locator("dd").nth(4)).to_have_text("1")

    position = add(pair[1].url, customer, "0.01")
    expect(result).to_contain_text("9007199254740993.02")
    expect(result.locator("dd").first).to_have_text(position)


def test_the_choice_of_another_read_model_removes_the_key_that_was_shown(view: View, pair: Pair) -> None:
    customer = customer_in(0)
    ask_again(pair[0].url, customer, add(pair[0].url, customer, "1.00"))
    look_up(view.page, customer)
    expect(view.page.locator("#key-result")).to_contain_text("live")

    view.page.locator("#keys-model").select_option("activity")

    # The page is drawn again each second.
    view.page.wait_for_timeout(2500)
    expect(view.page.locator("#key-result")).to_be_empty()


def test_the_commands_shown_with_a_key_do_the_same(view: View, pair: Pair, settings: dict[str, str]) -> None:
    customer = customer_in(0)
    ask_again(pair[0].url, customer, add(pair[0].url, customer, "7.00"))

    look_up(view.page, customer)
    commands = view.page.locator("#key-result .command code")
    expect(commands.first).to_have_text(f"curl -i {pair[0].url}/api/models/balance/keys/{customer}")
    program, *arguments = commands.nth(1).inner_text().split()

    done = run(settings, *arguments)
    assert (program, done.code) == ("balance-service", 0)
    assert done.stdout.startswith("7.00 ")


def test_a_key_without_a_state_is_no_error(browser: Browser, pair: Pair) -> None:
    with viewed(browser, pair[0].url) as view:
        look_up(view.page, "a-new-customer")
        expect(view.page.locator("#key-result")).to_contain_text("a-new-customer has no state.")
        assert view.unexpected(404) == []


def test_keys_are_listed_by_prefix_and_by_greatest_value(view: View, pair: Pair) -> None:
    for name, amount in (("zz-a", "1.00"), ("zz-b", "99999999999999.99"), ("zy", "2.00")):
        ask_again(pair[0].url, name, add(pair[0].url, name, amount))

    view.open("Keys")
    view.page.locator("#keys-model").select_option("balance")
    view.page.locator("#range-form input[name=prefix]").fill("zz-")
    view.page.get_by_role("button", name="List", exact=True).click()
    entries = view.page.locator("#entries tbody tr")
    expect(entries).to_have_count(2)
    expect(entries.nth(1)).to_contain_text("99999999999999.99")

    view.page.get_by_role("button", name="List the greatest").click()
    expect(entries.first).to_contain_text(re.compile(r"\d{14,}\.\d\d"))
    expect(view.page.locator("#entries .command").first).to_contain_text("top?by=amount")


def test_added_funds_become_visible_and_count_once(view: View, pair: Pair) -> None:
    customer = customer_in(1)
    view.open("Keys")
    form = view.page.locator("#funds-form")
    form.locator("[name=customerId]").fill(customer)
    form.locator("[name=amount]").fill("12.34")
    outcome, key = view.page.locator("#funds-outcome"), form.locator("[name=idempotencyKey]")

    def add(amount: str) -> None:
        form.get_by_role("button", name="Add").click()
        expect(outcome).to_contain_text("does not count twice")
        expect(outcome).to_contain_text(re.compile(rf"shows it after [\d.]+ m?s: the amount is {re.escape(amount)}\."))

    first = key.input_value()
    add("12.34")
    expect(key).not_to_have_value(first)
    # Another addition has another key, whether or not its amount differs.
    add("24.68")
    form.locator("[name=amount]").fill("5.00")
    add("29.68")
    # The first one again.
    form.locator("[name=amount]").fill("12.34")
    key.fill(first)
    add("29.68")
    assert str(amount_of(ask_again(pair[1].url, customer))) == "29.68"


@pytest.fixture
def garbage(pair: Pair, poison: PoisonWriter) -> list[str]:
    """Four dead letters that can only be discarded, for each read model."""
    ids = [poison.put(customer_in(n % 2), b"garbage %d" % n, headers=[("source", b"till-7")]) for n in range(4)]
    ids += [one.replace("balance/", "activity/") for one in ids]
    for one in ids:
        letter(pair[0], one)
    return ids


def show_letters(page: Page, *, cause: str) -> None:
    page.locator("nav").get_by_role("link", name="Dead letters", exact=True).click()
    page.locator("#letters-model").select_option("balance")
    page.locator("#letters-cause").select_option(cause)


def test_dead_letters_are_discarded_after_a_preview_a_reason_and_a_confirmation(
    view: View, pair: Pair, garbage: list[str]
) -> None:
    page = view.page
    view.wait_for_text("needs", "8 dead letters need you")
    show_letters(page, cause="magic-byte-unknown")
    expect(page.locator("#letters-list tbody tr")).to_have_count(4)

    page.get_by_role("button", name=garbage[0], exact=True).click()
    shown = page.locator("#letter")
    expect(shown).to_contain_text("garbage 0")
    expect(shown).to_contain_text("till-7")
    expect(shown).to_contain_text("What to do: The record has fewer than 5 bytes, or does not begin with 0.")
    expect(shown).to_contain_text("Redrive is refused. Discard it and produce a correct event.")
    expect(shown).to_contain_text(re.compile(r"Record's time\s*\d+ s ago|Record's time\s*[\d.]+ (s|min)"))
    # What would be refused is not offered.
    expect(shown.get_by_role("button", name="Redrive …")).to_have_count(0)
    expect(page.get_by_role("button", name="Redrive all that match …")).to_be_hidden()
    expect(shown.locator("pre.bytes")).to_contain_text("67 61 72 62 61 67 65 20 30")

    page.get_by_role("button", name="Discard all that match …").click()
    dialog = page.get_by_role("dialog", name="Discard dead letters")
    expect(dialog).to_contain_text("4 dead letters that match. Records will never be applied")
    expect(dialog).to_contain_text("balance: magic-byte-unknown, waiting: 4")
    do = dialog.get_by_role("button", name="Discard 4 dead letters")
    expect(do).to_be_disabled()
    dialog.get_by_label("Reason, which is stored").fill("a broken till")
    expect(do).to_be_disabled()
    dialog.get_by_label("I know that discarded records").check()
    expect(dialog.locator(".command code")).to_have_text(
        "balance-service dead-letters discard --model balance --cause magic-byte-unknown "
        f"--reason 'a broken till' --url {pair[0].url}"
    )
    do.click()
    expect(dialog).to_contain_text("4 discarded.")
    dialog.get_by_role("button", name="Close").click()
    wait_for(pair[0], "discarded", *garbage[:4])
    view.wait_for_text("needs", "4 dead letters need you")
    expect(page.locator("#letters-list tbody tr").first).to_contain_text("discarded")


@pytest.mark.parametrize(
    ("verb", "listed", "more", "is_offered"),
    [
        ("redrive", [("a", "waiting", "never")], [("a", "waiting")], False),
        ("redrive", [("a", "waiting", "never")], [("a", "waiting"), ("b", "waiting")], True),
        ("redrive", [("a", "waiting", "never")], [("b", "behind")], False),
        ("redrive", [("a", "waiting", "never"), ("b", "parked", "")], [], True),
        ("redrive", [("b", "applied", "it is applied already")], [("b", "parked")], True),
        ("discard", [("a", "waiting", "never")], [], True),
        ("discard", [("a", "discarded", "it is discarded already")], [("a", "behind")], True),
        ("discard", [("a", "discarded", "it is discarded already")], [], False),
    ],
)
def test_what_would_be_refused_is_not_offered_for_those_beyond_the_list_either(
    view: View, verb: str, listed: list[tuple[str, str, str]], more: list[tuple[str, str]], *, is_offered: bool
) -> None:
    given = [
        verb,
        [dict(zip(("cause", "status", "redriveRefused"), one, strict=True)) for one in listed],
        [dict(zip(("cause", "status"), one, strict=True)) for one in more],
    ]
    offered = "async (given) => (await import('/console/decide.js')).isOffered(...given)"

    assert view.page.evaluate(offered, given) is is_offered


def test_dead_letters_that_can_be_applied_are_redriven(view: View, pair: Pair, poison: PoisonWriter) -> None:
    customer, schema_id = customer_in(0), poison.unknown_id()
    unknown = poison.put_unknown(schema_id, customer, "5.00")
    letter(pair[0], unknown)
    show_letters(view.page, cause="schema-id-unknown")
    row = view.page.locator("#letters-list tbody tr").filter(has_text=unknown)
    expect(row).to_contain_text("scheduled")
    expect(view.page.locator("#causes tr").filter(has_text="schema-id-unknown").first).to_contain_text("1")

    poison.make_known(schema_id)
    row.get_by_role("checkbox").check()
    view.page.get_by_role("button", name="Redrive selected …").click()
    dialog = view.page.get_by_role("dialog", name="Redrive dead letters")
    expect(dialog).to_contain_text("1 dead letter. Records are applied again")
    dialog.get_by_label("Reason, which is stored").fill("the schema is registered")
    dialog.get_by_role("button", name="Redrive 1 dead letter").click()
    expect(dialog).to_contain_text("1 tried again")
    dialog.get_by_role("button", name="Close").click()
    expect(row).to_contain_text("applied")
    assert str(amount_of(ask_again(pair[0].url, customer))) == "5.00"


def test_what_is_chosen_survives_a_reload(view: View, pair: Pair) -> None:
    page = view.page
    ask_again(pair[0].url, "reloaded", add(pair[0].url, "reloaded", "3.00"))
    view.open("Partitions")
    page.locator("#partitions-model").select_option("activity")
    view.open("Dead letters")
    page.locator("#letters-status").select_option("parked")
    look_up(page, "reloaded")
    expect(page.locator("#key-result")).to_contain_text("3.00")

    page.reload()
    view.wait_for_text("state", "live")
    expect(page.locator("#keys")).to_be_visible()
    expect(page.locator("#key-result")).to_contain_text("3.00")
    view.open("Partitions")
    expect(page.locator("#partitions-model")).to_have_value("activity")
    view.open("Dead letters")
    expect(page.locator("#letters-status")).to_have_value("parked")


def test_the_page_keeps_focus_and_text_while_it_refreshes(view: View, pair: Pair) -> None:
    page = view.page
    link = page.locator("#models-table a").first
    link.focus()
    page.evaluate("window.focused = document.activeElement")
    add(pair[0].url, "refreshing", "1.00")
    page.locator("#range-form input[name=from]").evaluate("(field) => field.value = 'half a word'")
    expect(page.locator("#charts-title")).to_be_attached()
    page.wait_for_timeout(2500)
    assert page.evaluate("document.activeElement === window.focused")
    expect(page.locator("#range-form input[name=from]")).to_have_value("half a word")


def test_a_paused_page_changes_nothing_and_says_so(view: View, pair: Pair) -> None:
    page = view.page
    view.open("Partitions")
    page.get_by_role("button", name="Pause").click()
    view.wait_for_text("state", "paused; as of")
    before = view.text("#partitions-table")
    for _ in range(3):
        add(pair[0].url, "paused", "1.00")
    page.wait_for_timeout(2500)
    assert view.text("#partitions-table") == before

    page.get_by_role("button", name="Resume").click()
    view.wait_for_text("state", "live")
    eventually(lambda: view.text("#partitions-table") != before, "the page goes on")


def test_the_runbook_is_read_in_the_page(view: View, garbage: list[str]) -> None:
    view.wait_for_text("needs", "dead letters need you")
    view.page.locator("#needs a.runbook").first.click()
    dialog = view.page.get_by_role("dialog", name="BalanceDeadLettersWaiting")
    expect(dialog).to_contain_text("Dead letters have waited for a decision for an hour.")
    expect(dialog.get_by_role("list")).to_contain_text("Act by cause")
    view.page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()


def test_charts_and_the_flow_are_drawn(view: View, pair: Pair) -> None:
    page = view.page
    view.open("Charts")
    figures = page.locator("#charts figure")
    expect(figures).to_have_count(4)
    customers = [customer_in(partition) for partition in (0, 1)]

    def are_measured() -> bool:
        for customer in customers:
            ask_again(pair[0].url, customer, add(pair[0].url, customer, "1.00"))
        now = [figures.filter(has_text=title).locator(".now").inner_text() for title in ("Commit", "Query")]
        return all(re.match(r"p50 [\d.]+ m?s · p99 [\d.]+ m?s", text) for text in now)

    eventually(are_measured, "commits and queries are measured")
    expect(figures.first.locator("path").first).to_have_attribute("d", re.compile("L"))
    view.open("Flow")
    drawing = page.get_by_role("img", name="Flow of balance")
    expect(drawing.locator(".node")).to_have_count(3)


def test_everything_can_be_done_by_keyboard(view: View, pair: Pair, garbage: list[str]) -> None:
    page = view.page
    ask_again(pair[0].url, "typed", add(pair[0].url, "typed", "4.00"))
    page.wait_for_timeout(1500)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    expect(page.locator("#overview-title")).to_be_focused()

    view.tab_to('nav [data-panel="keys"]', back=True)
    page.keyboard.press("Enter")
    view.tab_to("#keys-model")
    page.keyboard.type("balance")
    view.tab_to("#key")
    page.keyboard.type("typed")
    page.keyboard.press("Enter")
    expect(page.locator("#key-result")).to_contain_text("4.00")

    view.tab_to('nav [data-panel="letters"]', back=True)
    page.keyboard.press("Enter")
    view.tab_to("#letters-list input[type=checkbox]")
    page.keyboard.press("Space")
    view.tab_to("#discard-selected")
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name="Discard dead letters")
    expect(dialog).to_contain_text("1 dead letter")
    page.keyboard.type("by keyboard")
    view.tab_to("#decision-sure")
    page.keyboard.press("Space")
    view.tab_to("#decision-do")
    page.keyboard.press("Enter")
    expect(dialog).to_contain_text("1 discarded.")
    page.keyboard.press("Enter")
    expect(dialog).to_be_hidden()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, 768, DESKTOP])
def test_the_page_is_accessible_and_fits(
    browser: Browser, pair: Pair, garbage: list[str], width: int, *, dark: bool
) -> None:
    ask_again(pair[0].url, "alice", add(pair[0].url, "alice", "12.64"))
    url = f"{pair[0].url}/#keyModel=balance&key=alice&list=entries&limit=5&letter={garbage[0]}"
    filled: dict[str, tuple[str, str | re.Pattern[str]]] = {
        "Keys": ("#key-result", "Position"),
        "Dead letters": ("#letter", "garbage"),
        "Instances": ("#instances", "Version"),
    }
    filled |= {
        "History": ("#history-list", re.compile("Time|Nothing")),
        "Flow": ("#flow-drawing", "balance-service flow"),
    }
    with viewed(browser, url, width=width, dark=dark) as view:
        page = view.page
        for panel in page.locator("nav a").all_inner_texts():
            view.open(panel)
            if panel in filled:
                element, content = filled[panel]
                expect(page.locator(element)).to_contain_text(content)
            view.keep(f"console-{panel.lower().replace(' ', '-')}-{width}-{'dark' if dark else 'light'}")
            assert view.accessibility_findings() == [], panel
            assert page.evaluate("document.documentElement.scrollWidth") <= width, panel

        view.open("Dead letters")
        page.get_by_role("button", name="Discard all that match …").click()
        dialog = page.get_by_role("dialog", name="Discard dead letters")
        expect(dialog).to_contain_text("that match")
        page.screenshot(path=SCREENSHOTS / f"discard-{width}-{'dark' if dark else 'light'}.png")
        assert view.accessibility_findings() == []
        # An instance of a busy machine may not answer in time.
        assert view.unexpected(503) == []


def judged(
    view: View, causes: Sequence[dict[str, object]], *, partitions: int = 3, answers: bool = True
) -> dict[str, Any]:
    """What the page makes of the causes that an instance tells about its only read model, whose partitions it owns."""
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


def test_only_the_panel_that_is_open_asks_for_keys_and_dead_letters(browser: Browser, pair: Pair) -> None:
    url = f"{pair[0].url}/#keyModel=balance&key=alice&list=entries&letter=balance/0:1"
    asked: list[str] = []
    with viewed(browser, url) as view:
        view.page.on("request", lambda request: asked.append(request.url))
        view.page.reload()
        view.wait_for_text("needs", "serve")
        # The list of read models, which the keys wait for, comes within it.
        view.page.wait_for_timeout(3000)
        assert [one for one in asked if re.search("/keys/|/entries|deadLetters", one)] == []

        view.open("Keys")
        expect(view.page.locator("#key-result")).to_contain_text("Position")
        expect(view.page.locator("#entries")).to_contain_text("keys")
        assert view.unexpected(404, 503) == []


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


def test_the_page_of_each_instance_shows_its_process_its_settings_and_its_log(view: View, pair: Pair) -> None:
    page, other = view.page, address(pair[1])
    view.open("Instances")
    details = page.locator("#instance-details")
    expect(details).to_contain_text("Version")
    expect(details).to_contain_text(re.compile(r"Python \d+ %, Spark \d+ % of a core"))
    expect(details).to_contain_text(re.compile(r"Python [\d.]+ [MG]iB, Spark [\d.]+ [MG]iB"))
    expect(details).to_contain_text("BALANCE_APPLICATION_ID")

    page.locator("#instances-table").get_by_role("button", name=other).click()
    expect(details.get_by_role("link", name=other)).to_be_visible()
    expect(details).to_contain_text(f"BALANCE_APPLICATION_SERVER{other}", use_inner_text=False)
    assert f"instance={other.replace(':', '%3A')}" in page.url


def test_the_history_shows_who_decided_what_and_why(view: View, pair: Pair, garbage: list[str]) -> None:
    answered = decide(pair[0], "discard", garbage[0], reason="a broken till of the history")
    assert answered.status_code == 202

    view.open("History")
    row = view.page.locator("#history-list tbody tr").filter(has_text=garbage[0])
    expect(row).to_contain_text("a broken till of the history")
    expect(row).to_contain_text("127.0.0.1")
    expect(row).to_contain_text("its cause was magic-byte-unknown")


def test_the_kill_of_an_owner_is_seen_and_its_partitions_move(browser: Browser, pair: Pair) -> None:
    first, second = pair
    with viewed(browser, first.url) as view:
        view.open("Partitions")
        second.kill()
        view.wait_for_text("needs", f"{address(second)} is not heard of")
        view.wait_for_text("partitions-table", f"moved from {address(second)}")
        view.wait_for_text("needs", SERVES)
        assert owned(first) == {0, 1}
        second.start()
        wait_until_spread(pair)
        view.wait_for_text("partitions-table", f"moved from {address(first)}")
        # While a partition has no owner, its dead letters cannot be listed.
        assert view.unexpected(503, lost=True) == []


def test_the_page_of_a_killed_instance_marks_what_it_shows_as_old_and_returns_by_itself(
    browser: Browser, pair: Pair
) -> None:
    first, second = pair
    with viewed(browser, first.url) as view:
        first.kill()
        view.wait_for_text("state", r"no connection for .*as of")
        view.wait_for_text("needs", r"This instance does not answer\. As last heard: All 2 read models serve")
        expect(view.page.locator("#needs").get_by_role("link", name=address(second))).to_be_visible()
        assert "old" in view.page.locator("#page").get_attribute("class")  # type: ignore[operator]
        expect(view.page).to_have_title(re.compile("^■"))
        expect(view.page.locator("#icon")).to_have_attribute("href", "console/icon-now.svg")
        expect(view.page.locator("#models-table")).to_contain_text("balance")
        view.keep("killed-instance")
        first.start()
        view.wait_for_text("state", "live")
        view.wait_for_text("needs", SERVES)
        wait_until_spread(pair)
        assert view.unexpected(503, lost=True) == []


def test_a_page_whose_connection_hangs_connects_again(browser: Browser, pair: Pair) -> None:
    first = pair[0]
    with viewed(browser, first.url) as view:
        view.wait_for_text("needs", SERVES)
        first.kill()
        with ExitStack() as hanging:
            # The page stays connected to a server that says nothing, as to a host that is gone.
            with socket.create_server((HOST, first.port)) as silent:
                silent.settimeout(RETRIES_SECONDS)
                with suppress(TimeoutError):
                    while True:
                        hanging.enter_context(silent.accept()[0])
            first.start()
            view.wait_for_text("state", "live")
        wait_until_spread(pair)
        assert view.unexpected(503, lost=True) == []


def test_an_offline_rebuild_is_watched(
    browser: Browser, stack: LocalStack, broker: Server, settings: dict[str, str], pair: Pair
) -> None:
    first, second = pair
    before = amount_of(ask_again(second.url, "warm-up"))
    with viewed(browser, first.url) as view:
        view.wait_for_text("needs", SERVES)
        view.open("Dead letters")
        for instance in pair:
            instance.stop()
        view.wait_for_text("state", "no connection")
        environment = on(stack, settings) | {"BALANCE_STATE_DIR": str(first.state_dir)}
        done = run(environment, "rebuild", "--offline", "balance", seconds=120)
        assert done.code == 0, done
        # Without a broker, the start lasts until the page has seen it.
        broker.stop()
        for instance in pair:
            instance.launch()
        view.wait_for_text("needs", "This instance is starting")
        expect(view.page.locator("#causes")).to_contain_text("N/A")
        view.keep("rebuild")
        broker.start()
        for instance in pair:
            instance.wait_ready()
        view.wait_for_text("needs", SERVES)
        assert view.unexpected(503, lost=True) == []
    assert amount_of(ask_again(second.url, "warm-up")) == before
