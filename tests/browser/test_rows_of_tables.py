"""The console's panel of keys, for the rows of a table that a read model joins with."""

from __future__ import annotations

import json
import os
import struct
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from tests.browser.chromium import viewed
from tests.support.kafka import Writer
from tests.support.service import application, new_instance, running

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser

    from balance_service.devtools.local.stack import LocalInstance, LocalStack
    from tests.browser.chromium import View

TABLE = "labels-of-days"
_MODEL = f"""
from dataclasses import dataclass

from balance_service import Count, ReadModel, Stream, Table


@dataclass
class Bought:
    day: int


@dataclass
class Label:
    label: str


@dataclass
class Labelled:
    day: int
    label: str


@dataclass
class PerLabel:
    label: str
    purchases: int


class Labels(ReadModel):
    name = "{TABLE}"
    source = (
        Stream("bought", Bought, format="json")
        .by("day")
        .join(Table("{TABLE}", Label, format="json", key_format="long"), on="day", take={{"label": "label"}})
        .by("label", record=Labelled)
    )
    state = PerLabel
    purchases = Count("Labelled")
"""


@pytest.fixture(scope="module")
def instance(stack: LocalStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalInstance]:
    """An instance that joins with a table which has the name of the read model, and longs as keys."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "labels.py").write_text(_MODEL, encoding="utf-8")
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    settings = application(BALANCE_MODELS="labels:Labels", PYTHONPATH=path)
    with running(new_instance(stack, settings)) as (running_one,):
        yield running_one


@pytest.fixture
def labels(stack: LocalStack) -> Iterator[Writer]:
    with Writer(stack, TABLE) as writer:
        yield writer


def put(writer: Writer, day: int, label: str) -> None:
    writer.send(struct.pack(">q", day), json.dumps({"label": label}).encode())
    assert writer.producer.flush(10) == 0


@pytest.fixture
def keys(browser: Browser, instance: LocalInstance) -> Iterator[View]:
    with viewed(browser, instance.url) as view:
        view.open("Keys")
        yield view
        assert view.unexpected(400, 404, 503) == []


def test_a_row_of_a_joined_table_is_looked_up_by_its_key_as_text(keys: View, labels: Writer) -> None:
    put(labels, -7, "Sunday")
    page = keys.page
    result = page.locator("#key-result")
    page.locator("#keys-model").select_option(f"table {TABLE}")
    expect(page.locator("#key-label")).to_have_text("Key (long)")
    # There are no lists of rows.
    expect(page.locator("#range-form")).to_be_hidden()
    expect(page.locator("#top-form")).to_be_hidden()

    page.locator("#key").fill("8")
    page.locator("#key").press("Enter")
    expect(result).to_contain_text("8 has no row.")

    page.locator("#key").fill("eight")
    page.locator("#key").press("Enter")
    expect(result.get_by_role("alert")).to_contain_text("must be a number of at most 64 bits")

    page.locator("#key").fill("-7")
    page.locator("#key").press("Enter")
    expect(result.get_by_role("table", name="Value")).to_contain_text("Sunday")
    expect(result).to_contain_text("not live")
    expect(result).not_to_contain_text("Generation")
    expect(result.locator(".command code")).to_have_count(1)
    expect(result.locator(".command code")).to_contain_text(f"/api/tables/{TABLE}/keys/-7")
    assert keys.accessibility_findings() == []


def test_a_row_is_read_again_by_each_lookup_and_by_a_reload(keys: View, labels: Writer) -> None:
    put(labels, 1, "Monday")
    page = keys.page
    value = page.locator("#key-result table")
    page.locator("#keys-model").select_option(f"table {TABLE}")
    page.locator("#key").fill("1")
    page.locator("#key").press("Enter")
    expect(value).to_contain_text("Monday")

    put(labels, 1, "Lundi")
    # The instance follows the table, so the first answers may be older.
    for _ in range(20):
        page.get_by_role("button", name="Look up").click()
        page.wait_for_timeout(500)
        if "Lundi" in value.inner_text():
            break
    expect(value).to_contain_text("Lundi")

    page.reload()
    expect(page.locator("#keys-model")).to_have_value(f"table {TABLE}")
    expect(value).to_contain_text("Lundi")


def test_a_table_and_a_read_model_of_one_name_are_two_choices(keys: View) -> None:
    page = keys.page
    expect(page.locator("#keys-model option")).to_have_text([TABLE, f"table {TABLE}"])

    page.locator("#keys-model").select_option(TABLE)
    page.locator("#key").fill("Sunday")
    page.locator("#key").press("Enter")
    expect(page.locator("#key-result")).to_contain_text("Sunday has no state.")
    expect(page.locator("#range-form")).to_be_visible()
