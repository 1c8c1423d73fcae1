"""The shipped schemas: others write and read them, so their shape is a promise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import fastavro
import pytest

from balance_service.avro.schemas import full_name, load_schema
from balance_service.resources import resource

if TYPE_CHECKING:
    from pathlib import Path

SHIPPED = sorted(resource("schemas").glob("*.avsc"))


def fields(name: str) -> dict[str, Any]:
    return {field["name"]: field["type"] for field in load_schema(name)["fields"]}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_schema_is_valid_avro(path: Path) -> None:
    fastavro.parse_schema(load_schema(path.stem))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_schema_is_named_like_its_file_and_says_what_it_is(path: Path) -> None:
    schema = load_schema(path.stem)

    assert schema["name"] == path.stem
    assert schema["namespace"].startswith("parts.code.balance.")
    assert schema["doc"]


def test_the_four_records_of_the_service_are_shipped() -> None:
    assert {path.stem for path in SHIPPED} >= {"ApplicationServer", "BalanceState", "FundsAdded", "Position"}


def test_funds_added_has_the_shape_others_write() -> None:
    assert full_name(load_schema("FundsAdded")) == "parts.code.balance.events.FundsAdded"
    assert fields("FundsAdded") == {
        "id": "string",
        "occurredOn": {"type": "long", "logicalType": "timestamp-millis"},
        "customerId": "string",
        "amount": {"type": "bytes", "logicalType": "decimal", "precision": 18, "scale": 2},
    }


def test_a_balance_holds_38_digits_of_which_2_are_decimals() -> None:
    assert full_name(load_schema("BalanceState")) == "parts.code.balance.state.BalanceState"
    assert fields("BalanceState") == {
        "customerId": "string",
        "amount": {"type": "bytes", "logicalType": "decimal", "precision": 38, "scale": 2},
    }


@pytest.mark.parametrize(
    ("schema", "name"),
    [
        ({"type": "record", "name": "A", "namespace": "x.y", "fields": []}, "x.y.A"),
        ({"type": "record", "name": "A", "fields": []}, "A"),
        ({"type": "record", "name": "x.y.A", "namespace": "z", "fields": []}, "x.y.A"),
        ({"type": "record", "name": "A", "namespace": "", "fields": []}, "A"),
        ("string", "string"),
        ({"type": "string"}, "string"),
        (["null", "string"], ""),
    ],
)
def test_the_full_name_of_a_type_is_what_avro_says(schema: Any, name: str) -> None:
    assert full_name(schema) == name
