"""Named types in full at each use, and as Avro again."""

from __future__ import annotations

import json
from typing import Any

import fastavro
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balance_service.avro.named_types import contracted, expanded
from balance_service.avro.schemas import fields_of, type_name

ADDRESS = {"type": "record", "name": "Address", "fields": [{"name": "city", "type": "string"}]}
STATUS = {"type": "enum", "name": "Status", "symbols": ["NEW", "PAID"]}
HASH = {"type": "fixed", "name": "other.Hash", "size": 4}


def record(*kinds: Any, name: str = "Ordered", namespace: str = "shop") -> dict[str, Any]:
    fields = [{"name": f"f{n}", "type": kind} for n, kind in enumerate(kinds)]
    return {"type": "record", "name": name, "namespace": namespace, "fields": fields}


@pytest.mark.parametrize("use", ["Address", "shop.Address", {"type": "Address"}], ids=str)
def test_a_named_type_is_in_full_at_each_use(use: Any) -> None:
    whole = expanded(record(ADDRESS, use, ["null", use], {"type": "array", "items": use}))

    address = "Address{city string}"
    assert [*map(type_name, fields_of(whole).values())] == [address, address, f"{address}?", f"array<{address}>"]


def test_a_schema_that_uses_each_type_once_is_unchanged() -> None:
    schema = record(ADDRESS, ["null", STATUS], {"type": "map", "values": HASH}, {"type": "string", "doc": "text"})

    assert expanded(schema) == schema
    assert contracted(schema) == schema


def test_a_type_that_is_used_twice_is_written_as_it_was() -> None:
    schema = record(ADDRESS, "Address", STATUS, ["null", "Status"], HASH, "other.Hash")

    assert contracted(expanded(schema)) == schema


def test_a_type_is_defined_where_it_is_first_used_once_the_first_field_is_gone() -> None:
    whole = expanded(record(ADDRESS, "Address", "Address"))
    pruned = contracted({**whole, "fields": whole["fields"][1:]})

    assert pruned == record(ADDRESS, "Address") | {
        "fields": [
            {"name": "f1", "type": ADDRESS},
            {"name": "f2", "type": "Address"},
        ]
    }
    fastavro.parse_schema(pruned)


def test_a_type_keeps_its_namespace_where_another_is_around_it() -> None:
    inner = record(ADDRESS, name="Inner", namespace="stock")
    schema = record(inner, "stock.Address", record("stock.Address", name="Last", namespace="last"))
    whole = expanded(schema)
    pruned = contracted({**whole, "fields": whole["fields"][1:]})

    named = fastavro.parse_schema(pruned)["__named_schemas"]  # type: ignore[index,call-overload]
    assert {*named} == {"shop.Ordered", "stock.Address", "last.Last"}
    assert contracted(whole) == schema


def test_a_type_that_contains_itself_remains_a_name_within_itself() -> None:
    node = {"type": "record", "name": "Node", "fields": [{"name": "next", "type": ["null", "Node"]}]}

    whole = expanded(record(node, "Node"))

    assert [type_name(kind) for kind in fields_of(whole).values()] == ["Node{next shop.Node?}"] * 2
    fastavro.parse_schema(contracted(whole))


def test_two_definitions_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match=r"it defines shop\.Status in two ways"):
        expanded(record(STATUS, {**STATUS, "symbols": ["OLD"]}))


def test_a_schema_that_doubles_with_each_level_is_refused() -> None:
    kind: Any = "long"
    for level in range(30):
        kind = record(kind, f"R{level - 1}" if level else "long", name=f"R{level}")

    with pytest.raises(ValueError, match="more than 10000 types"):
        expanded(kind)


@st.composite
def schemas(draw: st.DrawFn) -> dict[str, Any]:
    """Draws a record whose fields use a few named types in any order, some in other namespaces."""
    names = [f"{space}N{n}" for n, space in enumerate(draw(st.lists(st.sampled_from(["", "a.", "a.b."]), max_size=4)))]
    done: dict[str, str] = {}

    def kind(depth: int, space: str) -> Any:
        choices = ["long", "array", "map", "null"] + (names if depth < 4 else [])
        choice = draw(st.sampled_from(choices))
        if choice in ("array", "map"):
            return {"type": choice, "items" if choice == "array" else "values": kind(depth + 1, space)}
        if choice == "null":
            inner = kind(depth + 1, space)
            return inner if isinstance(inner, list) else ["null", inner] if inner != "null" else "null"
        if choice == "long":
            return "long"
        if choice in done:
            return done[choice]
        done[choice] = full = choice if "." in choice else f"{space}.{choice}"
        inside = full.rpartition(".")[0]
        count = draw(st.integers(0, 3))
        fields = [{"name": f"f{n}", "type": kind(depth + 1, inside)} for n in range(count)]
        return {"type": "record", "name": choice, "fields": fields}

    count = draw(st.integers(1, 5))
    return record(*(kind(0, "shop") for _ in range(count)))


@given(schemas())
def test_a_schema_in_full_means_the_same_once_it_is_avro_again(schema: dict[str, Any]) -> None:
    text = json.dumps(schema)
    there_and_back = contracted(expanded(schema))

    assert json.dumps(schema) == text
    assert expanded(there_and_back) == expanded(schema)
    assert fastavro.schema.to_parsing_canonical_form(there_and_back) == fastavro.schema.to_parsing_canonical_form(
        schema
    )


@given(schemas(), st.data())
def test_any_fields_of_a_schema_in_full_are_avro(schema: dict[str, Any], data: st.DataObject) -> None:
    whole = expanded(schema)
    kept = data.draw(st.lists(st.sampled_from(whole["fields"]), unique_by=lambda field: field["name"]))

    fastavro.parse_schema(contracted({**whole, "fields": kept}))
