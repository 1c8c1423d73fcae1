"""The console of an instance that demands tokens, of one that starts, and of one whose broker is away."""

from __future__ import annotations

import hashlib
import json
import re
import time
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from balance_service.devtools.local.processes import accepts_connections
from tests.browser.chromium import viewed
from tests.support.service import application, new_instance, running
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from balance_service.devtools.local.processes import Server
    from balance_service.devtools.local.stack import LocalInstance, LocalStack

TOKENS = {
    "operator": ["balance:read", "balance:add", "balance:operations", "balance:operate"],
    "watcher": ["balance:operations"],
}
FIRST_PAINT_SECONDS = 1.0


@pytest.fixture(scope="module")
def instance(stack: LocalStack, tmp_path_factory: pytest.TempPathFactory) -> LocalInstance:
    """An instance that demands tokens, whose names are the tokens; it is not running."""
    tokens = tmp_path_factory.mktemp("tokens") / "tokens.json"
    listed = [
        {"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), "scopes": scopes}
        for name, scopes in TOKENS.items()
    ]
    tokens.write_text(json.dumps({"tokens": listed}))
    secured = {"BALANCE_TOKENS_FILE": str(tokens), "BALANCE_PEER_SECRET": "a secret that all instances share"}
    return new_instance(stack, application(**secured))


def test_an_instance_that_waits_for_its_broker_paints_its_page_and_says_so(
    browser: Browser, stack: LocalStack, broker: Server
) -> None:
    instance = new_instance(stack, application())
    broker.stop()
    try:
        instance.launch()
        eventually(lambda: accepts_connections(instance.port), "the port is open")
        began = time.monotonic()
        with viewed(browser, instance.url, waits=False) as view:
            view.wait_for_text("needs", r"This instance is starting\.")
            assert time.monotonic() - began < 10
            assert first_paint(view.page) <= FIRST_PAINT_SECONDS
            view.wait_for_text("needs", r"and waits: Kafka at .* does not answer")
            expect(view.page.locator("#models-table")).to_contain_text("No read model is known yet")
            view.keep("starting")
            assert view.unexpected() == []

            broker.start()
            # The same page shows the rest when there is more to show.
            view.wait_for_text("needs", "The read model serves; nothing needs you")
            expect(view.page.locator("#keys-model")).to_have_value("balance")
            # An owner that has just opened its partition may not hold the lease yet.
            assert view.unexpected(503) == []
    finally:
        instance.stop()


@pytest.mark.shows("browser")
def test_the_page_asks_for_a_token_and_keeps_it_in_memory_only(browser: Browser, instance: LocalInstance) -> None:
    with running(instance), viewed(browser, instance.url, waits=False) as view:
        page = view.page
        form = page.locator("#token")
        expect(form).to_contain_text("This instance demands a token.")
        view.keep("token")

        form.get_by_label("Token").fill("wrong")
        form.get_by_role("button").click()
        expect(form).to_contain_text("The token was not accepted")

        form.get_by_label("Token").fill("operator")
        form.get_by_role("button").click()
        expect(form).to_be_hidden()
        view.wait_for_text("needs", "The read model serves; nothing needs you")
        view.open("Dead letters")
        expect(page.locator("#letters-list")).to_contain_text("No dead letter matches")
        view.open("Generations")
        expect(page.locator("#generations-table tbody tr")).to_contain_text("serving")
        stored = page.evaluate("JSON.stringify([localStorage, sessionStorage, document.cookie, location.href])")
        assert "operator" not in stored
        assert "operator" not in page.content()

        view.open("History")
        shown = re.compile("Who|Nothing was done")
        expect(page.locator("#history-list")).to_contain_text(shown)
        page.locator("#token-forget").click()
        expect(page.locator("#history-list")).not_to_contain_text(shown)

        page.reload()
        expect(form).to_contain_text("This instance demands a token.")
        form.get_by_label("Token").fill("watcher")
        form.get_by_role("button").click()
        view.wait_for_text("needs", "The read model serves; nothing needs you")
        expect(page.locator("#keys-problem")).to_contain_text("Not permitted")
        for panel, element in (
            ("Dead letters", "letters-list"),
            ("Generations", "generations-table"),
            ("Instances", "instance-details"),
            ("History", "history-list"),
        ):
            view.open(panel)
            expect(page.locator(f"#{element}")).to_contain_text("Not permitted")
            # A role is looked for among what is visible, which is one panel.
            expect(page.get_by_role("button", name=re.compile("Redrive|Discard"))).to_have_count(0)
        view.keep("token-without-scopes")
        assert view.unexpected(401, 403) == []


def first_paint(page: object) -> float:
    """Returns the seconds from the navigation to the first paint of content."""
    milliseconds: float = page.evaluate(  # type: ignore[attr-defined]
        "performance.getEntriesByName('first-contentful-paint')[0].startTime"
    )
    return milliseconds / 1000
