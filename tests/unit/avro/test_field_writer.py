"""Single values, encoded as fastavro encodes them."""

from __future__ import annotations

import io
from decimal import Decimal
from typing import Any

import fastavro
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balance_service.avro.codec import parsed
from balance_service.avro.field_writer import field_writer
from balance_service.testing.strategies import values_of

MONEY = {"type": "bytes", "logicalType": "decimal", "precision": 38, "scale": 2}
KINDS: list[Any] = [
    *("int", "long", "string", "double", "boolean", "bytes"),
    MONEY,
    {**MONEY, "precision": 5, "scale": 0},
    {"type": "fixed", "name": "F", "size": 9, "logicalType": "decimal", "precision": 20, "scale": 3},
    {"type": "long", "logicalType": "timestamp-micros"},
    {"type": "array", "items": ["null", "string"]},
    ["null", "long"],
    [MONEY, "null"],
    ["null", {"type": "enum", "name": "E", "symbols": ["A", "B"]}],
]


@given(st.sampled_from(KINDS).flatmap(lambda kind: st.tuples(st.just(kind), values_of(kind))))
def test_a_value_has_the_bytes_that_fastavro_writes(drawn: tuple[Any, Any]) -> None:
    kind, value = drawn
    body = io.BytesIO()
    fastavro.schemaless_writer(body, parsed(kind), value)

    assert field_writer(kind)(value) == body.getvalue()


def test_a_decimal_may_have_fewer_digits_after_the_point() -> None:
    assert field_writer(MONEY)(Decimal("1.5")) == field_writer(MONEY)(Decimal("1.50"))


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("int", 1 << 31),
        ("long", -(1 << 63) - 1),
        ("string", None),
        ("boolean", None),
        (MONEY, Decimal("0.001")),
        ({**MONEY, "precision": 4}, Decimal("100.00")),
        ({"type": "enum", "name": "E", "symbols": ["A"]}, "B"),
    ],
)
def test_a_value_that_does_not_fit_is_refused(kind: Any, value: Any) -> None:
    with pytest.raises(Exception):  # noqa: B017, PT011  (of any type)
        field_writer(kind)(value)
