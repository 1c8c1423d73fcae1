"""Reads JSON values as those of Avro types: exactly, or not at all. `java/JsonValues.java` reads the same."""

from __future__ import annotations

import base64
import math
import re
import struct
from copy import deepcopy
from datetime import UTC, date, datetime, timedelta
from decimal import Context, Decimal
from typing import TYPE_CHECKING, Any, NoReturn

from balance_service.avro.codec import VALUES_TOO_MANY, of_default
from balance_service.avro.schemas import fields_of, full_name, is_fixed_uuid, simple_name, without_null
from balance_service.errors import PoisonRecordError
from balance_service.formats.connect_schema import contradiction
from balance_service.formats.json_document import MALFORMED, MalformedJsonError, Number, parsed, without_frame

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from balance_service.avro.schemas import Schema

    Read = Callable[[Any, "Budget"], Any]

MISFIT, MISSING = "json-misfit", "field-missing"
EPOCH_MILLIS, EPOCH_MICROS, EPOCH_DAYS = "epoch-millis", "epoch-micros", "epoch-days"
"""The property `json` of a time, or of a date, that documents have as a number: of what, since 1970."""
BASE64, DIGITS, NUMERIC = "base64", "digits", "numeric"
"""The property `json` of a decimal that documents have in one form only: the base64 of its unscaled value, a string of
digits, or a number with as many digits after its point as the scale. Without it, numbers and strings are read."""
IGNORED = "ignored"
"""The cause of a record of another type; its detail is the name."""
_MOST_SAID = 400
_MOST_EXPONENT = 100_000
_VALUES, _VALUES_PER_BYTE = 250_000, 4
_NUMBER = re.compile(r"(-?[0-9]{1,1000}(?:\.[0-9]{1,1000})?)(?:[eE]([+-]?[0-9]{1,1000}))?")
_DATE = r"([0-9]{4})-([0-9]{2})-([0-9]{2})"
_TIME = re.compile(
    _DATE + r"[Tt ]([0-9]{2}):([0-9]{2})(?::([0-9]{2})(?:[.,]([0-9]{1,30}))?)?([Zz]|[+-][0-9]{2}(?::?[0-9]{2})?)?"
)
_UUID = re.compile("[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001  (times of some types have no zone)
_SECOND = 1_000_000
_MICROS = {EPOCH_MILLIS: 1_000, EPOCH_MICROS: 1}
_DAY = 86_400 * _SECOND
# The years 1 to 9999, in microseconds since 1970.
_FIRST, _END = -719_162 * _DAY, 2_932_897 * _DAY
_DIGITS = {"millis": 3, "micros": 6, "nanos": 9}
_BITS = {"int": 32, "long": 64}
# Records of Debezium that are no change of a row, by the fields that they have, and those that they may have.
# Source: Debezium, `SchemaFactory` and the PostgreSQL connector's `LogicalDecodingMessageMonitor`.
_NO_ROWS: Mapping[str, tuple[frozenset[str], frozenset[str]]] = {
    "Heartbeat": (frozenset({"ts_ms"}), frozenset({"ts_us", "ts_ns"})),
    "MessageValue": (
        frozenset({"op", "source", "message"}),
        frozenset({"ts_ms", "ts_us", "ts_ns", "transaction"}),
    ),
    "TransactionMetadataValue": (frozenset({"status", "id", "event_count", "data_collections"}), frozenset({"ts_ms"})),
}


_DECIMALS: Mapping[str | None, tuple[Any, str]] = {
    None: (Number | str, "a number, or a string of digits,"),
    DIGITS: (str, "a string of digits"),
    NUMERIC: (Number, "a number"),
}


class Budget:
    """How many more values a document may hold, as in `java/Json.java`."""

    def __init__(self, size: int) -> None:
        self._left = _VALUES + _VALUES_PER_BYTE * size

    def spend(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            per_byte = f"{_VALUES_PER_BYTE} more for each of its bytes"
            raise PoisonRecordError(VALUES_TOO_MANY, f"it holds more than {_VALUES} values and {per_byte}")


class JsonRecords:
    """Reads documents as records of some schemas. Any thread may use it."""

    def __init__(
        self, schemas: Iterable[Schema], type_field: str = "", data_field: str = "", schema_field: str = ""
    ) -> None:
        """Args:
        schemas: each with named types in full at each use.
        type_field: the field that names the record; empty if there is only one, or if a header names it.
        data_field: the field that holds the record, if no header names it; empty if the document is it.
        schema_field: the only other field of a document that holds the record, as Kafka Connect's may; a document with
            other fields is the record. Empty if `data_field` tells.
        """
        schemas = [*schemas]
        self._schemas = {schema["name"]: schema for schema in schemas}
        self._readers = {schema["name"]: _record(schema, "") for schema in schemas}
        self._kinds = {kind: schema["name"] for schema in schemas for kind in kinds_of(schema)}
        self._type_field = type_field
        self._data_field = data_field
        self._schema_field = schema_field

    def read(self, value: bytes, kind: str = "") -> tuple[str, dict[str, Any]]:
        """Returns the simple name of a value's record, and the record.

        Args:
            kind: the header that names the record; empty if there is none.

        Raises:
            PoisonRecordError: it is none of the records; with the cause `IGNORED`, one of another type.
        """
        try:
            return self._read(value, kind)
        except MalformedJsonError as error:
            raise PoisonRecordError(MALFORMED, _said(str(error))) from None
        except PoisonRecordError as error:
            raise PoisonRecordError(error.cause, _said(error.detail)) from None

    def _read(self, value: bytes, kind: str) -> tuple[str, dict[str, Any]]:
        if kind and kind not in self._kinds:
            raise PoisonRecordError(IGNORED, kind)
        found, budget = parsed(value), Budget(len(without_frame(value)))
        record = next(iter(self._readers))
        is_wrapped = not kind and bool(self._data_field)
        if self._schema_field:
            is_wrapped = isinstance(found, dict) and found.keys() == {self._schema_field, self._data_field}
        if kind or self._type_field:
            kind = kind or self._kind_of(found)
            if kind not in self._kinds:
                raise PoisonRecordError(IGNORED, kind)
            record = self._kinds[kind]
        if is_wrapped and self._data_field not in found:
            raise PoisonRecordError(MISSING, f"{self._data_field} is missing, and holds the record")
        try:
            return record, self._inside(record, found, budget) if is_wrapped else self._readers[record](found, budget)
        except PoisonRecordError as error:
            row = found[self._data_field] if is_wrapped else found
            if self._schema_field and error.cause == MISSING and (other := _no_row(row)):
                raise PoisonRecordError(IGNORED, other) from None
            raise

    def _inside(self, record: str, found: Mapping[str, Any], budget: Budget) -> dict[str, Any]:
        read: dict[str, Any] = {}
        # In the order of the document, as Java's: the first fault is told.
        for name, member in found.items():
            if name == self._data_field:
                read = self._readers[record](member, budget)
            elif self._schema_field and (said := contradiction(self._schemas[record], member)):
                raise PoisonRecordError(MISFIT, said)
        return read

    def _kind_of(self, found: Any) -> str:
        name = self._type_field
        if not isinstance(found, dict):
            raise PoisonRecordError(MISFIT, "it is no object")
        if name not in found:
            raise PoisonRecordError(MISFIT, f"{name} is missing, which names the record")
        if not isinstance(found[name], str):
            raise PoisonRecordError(MISFIT, f"{name} is no string, but names the record")
        return str(found[name])


def kinds_of(schema: Schema) -> tuple[str, ...]:
    """Returns what a document may call a record: its `kind`, or else its name with and without namespace."""
    return (schema["kind"],) if "kind" in schema else (schema["name"], full_name(schema))


def _no_row(found: Mapping[str, Any]) -> str:
    """Returns which record of Debezium an object is, if that is no change of a row; else empty."""
    return next((name for name, (has, may) in _NO_ROWS.items() if has <= found.keys() <= has | may), "")


def _said(detail: str) -> str:
    return detail.encode(errors="replace").decode()[:_MOST_SAID]


def _misfit(path: str, value: Any, wanted: str) -> NoReturn:
    if value is None:
        raise PoisonRecordError("field-null", f"{path} is null")
    kinds = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    raise PoisonRecordError(MISFIT, f"{path} is {kinds.get(type(value), 'a number')}, and {wanted} is expected")


def _is_not(path: str, why: str) -> NoReturn:
    raise PoisonRecordError(MISFIT, f"{path} {why}")


def _of(kind: Any, path: str) -> Read:
    kind, is_nullable = without_null(kind)
    if isinstance(kind, list):
        kind = kind[0]
    read = _of_type(kind, path)
    return (lambda value, budget: None if value is None else read(value, budget)) if is_nullable else read


def _of_type(kind: Any, path: str) -> Read:
    match simple_name(kind):
        case "record":
            return _record(kind, path)
        case "array":
            return _array(kind, path)
        case "map":
            return _map(kind, path)
        case "decimal":
            return lambda value, _budget: _decimal(kind, value, path)
        case "int" | "long" | "time-millis" | "time-micros" as name:
            bits = _BITS.get(name) or _BITS[kind["type"]]
            return lambda value, _budget: _integer(value, path, bits)
        case "float" | "double" as name:
            return lambda value, _budget: _double(name, value, path)
        case "boolean":
            return lambda value, _budget: value if isinstance(value, bool) else _misfit(path, value, "a boolean")
        case "date":
            if isinstance(kind, dict) and kind.get("json") == EPOCH_DAYS:
                return lambda value, _budget: _days(_integer(value, path, 32), path)
            return lambda value, _budget: _day(value, path)
        case "enum":
            return lambda value, _budget: _symbol(kind, value, path)
        case "bytes" | "fixed":
            return lambda value, _budget: _bytes(kind, value, path)
        case "uuid" if is_fixed_uuid(kind):
            return lambda value, _budget: _uuid(value, path)
        case name if "timestamp-" in name:
            if micros := _MICROS.get(kind.get("json")):
                return lambda value, _budget: _moment(_integer(value, path, 64) * micros, name, path)
            return lambda value, _budget: _time(name, value, path)
    return lambda value, _budget: _text(value, path, "a string")


def _record(kind: Schema, path: str) -> Read:
    inside = f"{path}." if path else ""
    fields = [(name, _of(type_, f"{inside}{name}")) for name, type_ in fields_of(kind).items()]
    defaults = {
        field["name"]: of_default(field["type"], field["default"]) for field in kind["fields"] if "default" in field
    }

    def read(value: Any, budget: Budget) -> dict[str, Any]:
        if not isinstance(value, dict):
            _misfit(path or "it", value, "an object")
        budget.spend(2 + len(fields))
        # In the order of the document, as Java's: the first fault is told.
        found = {name: by_name[name](member, budget) for name, member in value.items() if name in by_name}
        for name, _ in fields:
            if name not in found:
                if name not in defaults:
                    raise PoisonRecordError(MISSING, f"{inside}{name} is missing, and has no default")
                found[name] = deepcopy(defaults[name])
        return {name: found[name] for name, _ in fields}

    by_name = dict(fields)
    return read


def _array(kind: Any, path: str) -> Read:
    item = _of(kind["items"], f"{path}[]")

    def read(value: Any, budget: Budget) -> list[Any]:
        if not isinstance(value, list):
            _misfit(path, value, "an array")
        return [item(member, budget) for member in value]

    return read


def _map(kind: Any, path: str) -> Read:
    of_value = _of(kind["values"], path + "{}")

    def read(value: Any, budget: Budget) -> dict[str, Any]:
        if not isinstance(value, dict):
            _misfit(path, value, "an object")
        return {name: of_value(member, budget) for name, member in value.items()}

    return read


def _text(value: Any, path: str, wanted: str) -> str:
    return value if isinstance(value, str) else _misfit(path, value, wanted)


def _exact(text: str) -> tuple[int, str, int]:
    """Returns sign, digits and exponent of a number, without zeros at the end; those far beyond any type remain so."""
    found = _NUMBER.fullmatch(text)
    if found is None:
        raise MalformedJsonError(f"it is not JSON: {text}")
    whole, _, fraction = found[1].removeprefix("-").partition(".")
    digits = (whole + fraction).lstrip("0")
    exponent = _exponent(found) - len(fraction)
    short = digits.rstrip("0")
    return int(text.startswith("-")), short, exponent + len(digits) - len(short)


def _exponent(found: re.Match[str]) -> int:
    return max(-_MOST_EXPONENT, min(_MOST_EXPONENT, int(found[2] or 0)))


def _integer(value: Any, path: str, bits: int) -> int:
    if not isinstance(value, Number):
        _misfit(path, value, "a number")
    sign, digits, exponent = _exact(value.text)
    if not digits:
        return 0
    if exponent >= 0 and len(digits) + exponent <= 19:
        number = int(("-" if sign else "") + digits + "0" * exponent)
        if -(2 ** (bits - 1)) <= number < 2 ** (bits - 1):
            return number
    return _is_not(path, f"is no whole number of {bits} bits")


def _double(name: str, value: Any, path: str) -> float:
    if not isinstance(value, Number):
        _misfit(path, value, "a number")
    number = float(value.text)
    try:
        if name == "float":
            (number,) = struct.unpack("<f", struct.pack("<f", number))
    except OverflowError:
        number = math.inf
    return _is_not(path, f"is no number that a {name} holds") if math.isinf(number) else number


def _decimal(kind: Any, value: Any, path: str) -> Decimal:
    precision, scale, form = kind["precision"], kind.get("scale", 0), kind.get("json")
    if form == BASE64:
        return _unscaled(precision, scale, _text(value, path, "the base64 of a decimal"), path)
    types, wanted = _DECIMALS[form]
    if not isinstance(value, types):
        _misfit(path, value, wanted)
    text = value.text if isinstance(value, Number) else value
    found = _NUMBER.fullmatch(text)
    if found is None:
        _is_not(path, "is no number")
    sign, digits, exponent = _exact(text)
    if form == NUMERIC and len(found[1].partition(".")[2]) - _exponent(found) != scale:
        _is_not(path, f"has not {scale} digits after its point, so it may be a double, which loses digits")
    if not digits:
        return Decimal((0, (0,), -scale))
    if exponent < -scale or len(digits) + exponent > precision - scale:
        _loses(path, precision, scale)
    return Decimal((sign, [*map(int, digits)], exponent)).quantize(
        Decimal((0, (1,), -scale)), context=Context(prec=precision)
    )


def _unscaled(precision: int, scale: int, text: str, path: str) -> Decimal:
    number = int.from_bytes(_of_base64(text, path) or _is_not(path, "is no number"), "big", signed=True)
    if abs(number) >= 10**precision:
        _loses(path, precision, scale)
    return Decimal(number).scaleb(-scale, Context(prec=precision))


def _loses(path: str, precision: int, scale: int) -> NoReturn:
    raise PoisonRecordError("decimal-loses-digits", f"{path} has more digits than decimal({precision},{scale})")


def _of_base64(text: str, path: str) -> bytes:
    try:
        found = base64.b64decode(text, validate=True)
    except ValueError:
        found = None
    if found is None or base64.b64encode(found).decode() != text:
        _is_not(path, "is not base64")
    return found


def _bytes(kind: Any, value: Any, path: str) -> bytes:
    found = _of_base64(_text(value, path, "base64"), path)
    size = kind.get("size") if isinstance(kind, dict) else None
    return found if size in (None, len(found)) else _is_not(path, f"has not {size} bytes")


def _uuid(value: Any, path: str) -> str:
    text = _text(value, path, "a UUID")
    return text.lower() if _UUID.fullmatch(text) else _is_not(path, "is no UUID")


def _symbol(kind: Any, value: Any, path: str) -> str:
    text = _text(value, path, "a symbol")
    if text in kind["symbols"]:
        return text
    return str(kind["default"]) if "default" in kind else _is_not(path, "is none of its symbols")


def _day(value: Any, path: str) -> date:
    found = re.fullmatch(_DATE, _text(value, path, "a date such as 2026-02-28"))
    if found is None:
        _is_not(path, "is no date such as 2026-02-28")
    return _date(found, path, "date such as 2026-02-28")


def _days(number: int, path: str) -> date:
    if not _FIRST <= number * _DAY < _END:
        _out_of_range(path)
    return _EPOCH.date() + timedelta(days=number)


def _date(found: re.Match[str], path: str, wanted: str) -> date:
    year, month, day = (int(found[n]) for n in (1, 2, 3))
    try:
        # The year 0 has all days of the year 4.
        made = date(year or 4, month, day)
    except ValueError:
        _is_not(path, f"is no {wanted}")
    return made if year else _out_of_range(path)


def _time(name: str, value: Any, path: str) -> datetime:
    is_local = name.startswith("local-")
    wanted = f"time such as 2026-02-28T12:30:00.123{'' if is_local else 'Z'}"
    found = _TIME.fullmatch(_text(value, path, f"a {wanted}"))
    if found is None:
        _is_not(path, f"is no {wanted}")
    zone = found[8]
    if is_local != (zone is None):
        _is_not(path, "has a zone" if is_local else "has no zone")
    hour, minute, second = (int(found[n] or 0) for n in (4, 5, 6))
    hours = minutes = 0
    if zone is not None and len(zone) > 1:
        hours, minutes = int(zone[1:3]), 0 if len(zone) == 3 else int(zone[-2:])
    if hour > 23 or minute > 59 or second > 59 or hours > 23 or minutes > 59:
        _is_not(path, f"is no {wanted}")
    digits = found[7] or ""
    if digits[_DIGITS[name.rpartition("-")[2]] :].strip("0"):
        _is_not(path, "has more digits of a second than its type")
    offset = (-1 if zone and zone[0] == "-" else 1) * (hours * 60 + minutes)
    seconds = hour * 3600 + (minute - offset) * 60 + second
    days = (_date(found, path, wanted) - _EPOCH.date()).days
    return _moment(days * _DAY + seconds * _SECOND + int(f"{digits:0<6}"[:6]), name, path)


def _moment(micros: int, name: str, path: str) -> datetime:
    if not _FIRST <= micros < _END:
        _out_of_range(path)
    moment = _EPOCH + timedelta(microseconds=micros)
    return moment if name.startswith("local-") else moment.replace(tzinfo=UTC)


def _out_of_range(path: str) -> NoReturn:
    raise PoisonRecordError("time-out-of-range", f"{path} is not in the years 1 to 9999")
