"""Reads one number of a record's body and skips the fields before it, in a third of the time of decoding the record.

Source: Avro specification, "Binary encoding", "Decimal".
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from decimal import Context
from typing import TYPE_CHECKING, Any

from balance_service.avro.schemas import fields_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from balance_service.avro.schemas import Schema

Skip = Callable[[bytes, int], int]
"""The offset of a value → the offset after it."""
Read = Callable[[bytes, int], Any]
"""The offset of a value → the value. Raises IndexError or struct.error if the bytes end before."""

_FLOAT, _DOUBLE = struct.Struct("<f"), struct.Struct("<d")
_DIGITS = 1_000


def number_reader(schema: Schema, name: str) -> Read | None:
    """Returns a function that reads a field, given the offset of the record.

    None if the field is no number, or follows an array, a map or a record.
    """
    skips: list[Skip] = []
    for field, kind in fields_of(schema).items():
        if field == name:
            read = _reader(kind)
            return None if read is None else _after(skips, read)
        skip = _skip(kind)
        if skip is None:
            return None
        skips.append(skip)
    return None


def _after(skips: Sequence[Skip], read: Read) -> Read:
    def read_after(data: bytes, at: int) -> Any:
        for skip in skips:
            at = skip(data, at)
        return read(data, at)

    return read_after


def _reader(kind: Any) -> Read | None:
    match kind:
        case "int" | "long":
            return lambda data, at: long_at(data, at)[0]
        case "float":
            return lambda data, at: _FLOAT.unpack_from(data, at)[0]
        case "double":
            return lambda data, at: _DOUBLE.unpack_from(data, at)[0]
        case {"type": str(plain)} if "logicalType" not in kind and plain in ("int", "long", "float", "double"):
            return _reader(plain)
        case {"type": "bytes", "logicalType": "decimal"}:
            return _decimal(kind.get("scale", 0))
        case ["null", other] | [other, "null"]:
            null, read = kind.index("null"), _reader(other)
            return None if read is None else _nullable(null, read)
        case _:
            return None


def _decimal(scale: int) -> Read:
    # More digits than any precision.
    exact = Context(prec=_DIGITS)

    def read(data: bytes, at: int) -> Any:
        length, at = long_at(data, at)
        if length < 0 or at + length > len(data):
            raise IndexError("the number is cut short")
        return exact.scaleb(exact.create_decimal(int.from_bytes(data[at : at + length], "big", signed=True)), -scale)

    return read


def _nullable(null: int, read: Read) -> Read:
    def read_nullable(data: bytes, at: int) -> Any:
        branch, at = long_at(data, at)
        return None if branch == null else read(data, at)

    return read_nullable


def _skip(kind: Any) -> Skip | None:
    match kind:
        case "null":
            return lambda _data, at: at
        case "boolean":
            return lambda _data, at: at + 1
        case "int" | "long":
            return lambda data, at: long_at(data, at)[1]
        case "float":
            return lambda _data, at: at + _FLOAT.size
        case "double":
            return lambda _data, at: at + _DOUBLE.size
        case "string" | "bytes":
            return _skip_bytes
        case {"type": str(plain)} if plain in ("int", "long", "string", "bytes"):
            return _skip(plain)
        case list():
            members = [_skip(member) for member in kind]
            return None if None in members else lambda data, at: _skip_union(members, data, at)
        case _:
            return None


def _skip_bytes(data: bytes, at: int) -> int:
    length, at = long_at(data, at)
    if length < 0:
        raise IndexError("a length is negative")
    return at + length


def _skip_union(members: Sequence[Skip | None], data: bytes, at: int) -> int:
    branch, at = long_at(data, at)
    skip = members[branch]
    return at if skip is None else skip(data, at)


def long_at(data: bytes, at: int) -> tuple[int, int]:
    """A zigzag-encoded number, and the offset after it."""
    byte = data[at]
    at += 1
    number, shift = byte & 0x7F, 7
    while byte & 0x80:
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        shift += 7
    return (number >> 1) ^ -(number & 1), at
