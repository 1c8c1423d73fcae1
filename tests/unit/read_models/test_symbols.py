"""`Symbols`: upserts, tombstones, and a filter that deletes."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest

from balance_service.read_models.balance import Balance
from balance_service.read_models.symbols import Symbols
from balance_service.testing import Driver, event, tombstone

if TYPE_CHECKING:
    from collections.abc import Iterator


def symbol(ticker: str = "TCS", **fields: Any) -> Any:
    return event("Symbol", {"symbol": ticker, "name": "Tata", "price": Decimal("3500.0000"), **fields})


@pytest.fixture
def symbols() -> Iterator[Driver]:
    with Driver(Symbols()) as driver:
        yield driver


def test_the_newest_record_of_a_symbol_is_its_state(symbols: Driver) -> None:
    later: dict[str, Any] = {
        "name": "Tata Consultancy",
        "price": Decimal("3512.2500"),
        "currency": "INR",
        "exchange": "XNSE",
    }

    symbols.given(symbol()).when(symbol(**later)).then(later)


def test_a_tombstone_deletes_the_state(symbols: Driver) -> None:
    symbols.given(symbol(), symbol("INFY"))

    assert symbols.commit([tombstone("TCS")]).deleted == 1
    assert symbols.restart().view("TCS") is None
    assert symbols.view("INFY") is not None
    assert not symbols.dead_letters()


def test_a_deleted_symbol_can_return(symbols: Driver) -> None:
    view = {"name": "again", "price": Decimal("3500.0000"), "currency": "", "exchange": ""}

    symbols.given(symbol(), tombstone("TCS")).when(symbol(name="again")).then(view)


def test_a_tombstone_for_a_missing_symbol_changes_nothing(symbols: Driver) -> None:
    done = symbols.commit([tombstone("TCS")])

    assert (done.applied, done.deleted, symbols.counted) == (1, 0, 0)


@pytest.mark.parametrize(
    "fallen_out", [symbol(name=""), symbol("TOOLONG"), symbol("tcs")], ids=["name", "long", "case"]
)
def test_a_record_that_the_filter_rejects_deletes_the_state(symbols: Driver, fallen_out: Any) -> None:
    symbols.given(symbol()).when(fallen_out).then(None)

    assert symbols.counted == (0 if fallen_out.fields["symbol"] == "TCS" else 1)


def test_a_malformed_key_without_a_value_is_a_dead_letter(symbols: Driver) -> None:
    symbols.when(tombstone("line\nbreak"), tombstone(""))

    assert [letter.cause for letter in symbols.dead_letters()] == ["symbol-malformed"] * 2


def test_an_undeclared_tombstone_is_a_dead_letter() -> None:
    with Driver(Balance()) as balance:
        balance.when(tombstone("alice"))

        assert [letter.cause for letter in balance.dead_letters()] == ["value-null"]
