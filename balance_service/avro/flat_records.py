"""Encodes records of plain values in a fraction of fastavro's time, if decoding returns them unchanged.

Source: Avro 1.12 specification, "Binary Encoding".
"""

from __future__ import annotations

import struct
from datetime import date
from decimal import Context, Decimal, Inexact, InvalidOperation
from functools import partial
from typing import TYPE_CHECKING, Any

from balance_service.avro.schemas import fields_of, simple_name, without_null

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Writer = Callable[[Any], bytes]

_EXACT = Context(prec=80, traps=[InvalidOperation, Inexact])
_LIMITS = {"int": 1 << 31, "long": 1 << 63}
_DAY_0 = date(1970, 1, 1).toordinal()
_DOUBLE = struct.Struct("<d")
_SMALL = 8192


class NotFlatError(Exception):
    """A value may be refused, or decoded as another."""


def varint(value: int) -> bytes:
    """Encodes an int or a long, or the length of what follows."""
    bits = value << 1 if value >= 0 else (~value << 1) | 1
    if bits < 128:
        return bits.to_bytes(1, "big")
    found = bytearray()
    while bits > 127:
        found.append(bits & 127 | 128)
        bits >>= 7
    found.append(bits)
    return bytes(found)


_NUMBERS = [varint(value) for value in range(_SMALL)]


def flat_writer(schema: Any, header: bytes) -> Callable[[Mapping[str, Any]], bytes] | None:
    """Returns what encodes records of a schema, after a header; None if a field may have other than a plain value.

    The function raises an error of any type if a record may not fit, or may not be decoded as exactly the same record:
    a subclass of a type, a decimal of another scale, a default. fastavro encodes or refuses it then.

    Args:
        schema: of a record, with each named type in full at each use.
    """
    fields = [(name, _writer(kind)) for name, kind in fields_of(schema).items()]
    writers = [(name, write) for name, write in fields if write is not None]
    return partial(_written, header, writers) if len(writers) == len(fields) else None


def _written(header: bytes, writers: Sequence[tuple[str, Writer]], record: Mapping[str, Any]) -> bytes:
    if len(record) != len(writers):
        raise NotFlatError
    return header + b"".join([write(record[name]) for name, write in writers])


def _writer(kind: Any) -> Writer | None:
    inner, is_nullable = without_null(kind)
    write = _plain(inner)
    if not is_nullable or write is None:
        return write
    of_null, of_value = (varint(kind.index(member)) for member in ("null", inner))
    return lambda value: of_null if value is None else of_value + write(value)


def _plain(kind: Any) -> Writer | None:
    match simple_name(kind):
        case "string":
            return _text
        case "int" | "long" as name:
            return partial(_integer, _LIMITS[name])
        case "boolean":
            return _truth
        case "double":
            return _double
        case "bytes":
            return _bytes
        case "date" if kind["type"] == "int":
            return _day
        case "enum" if "symbols" in kind:
            return partial(_symbol, {symbol: varint(at) for at, symbol in enumerate(kind["symbols"])})
        case "decimal" if kind["type"] == "bytes":
            scale = kind.get("scale", 0)
            return partial(_decimal, scale, Decimal((0, (1,), -scale)), 10 ** kind["precision"])
    return None


def _text(value: Any) -> bytes:
    if value.__class__ is not str:
        raise NotFlatError
    data: bytes = value.encode()
    size = len(data)
    return (_NUMBERS[size] if size < _SMALL else varint(size)) + data


def _bytes(value: Any) -> bytes:
    if value.__class__ is not bytes:
        raise NotFlatError
    data: bytes = value
    return varint(len(data)) + data


def _integer(limit: int, value: Any) -> bytes:
    if value.__class__ is not int or not -limit <= value < limit:
        raise NotFlatError
    return _NUMBERS[value] if 0 <= value < _SMALL else varint(value)


def _truth(value: Any) -> bytes:
    if value.__class__ is not bool:
        raise NotFlatError
    return b"\1" if value else b"\0"


def _double(value: Any) -> bytes:
    if value.__class__ is not float:
        raise NotFlatError
    return _DOUBLE.pack(value)


def _day(value: Any) -> bytes:
    # A datetime would lose its time.
    if value.__class__ is not date:
        raise NotFlatError
    return varint(value.toordinal() - _DAY_0)


def _symbol(symbols: Mapping[str, bytes], value: Any) -> bytes:
    if value.__class__ is not str:
        raise NotFlatError
    return symbols[value]


def _decimal(scale: int, unit: Decimal, limit: int, value: Any) -> bytes:
    if value.__class__ is not Decimal or not value.same_quantum(unit):
        raise NotFlatError
    unscaled = int(value.scaleb(scale, _EXACT))
    # There is no negative zero in Avro.
    if not -limit < unscaled < limit or (not unscaled and value.is_signed()):
        raise NotFlatError
    size = unscaled.bit_length() // 8 + 1
    return _NUMBERS[size] + unscaled.to_bytes(size, "big", signed=True)
