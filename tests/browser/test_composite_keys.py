"""The console's panel of keys, for a read model whose key has several columns."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from tests.browser.chromium import viewed
from tests.support import composite
from tests.support.commands import run
from tests.support.service import application, new_instance, on, running

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser

    from balance_service.devtools.local.stack import LocalInstance, LocalStack
    from tests.browser.chromium import View

_CARDS, _DAYS = ("a", "a&b=1"), (-1, 0, 7)


@pytest.fixture(scope="module")
def instance(stack: LocalStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalInstance]:
    """An instance that has a state for each card and day."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "spent.py").write_text(Path(composite.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    settings = application(BALANCE_MODELS="spent:SpentPerDay", PYTHONPATH=path)
    purchases = [{"card": card, "day": day, "amount": 10 + day} for card in _CARDS for day in _DAYS]
    with running(new_instance(stack, settings)) as (running_one,):
        lines = "".join(f"{json.dumps(one)}\n" for one in purchases)
        sent = run(on(stack, settings), "produce", "purchases", stdin=lines.encode())
        assert sent.code == 0, sent
        yield running_one


@pytest.fixture
def keys(browser: Browser, instance: LocalInstance) -> Iterator[View]:
    with viewed(browser, instance.url) as view:
        view.open("Keys")
        view.page.locator("#keys-model").select_option("spent-per-day")
        yield view
        assert view.unexpected(404, 503) == []


def test_a_key_of_several_columns_is_looked_up_as_a_query_names_it(keys: View) -> None:
    page = keys.page
    expect(page.locator("#key-label")).to_have_text("card=…&day=…")

    page.locator("#key").fill("day=7&card=a%26b%3D1")
    page.locator("#key").press("Enter")
    result = page.locator("#key-result")
    expect(result).to_contain_text("17")
    expect(result.locator(".command code").first).to_contain_text("/api/models/spent-per-day/keys?day=7&card=a%26b%3D1")

    page.locator("#key").fill("card=a&day=8")
    page.locator("#key").press("Enter")
    expect(result).to_contain_text("card=a&day=8 has no state.")


def test_keys_with_the_same_first_columns_are_listed_and_looked_up_from_the_list(keys: View) -> None:
    page = keys.page
    expect(page.locator("#within-label")).to_have_text("Of card=…")
    form, entries = page.locator("#range-form"), page.locator("#entries tbody tr")

    form.locator("input[name=within]").fill("card=a%26b%3D1")
    form.locator("input[name=from]").fill("0")
    page.get_by_role("button", name="List", exact=True).click()
    expect(entries).to_have_count(2)
    expect(entries.first).to_contain_text("card=a%26b%3D1&day=0")

    entries.nth(1).get_by_role("button").click()
    expect(page.locator("#key")).to_have_value("card=a%26b%3D1&day=7")
    expect(page.locator("#key-result")).to_contain_text("17")

    # The list of all keys: cards first, numbers in their order.
    for name in ("within", "from"):
        form.locator(f"input[name={name}]").fill("")
    page.get_by_role("button", name="List", exact=True).click()
    expect(entries).to_have_count(6)
    expect(entries.first).to_contain_text("card=a&day=-1")
