"""What a writer's schema can hold, and schemas that refer to each other."""

from __future__ import annotations

import json
from typing import Any

import pytest

from balance_service.avro.writer_schema import WriterSchema, self_contained

SOURCE = {"type": "record", "name": "Source", "namespace": "com.acme", "fields": [{"name": "app", "type": "string"}]}
AMOUNT = {
    "type": "fixed",
    "name": "Amount",
    "namespace": "com.acme",
    "size": 16,
    "logicalType": "decimal",
    "precision": 38,
    "scale": 2,
}
KIND = {"type": "enum", "name": "Kind", "namespace": "", "symbols": ["A"]}


def record(name: str, *kinds: Any) -> dict[str, Any]:
    namespace, _, simple = name.rpartition(".")
    fields = [{"name": f"f{i}", "type": kind} for i, kind in enumerate(kinds)]
    return {"type": "record", "name": simple, "namespace": namespace, "fields": fields}


@pytest.mark.parametrize(
    ("schema", "records"),
    [
        (record("a.R"), ("a.R",)),
        ({"type": "record", "name": "a.b.R", "namespace": "other", "fields": []}, ("a.b.R",)),
        (["null", record("a.R"), "string", record("S")], ("a.R", "S")),
        (KIND, ()),
        ("long", ()),
        ({"type": "array", "items": record("a.R")}, ()),
    ],
)
def test_the_records_that_a_value_can_be(schema: Any, records: tuple[str, ...]) -> None:
    assert WriterSchema.from_schema(schema).records == records


@pytest.mark.parametrize(
    ("body", "name"), [(b"\x00", ""), (b"\x02", "a.R"), (b"\x04", "b.S"), (b"\x06", ""), (b"\x01", ""), (b"", "")]
)
def test_the_record_of_a_union_is_the_member_that_was_written(body: bytes, name: str) -> None:
    assert WriterSchema.from_schema(["null", record("a.R"), record("b.S")]).record_of(body) == name


def test_the_own_types_of_a_schema_stay_where_they_are() -> None:
    schema = record("a.R", "string", {"type": "array", "items": record("a.S")}, "a.S", {"type": "long"})

    assert self_contained(schema, [SOURCE]) == schema


def test_a_type_is_defined_where_it_is_first_named() -> None:
    schema = record("a.R", ["null", "com.acme.Source"], {"type": "map", "values": "com.acme.Source"}, "long")

    fields = self_contained(schema, [SOURCE])["fields"]

    assert [field["type"] for field in fields] == [
        ["null", SOURCE],
        {"type": "map", "values": "com.acme.Source"},
        "long",
    ]


def test_a_type_within_another_type_object_is_defined() -> None:
    assert self_contained(record("a.R", {"type": "com.acme.Amount"}), [AMOUNT])["fields"][0]["type"] == AMOUNT


def test_names_are_of_the_namespace_around_them_and_else_of_none() -> None:
    schema = record("com.acme.R", "Source", "Kind")

    fields = self_contained(schema, [SOURCE, KIND])["fields"]

    assert [field["type"] for field in fields] == [SOURCE, KIND]


def test_a_union_of_references_has_its_records() -> None:
    other = record("b.S", "com.acme.Source")

    schema = self_contained(["null", "com.acme.Source", "b.S"], [SOURCE, other])

    assert schema == ["null", SOURCE, other]
    assert WriterSchema.from_schema(schema).records == ("com.acme.Source", "b.S")


def test_a_type_within_a_referenced_schema_can_be_named() -> None:
    order = record("b.Order", {"type": "array", "items": record("b.Line", "com.acme.Amount")})

    fields = self_contained(record("a.R", "b.Line", "b.Order"), [order, AMOUNT])["fields"]

    assert fields[0]["type"] == record("b.Line", AMOUNT)
    assert fields[1]["type"] == record("b.Order", {"type": "array", "items": "b.Line"})


def test_types_that_name_each_other_are_each_defined_once() -> None:
    person = record("a.Person", ["null", "Home"])
    home = record("a.Home", ["null", "Person"])

    schema = self_contained(record("a.R", "Person", "Home"), [person, home])

    assert json.dumps(schema).count('"type": "record"') == 3


def test_a_name_that_nothing_defines_remains() -> None:
    assert self_contained(["null", "a.Missing"], [SOURCE]) == ["null", "a.Missing"]
