"""The console of two instances: what it shows, what can be done with it, and a kill and a rebuild while it is open."""

from __future__ import annotations

import re
import socket
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from balance_service.devtools.local.processes import HOST
from tests.browser.chromium import DESKTOP, PHONE, SCREENSHOTS, viewed
from tests.e2e.dead_letters import PoisonWriter, customer_in, letter, wait_for
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


def test_a_healthy_service_is_one_line(view: View) -> None:
    view.wait_for_text("needs", SERVES + r"; no dead letter needs you\.$")
    assert view.page.title().startswith("✓")


def test_each_partition_shows_its_owner_and_its_standby(view: View, pair: Pair) -> None:
    table = view.page.locator("#partitions-table")
    expect(table.locator("tbody tr")).to_have_count(4)
    for row in table.locator("tbody tr").all():
        expect(row).to_contain_text(re.compile("owner RUNNING"))
        expect(row).to_contain_text(re.compile("standby TAILING"))
    for instance in pair:
        expect(table.locator("thead")).to_contain_text(address(instance))


def look_up(page: Page, customer: str) -> None:
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
    page.locator("#partitions-model").select_option("activity")
    page.locator("#letters-status").select_option("parked")
    look_up(page, "reloaded")
    expect(page.locator("#key-result")).to_contain_text("3.00")
    page.locator("#letters").scroll_into_view_if_needed()
    page.evaluate("document.getElementById('letters').scrollIntoView()")
    page.wait_for_function("() => new URLSearchParams(location.hash.slice(1)).get('at') === 'letters'")
    before = page.evaluate("scrollY")

    page.reload()
    view.wait_for_text("state", "live")
    expect(page.locator("#key-result")).to_contain_text("3.00")
    expect(page.locator("#partitions-model")).to_have_value("activity")
    expect(page.locator("#letters-status")).to_have_value("parked")
    page.wait_for_function("(y) => Math.abs(scrollY - y) < 400 && scrollY > 0", arg=before)


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
    expect(page.locator("#letters-list")).to_contain_text(re.compile("Dead letter|No dead letter"))
    page.locator("nav").get_by_role("link", name="Charts").click()
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
    drawing = page.get_by_role("img", name="Flow of balance")
    drawing.scroll_into_view_if_needed()
    expect(drawing.locator(".node")).to_have_count(3)


def test_everything_can_be_done_by_keyboard(view: View, pair: Pair, garbage: list[str]) -> None:
    page = view.page
    ask_again(pair[0].url, "typed", add(pair[0].url, "typed", "4.00"))
    page.wait_for_timeout(1500)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")

    view.tab_to("#keys-model")
    page.keyboard.type("balance")
    view.tab_to("#key")
    page.keyboard.type("typed")
    page.keyboard.press("Enter")
    expect(page.locator("#key-result")).to_contain_text("4.00")

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
    with viewed(browser, url, width=width, dark=dark) as view:
        page = view.page
        expect(page.locator("#key-result")).to_contain_text("Position")
        expect(page.locator("#letter")).to_contain_text("garbage")
        for panel in ("charts", "flow"):
            page.evaluate(f"document.getElementById('{panel}').scrollIntoView()")
            page.wait_for_timeout(1200)
        view.keep(f"console-{width}-{'dark' if dark else 'light'}")
        assert view.accessibility_findings() == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width

        page.get_by_role("button", name="Discard all that match …").click()
        dialog = page.get_by_role("dialog", name="Discard dead letters")
        expect(dialog).to_contain_text("that match")
        page.screenshot(path=SCREENSHOTS / f"discard-{width}-{'dark' if dark else 'light'}.png")
        assert view.accessibility_findings() == []
        assert view.unexpected() == []


def published(state: str = "RUNNING", **changed: object) -> dict[str, object]:
    """The owner of the only partition of a read model, as the status has it."""
    task = {"task": "m_0", "readModel": "m", "partition": 0, "role": "active", "state": state, "epoch": 1}
    figures = {"position": 5, "lag": 0, "lagSeconds": 0, "lagSecondsIsLeast": False, "reason": "", "deadLetters": []}
    return {**task, **figures, "restored": 0, "toRestore": 0, "secondsLeft": None, **changed}


