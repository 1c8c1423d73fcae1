"""Conversion of writers' records on Spark: the width of decimals, and the types that Avro may resolve."""

from __future__ import annotations

import json
from typing import Any

import pytest

from balance_service.avro.schemas import fields_of, load_schema
from balance_service.spark.shape import (
    check_resolvable,
    field_types,
    nested_type,
    standing_alone,
    widened,
    with_full_names,
)
from tests.support.models import KIND, MONEY, PLACE, WHEN

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
        # A row with digits beyond the reader's scale is refused.
        ([_decimal(20, 4)], "decimal(18,2)"),
        ([_decimal(17, 0)], "decimal(38,2)"),
        ([_decimal(18, 2), _decimal(19, 2)], "decimal(38,2)"),
        (["long"], "decimal(38,2)"),
        ([["null", _decimal(18, 2)]], "decimal(38,2)"),
        ([None], "decimal(38,2)"),
    ],
)
def test_a_decimal_is_as_wide_as_its_writers_need(written: list[Any], expected: str) -> None:
    types = field_types(OURS, [_writer(kind) for kind in written])

    assert types == {"id": "string", "occurredOn": "timestamp", "customerId": "string", "amount": expected}


def array(items: Any) -> Any:
    return {"type": "array", "items": items}


FIXED = {"type": "fixed", "name": "F", "logicalType": "decimal", "precision": 5, "scale": 1}
NAMED: Any = {"type": "record", "name": "Outer", "namespace": "n", "fields": [{"name": "at", "type": PLACE}]}
ELSEWHERE: Any = {"type": "fixed", "name": "c.Hash", "size": 4}
INNER: Any = {
    "type": "record",
    "name": "Inner",
    "namespace": "c",
    "fields": [
        {"name": "kind", "type": KIND},
        {"name": "same", "type": "Kind"},
        {"name": "of_outer", "type": "a.b.Kind"},
    ],
}
OUTER: Any = {
    "type": "record",
    "name": "Outer",
    "namespace": "a.b",
    "fields": [
        {"name": "kind", "type": KIND},
        {"name": "hash", "type": ["null", ELSEWHERE]},
        {"name": "inner", "type": array(INNER)},
        {"name": "simple", "type": "Kind"},
        {"name": "full", "type": "a.b.Kind"},
        {"name": "of_inner", "type": array("c.Kind")},
        {"name": "hashes", "type": {"type": "map", "values": "c.Hash"}},
        {"name": "plain", "type": ["null", "string"]},
    ],
}
KIND_IN_FULL = {**KIND, "name": "a.b.Kind", "namespace": "a.b"}
KIND_OF_INNER = {**KIND, "name": "c.Kind", "namespace": "c"}
HASH_IN_FULL = {**ELSEWHERE, "namespace": "c"}


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        (array("int"), array("long")),
        (array("string"), array(["null", "string"])),
        (["null", array("string")], array("string")),
        (array({**MONEY, "precision": 9}), array(MONEY)),
        ({"type": "map", "values": "float"}, {"type": "map", "values": "double"}),
        ("n.Place", PLACE),
        ("n.Outer", NAMED),
        (KIND, KIND),
        (PLACE, {**PLACE, "fields": [*PLACE["fields"], {"name": "zip", "type": "string", "default": ""}]}),
    ],
    ids=repr,
)
def test_a_type_resolves_to_one_that_holds_all_its_values(written: Any, wanted: Any) -> None:
    check_resolvable(written, wanted, in_full(NAMED)[1])


@pytest.mark.parametrize(
    ("written", "wanted", "why"),
    [
        (array("long"), array("int"), "long would be read as int"),
        (array(WHEN), array("long"), "timestamp-millis would be read as long"),
        (
            array({**MONEY, "scale": 4}),
            array(MONEY),
            "decimal of scale 4, in bytes would be read as decimal of scale 2",
        ),
        (array("string"), {"type": "map", "values": "string"}, "array would be read as map"),
        ("string", PLACE, "string would be read as record"),
        (NAMED, PLACE, "Place lacks 'city'"),
    ],
    ids=repr,
)
def test_a_type_does_not_resolve_to_one_with_another_meaning(written: Any, wanted: Any, why: str) -> None:
    with pytest.raises(TypeError, match=why):
        check_resolvable(written, wanted, in_full(NAMED)[1])


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (["simple"], [KIND_IN_FULL]),
        (["full"], [KIND_IN_FULL]),
        (["simple", "full"], [KIND_IN_FULL, "a.b.Kind"]),
        (["kind", "full"], [KIND_IN_FULL, "a.b.Kind"]),
        (["of_inner", "full"], [array(KIND_OF_INNER), KIND_IN_FULL]),
        (["hashes", "hash"], [{"type": "map", "values": HASH_IN_FULL}, ["null", "c.Hash"]]),
        (["plain"], [["null", "string"]]),
    ],
    ids=repr,
)
def test_a_named_type_is_defined_even_if_the_defining_field_is_left_out(fields: list[str], expected: list[Any]) -> None:
    kinds, named = in_full(OUTER)

    assert list(standing_alone({name: kinds[name] for name in fields}, named).values()) == expected


def test_a_named_type_is_defined_once() -> None:
    kinds, named = in_full(OUTER)

    alone = standing_alone({"of_inner": kinds["of_inner"], "inner": kinds["inner"]}, named)

    assert [field["type"] for field in alone["inner"]["items"]["fields"]] == ["c.Kind", "c.Kind", KIND_IN_FULL]


@pytest.mark.parametrize("field", ["simple", "full"])
def test_a_type_is_found_by_its_simple_and_its_full_name(field: str) -> None:
    kinds, named = in_full(OUTER)

    check_resolvable(kinds[field], KIND, named)


def test_a_name_without_namespace_is_found_from_within_a_namespace() -> None:
    # Java's library writes schemas in this form.
    inner = {**INNER, "fields": [{"name": "kind", "type": "Kind"}]}
    outer = {"type": "record", "name": "Outer", "fields": [{"name": "k", "type": KIND}, {"name": "in", "type": inner}]}

    kinds, named = in_full(outer)

    assert fields_of(kinds["in"]) == {"kind": "Kind"}
    assert named["Kind"] == {**KIND, "namespace": ""}


def in_full(schema: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the types of the schema's fields, and its named types."""
    named: dict[str, Any] = {}
    return fields_of(with_full_names(schema, named)), named


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (array(MONEY), "array<decimal(38,2)>"),
        ({"type": "map", "values": ["null", {**FIXED, "size": 16}]}, "map<string,decimal(38,1)>"),
        # Spark reads all of 8 bytes, and 12 bytes hold fewer than 38 digits.
        (array({**FIXED, "size": 8}), "array<decimal(5,1)>"),
        (array({**FIXED, "size": 12}), "array<decimal(28,1)>"),
        (PLACE, "struct<`city`:string,`since`:timestamp>"),
        (array(KIND), "array<string>"),
    ],
    ids=repr,
)
def test_a_nested_decimal_is_read_with_its_greatest_precision(kind: Any, expected: str) -> None:
    assert nested_type(widened(kind)) == expected
