"""Instances of dataclasses become records and are read back, also from records of an older class."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field, make_dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balance_service.avro.codec import AvroCodec, UntrustedSchema
from balance_service.errors import PoisonRecordError
from balance_service.model.converters import converter_of
from balance_service.model.value_types import scale
from balance_service.testing.fakes import FakeRegistry
from tests.unit.model.dataclass_states import (
    BASKET,
    Basket,
    Level,
    Limits,
    Line,
    Money,
    holding,
    schema_of_field,
    there_and_back,
)

if TYPE_CHECKING:
    from collections.abc import Callable


def test_a_state_is_read_back() -> None:
    read = there_and_back(BASKET)

    assert read == BASKET
    assert read.at.tzinfo is UTC
    assert type(read.level) is Level


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
    strict: Limits | None = Limits(Decimal(1))  # noqa: RUF009  (it is frozen)
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


@pytest.mark.parametrize("value", [None, {"sku": "a"}, dataclasses.replace(BASKET)])
def test_an_object_that_is_not_an_instance_of_the_state_is_a_dead_letter(value: Any) -> None:
    with pytest.raises(
        PoisonRecordError, match=f"Line has a value of type {type(value).__name__}, and a Line is expected"
    ):
        converter_of(Line, "test").to_record(value)


def test_flat_states_of_plain_types_are_read_by_the_constructor_only() -> None:
    made: list[dict[str, Any]] = []

    def note(state: Any) -> None:
        made.append(vars(state))

    flat: Callable[..., Any] = make_dataclass("Flat", [("a", str), ("b", int)], namespace={"__post_init__": note})
    converter = converter_of(flat, "test")  # type: ignore[arg-type]

    converter.from_record({"a": "a", "b": 1})

    assert made == [{"a": "a", "b": 1}]