WAITS = {"cause": "key-null", "status": "waiting", "needsDecision": True, "count": 3}
HEALS = {"cause": "schema-id-unknown", "status": "scheduled", "needsDecision": False, "count": 2}


@pytest.mark.parametrize(
    ("task", "more", "verdict"),
    [
        (published(), {}, ["serves", ""]),
        (published(deadLetters=[HEALS]), {}, ["serves", ""]),
        (published(deadLetters=[WAITS]), {}, ["serves", "BalanceDeadLettersWaiting"]),
        (published(lag=9, lagSeconds=61), {}, ["behind", "BalanceLagGrowing"]),
        (published(lag=9, lagSeconds=59), {}, ["serves", ""]),
        (published(lag=None, lagSeconds=None), {}, ["serves", ""]),
        (published("WAITING", reason="make room"), {}, ["WAITING", "BalanceTaskWaiting"]),
        (published(), {"problems": ["m: the query failed"]}, ["not folded", "BalanceStreamFailing"]),
        (published(), {"problems": ["other: the query failed"]}, ["serves", ""]),
        (published("RESTORING", secondsLeft=9), {}, ["RESTORING", "BalanceRestoring"]),
        (published("HALTED", reason="recreated"), {}, ["HALTED", "BalanceTaskHalted"]),
        (published(), {"suspect": True}, ["no owner", "BalancePartitionUnanswered"]),
        (published(role="standby"), {}, ["no owner", "BalancePartitionUnanswered"]),
    ],
)
def test_a_state_is_judged_and_leads_to_its_section_of_the_runbook(
    view: View, task: object, more: dict[str, object], verdict: Sequence[str]
) -> None:
    server = {"applicationServer": "a:1", "suspect": more.get("suspect", False), "models": ["m"], "tasks": [task]}
    status = {
        "applicationServer": "b:1",
        "models": [{"name": "m", "source": "t", "partitions": 1, "standbyReplicas": 0}],
        "tasks": [],
        "unhosted": [],
        "problems": more.get("problems", []),
        "applicationServers": [server],
    }
    judge = "async (status) => (await import('/console/judge.js')).modelsOf(status)"
    (model,) = view.page.evaluate(judge, status)

    assert [model["verdict"]["word"], model["verdict"]["section"]] == verdict


def test_what_has_one_cause_is_told_once_and_says_which_partitions_it_concerns(view: View) -> None:
    halted = {"reason": "topic t was deleted or recreated", "state": "HALTED"}
    tasks = [{**published(), **halted, "task": f"m_{n}", "partition": n} for n in range(3)]
    server = {"applicationServer": "b:1", "suspect": False, "shared": False, "models": ["m"], "tasks": []}
    status = {
        "applicationServer": "b:1",
        "ready": False,
        "reasons": [f"m_{n} is HALTED: topic t was deleted or recreated" for n in range(3)],
        "partitions": 3,
        "models": [{"name": "m", "source": "t", "partitions": 3, "standbyReplicas": 0}],
        "tasks": tasks,
        "unhosted": [],
        "problems": [],
        "endsAgeSeconds": 0,
        "applicationServers": [server],
    }
    needs = """async (status) => {
        const {needsOf, troubleOf} = await import('/console/summary.js');
        const {text, items} = needsOf(status);
        const told = items.map((item) => [item].flat(9).map((part) => part.textContent ?? part).join(""));
        return [text, ...told, troubleOf(status, "m", "1:7"), troubleOf(status, "m", "")];
    }"""
    headline, cause, of_a_key, of_no_key = view.page.evaluate(needs, status)

    assert headline == "0 of 1 read model serves:"
    assert cause.startswith("m_0 at b:1 is HALTED: topic t was deleted or recreated. So are m_1, m_2.")
    assert of_a_key == "m_1 at b:1 is HALTED: topic t was deleted or recreated."
    assert of_no_key == ""


def test_the_kill_of_an_owner_is_seen_and_its_partitions_move(browser: Browser, pair: Pair) -> None:
    first, second = pair
    with viewed(browser, first.url) as view:
        second.kill()
        view.wait_for_text("needs", f"{address(second)} has been silent for")
        view.wait_for_text("partitions-table", f"moved from {address(second)}")
        view.keep("killed-owner")
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
