"""A dataclass of the service has the fields of its published Avro record: the same names, order and types."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

import pytest

from balance_service.avro.schemas import fields_of, load_schema
from balance_service.cluster.directory import ApplicationServer
from balance_service.engine.dead_letter import Letter
from balance_service.engine.decisions import DeadLetterDecision
from balance_service.engine.records import Position
from balance_service.http.answer import compact_json
from balance_service.http.openapi import document
from balance_service.http.route import Route, Tag, ok
from balance_service.model.generations import Declaration, Generations
from balance_service.model.json_view import exact_json
from balance_service.structs import Struct, absent, names_of, without_none

_TYPES: dict[Any, tuple[str, ...]] = {
    bool: ("boolean",),
    bytes: ("bytes",),
    float: ("double",),
    int: ("int", "long"),
    str: ("string",),
}
_TIMES = ("timestamp-millis", "timestamp-micros")


def check(kind: type[Struct], schema: Any, *, written_apart: Collection[str] = ()) -> None:
    """Checks a dataclass against a record's schema.

    Args:
        written_apart: the fields of the schema that the dataclass converts itself.
    """
    hints, expected = get_type_hints(kind), {field["name"]: field["type"] for field in schema["fields"]}
    names = names_of(kind)

    assert [*names.values()] == [name for name in expected if name not in written_apart], kind
    for attribute, name in names.items():
        check_type(hints[attribute], expected[name], f"{kind.__name__}.{attribute}")


def check_type(hint: Any, schema: Any, where: str) -> None:
    kind, is_nullable = without_none(hint)
    if is_nullable:
        assert schema[0] == "null", where
        schema = schema[1]
    if isinstance(kind, type) and issubclass(kind, Struct):
        check(kind, schema)
    elif isinstance(kind, type) and issubclass(kind, Enum):
        assert [member.value for member in kind] == schema["symbols"], where
    elif get_origin(kind) is Literal:
        assert [*get_args(kind)] == schema["symbols"], where
    elif get_origin(kind) is tuple:
        assert (schema["type"], get_args(kind)[1]) == ("array", ...), where
        check_type(get_args(kind)[0], schema["items"], where)
    elif get_origin(kind) is Mapping:
        assert schema["type"] == "map", where
        check_type(get_args(kind)[1], schema["values"], where)
    elif kind is datetime:
        assert schema["logicalType"] in _TIMES, where
    else:
        assert schema in _TYPES[kind], where


@pytest.mark.parametrize(
    ("kind", "written_apart"),
    [
        (ApplicationServer, ()),
        (DeadLetterDecision, ()),
        (Generations, ("declarations",)),
        (Letter, ()),
        (Position, ("format", "offsets")),
    ],
)
def test_a_dataclass_has_the_fields_of_its_published_record(kind: type[Struct], written_apart: Collection[str]) -> None:
    check(kind, load_schema(kind.__name__), written_apart=written_apart)


def test_a_declaration_has_the_fields_of_its_record_but_the_generation() -> None:
    check(Declaration, fields_of(load_schema("Generations"))["declarations"]["items"], written_apart=["generation"])


class Colour(Enum):
    RED = "red"


@dataclass(frozen=True, slots=True)
class Part(Struct):
    size_mm: int


@dataclass(frozen=True, slots=True)
class Thing(Struct, names={"since_ms": "since"}, beside=("key",)):
    key: str
    since_ms: int
    colour: Colour | None
    parts: tuple[Part, ...]
    first_part: Part | None = None
    key_base64: str = field(default_factory=absent)


@dataclass(frozen=True, slots=True)
class LargerThing(Thing, beside=("seen",)):
    seen: bool = False


@dataclass(frozen=True, slots=True)
class Shown(Struct):
    size_mm: int = 0
    """From end to end."""
    key_base64: str = field(default_factory=absent)


THING = Thing("k", 5, Colour.RED, (Part(1), Part(2)))
RECORD = {"since": 5, "colour": "red", "parts": [{"sizeMm": 1}, {"sizeMm": 2}], "firstPart": None}


def test_a_record_has_plain_values_under_its_names() -> None:
    assert THING.record() == RECORD
    assert LargerThing("k", 5, Colour.RED, (Part(1), Part(2)), seen=True).record() == RECORD


def test_a_field_that_may_be_absent_is_in_the_record_if_it_is_given() -> None:
    assert Thing("k", 5, None, (), key_base64="aw==").record()["keyBase64"] == "aw=="


def test_an_instance_is_read_from_its_record_and_what_is_beside_it() -> None:
    read = Thing.of({**RECORD, "firstPart": {"sizeMm": 3}, "colour": None, "keyBase64": ""}, key="k")

    assert read == Thing("k", 5, None, (Part(1), Part(2)), Part(3), key_base64="")


def test_both_writers_of_json_take_a_record_and_what_holds_one() -> None:
    assert json.loads(compact_json({"things": [THING]})) == json.loads(exact_json({"things": [THING]}))
    assert json.loads(compact_json(THING)) == RECORD
    with pytest.raises(TypeError, match="cannot represent"):
        compact_json(object())


def test_the_document_describes_each_field_without_its_default_and_requires_it_unless_it_may_be_absent() -> None:
    route = Route(
        name="getPart",
        path="/parts",
        handle=cast("Any", None),
        tag=Tag("parts", "Parts."),
        scopes=frozenset(),
        summary="A part",
        description="A part.",
        responses=(ok("The part.", Shown),),
    )

    assert document([route])["components"]["schemas"]["Shown"] == {
        "additionalProperties": False,
        "properties": {
            "sizeMm": {"description": "From end to end.", "type": "integer"},
            "keyBase64": {"type": "string"},
        },
        "required": ["sizeMm"],
        "title": "Shown",
        "type": "object",
    }
