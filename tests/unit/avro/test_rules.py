"""Which schemas newer rules of the decoder read otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from balance_service.avro.rules import rules_of
from balance_service.avro.schemas import Schema, full_name
from balance_service.avro.writer_schema import WriterSchema

MILLIS = {"type": "long", "connect.name": "io.debezium.time.Timestamp"}
MICROS = {"type": "long", "connect.name": "io.debezium.time.MicroTimestamp"}


def record(kind: Any, name: str = "R") -> Schema:
    return {"type": "record", "name": name, "namespace": "n", "fields": [{"name": "at", "type": kind}]}


def rules(written: Any, wanted: Any) -> int:
    schema = record(wanted)
    return rules_of(WriterSchema.from_schema(written).text, {full_name(schema): schema})


def logical(name: str) -> Any:
    return {"type": "long", "logicalType": name}


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        (MILLIS, logical("timestamp-micros")),
        (["null", MILLIS], ["null", logical("local-timestamp-micros")]),
        (MICROS, logical("timestamp-millis")),
        ({"type": "array", "items": MILLIS}, {"type": "array", "items": logical("timestamp-micros")}),
        (record(MILLIS, "I"), record(logical("timestamp-micros"), "I")),
        ({"type": "long", "connect.name": "io.debezium.time.NanoTime"}, logical("timestamp-micros")),
    ],
    ids=str,
)
def test_a_time_of_another_unit_than_the_readers_had_another_value(written: Any, wanted: Any) -> None:
    assert rules(record(written), wanted) == 2
    assert rules(["null", record("string", "Other"), record(written)], wanted) == 2


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        (MILLIS, logical("timestamp-millis")),
        (MICROS, logical("timestamp-micros")),
        (MILLIS, "long"),
        (logical("timestamp-millis"), logical("timestamp-micros")),
        ("long", logical("timestamp-micros")),
        ({"type": "int", "connect.name": "io.debezium.time.Date"}, {"type": "int", "logicalType": "date"}),
    ],
    ids=str,
)
def test_a_value_that_was_right_before_needs_no_newer_rules(written: Any, wanted: Any) -> None:
    assert rules(record(written), wanted) == 1


def test_a_column_that_is_not_read_needs_no_newer_rules() -> None:
    assert rules({**record("string"), "fields": [{"name": "other", "type": MILLIS}]}, "string") == 1
    assert rules(record(MILLIS, "Other"), logical("timestamp-micros")) == 1


@pytest.mark.parametrize(
    "text",
    [
        'syntax = "proto3"; // io.debezium.time.Timestamp',
        '{"type": "record", "name": "R", "fields": [{"name": "io.debezium.time.Timestamp"}]}',
        '{"type": "record", "name": "R", "fields": "io.debezium.time."}',
        "[" * 5_000 + '"io.debezium.time."' + "]" * 5_000,
    ],
    ids=["no JSON", "no type", "no fields", "too deep"],
)
def test_a_schema_that_cannot_be_used_needs_no_newer_rules(text: str) -> None:
    schema = record(logical("timestamp-micros"))

    assert rules_of(text, {full_name(schema): schema}) == 1
