"""Writers of single values. For the types that states mostly have, they take a fraction of fastavro's time."""

from __future__ import annotations

import io
from decimal import Context, Decimal, Inexact, InvalidOperation
from functools import partial
from typing import TYPE_CHECKING, Any

import fastavro

from balance_service.avro.codec import parsed
from balance_service.avro.flat_records import varint
from balance_service.avro.schemas import simple_name, without_null

if TYPE_CHECKING:
    from collections.abc import Callable

_EXACT = Context(prec=80, traps=[InvalidOperation, Inexact])
_LIMITS = {"int": 1 << 31, "long": 1 << 63}


def field_writer(kind: Any) -> Callable[[Any], bytes]:
    """Returns the function that encodes values of an Avro type, as fastavro does.

    It raises an error of any type if a value does not fit. A decimal may have fewer digits after the point.
    """
    inner, is_nullable = without_null(kind)
    write = _writer(inner)
    if not is_nullable:
        return write
    of_null, of_value = (varint(kind.index(member)) for member in ("null", next(one for one in kind if one != "null")))
    return lambda value: of_null if value is None else of_value + write(value)


def _writer(kind: Any) -> Callable[[Any], bytes]:
    match simple_name(kind):
        case "int" | "long" as name:
            return partial(_integer, _LIMITS[name])
        case "string":
            return _text
        case "decimal" if kind["type"] == "bytes":
            return partial(_decimal, kind.get("scale", 0), 10 ** kind["precision"])
    schema = parsed(kind)

    def write(value: Any) -> bytes:
        if value is None:
            # fastavro would write it as false.
            raise TypeError
        body = io.BytesIO()
        fastavro.schemaless_writer(body, schema, value)
        return body.getvalue()

    return write


def _integer(limit: int, value: int) -> bytes:
    if not -limit <= value < limit:
        raise OverflowError
    return varint(value)


def _text(value: str) -> bytes:
    data = value.encode()
    return varint(len(data)) + data


def _decimal(scale: int, limit: int, value: Decimal) -> bytes:
    shifted = _EXACT.scaleb(value, scale)
    number = int(shifted)
    if number != shifted or not -limit < number < limit:
        raise OverflowError
    size = number.__abs__().bit_length() // 8 + 1
    return varint(size) + number.to_bytes(size, "big", signed=True)
