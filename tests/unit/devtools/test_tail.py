"""A record as a line of JSON, complete and exact."""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Any, cast

import pytest

from balance_service.avro.codec import AvroCodec
from balance_service.avro.frames import frame_header
from balance_service.avro.schemas import load_schema
from balance_service.devtools.tail import line_of
from balance_service.errors import RetriableError
from balance_service.formats.any_record import AnyRecordReader
from balance_service.testing.fakes import FakeRegistry

if TYPE_CHECKING:
    from confluent_kafka import Message

    from balance_service.model.record_keys import KeyFormat


@dataclass
class Delivered:
    """A consumed message."""

    value_: bytes | None = None
    key_: bytes | None = b"k"
    timestamp_: int = 0
    headers_: list[tuple[str, bytes | None]] | None = field(default=None)

    def value(self) -> bytes | None:
        return self.value_

    def key(self) -> bytes | None:
        return self.key_

    def timestamp(self) -> tuple[int, int]:
        return 1, self.timestamp_

    def headers(self) -> Any:
        return self.headers_

    def partition(self) -> int:
        return 1

    def offset(self) -> int:
        return 42


def line(registry: FakeRegistry | None = None, **what: Any) -> str:
    return line_of(cast("Message", Delivered(**what)), AnyRecordReader(registry or FakeRegistry()))


def test_a_line_has_all_parts_of_a_record() -> None:
    registry = FakeRegistry()
    frame = AvroCodec(registry, "s", load_schema("BalanceState")).encode(
        {"customerId": "Zoë", "amount": Decimal("9999999999999999999999999999999999.10")}
    )

    shown = line(registry, value_=frame, key_="Zoë".encode(), timestamp_=1, headers_=[("origin", b"pos:1:42")])

    assert shown == (
        '{"partition":1,"offset":42,"timestamp":"1970-01-01T00:00:00.001Z","key":"Zoë",'
        '"headers":[{"name":"origin","value":"pos:1:42"}],"record":"parts.code.balance.state.BalanceState",'
        '"value":{"customerId":"Zoë","amount":9999999999999999999999999999999999.10}}'
    )


@pytest.mark.parametrize(
    ("what", "shown"),
    [
        ({}, '"value":null'),
        ({"key_": None}, '"key":null'),
        ({"key_": b"\xff"}, '"keyBase64":"/w=="'),
        (
            {"headers_": [("b", b"1"), ("a", None), ("b", b"\xff"), ("b", b"1")]},
            '"headers":[{"name":"b","value":"1"},{"name":"a","value":null},'
            '{"name":"b","valueBase64":"/w=="},{"name":"b","value":"1"}]',
        ),
        ({"timestamp_": -1}, '"timestamp":"1969-12-31T23:59:59.999Z"'),
        ({"timestamp_": 10**17}, '"timestamp":100000000000000000'),
        ({"value_": b'{"n": 1.50, "a": ["x"]}'}, '"record":"","value":{"n":1.50,"a":["x"]}'),
        ({"value_": b'{"n": 1, "n": 2}'}, '"problem":"n is there twice","valueBase64":'),
        ({"value_": b""}, '"problem":"a record of 0 bytes has no frame","valueBase64":""'),
        (
            {"value_": b"\0\0\0\0\1\2", "headers_": [("__value_schema_id", b"\1" + bytes(16))]},
            '"problem":"a record names schema 00000000-0000-0000-0000-000000000000, which the registry does not know",'
            '"valueBase64":"AAAAAAEC"',
        ),
        (
            {"value_": frame_header(9)},
            '"problem":"it names schema 9, which the registry does not know","valueBase64"',
        ),
    ],
)
def test_unusual_content_is_shown(what: dict[str, Any], shown: str) -> None:
    assert shown in line(**what)


def test_an_unavailable_registry_is_an_error() -> None:
    registry = FakeRegistry()
    registry.is_up = False

    with pytest.raises(RetriableError):
        line(registry, value_=frame_header(1))


@pytest.mark.parametrize(
    ("form", "key", "shown"),
    [
        ("long", (-5).to_bytes(8, "big", signed=True), '"key":"-5"'),
        ("int", (7).to_bytes(4, "big"), '"key":"7"'),
        ("bytes", b"\x00\xff", '"key":"00ff"'),
        ("uuid", b"123e4567-e89b-12d3-a456-426614174000", '"key":"123e4567-e89b-12d3-a456-426614174000"'),
        ("long", b"12345", '"keyBase64":"MTIzNDU="'),
        ("uuid", b"\xff", '"keyBase64":"/w=="'),
        ("long", None, '"key":null'),
    ],
)
def test_a_key_is_shown_as_queries_name_it(form: KeyFormat, key: bytes | None, shown: str) -> None:
    message = cast("Message", Delivered(key_=key))

    assert shown in line_of(message, AnyRecordReader(FakeRegistry()), form)
