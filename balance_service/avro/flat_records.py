"""Encodes records of plain values in a fraction of fastavro's time, if decoding returns them unchanged.

Source: Avro 1.12 specification, "Binary Encoding".
"""

from __future__ import annotations

import struct
from datetime import date
from decimal import Context, Decimal, Inexact, InvalidOperation
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from balance_service.avro.number_columns import decimals, unscaled, varints
from balance_service.avro.schemas import fields_of, simple_name, without_null

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Column = Sequence[Any]

_EXACT = Context(prec=80, traps=[InvalidOperation, Inexact])
_LIMITS = {"int": 1 << 31, "long": 1 << 63}
_DAY_0 = date(1970, 1, 1).toordinal()
_DOUBLE = struct.Struct("<d")
_SMALL = 8192
# In bytes: a number, the length of a text, the member of a union.
_LONGEST_NUMBER = 10
_MOST_ARROW_DIGITS = 38
_NOTHING = pa.scalar(b"", pa.binary())


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


class FlatRecords:
    """The records of a schema that has plain fields only; `flat_records` makes it.

    A record is exact if decoding returns it type for type: no subclass of a type, no decimal of another scale, no
    missing field. Columns have one value of each of some records.
    """

    def __init__(self, fields: Mapping[str, _Plain], header: bytes) -> None:
        self._names = [*fields]
        self._kinds = [*fields.values()]
        self._writers = [(name, kind.write) for name, kind in fields.items()]
        self._values_of = itemgetter(*fields) if len(fields) > 1 else lambda record: (record[self._names[0]],)
        self._header = header

    def encode(self, record: Mapping[str, Any]) -> bytes:
        """Encodes a record behind the header. Raises an error of any type if it is not exact."""
        if len(record) != len(self._writers):
            raise NotFlatError
        return self._header + b"".join([write(record[name]) for name, write in self._writers])

    def values(self, record: Mapping[str, Any]) -> tuple[Any, ...]:
        """Returns the values of a record in the order of the fields. Raises NotFlatError or KeyError."""
        if len(record) != len(self._names):
            raise NotFlatError
        values: tuple[Any, ...] = self._values_of(record)
        return values

    def are_exact(self, columns: Sequence[Column], most_bytes: int) -> bool:
        """Whether all of some records are exact, and known to take at most so many bytes with their header."""
        if not all(kind.are_exact(values) for kind, values in zip(self._kinds, columns, strict=True)):
            return False
        size = sum(kind.most_bytes(values) for kind, values in zip(self._kinds, columns, strict=True))
        return len(self._header) + size <= most_bytes

    def encode_all(self, columns: Sequence[Column]) -> pa.Array:
        """Returns the bytes of `encode` for each of some exact records."""
        parts = [part for kind, values in zip(self._kinds, columns, strict=True) for part in kind.parts(values)]
        return pc.binary_join_element_wise(pa.scalar(self._header, pa.binary()), *parts, _NOTHING)


def flat_records(schema: Any, header: bytes) -> FlatRecords | None:
    """Returns what encodes records of a schema, after a header; None if a field may have other than a plain value.

    Args:
        schema: of a record, with each named type in full at each use.
    """
    kinds = {name: _kind(kind) for name, kind in fields_of(schema).items()}
    plain = {name: kind for name, kind in kinds.items() if kind is not None}
    return FlatRecords(plain, header) if plain and len(plain) == len(kinds) else None


def _kind(kind: Any) -> _Plain | None:
    inner, is_nullable = without_null(kind)
    plain = _plain(inner)
    if not is_nullable or plain is None:
        return plain
    of_null, of_value = (varint(kind.index(member)) for member in ("null", inner))
    return _Nullable(plain, of_null, of_value)


def _plain(kind: Any) -> _Plain | None:
    match simple_name(kind):
        case "string":
            return _Text()
        case "int" | "long" as name:
            return _Integer(_LIMITS[name])
        case "boolean":
            return _Truth()
        case "double":
            return _Double()
        case "bytes":
            return _Bytes()
        case "date" if kind["type"] == "int":
            return _Day()
        case "enum" if "symbols" in kind:
            return _Symbol(kind["symbols"])
        case "decimal" if kind["type"] == "bytes":
            return _Decimal(kind.get("scale", 0), kind["precision"])
    return None


class _Plain:
    """A type of plain values."""

    of: ClassVar[type]

    def write(self, value: Any) -> bytes:
        """Encodes a value. Raises an error of any type if it is not exact."""
        raise NotImplementedError

    def are_exact(self, values: Column) -> bool:
        return {self.of}.issuperset(map(type, values))

    def most_bytes(self, values: Column) -> int:
        """The most bytes that one of some exact values takes."""
        del values
        return _LONGEST_NUMBER

    def parts(self, values: Column) -> list[pa.Array]:
        """Returns columns whose bytes, joined, are those of `write` for each of some exact values."""
        return [pa.array([*map(self.write, values)], pa.binary())]


