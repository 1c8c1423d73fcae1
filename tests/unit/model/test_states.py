"""Dataclass states: values are read back or refused, and invalid classes are refused with the reason."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from dataclasses import InitVar, dataclass, field, make_dataclass
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum, Flag, IntEnum, StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Dict, List, Optional, Union  # noqa: UP035  (users write them)

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balance_service.avro.codec import AvroCodec, UntrustedSchema
from balance_service.avro.named_types import expanded
from balance_service.avro.schemas import fields_of, full_name, subject_of, type_name
from balance_service.errors import ConfigurationError, PoisonRecordError
from balance_service.model.states import Scale, converter_of, scale
from balance_service.testing.fakes import FakeRegistry
from balance_service.testing.rows import arrow_type

if TYPE_CHECKING:
    from collections.abc import Callable

    from uuid_of_nobody import Missing  # type: ignore[import-not-found]

Money = Annotated[Decimal, scale(2)]
MONEY = {"type": "bytes", "logicalType": "decimal", "precision": 38, "scale": 2}
MICROS = {"type": "long", "logicalType": "timestamp-micros"}
DATE = {"type": "int", "logicalType": "date"}
NOON = datetime(2024, 5, 17, 12, 0, 0, 123456, tzinfo=UTC)


class Level(Enum):
    LOW = 1
    HIGH = "high"


class Size(StrEnum):
    SMALL = "s"


class Rank(IntEnum):
    FIRST = 1


@dataclass(frozen=True)
class Line:
    sku: str
    price: Annotated[Decimal, scale(2)]
    level: Level = Level.LOW


@dataclass
class Basket:
    customerId: str  # noqa: N815
    count: int
    weight: float
    paid: bool
    digest: bytes
    at: datetime
    day: date
    total: Annotated[Decimal, scale(2, precision=10)]
    level: Level
    note: str | None
    lines: list[Line]
    prices: dict[str, Annotated[Decimal, scale(2)]]
    last: Optional[Line]  # noqa: UP045
    levels: List[Level]  # noqa: UP006


BASKET = Basket(
    customerId="Zoë",
    count=-(2**63),
    weight=0.1,
    paid=True,
    digest=b"\x00\xff",
    at=NOON,
    day=date(1, 1, 1),
    total=Decimal("-12345678.90"),
    level=Level.HIGH,
    note=None,
    lines=[Line("a", Decimal("1.00")), Line("b", Decimal("0.01"), Level.HIGH)],
    prices={"a": Decimal("1.00"), "-type": Decimal("2.00")},
    last=Line("a", Decimal("1.00")),
    levels=[Level.LOW],
)


def there_and_back(state: Any) -> Any:
    converter = converter_of(type(state), "test")
    codec = AvroCodec(FakeRegistry(), "states", converter.schema)
    return converter.from_record(codec.decode(codec.encode(converter.to_record(state))))


def holding(hint: Any, **of_field: Any) -> Any:
    """A dataclass with one field."""
    return make_dataclass("Holding", [("f", hint, field(**of_field))])


def schema_of_field(hint: Any, **of_field: Any) -> dict[str, Any]:
    schema = converter_of(holding(hint, **of_field), "test").schema
    UntrustedSchema(json.dumps(schema))
    (found,) = schema["fields"]
    return {name: part for name, part in found.items() if name != "name"}


def refusal(state: Any) -> str:
    with pytest.raises(ConfigurationError) as refused:
        converter_of(state, "test")
    return str(refused.value)


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


def test_a_state_is_read_back() -> None:
    read = there_and_back(BASKET)

    assert read == BASKET
    assert read.at.tzinfo is UTC
    assert type(read.level) is Level


@pytest.mark.parametrize(
    ("hint", "given_value", "read"),
    [
        (Money, Decimal(1), "1.00"),
        (Money, Decimal("1E+35"), "1" + "0" * 35 + ".00"),
        (Money, Decimal("9" * 36 + ".99"), "9" * 36 + ".99"),
        (Annotated[Decimal, scale(0)], Decimal("9" * 38), "9" * 38),
        (Annotated[Decimal, scale(38)], Decimal("0." + "9" * 38), "0." + "9" * 38),
        (Money | None, Decimal(-1), "-1.00"),
        (list[Money], [Decimal("1.5")], "['1.50']"),
    ],
)
def test_a_decimal_is_widened_exactly(hint: Any, given_value: Any, read: str) -> None:
    value = there_and_back(holding(hint)(given_value)).f

    assert str([*map(str, value)] if isinstance(value, list) else format(value, "f")) == read


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (float, 3),
        (float, math.inf),
        (str, Size.SMALL),
        (int, Rank.FIRST),
        (Size, Size.SMALL),
        (Rank | None, Rank.FIRST),
        (Dict[str, list[int | None]], {"a": [1, None], "": []}),  # noqa: UP006
        (list[bool], [True, False]),
        (list[list[float]], [[1, 0.5], []]),
        (datetime, datetime(2024, 1, 1, tzinfo=timezone(timedelta(hours=5, minutes=30)))),
        (datetime | None, datetime.max.replace(tzinfo=UTC)),
        (dict[str, str] | None, {"a": "b"}),
        (Annotated[int, "in grams"], 1),
        (Line | None, Line("a", Decimal("1.00"))),
    ],
)
def test_a_value_that_a_type_holds_exactly_is_read_back(hint: Any, value: Any) -> None:
    assert there_and_back(holding(hint)(value)).f == value


_VALUES: list[tuple[Any, Any]] = [
    (str, st.text(st.characters(exclude_categories=["Cs"]), max_size=5)),
    (int, st.integers(-(2**63), 2**63 - 1)),
    (float, st.floats(allow_nan=False)),
    (bool, st.booleans()),
    (bytes, st.binary(max_size=5)),
    (datetime, st.datetimes(timezones=st.just(UTC))),
    (date, st.dates()),
    (Level, st.sampled_from(Level)),
    (Money, st.integers(-(10**38) + 1, 10**38 - 1).map(lambda cents: Decimal(f"{cents}E-2"))),
]


def typed_values(kind: tuple[Any, Any]) -> st.SearchStrategy[tuple[Any, Any]]:
    """Extends a type to types that contain it, with their values."""
    hint: Any
    values: Any
    hint, values = kind
    nullable, lists, maps = hint | None, list.__class_getitem__, dict.__class_getitem__
    return st.sampled_from(
        [
            kind,
            (nullable, st.none() | values),
            (lists(hint), st.lists(values, max_size=3)),
            (maps((str, hint)), st.dictionaries(st.text("ab", max_size=2), values, max_size=3)),
            (lists(nullable) | None, st.none() | st.lists(st.none() | values, max_size=3)),
        ]
    )


@st.composite
def states(draw: st.DrawFn, depth: int = 1) -> Any:
    kinds = draw(st.lists(st.sampled_from(_VALUES).flatmap(typed_values), min_size=1, max_size=5))
    values = [draw(of_kind) for _, of_kind in kinds]
    hints = [hint for hint, _ in kinds]
    if depth and draw(st.booleans()):
        inner = draw(states(depth - 1))
        hints += [type(inner), list.__class_getitem__(type(inner)), type(inner) | None]
        values += [inner, draw(st.lists(st.just(inner), max_size=2)), draw(st.sampled_from([None, inner]))]
    name = f"Generated{depth}"
    has_defaults = draw(st.booleans())
    made = make_dataclass(
        name,
        [
            (f"f{i}", hint, field(default=value) if has_defaults and value.__class__.__hash__ else field())
            for i, (hint, value) in enumerate(zip(hints, values, strict=True))
        ],
        frozen=True,
        kw_only=True,
    )
    return made(**{f"f{i}": value for i, value in enumerate(values)})


@settings(max_examples=200, deadline=None)
@given(states())
def test_any_state_of_any_dataclass_is_read_back(state: Any) -> None:
    assert there_and_back(state) == state


@settings(max_examples=100, deadline=None)
@given(states())
def test_an_older_state_gets_every_default_that_avro_can_represent(state: Any) -> None:
    # The older state has none of these fields.
    newer = converter_of(type(state), "test")
    has_all = all("default" in each for each in newer.schema["fields"])
    registry = FakeRegistry()
    older = AvroCodec(registry, "states", converter_of(holding(int, default=1), "test").schema).encode({"f": 1})
    if not has_all:
        return
    json_text = json.loads(json.dumps(newer.schema))

    assert newer.from_record(AvroCodec(registry, "states", json_text).decode(older)) == state


@dataclass(frozen=True)
class Limits:
    most: Annotated[Decimal, scale(2)] = Decimal("100.5")
    since: datetime = NOON
    tags: list[str] = field(default_factory=list)


@dataclass
class Stamped:
    at: datetime = field(default_factory=lambda: datetime.now(UTC))


@dataclass
class Newer:
    f: int
    text: str = "é"
    count: int = 7
    weight: float = 1
    paid: bool = True
    digest: bytes = b"\x00\xff"
    at: datetime = datetime(1969, 12, 31, 23, 59, 59, 999999, tzinfo=UTC)
    day: date = date(1969, 12, 31)
    total: Annotated[Decimal, scale(2)] = Decimal(-2)
    level: Level = Level.HIGH
    note: str | None = None
    name: str | None = "a"
    pages: list[str] = field(default_factory=list)
    prices: dict[str, Annotated[Decimal, scale(2)]] | None = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    strict: Limits | None = Limits(Decimal(1))
    line: Line | None = None


def test_an_older_state_gets_the_default_of_an_added_field() -> None:
    registry = FakeRegistry()
    older = AvroCodec(registry, "states", converter_of(holding(int), "test").schema).encode({"f": 1})
    newer = converter_of(Newer, "test")
    codec = AvroCodec(registry, "states", newer.schema)

    read = newer.from_record(codec.decode(older))
    read.pages.append("of this state alone")
    read.limits.tags.append("of this state alone")
    again = newer.from_record(codec.decode(older))

    assert again == Newer(1)
    assert (str(again.total), str(again.limits.most), again.at.tzinfo) == ("-2.00", "100.50", UTC)
    assert type(again.weight) is float
    assert there_and_back(again) == again
    # Other readers use the Avro defaults.
    UntrustedSchema(json.dumps(newer.schema))


@pytest.mark.parametrize(
    ("hint", "default", "written"),
    [
        (Optional[str], {"default": None}, {"type": ["null", "string"], "default": None}),  # noqa: UP045
        (str | None, {"default": "a"}, {"type": ["string", "null"], "default": "a"}),
        (None | str, {}, {"type": ["null", "string"]}),
        (float, {"default": 1}, {"type": "double", "default": 1.0}),
        (float, {"default": math.nan}, {"type": "double"}),
        (int, {"default": Rank.FIRST}, {"type": "long", "default": 1}),
        (Money, {"default": Decimal("2.56")}, {"type": MONEY, "default": "\x01\x00"}),
        (Money, {"default": Decimal(0)}, {"type": MONEY, "default": "\x00"}),
        (bytes, {"default": b"\xff"}, {"type": "bytes", "default": "ÿ"}),
        (datetime, {"default": datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)}, {"type": MICROS, "default": 1_000_000}),
        (date, {"default": date(1970, 1, 2)}, {"type": DATE, "default": 1}),
        (list[int], {"default_factory": list}, {"type": {"type": "array", "items": "long"}, "default": []}),
        (list[int], {"default_factory": lambda: [1]}, {"type": {"type": "array", "items": "long"}}),
        (datetime, {"default_factory": lambda: datetime.now(UTC)}, {"type": MICROS}),
    ],
)
def test_a_default_becomes_an_avro_default(hint: Any, default: Any, written: Any) -> None:
    assert schema_of_field(hint, **default) == written


def test_a_default_factory_that_may_vary_makes_no_avro_default() -> None:
    assert "default" not in schema_of_field(Stamped, default_factory=Stamped)


def test_a_record_without_a_field_that_has_a_default_is_read() -> None:
    newer = converter_of(Newer, "test")
    made = converter_of(holding(list[int], default_factory=lambda: [1]), "test")

    assert newer.from_record({"f": 1, "text": "b"}) == Newer(1, "b")
    assert made.from_record({}).f == [1]


@pytest.mark.parametrize(("hint", "value"), [(dict[str, int], {"a": 1}), (list[int], [1])])
def test_an_instance_does_not_share_unconverted_values_with_its_record(hint: Any, value: Any) -> None:
    converter = converter_of(holding(hint), "test")

    converter.from_record({"f": value}).f.clear()

    assert value


def test_an_instance_shares_nothing_with_its_record() -> None:
    converter = converter_of(Basket, "test")
    record = converter.to_record(BASKET)
    before = converter.from_record(record)

    state = converter.from_record(record)
    state.lines.append(Line("c", Decimal(1)))
    state.prices.clear()
    state.count = 0

    assert converter.from_record(record) == before == BASKET


@pytest.mark.parametrize(
    ("hint", "value", "why"),
    [
        (int, "1", "has a value of type str, and int is expected"),
        (int, True, "of type bool, and int"),
        (int, 1.0, "of type float, and int"),
        (int, None, "of type NoneType, and int"),
        (int | None, False, "of type bool, and int"),
        (list[int], [1, True], "of type bool, and int"),
        (list[int], (1,), "of type tuple, and a list"),
        (list[str], "ab", "of type str, and a list"),
        (list[Line], [{"sku": "a"}], "Line has a value of type dict, and a Line is expected"),
        (dict[str, int], {"a": 1.5}, "of type float, and int"),
        (dict[str, str], [], "of type list, and a dict"),
        (float, "1", "of type str, and float"),
        (float, True, "of type bool, and float"),
        (float, Decimal(1), "of type Decimal, and float"),
        (float, 2**53 + 1, "an int that no float represents exactly"),
        (float, 10**400, "an int that no float represents exactly"),
        (bool, 1, "of type int, and bool"),
        (bool, None, "of type NoneType, and bool"),
        (date, NOON, "of type datetime, and date"),
        (date, "2024-05-17", "of type str, and date"),
        (datetime, NOON.replace(tzinfo=None), "has a datetime without a time zone"),
        (datetime, 1_700_000_000, "of type int, and datetime"),
        (datetime, datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=1))), "outside of the years 1 to 9999 in UTC"),
        (Money, 1, "of type int, and a Decimal"),
        (Money, 1.5, "of type float, and a Decimal"),
        (Money, b"a", "of type bytes, and a Decimal"),
        (Money, Decimal("0.001"), "a Decimal with more than 38 digits, or more than 2 after the point"),
        (Money, Decimal("1.000"), "2 after the point"),
        (Money, Decimal("1E+36"), "more than 38 digits"),
        (Money, Decimal("1E+40"), "more than 38 digits"),
        (Money | None, Decimal("NaN"), "more than 38 digits"),
        (Money, Decimal("-Infinity"), "more than 38 digits"),
        (list[Money], [Decimal("0.001")], "2 after the point"),
        (Annotated[Decimal, scale(2, precision=4)], Decimal(100), "more than 4 digits"),
        (Level, "LOW", "of type str, and a member of Level"),
        (Level, Size.SMALL, "of type Size, and a member of Level"),
        (Line, None, "Line has a value of type NoneType, and a Line is expected"),
    ],
)
def test_a_value_that_does_not_fit_its_type_is_a_dead_letter(hint: Any, value: Any, why: str) -> None:
    state = holding(hint)

    with pytest.raises(PoisonRecordError, match=re.escape(why)) as refused:
        converter_of(state, "test").to_record(state(value))

    assert refused.value.cause == "state-does-not-fit"
    assert str(refused.value).startswith("the state cannot be kept: ")


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (int, 2**63),
        (int | None, -(2**63) - 1),
        (list[int], [2**63]),
        (str, 1),
        (str, None),
        (str, "\ud800"),
        (str | None, b"a"),
        (list[str], ["a", 1]),
        (bytes, "a"),
        (dict[str, str], {1: "a"}),
        (dict[str, int] | None, {1: 1}),
    ],
)
def test_the_codec_refuses_values_that_the_converter_leaves_to_it(hint: Any, value: Any) -> None:
    state = holding(hint)
    converter = converter_of(state, "test")
    codec = AvroCodec(FakeRegistry(), "states", converter.schema)
    record = converter.to_record(state(value))

    with pytest.raises((TypeError, ValueError, OverflowError)):
        codec.encode(record)


@pytest.mark.parametrize("value", [None, {"sku": "a"}, dataclasses.replace(BASKET)])
def test_an_object_that_is_not_an_instance_of_the_state_is_a_dead_letter(value: Any) -> None:
    with pytest.raises(
        PoisonRecordError, match=f"Line has a value of type {type(value).__name__}, and a Line is expected"
    ):
        converter_of(Line, "test").to_record(value)


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


def test_flat_states_of_plain_types_are_read_by_the_constructor_only() -> None:
    made: list[dict[str, Any]] = []

    def note(state: Any) -> None:
        made.append(vars(state))

    flat: Callable[..., Any] = make_dataclass("Flat", [("a", str), ("b", int)], namespace={"__post_init__": note})
    converter = converter_of(flat, "test")  # type: ignore[arg-type]

    converter.from_record({"a": "a", "b": 1})

    assert made == [{"a": "a", "b": 1}]
