"""Dataclasses with a field of each type, and what a test does with a state."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, make_dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from typing import Annotated, Any, List, Optional  # noqa: UP035  (users write them)

import pytest

from balance_service.avro.codec import AvroCodec, UntrustedSchema
from balance_service.errors import ConfigurationError
from balance_service.model.converters import converter_of
from balance_service.model.value_types import scale
from balance_service.testing.fakes import FakeRegistry

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


@dataclass(frozen=True)
class Limits:
    most: Annotated[Decimal, scale(2)] = Decimal("100.5")
    since: datetime = NOON
    tags: list[str] = field(default_factory=list)
