"""Converts JSON to values of Avro types, in the forms that `model.json_view` writes.

The conversion is exact: a decimal never becomes a float, and a value that does not fit its type is refused.
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct
from datetime import date, datetime
from decimal import Context, Decimal, DecimalException, Inexact, InvalidOperation
from typing import TYPE_CHECKING, Any, NoReturn, Self
from uuid import UUID

from balance_service.avro.schemas import fields_of, simple_name, type_name, without_null
from balance_service.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from balance_service.avro.schemas import Schema

# `Decimal` accepts "Infinity" and "1_000" too.
_DECIMAL = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")
_BITS = {"int": 32, "long": 64}
_NOT_FINITE = ("nan", "inf", "-inf")
# `datetime.fromisoformat` truncates further digits.
_BEYOND_MICROSECONDS = re.compile(r"[.,][0-9]{7}")
_SHOWN_CHARACTERS = 60
# The whole years whose nanoseconds since 1970 a long holds.
_FIRST_NANO_YEAR, _LAST_NANO_YEAR = 1678, 2261


class _Number(Decimal):
    """A number with a point or an exponent, and its text."""

    __slots__ = ("text",)
    text: str

    def __new__(cls, text: str) -> Self:
        made = super().__new__(cls, text)
        made.text = text
        return made


def parsed_json(text: str) -> Any:
    """Parses a JSON text. Numbers with a point or an exponent become decimals with exactly their digits.

    Raises:
        InvalidInputError: the text is not JSON, or an object has a duplicate field.
    """
    try:
        return json.loads(text, parse_float=_Number, parse_constant=_refuse_constant, object_pairs_hook=_object_of)
    except json.JSONDecodeError as error:
        raise InvalidInputError(f"not JSON: {error.msg} at character {error.pos + 1}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"not JSON: {error}") from None


def record_of(schema: Schema, value: Any) -> dict[str, Any]:
    """Converts the result of `parsed_json` to a record for `AvroCodec.encode`.

    A field with a default may be missing. Decimals are numbers or strings of digits; timestamps are ISO 8601, with a
    zone unless the type is local; bytes are base64.

    Raises:
        InvalidInputError: the value does not fit the schema; the message names the field and the rule.
    """
    if not isinstance(value, dict):
        raise InvalidInputError(f"{schema['name']} must be a JSON object, not {_shown(value)}")
    return _record(schema, value, "")


def record_line(
    line: bytes, schema: Schema, key_separator: str | None, *, takes_tombstones: bool = False
) -> tuple[bytes | None, dict[str, Any] | None]:
    """Key and record of a line `[key S] JSON`; the key ends at the first separator S.

    Args:
        key_separator: None if lines have no key.
        takes_tombstones: `null` after a key is a tombstone, whose record is None.

    Raises:
        InvalidInputError: the line is not such a record; the message says why.
    """
    key, text = key_and_json(line, key_separator)
    value = parsed_json(text)
    if value is None and key is not None and takes_tombstones:
        return key, None
    return key, record_of(schema, value)


def key_and_json(line: bytes, key_separator: str | None) -> tuple[bytes | None, str]:
    """Key and JSON of a line, as `record_line` divides it. Raises InvalidInputError if the line lacks a part."""
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"not UTF-8 from byte {error.start + 1} on") from None
    if key_separator is None:
        return None, text
    before, found, text = text.partition(key_separator)
    if not found:
        raise InvalidInputError(f"no key separator '{key_separator}'")
    if not before:
        raise InvalidInputError(f"no key before '{key_separator}'")
    return before.encode(), text


def _value(kind: Any, value: Any, path: str) -> Any:
    kind, is_nullable = without_null(kind)
    if value is None and is_nullable:
        return None
    read = _FORMS.get(simple_name(kind))
    if read is None:
        raise InvalidInputError(f"'{path}' is of type {type_name(kind)}, which has no JSON form")
    return read(kind, value, path)


def _record(kind: Schema, value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        _refuse(path, "a JSON object", value)
    inside = f"{path}." if path else ""
    fields = fields_of(kind)
    for name in value:
        if name not in fields:
            raise InvalidInputError(f"'{inside}{name}' is no field of {kind['name']}, which has {', '.join(fields)}")
    for field in kind["fields"]:
        if field["name"] not in value and "default" not in field:
            raise InvalidInputError(f"'{inside}{field['name']}' is missing")
    return {name: _value(fields[name], member, f"{inside}{name}") for name, member in value.items()}


def _array(kind: Any, value: Any, path: str) -> list[Any]:
    if not isinstance(value, list):
        _refuse(path, "a JSON array", value)
    return [_value(kind["items"], member, f"{path}[{index}]") for index, member in enumerate(value)]


def _map(kind: Any, value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        _refuse(path, "a JSON object", value)
    return {_text(kind, name, path): _value(kind["values"], member, f"{path}.{name}") for name, member in value.items()}


def _text(_kind: Any, value: Any, path: str) -> str:
    if not isinstance(value, str):
        _refuse(path, "a string", value)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidInputError(f"'{path}' is not UTF-8") from None
    return value


def _boolean(_kind: Any, value: Any, path: str) -> bool:
    if not isinstance(value, bool):
        _refuse(path, "true or false", value)
    return value


def _integer(kind: Any, value: Any, path: str) -> int:
    bits = _BITS[simple_name(kind)]
    if not isinstance(value, int) or isinstance(value, bool) or not -(2 ** (bits - 1)) <= value < 2 ** (bits - 1):
        _refuse(path, f"a whole number of {bits} bits", value)
    return value


def _double(kind: Any, value: Any, path: str) -> float:
    is_number = isinstance(value, int | Decimal) and not isinstance(value, bool)
    try:
        number = float(value) if is_number or value in _NOT_FINITE else None
        if number is not None and simple_name(kind) == "float":
            struct.pack("<f", number)
    except OverflowError:
        number = None
    if number is None or (is_number and math.isinf(number)):
        _refuse(path, f"a number that a {simple_name(kind)} holds", value)
    return number


def _decimal(kind: Any, value: Any, path: str) -> Decimal:
    precision, scale = kind["precision"], kind.get("scale", 0)
    is_number = isinstance(value, int | Decimal) and not isinstance(value, bool)
    try:
        if not is_number and not (isinstance(value, str) and _DECIMAL.fullmatch(value)):
            raise InvalidOperation
        exact = Context(prec=precision, traps=[Inexact, InvalidOperation])
        return Decimal(value).quantize(Decimal(1).scaleb(-scale), context=exact)
    except DecimalException:
        rule = f"a number or a string of digits, at most {precision - scale} before the point and {scale} after"
        _refuse(path, rule, value)


def _bytes(kind: Any, value: Any, path: str) -> bytes:
    size = kind["size"] if isinstance(kind, dict) and "size" in kind else None
    try:
        content = base64.b64decode(value, validate=True)
    except (ValueError, TypeError):
        content = None
    if content is None or size not in (None, len(content)):
        _refuse(path, "base64" if size is None else f"{size} bytes in base64", value)
    return content


def _enum(kind: Any, value: Any, path: str) -> str:
    if value not in kind["symbols"]:
        _refuse(path, f"one of {', '.join(kind['symbols'])}", value)
    return str(value)


def _uuid(_kind: Any, value: Any, path: str) -> str:
    try:
        return str(UUID(value))
    except (ValueError, TypeError, AttributeError):
        _refuse(path, "a UUID", value)


def _date(_kind: Any, value: Any, path: str) -> date:
    try:
        return date.fromisoformat(value)
    except (ValueError, TypeError):
        _refuse(path, "a date such as 2026-02-28", value)


def _time(kind: Any, value: Any, path: str) -> datetime:
    name = simple_name(kind)
    is_local, is_millis = name.startswith("local-"), name.endswith("-millis")
    try:
        moment = datetime.fromisoformat(value)
    except (ValueError, TypeError):
        moment = None
    is_cut = moment is not None and (_BEYOND_MICROSECONDS.search(value) or (is_millis and moment.microsecond % 1000))
    if moment is not None and name.endswith("-nanos") and not _FIRST_NANO_YEAR <= moment.year <= _LAST_NANO_YEAR:
        _refuse(path, f"a time in the years {_FIRST_NANO_YEAR} to {_LAST_NANO_YEAR}", value)
    if moment is None or is_cut or (moment.tzinfo is None) != is_local:
        example = f"2026-02-28T12:30:00.{'123' if is_millis else '123456'}{'' if is_local else 'Z'}"
        _refuse(path, f"a time such as {example}, with no more digits of a second", value)
    return moment


def _refuse(path: str, rule: str, value: Any) -> NoReturn:
    raise InvalidInputError(f"'{path}' must be {rule}, not {_shown(value)}")


def _shown(value: Any) -> str:
    text = _as_given(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def _as_given(value: Any) -> str:
    match value:
        case dict():
            return "{" + ", ".join(f"{json.dumps(name)}: {_as_given(member)}" for name, member in value.items()) + "}"
        case list():
            return f"[{', '.join(map(_as_given, value))}]"
        case _Number():
            return value.text
        case _:
            return json.dumps(value, default=str)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _object_of(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"an object has the field '{name}' twice")
        found[name] = value
    return found


_FORMS: Mapping[str, Callable[[Any, Any, str], Any]] = {
    "boolean": _boolean,
    "int": _integer,
    "long": _integer,
    "float": _double,
    "double": _double,
    "string": _text,
    "bytes": _bytes,
    "fixed": _bytes,
    "enum": _enum,
    "decimal": _decimal,
    "uuid": _uuid,
    "date": _date,
    "timestamp-millis": _time,
    "timestamp-micros": _time,
    "timestamp-nanos": _time,
    "local-timestamp-millis": _time,
    "local-timestamp-micros": _time,
    "local-timestamp-nanos": _time,
    "array": _array,
    "map": _map,
    "record": _record,
}
