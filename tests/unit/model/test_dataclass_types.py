"""Which schema a dataclass has, and why a class is refused as a state."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import InitVar, dataclass, make_dataclass
from decimal import Decimal
from enum import Enum, Flag
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, List, Union  # noqa: UP035  (users write them)

import pytest

from balance_service.avro.codec import UntrustedSchema
from balance_service.avro.named_types import expanded
from balance_service.avro.schemas import fields_of, full_name, subject_of, type_name
from balance_service.model.converters import converter_of
from balance_service.model.value_types import Scale, scale
from balance_service.testing.rows import arrow_type
from tests.unit.model.dataclass_states import (
    BASKET,
    DATE,
    MICROS,
    MONEY,
    Basket,
    Limits,
    Line,
    Money,
    Size,
    holding,
    refusal,
    there_and_back,
)

if TYPE_CHECKING:
    from uuid_of_nobody import Missing  # type: ignore[import-not-found]


def test_a_schema_has_the_fields_in_order_and_the_read_models_namespace() -> None:
    schema = converter_of(Basket, "big-baskets").schema

    assert full_name(schema) == "big_baskets.State"
    assert subject_of("changelog", schema) == "changelog-big_baskets.State"
    assert [*fields_of(schema)] == [each.name for each in dataclasses.fields(Basket)]
    level = {"type": "enum", "name": "Level", "namespace": "big_baskets", "symbols": ["LOW", "HIGH"]}
    line = {
        "type": "record",
        "name": "Line",
        "namespace": "big_baskets",
        "fields": [
            {"name": "sku", "type": "string"},
            {"name": "price", "type": MONEY},
            {"name": "level", "type": "big_baskets.Level", "default": "LOW"},
        ],
    }
    assert fields_of(schema) == {
        "customerId": "string",
        "count": "long",
        "weight": "double",
        "paid": "boolean",
        "digest": "bytes",
        "at": MICROS,
        "day": DATE,
        "total": {**MONEY, "precision": 10},
        "level": level,
        "note": ["null", "string"],
        "lines": {"type": "array", "items": line},
        "prices": {"type": "map", "values": MONEY},
        "last": ["null", "big_baskets.Line"],
        "levels": {"type": "array", "items": "big_baskets.Level"},
    }
    assert __name__ not in json.dumps(schema)
    UntrustedSchema(json.dumps(schema))


def test_named_types_are_inlined_for_inspection() -> None:
    schema = converter_of(Basket, "baskets").schema

    whole = fields_of(expanded(schema))

    assert type_name(whole["last"]) == "Line{sku string, price decimal(38,2), level Level(LOW, HIGH)}?"
    assert type_name(whole["levels"]) == "array<Level(LOW, HIGH)>"
    assert arrow_type(whole["last"]) == arrow_type(whole["lines"]["items"])
    assert fields_of(schema)["last"] == ["null", "baskets.Line"]


class Nothing(Enum):
    pass


class Aliased(Enum):
    FIRST = 1
    BEST = 1  # noqa: PIE796


class Accented(Enum):
    é = 1


class Rights(Flag):
    READ = 1


@dataclass
class Node:
    children: list[Node]


@dataclass
class Ping:
    pong: Pong | None


@dataclass
class Pong:
    ping: Ping | None


@dataclass
class Unresolved:
    fine: int
    gone: dict[str, Missing]


@dataclass
class Initialised:
    kept: int
    given: InitVar[int]


@dataclass(init=False)
class OwnInit:
    kept: int


class Plain:
    kept: int


class Undecorated(Line):
    more: int


@dataclass
class Empty:
    pass


@dataclass
class Ünicode:
    kept: int


def one_called(name: str) -> Any:
    return make_dataclass(name, [("kept", int)])


TWO_LINES = make_dataclass("Two", [("one", Line), ("other", one_called("Line"))])
WRITE_SCALE = "write `Annotated[Decimal, scale(2)]`"


@pytest.mark.parametrize(
    ("hint", "why"),
    [
        (set[str], "is of type set[str], which Avro does not have: use str, int, "),
        (tuple[int, ...], "is of type tuple[int, ...], which Avro"),
        (Any, "is of type Any, which Avro"),
        (object, "is of type object, which Avro"),
        (None, "is of type NoneType, which Avro"),
        (complex, "is of type complex, which Avro"),
        (int | str, "is int | str, which allows several types: use X or X | None"),
        (Union[int, str, None], "is Union[int, str, NoneType], which"),  # noqa: UP007
        (dict[int, str], "is a dict[int, str], but keys of Avro maps are text: use dict[str, X]"),
        (dict, "is a dict without item type: write `list[X]` or `dict[str, X]`"),
        (List, "is a List without item type: write"),  # noqa: UP006
        (Decimal, f"is a Decimal without its digits after the point: {WRITE_SCALE}"),
        (Annotated[Decimal, scale], f"is a Decimal without its digits after the point: {WRITE_SCALE}"),
        (list[Decimal | None], "is a Decimal without its digits"),
        (Annotated[int, scale(2)], f"has `scale` on int: {WRITE_SCALE}"),
        (Annotated[Decimal | None, scale(2)], f"{WRITE_SCALE}, and any `| None` after it"),
        (Annotated[Decimal, scale(39)], "has Scale(digits=39, precision=38): a Decimal has 1 to 38 digits"),
        (Annotated[Decimal, scale(-1)], "has Scale(digits=-1, precision=38)"),
        (Annotated[Decimal, Scale(2, 39)], "has Scale(digits=2, precision=39)"),
        (Annotated[Decimal, scale(0, precision=0)], "has Scale(digits=0, precision=0)"),
        (Nothing, "is the Enum Nothing, which has no members: give it one"),
        (Aliased, "is the Enum Aliased, where BEST is an alias of FIRST: remove one of them"),
        (Accented, "is the Enum Accented, but Avro allows no symbol é: use ASCII"),
        (Rights, "is the Flag Rights, whose values combine several members"),
        (Ünicode, "is of type Ünicode, a name that Avro does not allow: rename the class"),
        (one_called("string"), "is of type string, a name that Avro does not allow"),
        (one_called("State"), "is of type State, the name of another class in this state or of the state"),
    ],
)
def test_the_error_for_a_field_without_avro_type_says_why(hint: Any, why: str) -> None:
    sentence = refusal(holding(hint))

    assert " cannot be a state: its field 'f' " in sentence
    assert why in sentence


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (Node, "its field 'children' contains Node recursively: keep the key of the other one instead"),
        (Ping, "its field 'ping' contains Ping recursively"),
        (Unresolved, "its field 'gone' has a type that cannot be resolved (name 'Missing' is not defined): define or "),
        (Initialised, "its field 'given' is an InitVar, which instances do not keep: make it a field"),
        (OwnInit, "it has no `__init__` of a dataclass: remove `init=False`"),
        (Plain, "write `@dataclass` above it"),
        (Undecorated, "write `@dataclass` above it"),
        (Empty, "it has no fields: give it one"),
        (holding(int, init=False), "its field 'f' is not an argument of the class: remove `init=False`"),
        (make_dataclass("Accented", [("é", int)]), "its field 'é' has a name that Avro does not allow: use ASCII"),
        (TWO_LINES, "its field 'other' is of type Line, the name of another class in this state or of the state"),
        (holding(str, default=None), "has a default that does not fit: the state cannot be kept: Holding.f has"),
        (holding(int, default=2**63), "Holding.f is beyond 64 bits; use one of its type"),
        (holding(Money, default=Decimal("0.001")), "2 after the point; use one of its type"),
        (holding(list[int], default_factory=dict), "of type dict, and a list is expected; use one of its type"),
        (holding(Line, default=Line("a", 1)), "has a default that does not fit"),  # type: ignore[arg-type]
        (holding(Line, default=Line(1, Decimal(1))), "Line.sku has a value of type int"),  # type: ignore[arg-type]
    ],
)
def test_the_error_for_a_class_that_cannot_be_a_state_says_why(state: Any, why: str) -> None:
    assert why in refusal(state)


def line_of(text: str) -> int:
    return Path(__file__).read_text(encoding="utf-8").splitlines().index(text) + 1


def test_the_error_names_the_file_and_line_of_the_class() -> None:
    at = line_of("class Node:") - 1

    assert refusal(Node).startswith(f"the dataclass Node ({__file__}:{at}) cannot be a state: ")
    assert refusal(Plain).startswith(f"the class Plain ({__file__}:{line_of('class Plain:')}) cannot be")
    assert refusal(int).startswith("the class int (module builtins) cannot be a state")
    assert refusal(BASKET).startswith("the class Basket(customerId=")


def test_the_error_for_a_class_without_source_names_its_module() -> None:
    typed = "from dataclasses import dataclass\n@dataclass\nclass Typed:\n    seen: set[str]\n"
    names: dict[str, Any] = {"__name__": "typed_at_a_prompt"}
    exec(compile(typed, "<stdin>", "exec", dont_inherit=True), names)

    assert refusal(names["Typed"]).startswith("the dataclass Typed (module typed_at_a_prompt) cannot be a state")


def test_a_type_that_is_used_twice_is_defined_once() -> None:
    twice = make_dataclass("Twice", [("a", Size), ("b", list[Size]), ("c", Limits), ("d", Limits | None)])
    schema = converter_of(twice, "m").schema
    definitions = re.findall(r'"name": "(Size|Limits)"', json.dumps(schema))

    assert definitions == ["Size", "Limits"]
    assert fields_of(schema)["b"] == {"type": "array", "items": "m.Size"}
    assert fields_of(schema)["d"] == ["null", "m.Limits"]
    assert there_and_back(twice(Size.SMALL, [Size.SMALL], Limits(), Limits(Decimal(1)))).d == Limits(Decimal(1))
