"""Topics as public producers write them (`tests/data/wild`), a model for each, and what it must make of the records."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import yaml

from balance_service import (
    BASE64,
    EPOCH_DAYS,
    EPOCH_MICROS,
    EPOCH_MILLIS,
    RECORD_KEY,
    Count,
    Debezium,
    ReadModel,
    RunningSum,
    Stream,
    Upsert,
    scale,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_FILE = Path(__file__).parents[1] / "data" / "wild" / "topics.yaml"
Money = Annotated[Decimal, scale(2, precision=10)]
Unscaled = Annotated[Decimal, scale(2, precision=10), BASE64]


@dataclass(frozen=True)
class Record:
    key: bytes | None
    headers: Sequence[tuple[str, bytes]]
    value: bytes | None


@dataclass(frozen=True)
class Wild:
    """What a model makes of a topic."""

    model: type[ReadModel]
    states: Mapping[str, Any]
    """By key, as an answer has them; None for one that has none."""
    letters: Mapping[int, tuple[str, str]]
    """Offset → cause and detail."""
    ignored: Mapping[int, str] = field(default_factory=dict)
    """Offset → the name of the record that is passed over."""


@cache
def _topics() -> Mapping[str, Any]:
    return {one["topic"]: one for one in yaml.safe_load(_FILE.read_text(encoding="utf-8"))}


def records_of(topic: str) -> list[Record]:
    return [
        Record(
            _bytes(one.get("key")),
            [(name, _bytes(value) or b"") for name, value in one.get("headers", {}).items()],
            _bytes(one["value"]),
        )
        for one in _topics()[topic]["records"]
    ]


def schema_of(topic: str) -> dict[str, Any] | None:
    """Returns the schema of a topic of Avro, whose id in the records is 1."""
    text = _topics()[topic].get("schema")
    return None if text is None else json.loads(text)


def _bytes(given: Any) -> bytes | None:
    match given:
        case None:
            return None
        case {"hex": text}:
            return bytes.fromhex(text)
    return str(given).encode()


@dataclass
class Order:
    orderId: str  # noqa: N815
    customerId: str  # noqa: N815
    amount: Money
    placedAt: datetime  # noqa: N815


@dataclass
class Spent:
    customerId: str  # noqa: N815
    orders: int
    total: Annotated[Decimal, scale(2)]


class Kafkajs(ReadModel):
    name = "wild-kafkajs"
    source = Stream("kafkajs", Order, format="json")
    key = "customerId"
    state = Spent
    orders = Count("Order")
    total = RunningSum("Order.amount")


class JsonSchema(Kafkajs):
    name = "wild-confluent-json-schema"
    source = Stream("confluent-json-schema", Order, format="json")


@dataclass
class OrderPlaced:
    __namespace__ = "com.acme.shop"

    customerId: str  # noqa: N815
    amount: Money
    placedAt: Annotated[Decimal, scale(9)]  # noqa: N815


@dataclass
class OrderTimed:
    __namespace__ = "com.acme.shop"

    customerId: str  # noqa: N815
    amount: Money
    placedAt: datetime  # noqa: N815


@dataclass
class Placed:
    customerId: str  # noqa: N815
    orders: int
    total: Annotated[Decimal, scale(2)]
    seconds: Annotated[Decimal, scale(9)]


class Spring(ReadModel):
    name = "wild-spring"
    source = Stream("spring", OrderPlaced, OrderTimed, format="json", type="header:__TypeId__")
    key = "customerId"
    state = Placed
    orders = Count("OrderPlaced")
    total = RunningSum("OrderPlaced.amount")
    seconds = RunningSum("OrderPlaced.placedAt")


@dataclass
class CloudOrder:
    __kind__ = "com.example.order.placed"

    orderId: str  # noqa: N815
    customerId: str  # noqa: N815
    amount: Money
    placedAt: datetime  # noqa: N815


class Structured(ReadModel):
    name = "wild-cloudevents-structured"
    source = Stream("cloudevents-structured", CloudOrder, format="cloudevents")
    key = "customerId"
    state = Spent
    orders = Count("CloudOrder")
    total = RunningSum("CloudOrder.amount")


class Binary(Structured):
    name = "wild-cloudevents-binary"
    source = Stream("cloudevents-binary", CloudOrder, format="cloudevents")


@dataclass
class Customer:
    id: int
    email: str | None
    balance: Money | None
    note: str | None
    photo: bytes | None
    at: datetime | None
    seen: str | None
    born: date | None


@dataclass
class PgValue:
    __namespace__ = "pg.public.customers"

    id: int
    email: str | None
    balance: Unscaled | None
    note: str | None
    photo: bytes | None
    at: Annotated[datetime, EPOCH_MICROS] | None
    seen: str | None
    born: Annotated[date, EPOCH_DAYS] | None


@dataclass
class MyValue:
    __namespace__ = "my.shop.customers"

    id: int
    email: str | None
    balance: Unscaled | None
    note: str | None
    photo: bytes | None
    at: Annotated[datetime, EPOCH_MILLIS] | None
    seen: str | None
    born: Annotated[date, EPOCH_DAYS] | None


# Both records are called so, each in a namespace of its own.
PgValue.__name__ = MyValue.__name__ = "Value"


def _envelope(value: type, namespace: str) -> type:
    annotations = {"before": value | None, "after": value | None, "op": str}
    return dataclass(type("Envelope", (), {"__annotations__": annotations, "__namespace__": namespace}))


PgEnvelope = _envelope(PgValue, "pg.public.customers")
MyEnvelope = _envelope(MyValue, "my.shop.customers")


def _of_debezium(topic: str, record: type, format: str, key: str = "id") -> type[ReadModel]:  # noqa: A002
    source: Any = Stream(topic, record, format=format)  # type: ignore[arg-type]
    members = {
        "name": f"wild-{topic}",
        "source": source.by(key) if key else source,
        "state": Customer,
        "fold": Debezium(record),
    }
    return type("OfDebezium", (ReadModel,), members)


@dataclass
class Row:
    id: int
    total: Unscaled
    placed: Annotated[datetime, EPOCH_MILLIS]
    due: Annotated[date, EPOCH_DAYS] | None


@dataclass
class KeptRow:
    id: int
    total: Annotated[Decimal, scale(2)]
    placed: datetime
    due: date | None


def _of_rows(topic: str) -> type[ReadModel]:
    members = {
        "name": f"wild-{topic}",
        "source": Stream(topic, Row, format="connect"),
        "key": RECORD_KEY,
        "state": KeptRow,
        "fold": Upsert(Row),
    }
    return type("OfRows", (ReadModel,), members)


@dataclass
class Counted:
    amount: int


@dataclass
class Total:
    total: int


class OfLongs(ReadModel):
    name = "wild-long-keys"
    source = Stream("long-keys", Counted, format="json", key_format="long")
    key = RECORD_KEY
    state = Total
    total = RunningSum("Counted.amount")


class OfUuids(OfLongs):
    name = "wild-uuid-keys"
    source = Stream("uuid-keys", Counted, format="json", key_format="uuid")


_NOON = datetime(2026, 2, 28, 12, 30, tzinfo=UTC)
_NO_TIME = "a time such as 2026-02-28T12:30:00.123Z is expected"
_NO_BASE64 = "the base64 of a decimal is expected"


def _customer(id: int, *, mysql: bool = False, **columns: Any) -> dict[str, Any]:  # noqa: A002
    return {
        "email": "a@example.org",
        "balance": Decimal("12345.67"),
        "note": "large",
        "photo": b"\0\xff",
        "at": _NOON + timedelta(microseconds=123_000 if mysql else 123_456),
        "seen": "2026-02-28T12:30:00Z" if mysql else "2026-02-28T12:30:00.123456Z",
        "born": date(2026, 2, 28),
        **columns,
    }


def _debezium_json(topic: str, record: type, *, mysql: bool) -> Wild:
    path = "after.balance"
    return Wild(
        _of_debezium(topic, record, "connect"),
        {
            "1": _customer(1, mysql=mysql, email="new@example.org"),
            "2": None,
            "3": _customer(3, mysql=mysql, email=None, balance=Decimal("-26588.24")),
            **dict.fromkeys("45678"),
        },
        {
            6: ("json-misfit", f"{path} is a number, and {_NO_BASE64}"),
            7: ("json-misfit", f"{path} is not base64"),
            8: ("json-misfit", f"{path} is an object, and {_NO_BASE64}"),
            9: ("decimal-loses-digits", f"{path} has more digits than decimal(10,2)"),
            10: ("json-misfit", "after.at is a string, and a number is expected"),
        },
        {} if mysql else {11: "Heartbeat", **dict.fromkeys((12, 13), "TransactionMetadataValue"), 14: "MessageValue"},
    )


def _debezium_flat(topic: str, record: type, *, mysql: bool) -> Wild:
    return Wild(
        _of_debezium(topic, record, "connect"),
        {"1": _customer(1, mysql=mysql, note="more" if mysql else "large"), "2": None, "4": None},
        {4: ("json-misfit", f"balance is a number, and {_NO_BASE64}")},
    )


def _debezium_avro(topic: str, record: type, *, mysql: bool) -> Wild:
    return Wild(
        _of_debezium(topic, record, "avro"),
        {
            "1": _customer(1, mysql=mysql, email="new@example.org"),
            "2": None,
            "3": _customer(3, mysql=mysql, email=None, balance=Decimal("-0.01")),
            "4": None,
        },
        {6: ("operation-unknown", "'op' is none of c, u, r, d, t and m")},
    )


def _debezium_avro_flat(topic: str, record: type, *, mysql: bool) -> Wild:
    found = _debezium_flat(topic, record, mysql=mysql)
    return Wild(_of_debezium(topic, record, "avro"), found.states, {})


def _connect(topic: str, *, with_schema: bool) -> Wild:
    row = {"id": 1, "total": Decimal("-26588.24"), "placed": _NOON + timedelta(milliseconds=123), "due": None}
    return Wild(
        _of_rows(topic),
        {"1": row, **dict.fromkeys("23456")},
        {
            3: ("json-misfit", f"total is a number, and {_NO_BASE64}"),
            4: ("json-misfit", "total is not base64"),
            5: ("time-out-of-range", "placed is not in the years 1 to 9999"),
            **({7: ("field-null", "it is null")} if with_schema else {}),
        },
    )


def _spent(orders: int, total: str) -> dict[str, Any]:
    return {"orders": orders, "total": Decimal(total)}


WILD: Mapping[str, Wild] = {
    "kafkajs": Wild(
        Kafkajs,
        {"ada": _spent(2, "25.00")},
        {
            2: ("decimal-loses-digits", "amount has more digits than decimal(10,2)"),
            3: ("field-null", "amount is null"),
            4: ("field-missing", "amount is missing, and has no default"),
            5: ("decimal-loses-digits", "amount has more digits than decimal(10,2)"),
            6: ("json-malformed", "it is not JSON"),
        },
    ),
    "spring": Wild(
        Spring,
        {"ada": {**_spent(2, "25.00"), "seconds": Decimal("3544563600.123456789")}},
        {
            3: ("json-misfit", f"placedAt is a number, and {_NO_TIME}"),
            4: ("json-misfit", f"placedAt is an array, and {_NO_TIME}"),
            5: ("json-misfit", "header:__TypeId__ is missing, which names the record"),
        },
        {2: "com.acme.shop.OrderCancelled"},
    ),
    "debezium-postgresql-json-schema": _debezium_json("debezium-postgresql-json-schema", PgEnvelope, mysql=False),
    "debezium-postgresql-json": _debezium_json("debezium-postgresql-json", PgEnvelope, mysql=False),
    "debezium-mysql-json-schema": _debezium_json("debezium-mysql-json-schema", MyEnvelope, mysql=True),
    "debezium-mysql-json": _debezium_json("debezium-mysql-json", MyEnvelope, mysql=True),
    "debezium-postgresql-json-flat": _debezium_flat("debezium-postgresql-json-flat", PgValue, mysql=False),
    "debezium-mysql-json-flat-schema": _debezium_flat("debezium-mysql-json-flat-schema", MyValue, mysql=True),
    "debezium-postgresql-avro": _debezium_avro("debezium-postgresql-avro", PgEnvelope, mysql=False),
    "debezium-mysql-avro": _debezium_avro("debezium-mysql-avro", MyEnvelope, mysql=True),
    "debezium-postgresql-avro-flat": _debezium_avro_flat("debezium-postgresql-avro-flat", PgValue, mysql=False),
    "debezium-mysql-avro-flat": _debezium_avro_flat("debezium-mysql-avro-flat", MyValue, mysql=True),
    "connect-json-schema": _connect("connect-json-schema", with_schema=True),
    "connect-json": _connect("connect-json", with_schema=False),
    "cloudevents-structured": Wild(
        Structured,
        {"ada": _spent(1, "24.90")},
        {
            2: ("field-missing", "data is missing, and holds the record"),
            3: ("decimal-loses-digits", "amount has more digits than decimal(10,2)"),
            4: ("field-missing", "data is missing, and holds the record"),
        },
        {1: "com.example.order.cancelled"},
    ),
    "cloudevents-binary": Wild(
        Binary,
        {"ada": _spent(1, "24.90")},
        {
            2: ("decimal-loses-digits", "amount has more digits than decimal(10,2)"),
            3: ("json-malformed", "it is not JSON"),
        },
        {1: "com.example.order.cancelled"},
    ),
    "confluent-json-schema": Wild(
        JsonSchema,
        {"ada": _spent(3, "26.00")},
        {
            3: ("json-malformed", "it is not JSON"),
            4: ("json-misfit", "amount is a boolean, and a number, or a string of digits, is expected"),
        },
    ),
    "long-keys": Wild(
        OfLongs,
        {"0": {"total": 1}, "1": {"total": 2}, "-1": {"total": 1}, str(2**63 - 1): {"total": 1}, "5": None}
        | {str(-(2**63)): {"total": 1}},
        {
            6: ("key-malformed", "the record's key is not a long, which takes 8 bytes"),
            7: ("key-null", "the record has no key"),
        },
    ),
    "uuid-keys": Wild(
        OfUuids,
        {"123e4567-e89b-12d3-a456-426614174000": {"total": 3}},
        {
            2: ("key-malformed", "the record's key is not a UUID as text in lower case"),
            3: ("key-malformed", "the record's key is not a UUID as text in lower case"),
        },
    ),
}
"""By topic. A detail is how one begins."""
