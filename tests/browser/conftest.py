"""One browser for the run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect, sync_playwright

from tests.browser.chromium import FLAGS, MISSING, chromium
from tests.support.waiting import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser

    from balance_service.devtools.local.processes import Server
    from balance_service.devtools.local.stack import LocalStack


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
