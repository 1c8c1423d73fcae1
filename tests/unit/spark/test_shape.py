"""How wide a decimal is on Spark: as long as it need not be more, a long."""

from __future__ import annotations

import json
from typing import Any

import pytest

from balance_service.avro.schemas import load_schema
from balance_service.spark.shape import field_types

OURS = load_schema("FundsAdded")


def _decimal(precision: int, scale: int) -> dict[str, Any]:
    return {"type": "bytes", "logicalType": "decimal", "precision": precision, "scale": scale}


def _writer(kind: Any) -> str:
    others = [field for field in OURS["fields"] if field["name"] != "amount"]
    return json.dumps({**OURS, "fields": [*others, {"name": "amount", "type": kind}] if kind else others})


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ([], "decimal(18,2)"),
        ([_decimal(18, 2)], "decimal(18,2)"),
        ([_decimal(18, 2), _decimal(9, 0)], "decimal(18,2)"),
        # Of digits beyond our scale, a row has none, or is refused.
        ([_decimal(20, 4)], "decimal(18,2)"),
        ([_decimal(17, 0)], "decimal(38,2)"),
        ([_decimal(18, 2), _decimal(19, 2)], "decimal(38,2)"),
        (["long"], "decimal(38,2)"),
        ([["null", _decimal(18, 2)]], "decimal(38,2)"),
        ([None], "decimal(38,2)"),
    ],
)
def test_an_amount_is_as_wide_as_its_writers_need(written: list[Any], expected: str) -> None:
    types = field_types(OURS, [_writer(kind) for kind in written])

    assert types == {"id": "string", "occurredOn": "timestamp", "customerId": "string", "amount": expected}
