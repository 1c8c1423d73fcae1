"""The page about JSON topics: its classes are read as it says."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any

from balance_service import Count, ReadModel, RunningSum, Stream, scale
from balance_service.formats.json_values import kinds_of
from balance_service.model.converters import record_converter
from balance_service.testing import Driver
from balance_service.testing.rows import InputEvent
from tests.support.documents import blocks

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

PAGE = "docs/how-to/json.md"


@dataclass
class _Total:
    customerId: str  # noqa: N815
    orders: int
    total: Annotated[Decimal, scale(2)]


def test_the_classes_of_the_page_are_read_as_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "\n\n".join(block.text for block in blocks(PAGE) if block.language == "python")
    (tmp_path / "events_of_page.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    page: Any = importlib.import_module("events_of_page")
    monkeypatch.delitem(sys.modules, "events_of_page")

    class Spent(ReadModel):
        name = "spent"
        source = Stream("orders", page.OrderPlaced, format="json")
        key = "customerId"
        state = _Total
        orders = Count("OrderPlaced")
        total = RunningSum("OrderPlaced.amount")

    documents = [
        b'{"orderId": "1", "customerId": "ada", "amount": "24.90", "placedAt": 1772409600000, "more": {}}',
        b'{"orderId": "2", "customerId": "ada", "amount": 0.1, "placedAt": 1772409600000.0, "coupon": null}',
        b'{"orderId": "3", "customerId": "ada", "amount": 1, "placedAt": "2026-03-02T00:00:00Z"}',
    ]
    with Driver(Spent()) as driver:
        driver.given(*(InputEvent("", {}, body=document) for document in documents))

        assert driver.view("ada") == {"orders": 2, "total": Decimal("25.00")}
        assert [one.cause for one in driver.dead_letters()] == ["json-misfit"]
    assert kinds_of(record_converter(page.Placed).schema) == ("order.placed",)
