"""The shipped schemas: others write and read them, so their shape is a promise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import fastavro
import pytest

from balance_service.avro.schemas import fields_of, full_name, load_schema
from balance_service.process.package import resource

if TYPE_CHECKING:
    from pathlib import Path

SHIPPED = sorted(resource("schemas").glob("*.avsc"))


def fields(name: str) -> dict[str, Any]:
    return fields_of(load_schema(name))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_schema_is_valid_avro(path: Path) -> None:
    fastavro.parse_schema(load_schema(path.stem))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_schema_is_named_like_its_file_and_documented(path: Path) -> None:
    schema = load_schema(path.stem)

    assert schema["name"] == path.stem
    assert schema["namespace"].startswith("parts.code.balance.")
    assert schema["doc"]


def test_the_four_records_of_the_service_are_shipped() -> None:
    assert {path.stem for path in SHIPPED} >= {"ApplicationServer", "BalanceState", "FundsAdded", "Position"}


def test_funds_added_has_the_fields_of_its_writers() -> None:
    assert full_name(load_schema("FundsAdded")) == "parts.code.balance.events.FundsAdded"
    assert fields("FundsAdded") == {
        "id": "string",
        "occurredOn": {"type": "long", "logicalType": "timestamp-millis"},
        "customerId": "string",
        "amount": {"type": "bytes", "logicalType": "decimal", "precision": 18, "scale": 2},
    }


def test_a_balance_has_precision_38_and_scale_2() -> None:
    assert full_name(load_schema("BalanceState")) == "parts.code.balance.state.BalanceState"
    assert fields("BalanceState") == {
        "customerId": "string",
        "amount": {"type": "bytes", "logicalType": "decimal", "precision": 38, "scale": 2},
    }


def test_an_invoice_has_the_fields_of_its_writers() -> None:
    cents = {"type": "bytes", "logicalType": "decimal", "precision": 18, "scale": 2}
    columns = fields("PosInvoice")
    lines, address = columns["lines"]["items"], columns["address"][1]

    assert full_name(load_schema("PosInvoice")) == "parts.code.balance.events.PosInvoice"
    assert list(columns) == [
        *("invoiceNumber", "storeId", "customerCardNo", "customerType", "deliveryType", "totalAmount"),
        *("customerName", "address", "lines"),
    ]
    assert columns["totalAmount"] == cents
    assert list(fields_of(address)) == ["street", "city", "postalCode", "country"]
    assert fields_of(lines) == {
        "itemCode": "string",
        "description": "string",
        "quantity": "int",
        "unitPrice": cents,
        "amount": cents,
    }


def test_a_line_for_analysis_has_no_field_that_identifies_the_buyer() -> None:
    personal = {"customerName", "address", "customerCardNo"}

    assert not personal & fields("HadoopRecord").keys()


def test_loyalty_points_lose_no_digit() -> None:
    points = {"type": "bytes", "logicalType": "decimal", "precision": 38, "scale": 4}

    assert fields("Rewards") == {"customerCardNo": "string", "points": points}
    assert fields("Notification") == {
        "invoiceNumber": "string",
        "customerCardNo": "string",
        "totalAmount": {"type": "bytes", "logicalType": "decimal", "precision": 18, "scale": 2},
        "earnedLoyaltyPoints": points,
        "totalLoyaltyPoints": points,
    }


def test_a_scored_game_is_a_score_with_the_names_of_its_player_and_game() -> None:
    score = {"score": "double", "product_id": "long", "player_id": "long"}

    assert fields("ScoreEvent") == score
    assert fields("Player") == fields("Product") == {"id": "long", "name": "string"}
    assert fields("ScoredGame") == {**score, "playerName": "string", "gameName": "string"}
    assert fields_of(fields("HighScores")["entries"]["items"]) == {
        "playerId": "long",
        "productId": "long",
        "playerName": "string",
        "gameName": "string",
        "score": "double",
        "scoredAt": "long",
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
def test_the_full_name_of_a_type_follows_the_avro_specification(schema: Any, name: str) -> None:
    assert full_name(schema) == name
