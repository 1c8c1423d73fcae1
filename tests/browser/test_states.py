"""Six states of a service, as an operator sees them at night: each is one line, on a desktop and on a phone."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from balance_service.client import Client
from tests.browser.chromium import DESKTOP, PHONE, viewed
from tests.e2e.dead_letters import PoisonWriter, customer_in, decide, letter
from tests.support.commands import run
from tests.support.service import (
    add,
    address,
    application,
    new_instance,
    on,
    running,
    wait_until_spread,
    warm_up,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Browser

    from balance_service.devtools.local.processes import Server
    from balance_service.devtools.local.stack import LocalInstance, LocalStack

    Pair = tuple[LocalInstance, LocalInstance]

_MOST_HEIGHT = 1200
_SERVES = r"^\W*All 2 read models serve"
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
        {bug}
        return Earned(event["customerId"], (state.points if state else 0) + 1)
"""
_BUG = 'assert str(event["amount"]) != "66.66", event["amount"]'


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A read model with a bug that a test may correct."""
    file = tmp_path_factory.mktemp("models") / "points.py"
    file.write_text(_POINTS.replace("{bug}", _BUG))
    return file


@pytest.fixture(scope="module")
def settings(module: Path) -> dict[str, str]:
    path = os.pathsep.join([str(module.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    return application(BALANCE_MODELS="balance,points:Points", PYTHONPATH=path)


@pytest.fixture(scope="module")
def pair(stack: LocalStack, settings: dict[str, str]) -> Iterator[Pair]:
    loaded = run(on(stack, settings), "load", "--events", "5000", "--customers", "300", seconds=120)
    assert loaded.code == 0, loaded
    first, second = new_instance(stack, settings), new_instance(stack, settings)
    with running(first, second):
        wait_until_spread((first, second))
        warm_up(first.url)
        yield first, second


def look(browser: Browser, instance: LocalInstance, name: str, kind: str, *told: str, headline: str = _SERVES) -> None:
    """Looks at the first page: one line for each cause, which begins as in `told`, the first as bad as `kind`.

    Pictures are kept as `state-<name>-<width>`.
    """
    for width in (DESKTOP, PHONE):
        with viewed(browser, instance.url, width=width, waits=False) as view:
            page = view.page
            items = page.locator("#needs .causes > li")
            view.wait_for_text("needs", headline)
            for cause in told:
                expect(items.filter(has_text=re.compile(cause))).to_have_count(1)
            expect(items).to_have_count(len(told))
            if told:
                expect(items.first).to_have_class(kind)
            # An instance does not report about itself what only others can.
            expect(page.locator("#needs")).not_to_contain_text(f"{address(instance)} is not heard of")
            view.keep(f"state-{name}-{width}")
            assert view.accessibility_findings() == []
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert view.unexpected(503, lost=True) == []


def test_a_healthy_service_is_one_line_on_a_short_page(browser: Browser, pair: Pair) -> None:
    look(browser, pair[0], "healthy", "ok", headline=_SERVES + r"; nothing needs you\.$")

    with viewed(browser, pair[0].url, width=PHONE) as view:
        expect(view.page.locator("#models-table tbody tr")).to_have_count(2)
        assert view.page.evaluate("document.documentElement.scrollHeight") <= _MOST_HEIGHT
        assert view.page.title().startswith("✓ ")
        expect(view.page.locator("#icon")).to_have_attribute("href", "console/icon.svg")


def test_dead_letters_are_one_line_with_their_causes_folded_away(
    browser: Browser, stack: LocalStack, settings: dict[str, str], pair: Pair
) -> None:
    with PoisonWriter(stack, settings) as poison:
        garbage = [poison.put(customer_in(n), b"garbage") for n in range(2)]
    garbage += [one.replace("balance/", "points/") for one in garbage]
    for one in garbage:
        letter(pair[0], one)

    look(browser, pair[0], "letters", "warn", "4 dead letters need you")
    with viewed(browser, pair[0].url) as view:
        assert view.page.title().startswith("▲ 1 ")
        view.page.locator("#needs .causes a", has_text="Show").click()
        expect(view.page.locator("#letters")).to_be_visible()

    assert decide(pair[1], "discard", *garbage).status_code == 202
    look(browser, pair[0], "healed", "ok")


def test_a_rebuild_is_one_line_and_nothing_is_red(browser: Browser, pair: Pair) -> None:
    with Client(pair[0].url) as client:
        client.rebuild("balance", switch="never", max_rate=20, reason="a test")
        try:
            told = "Generation 2 of balance is being built; generation 1 answers"
            headline = _SERVES + "; nothing needs you"
            look(browser, pair[0], "rebuild", "info", told, headline=headline)
        finally:
            client.drop("balance", generation=2, reason="a test")


def test_a_killed_instance_is_one_line_until_it_is_back(browser: Browser, pair: Pair) -> None:
    first, second = pair
    second.kill()
    try:
        look(browser, first, "killed", "warn", f"{re.escape(address(second))} is not heard of", headline="but:")
    finally:
        second.start()
    wait_until_spread(pair)


def test_a_broker_that_is_gone_is_the_only_line(browser: Browser, broker: Server, pair: Pair) -> None:
    with viewed(browser, pair[0].url) as view:
        view.wait_for_text("needs", _SERVES)
        broker.stop()
        told = r"Kafka at \S+ does not answer this instance\..* Since [^.]+\. Restore it, or the network to it"
        view.wait_for_text("needs", told)
        # It may heal by itself in seconds.
        expect(view.page.locator("#needs .causes > li").first).to_have_class("bad")
        look(browser, pair[0], "broker-gone", "bad", told, headline="0 of 2 read models serve:")
        broker.start()
        view.wait_for_text("needs", _SERVES)
    wait_until_spread(pair)


def test_a_halt_is_one_line_and_its_instance_shows_the_key_and_the_line_of_the_bug(
    browser: Browser, module: Path, pair: Pair
) -> None:
    customer = customer_in(0)
    add(pair[0].url, customer, "66.66")
    told = (
        r"points_0 at \S+ is halted: the code of the read model points fails at offset \d+ of \S+ with AssertionError"
    )
    look(browser, pair[0], "halted", "bad", told, headline="1 of 2 read models serve, but:")

    with viewed(browser, pair[0].url) as view:
        page = view.page
        view.wait_for_text("needs", told)
        owner = next(one for one in pair if address(one) in page.inner_text("#needs"))
        view.open("Instances")
        page.locator("#instances-table").get_by_role("button", name=address(owner)).click()
        halted = page.locator("#instance-details .halted")
        expect(halted).to_contain_text(customer)
        expect(halted).to_contain_text(re.compile(r"points\.py:\d+, in fold: assert str"))
        expect(halted.get_by_role("button", name=f"Copy: {customer}")).to_be_visible()
        view.keep("state-halted-instance")

    module.write_text(_POINTS.replace("{bug}", ""))
    for instance in pair:
        instance.stop()
    for instance in pair:
        instance.start()
    wait_until_spread(pair)
    look(browser, pair[0], "corrected", "ok")