class _Nullable(_Plain):
    def __init__(self, inner: _Plain, of_null: bytes, of_value: bytes) -> None:
        self._inner, self._of_null, self._of_value = inner, of_null, of_value

    def write(self, value: Any) -> bytes:
        return self._of_null if value is None else self._of_value + self._inner.write(value)

    def are_exact(self, values: Column) -> bool:
        return self._inner.are_exact([value for value in values if value is not None])

    def most_bytes(self, values: Column) -> int:
        return len(self._of_value) + self._inner.most_bytes([value for value in values if value is not None])

    def parts(self, values: Column) -> list[pa.Array]:
        is_value = np.fromiter((value is not None for value in values), dtype=bool, count=len(values))
        found = self._inner.parts([value for value in values if value is not None])
        joined = pc.binary_join_element_wise(pa.scalar(self._of_value, pa.binary()), *found, _NOTHING)
        places = pa.array(is_value.cumsum() - 1, mask=~is_value)
        return [joined.take(places).fill_null(self._of_null)]


class _Text(_Plain):
    of = str

    def write(self, value: Any) -> bytes:
        if value.__class__ is not str:
            raise NotFlatError
        data: bytes = value.encode()
        size = len(data)
        return (_NUMBERS[size] if size < _SMALL else varint(size)) + data

    def are_exact(self, values: Column) -> bool:
        if not super().are_exact(values):
            return False
        if (joined := "".join(values)).isascii():
            return True
        try:
            joined.encode()
        except UnicodeEncodeError:
            return False
        return True

    def most_bytes(self, values: Column) -> int:
        longest = max(map(len, values), default=0)
        return _LONGEST_NUMBER + (longest if all(map(str.isascii, values)) else 4 * longest)

    def parts(self, values: Column) -> list[pa.Array]:
        data = pa.array(values, pa.string()).cast(pa.binary())
        return [_lengths(data), data]


class _Bytes(_Plain):
    of = bytes

    def write(self, value: Any) -> bytes:
        if value.__class__ is not bytes:
            raise NotFlatError
        data: bytes = value
        return varint(len(data)) + data

    def most_bytes(self, values: Column) -> int:
        return _LONGEST_NUMBER + max(map(len, values), default=0)

    def parts(self, values: Column) -> list[pa.Array]:
        data = pa.array(values, pa.binary())
        return [_lengths(data), data]


class _Integer(_Plain):
    of = int

    def __init__(self, limit: int) -> None:
        self._limit = limit

    def write(self, value: Any) -> bytes:
        if value.__class__ is not int or not -self._limit <= value < self._limit:
            raise NotFlatError
        return _NUMBERS[value] if 0 <= value < _SMALL else varint(value)

    def are_exact(self, values: Column) -> bool:
        limit = self._limit
        return super().are_exact(values) and -limit <= min(values, default=0) and max(values, default=0) < limit

    def parts(self, values: Column) -> list[pa.Array]:
        return [varints(np.array(values, dtype=np.int64))]


class _Truth(_Plain):
    of = bool

    def write(self, value: Any) -> bytes:
        if value.__class__ is not bool:
            raise NotFlatError
        return b"\1" if value else b"\0"


class _Double(_Plain):
    of = float

    def write(self, value: Any) -> bytes:
        if value.__class__ is not float:
            raise NotFlatError
        return _DOUBLE.pack(value)


class _Day(_Plain):
    of = date

    def write(self, value: Any) -> bytes:
        # A datetime would lose its time.
        if value.__class__ is not date:
            raise NotFlatError
        return varint(value.toordinal() - _DAY_0)


class _Symbol(_Plain):
    of = str

    def __init__(self, symbols: Sequence[str]) -> None:
        self._symbols = {symbol: varint(at) for at, symbol in enumerate(symbols)}

    def write(self, value: Any) -> bytes:
        if value.__class__ is not str:
            raise NotFlatError
        return self._symbols[value]

    def are_exact(self, values: Column) -> bool:
        return super().are_exact(values) and self._symbols.keys() >= set(values)


class _Decimal(_Plain):
    of = Decimal

    def __init__(self, scale: int, precision: int) -> None:
        self._scale, self._precision = scale, precision
        self._unit, self._limit = Decimal((0, (1,), -scale)), 10**precision

    def write(self, value: Any) -> bytes:
        if value.__class__ is not Decimal or not value.same_quantum(self._unit):
            raise NotFlatError
        number = int(value.scaleb(self._scale, _EXACT))
        # There is no negative zero in Avro.
        if not -self._limit < number < self._limit or (not number and value.is_signed()):
            raise NotFlatError
        size = number.bit_length() // 8 + 1
        return _NUMBERS[size] + number.to_bytes(size, "big", signed=True)

    def are_exact(self, values: Column) -> bool:
        if not super().are_exact(values) or not all(map(self._unit.same_quantum, values)):
            return False
        # The place of the first digit; of a zero, that of the last.
        if max(map(Decimal.adjusted, values), default=-1) >= self._precision - self._scale:
            return False
        return all(values) or not any(value.is_signed() for value in values if not value)

    def most_bytes(self, values: Column) -> int:
        del values
        return _LONGEST_NUMBER + self._precision // 2 + 1

    def parts(self, values: Column) -> list[pa.Array]:
        if self._precision <= _MOST_ARROW_DIGITS:
            numbers, are_small = unscaled(pa.array(values, pa.decimal128(self._precision, self._scale)))
            if are_small.all():
                return [decimals(numbers)]
        return super().parts(values)


def _lengths(data: pa.Array) -> pa.Array:
    return varints(pc.binary_length(data).to_numpy().astype(np.int64))
