"""An instance lasts if it cannot change, and a codec returns it as it was given."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal  # noqa: TC003
from enum import Enum
from functools import cached_property
from typing import Annotated, Any

import pytest

from balance_service import scale
from balance_service.avro.codec import AvroCodec
from balance_service.avro.flat_records import NotFlatError
from balance_service.errors import PoisonRecordError
from balance_service.model.converters import converter_of
from balance_service.testing.fakes import FakeRegistry

ROOM = 1 << 20


class Colour(Enum):
    RED = 1
    BLUE = 2


@dataclass(frozen=True)
class Plain:
    number: int
    text: str
    flag: bool
    data: bytes
    day: date
    colour: Colour
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Slotted:
    number: int


@dataclass(frozen=True)
class Derived(Slotted):
    text: str = ""


def plain(**other: Any) -> Plain:
    values = {"number": 1, "text": "a", "flag": True, "data": b"x", "day": date(2020, 1, 1), "colour": Colour.RED}
    return Plain(**{**values, **other})


def lasts(instance: Any, room: int = ROOM) -> bool:
    converter = converter_of(type(instance), "model")
    flat = AvroCodec(FakeRegistry(), "states", converter.schema).flat
    assert converter.columns_of is not None
    assert flat is not None
    try:
        return flat.are_exact(converter.columns_of([instance]), room)
    except (NotFlatError, PoisonRecordError):
        return False


@pytest.mark.parametrize(
    "instance", [plain(), plain(note="b"), plain(text="Zürich"), plain(number=-(1 << 63)), Slotted(3), Derived(3, "x")]
)
def test_an_instance_of_a_frozen_class_with_plain_values_lasts(instance: Any) -> None:
    converter = converter_of(type(instance), "model")
    codec = AvroCodec(FakeRegistry(), "states", converter.schema)

    assert lasts(instance)
    assert converter.from_record(codec.decode(codec.encode(converter.to_record(instance)))) == instance


class Number(int):
    pass


@pytest.mark.parametrize(
    "instance",
    [
        plain(number=True),
        plain(number=Number(3)),
        plain(number=1 << 63),
        plain(flag=1),
        plain(text="\ud800"),
        plain(text=None),
        plain(data=bytearray(b"x")),
        plain(day=datetime(2020, 1, 1, tzinfo=UTC)),
        plain(colour="RED"),
        plain(note=3),
    ],
)
def test_a_value_that_is_refused_or_read_as_another_is_not_kept(instance: Plain) -> None:
    assert not lasts(instance)


def test_an_instance_has_no_more_than_its_fields() -> None:
    instance = plain()
    object.__setattr__(instance, "more", [])

    assert not lasts(instance)


def test_an_instance_that_may_be_too_large_is_not_kept() -> None:
    assert lasts(plain(text="é" * 1000), 5000)
    assert not lasts(plain(text="é" * 1000), 2000)
    assert not lasts(plain(data=b"x" * 2000), 2000)
    assert not lasts(plain(note="x" * 2000), 2000)


@pytest.mark.parametrize("room", [0, 50, 100, 200, 300])
@pytest.mark.parametrize("instance", [plain(), plain(text="x" * 99, note="y"), plain(number=-(1 << 63)), Slotted(1)])
def test_the_bytes_of_a_frame_are_never_more_than_was_asked(instance: Any, room: int) -> None:
    converter = converter_of(type(instance), "model")
    codec = AvroCodec(FakeRegistry(), "states", converter.schema)

    assert not lasts(instance, room) or len(codec.encode(converter.to_record(instance))) <= room


@dataclass
class Changeable:
    number: int


@dataclass(frozen=True)
class OfAFloat:
    share: float


@dataclass(frozen=True)
class OfADecimal:
    amount: Annotated[Decimal, scale(2)]


@dataclass(frozen=True)
class OfAMoment:
    at: datetime


@dataclass(frozen=True)
class OfAList:
    pages: list[str]


@dataclass(frozen=True)
class OfARecord:
    inner: Slotted


@dataclass(frozen=True)
class Normal:
    number: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "number", abs(self.number))


@dataclass(frozen=True)
class Own:
    number: int

    def __init__(self, number: int) -> None:
        object.__setattr__(self, "number", number + 1)


@dataclass(frozen=True)
class Cached:
    number: int

    @cached_property
    def parts(self) -> list[int]:
        return [self.number]


class Base:
    shared: list[int] = []  # noqa: RUF012


@dataclass(frozen=True)
class OnBase(Base):
    number: int


@dataclass(frozen=True)
class WithFactory:
    pages: dict[str, str] = field(default_factory=dict)


@pytest.mark.parametrize(
    "owner",
    [Changeable, OfAFloat, OfADecimal, OfAMoment, OfAList, OfARecord, Normal, Own, Cached, OnBase, WithFactory],
)
def test_instances_of_other_classes_are_encoded_each(owner: type) -> None:
    assert converter_of(owner, "model").columns_of is None
