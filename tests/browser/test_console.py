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
from tests.e2e.dead_letters import customer_in
from tests.support.commands import run
from tests.support.service import (
    add,
    address,
    amount_of,
    ask_again,
    on,
    owned,
    wait_until_spread,
)
from tests.support.waiting import eventually

if TYPE_CHECKING:
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
