"""Whether the states that a class left can be read after it changed, and what the sentence about it names."""

from __future__ import annotations

from typing import Any

import pytest

from balance_service.avro.codec import AvroCodec
from balance_service.avro.named_types import expanded
from balance_service.avro.resolution import difference, with_fields_of
from tests.support.fakes import FakeRegistry

DECIMAL = {"type": "bytes", "logicalType": "decimal", "precision": 18, "scale": 2}
DATE = {"type": "int", "logicalType": "date"}
MILLIS = {"type": "long", "logicalType": "timestamp-millis"}
MICROS = {"type": "long", "logicalType": "timestamp-micros"}
TEXT_UUID = {"type": "string", "logicalType": "uuid"}
FIXED_UUID = {"type": "fixed", "name": "Id", "size": 16, "logicalType": "uuid"}
INNER = {"type": "record", "name": "Inner", "fields": [{"name": "a", "type": "long"}]}
WORDS = {"type": "record", "name": "Inner", "fields": [{"name": "a", "type": "string"}]}


def holding(kind: Any, **more: Any) -> Any:
    return {"type": "record", "name": "P", "namespace": "shop", "fields": [{"name": "f", "type": kind, **more}]}


@pytest.mark.parametrize(
    ("written", "wanted", "why"),
    [
        ("long", "string", "'f' is a long there and a string here"),
        ("long", "int", "'f' is a long there and an int here"),
        ("double", "long", "'f' is a double there and a long here"),
        ("string", DECIMAL, "'f' is a string there and a decimal(18,2) here"),
        ("long", MILLIS, "'f' is a long there and a timestamp-millis here"),
        (DATE, "int", "'f' is a date there and an int here"),
        (["null", "long"], ["null", "string"], "'f' is a long there and a string here"),
        ("long", ["null", "string", DECIMAL], "'f' is a long there and a string | decimal(18,2)? here"),
        ({"type": "array", "items": "long"}, {"type": "array", "items": "string"}, "'f' is an array<long> there"),
        ({"type": "map", "values": "long"}, {"type": "array", "items": "long"}, "'f' is a map<long> there"),
        (INNER, WORDS, "'f.a' is a long there and a string here"),
        ({"type": "array", "items": INNER}, {"type": "array", "items": WORDS}, "'f' is an array<Inner{a long}> there"),
        (INNER, {**INNER, "name": "Other"}, "'f' is an Inner there and an Other here"),
        ({**FIXED_UUID, "logicalType": "x"}, {**FIXED_UUID, "logicalType": "x", "size": 8}, "'f' is a x there"),
    ],
)
def test_a_field_of_another_type_is_named_with_both_types(written: Any, wanted: Any, why: str) -> None:
    assert difference(expanded(holding(written)), expanded(holding(wanted))).startswith(why)


def test_a_new_field_without_a_default_and_another_record_are_named() -> None:
    newer = holding("long")
    newer["fields"].append({"name": "g", "type": "string"})

    assert difference(holding("long"), newer) == "'g' is missing there and has no default here"
    assert difference(holding("long"), {**newer, "name": "Q"}) == "the record is a shop.P there and a shop.Q here"


@pytest.mark.parametrize(
    ("written", "wanted", "value"),
    [
        ("int", "long", 5),
        ("int", "double", 5),
        ("long", ["null", "long"], 5),
        (["null", "long"], "long", 5),
        ("long", ["string", "double"], 5),
        (MILLIS, MICROS, None),
        ({**DECIMAL, "precision": 9}, DECIMAL, None),
        (TEXT_UUID, "string", "00000000-0000-0000-0000-00000000000a"),
        (TEXT_UUID, FIXED_UUID, None),
        ({"type": "enum", "name": "E", "symbols": ["A"]}, {"type": "enum", "name": "E", "symbols": ["A", "B"]}, "A"),
        (INNER, {**INNER, "name": "Other", "aliases": ["Inner"]}, {"a": 5}),
        (INNER, {**INNER, "fields": [*INNER["fields"], {"name": "b", "type": "int", "default": 0}]}, None),
    ],
)
def test_what_resolves_is_no_difference_and_is_read(written: Any, wanted: Any, value: Any) -> None:
    assert difference(expanded(holding(written)), expanded(holding(wanted))) == ""
    if value is not None:
        registry = FakeRegistry()
        frame = AvroCodec(registry, "s", holding(written)).encode({"f": value})
        assert AvroCodec(registry, "s", holding(wanted)).decode(frame) == {"f": value}


def test_a_type_within_itself_is_compared_once() -> None:
    tree: Any = holding(["null", "shop.P"])
    tree["fields"].append({"name": "n", "type": "long"})
    other: Any = holding(["null", "shop.P"])
    other["fields"].append({"name": "n", "type": "string"})

    assert difference(expanded(tree), expanded(tree)) == ""
    assert difference(expanded(tree), expanded(other)) == "'n' is a long there and a string here"


def test_the_fields_that_a_schema_lacks_come_after_its_own() -> None:
    theirs = {**holding(INNER), "doc": "An order."}
    more = [{"name": "g", "type": {**INNER, "namespace": "shop"}}, {"name": "h", "type": "long", "default": 0}]
    ours = {**holding("shop.Inner"), "fields": [*more, *holding("shop.Inner")["fields"]]}

    found = with_fields_of(theirs, expanded(ours))

    # Its own definition of a type that both have remains.
    assert found == {**theirs, "fields": [*theirs["fields"], {"name": "g", "type": "Inner"}, more[1]]}
    assert with_fields_of(found, expanded(ours)) is found


@pytest.mark.parametrize(
    ("ours", "why"),
    [
        (holding("string"), "'f' is a long there and a string here"),
        ({**holding("long"), "namespace": "mail"}, "one is shop.P, and the other mail.P"),
    ],
)
def test_a_schema_that_cannot_have_the_fields_of_another_is_refused(ours: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        with_fields_of(holding("long"), ours)
