"""One browser for the run, and two instances for the tests of a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect, sync_playwright

from tests.browser.chromium import FLAGS, MISSING, chromium, viewed
from tests.e2e.dead_letters import PoisonWriter, customer_in, letter
from tests.support.service import application, new_instance, running, wait_until_spread, warm_up
from tests.support.waiting import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser

    from balance_service.devtools.local.processes import Server
    from balance_service.devtools.local.stack import LocalInstance, LocalStack
    from tests.browser.chromium import View

    Pair = tuple[LocalInstance, LocalInstance]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = chromium()
    if path is None:
        pytest.fail(MISSING, pytrace=False)
    with sync_playwright() as playwright:
        expect.set_options(timeout=PATIENCE_SECONDS * 1000)
        running = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        yield running
        running.close()


@pytest.fixture
def broker(stack: LocalStack) -> Iterator[Server]:
    """The broker, for a test that stops it. It runs again when the test ends."""
    yield stack.broker
    if not stack.broker.running:
        stack.broker.start()


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


@pytest.fixture
def garbage(pair: Pair, poison: PoisonWriter) -> list[str]:
    """Four dead letters that can only be discarded, for each read model."""
    ids = [poison.put(customer_in(n % 2), b"garbage %d" % n, headers=[("source", b"till-7")]) for n in range(4)]
    ids += [one.replace("balance/", "activity/") for one in ids]
    for one in ids:
        letter(pair[0], one)
    return ids
