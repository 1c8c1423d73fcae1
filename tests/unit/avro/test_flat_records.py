"""Records of plain values have fastavro's bytes, and only those that decoding returns unchanged are written."""

from __future__ import annotations

import io
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import fastavro
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balance_service.avro.codec import AvroCodec, parsed
from balance_service.avro.flat_records import flat_records
from balance_service.testing.fakes import FakeRegistry
from balance_service.testing.strategies import values_of

HEADER = b"\0\0\0\0\1"
LARGEST = 1 << 20
MONEY = {"type": "bytes", "logicalType": "decimal", "precision": 38, "scale": 2}
KINDS: list[Any] = [
    *("int", "long", "string", "double", "boolean", "bytes"),
    MONEY,
    {**MONEY, "precision": 5, "scale": 0},
    {"type": "int", "logicalType": "date"},
    {"type": "enum", "name": "E", "symbols": ["A", "B"]},
    ["null", "long"],
    [MONEY, "null"],
    ["null", "string"],
]


class Text(str):
    __slots__ = ()


def schema(*kinds: Any) -> dict[str, Any]:
    return {"type": "record", "name": "R", "fields": [{"name": f"f{n}", "type": kind} for n, kind in enumerate(kinds)]}


def by_fastavro(of: Any, record: Any) -> bytes:
    body = io.BytesIO()
    fastavro.schemaless_writer(body, parsed(of), record, strict_allow_default=True)
    return HEADER + body.getvalue()


@given(
    st.lists(st.sampled_from(KINDS), min_size=1, max_size=4, unique_by=str).flatmap(
        lambda kinds: st.tuples(st.just(kinds), st.tuples(*map(values_of, kinds)))
    )
)
def test_a_record_has_the_bytes_that_fastavro_writes_and_is_read_as_it_was(drawn: tuple[list[Any], Any]) -> None:
    kinds, values = drawn
    of, record = schema(*kinds), {f"f{n}": value for n, value in enumerate(values)}
    codec = AvroCodec(FakeRegistry(), "records", of)

    frame = codec.encode_unchanged(record)

    if frame is None:
        # Values may be drawn that are read as others.
        return
    assert frame[5:] == by_fastavro(of, record)[5:]
    read = codec.decode(frame)
    assert repr(read) == repr(record)
    assert [*map(type, read.values())] == [*map(type, record.values())]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("string", "text"),
        ("string", "Zürich 東京"),
        ("string", "x" * 9000),
        ("long", -(1 << 63)),
        ("long", (1 << 63) - 1),
        ("int", -1),
        ("boolean", False),
        ("double", -0.0),
        ("double", float("inf")),
        ("bytes", b""),
        (MONEY, Decimal("0.00")),
        (MONEY, Decimal("-1.28")),
        (MONEY, Decimal((0, (9,) * 38, -2))),
        ({"type": "int", "logicalType": "date"}, date(1, 1, 1)),
        ({"type": "enum", "name": "E", "symbols": ["A", "B"]}, "B"),
        (["null", "string"], None),
        (["string", "null"], "x"),
    ],
)
def test_a_plain_value_is_written_here(kind: Any, value: Any) -> None:
    flat = flat_records(schema(kind), HEADER)

    assert flat is not None
    assert flat.encode({"f0": value}) == by_fastavro(schema(kind), {"f0": value})
    assert flat.are_exact([[value]], LARGEST)
    assert flat.encode_all([[value, value]]).to_pylist() == 2 * [by_fastavro(schema(kind), {"f0": value})]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("int", 1 << 31),
        ("long", True),
        ("long", 1 << 63),
        ("boolean", 1),
        ("double", 1),
        ("string", Text("a")),
        ("string", "\ud800"),
        ("string", None),
        ("bytes", bytearray(b"a")),
        (MONEY, Decimal("1.5")),
        (MONEY, Decimal("1.000")),
        (MONEY, Decimal("-0.00")),
        (MONEY, Decimal("NaN")),
        (MONEY, 1),
        ({**MONEY, "precision": 4}, Decimal("100.00")),
        ({"type": "int", "logicalType": "date"}, datetime(2020, 1, 1, tzinfo=UTC)),
        ({"type": "int", "logicalType": "date"}, 5),
        ({"type": "enum", "name": "E", "symbols": ["A"]}, "B"),
    ],
)
def test_what_does_not_fit_or_is_read_as_another_value_is_left_to_fastavro(kind: Any, value: Any) -> None:
    codec = AvroCodec(FakeRegistry(), "records", schema(kind))

    assert codec.encode_unchanged({"f0": value}) is None
    assert codec.flat is not None
    assert not codec.flat.are_exact([[value]], LARGEST)


@given(
    st.lists(st.sampled_from(KINDS), min_size=1, max_size=4, unique_by=str).flatmap(
        lambda kinds: st.tuples(
            st.just(kinds), st.lists(st.tuples(*map(values_of, kinds)), min_size=1, max_size=6), st.integers(5, 200)
        )
    )
)
def test_columns_have_the_bytes_of_records_and_the_bytes_are_never_more_than_was_asked(
    drawn: tuple[list[Any], list[tuple[Any, ...]], int],
) -> None:
    kinds, rows, most_bytes = drawn
    codec = AvroCodec(FakeRegistry(), "records", schema(*kinds))
    records = [{f"f{n}": value for n, value in enumerate(row)} for row in rows]
    one_by_one = [codec.encode_unchanged(record) for record in records]
    assert codec.flat is not None
    columns = [*zip(*map(codec.flat.values, records), strict=True)]

    are_exact = codec.flat.are_exact(columns, most_bytes)

    assert codec.flat.are_exact(columns, LARGEST) == (None not in one_by_one)
    assert not are_exact or max(len(frame or b"") for frame in one_by_one) <= most_bytes
    assert None in one_by_one or codec.flat.encode_all(columns).to_pylist() == one_by_one


def test_numbers_and_texts_of_all_lengths_are_written_in_columns() -> None:
    numbers = [sign * ((1 << bits) + one) for bits in range(63) for one in (-1, 0, 1) for sign in (1, -1)]
    texts = ["x" * size for size in (0, 1, 63, 64, 8191, 8192, 1 << 14)]
    of_numbers, of_texts = flat_records(schema("long"), HEADER), flat_records(schema(["null", "string"]), HEADER)
    assert of_numbers is not None
    assert of_texts is not None

    assert of_numbers.encode_all([numbers]).to_pylist() == [of_numbers.encode({"f0": one}) for one in numbers]
    assert of_texts.encode_all([[None, *texts]]).to_pylist() == [of_texts.encode({"f0": one}) for one in (None, *texts)]


@pytest.mark.parametrize("record", [{}, {"f0": 1, "more": 2}, {"more": 2}])
def test_a_record_without_exactly_its_fields_is_left_to_fastavro(record: dict[str, Any]) -> None:
    assert AvroCodec(FakeRegistry(), "records", schema("long")).encode_unchanged(record) is None


@pytest.mark.parametrize(
    "kind",
    [
        "float",
        {"type": "array", "items": "long"},
        {"type": "long", "logicalType": "timestamp-micros"},
        {"type": "string", "logicalType": "uuid"},
        ["null", "string", "long"],
        {"type": "fixed", "name": "F", "size": 9, "logicalType": "decimal", "precision": 20, "scale": 3},
    ],
)
def test_records_with_other_fields_are_left_to_fastavro(kind: Any) -> None:
    assert flat_records(schema("long", kind), HEADER) is None
