"""Logical types that Avro's libraries do not know: times that Kafka Connect names, nanoseconds, UUIDs of 16 bytes.

To decode and encode, this module adds them to fastavro. A value is what `spark/java/Reading.java` makes of it: the time
to microseconds, and the text of a UUID. A decimal of an untrusted writer is read exactly or refused: fastavro rounds it
to the precision of its schema.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, tzinfo
from decimal import Context, Decimal, Inexact, InvalidOperation
from typing import TYPE_CHECKING, Any
from uuid import UUID

from fastavro.read import LOGICAL_READERS
from fastavro.write import LOGICAL_WRITERS

from balance_service.avro.schemas import UUID_BYTES, fields_of, is_fixed_uuid, simple_name, without_null
from balance_service.errors import PoisonRecordError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from balance_service.avro.schemas import Schema

_CONNECT = "connect.name"
# Source: Debezium, "Temporal types"; Kafka Connect, `org.apache.kafka.connect.data`. Avro and the service have no type
# for the others: those of a day, durations and years remain numbers, and those with a zone remain text.
_TIMES = {
    "io.debezium.time.Date": ("int", "date"),
    "io.debezium.time.Timestamp": ("long", "timestamp-millis"),
    "io.debezium.time.MicroTimestamp": ("long", "timestamp-micros"),
    "io.debezium.time.NanoTimestamp": ("long", "timestamp-nanos"),
    "org.apache.kafka.connect.data.Date": ("int", "date"),
    "org.apache.kafka.connect.data.Timestamp": ("long", "timestamp-millis"),
}
_DEBEZIUM = "io.debezium.time."
_OF_CONNECT = "connect-"
_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001  (times of some types have no zone)
_NANOS_OF_MICRO = 1_000
_EXACT_DECIMAL = "exact-decimal"
# As in `spark/java/Reading.java`.
_DIGITS = 38
_MOST_BYTES, _MOST_DIGITS = 512, 1234
_EXACT = Context(prec=_MOST_DIGITS, traps=[Inexact, InvalidOperation])


def with_times(schema: Any) -> Any:
    """Returns a schema whose times have a `logicalType` where only `connect.name` tells that they are times."""
    text = json.dumps(schema)
    # Not by functions that call themselves: Python's stack is shorter than the deepest schemas.
    return json.loads(text, object_hook=_with_time) if _CONNECT in text else schema


def _with_time(kind: dict[str, Any]) -> dict[str, Any]:
    plain, logical = _TIMES.get(str(kind.get(_CONNECT)), ("", ""))
    return (
        {**kind, "logicalType": logical} if plain and kind.get("type") == plain and "logicalType" not in kind else kind
    )


def is_time(kind: Any) -> bool:
    """Whether values of a type are dates, or times with a date."""
    return simple_name(kind).removeprefix("local-").startswith(("date", "timestamp-"))


def is_time_by_name(text: str) -> bool:
    """Whether a schema, or a `connect.name`, has a time that no `logicalType` told: one of Debezium's."""
    return _DEBEZIUM in text


def of_writer(kind: Any) -> Any:
    """Marks decimals and times of Kafka Connect in a writer's schema.

    A decimal is read exactly then. A reader may take such a time as a number, and as a time of no zone.

    A writer's schema without the marks is for encoding, and for readers with the same schema.
    """
    if not isinstance(kind, dict):
        return kind
    if kind.get("logicalType") == "decimal" and kind.get("type") in ("bytes", "fixed") and _is_valid(kind):
        return {**kind, "logicalType": _EXACT_DECIMAL}
    if (kind.get("type"), kind.get("logicalType")) not in _TIMES.values():
        return kind
    return {**kind, "logicalType": _OF_CONNECT + kind["logicalType"]} if kind.get(_CONNECT) in _TIMES else kind


def _is_valid(decimal: Mapping[str, Any]) -> bool:
    precision, scale = decimal.get("precision"), decimal.get("scale", 0)
    return type(precision) is int and type(scale) is int and 0 <= scale <= precision and precision > 0


def resolvable(wanted: Any, written: Any) -> Any:
    """Returns a reader's schema with which fastavro reads a UUID of one form as one of another, or as text.

    fastavro resolves types by their names, and converts values by the writer's type.

    Args:
        wanted: with each named type in full at each use, and so is the result.
        written: as fastavro parsed it.
    """
    named = _named_in(written, {})
    return (
        _resolvable(wanted, written, named)
        if any(map(is_fixed_uuid, [*named.values(), *_named_in(wanted, {}).values()]))
        else wanted
    )


def _resolvable(wanted: Any, written: Any, named: Mapping[str, Any]) -> Any:
    if isinstance(written, str):
        written = named.get(written, written)
    inner, is_nullable = without_null(wanted)
    if isinstance(written, list) and not isinstance(inner, list):
        members = [_resolvable(inner, member, named) for member in written if member != "null"]
        distinct = [member for n, member in enumerate(members) if member not in members[:n]]
        return (
            distinct[0] if len(distinct) == 1 and not is_nullable else [*(["null"] if is_nullable else []), *distinct]
        )
    if is_nullable and not isinstance(inner, list):
        return ["null", _resolvable(inner, written, named)]
    is_wanted, is_written = is_fixed_uuid(inner), is_fixed_uuid(written)
    if is_written and (is_wanted or _is_text(inner)):
        return written
    if is_wanted and _is_text(written):
        return "string"
    match inner, written:
        case {"type": "array", "items": items}, {"type": "array", "items": theirs}:
            return {**inner, "items": _resolvable(items, theirs, named)}
        case {"type": "map", "values": values}, {"type": "map", "values": theirs}:
            return {**inner, "values": _resolvable(values, theirs, named)}
        case {"type": "record"}, {"type": "record"}:
            theirs = fields_of(written)
            return {**inner, "fields": [_resolvable_field(field, theirs, named) for field in inner["fields"]]}
    return wanted


def _resolvable_field(field: Schema, written: Mapping[str, Any], named: Mapping[str, Any]) -> Schema:
    if field["name"] not in written:
        return field
    # A default, which is not needed, might not be of the type.
    plain = {name: part for name, part in field.items() if name != "default"}
    return {**plain, "type": _resolvable(field["type"], written[field["name"]], named)}


def read_as_amount(wanted: Any, written: Any) -> str:
    """Returns the name of a field whose bytes or text would be read as a decimal, which they are not; empty if none is.

    Args:
        wanted: with each named type in full at each use.
        written: of an untrusted writer, as fastavro parsed it.
    """
    return _read_as_amount(wanted, written, _named_in(written, {}), "")


def _read_as_amount(wanted: Any, written: Any, named: Mapping[str, Any], field: str) -> str:
    inner, _ = without_null(wanted)
    for member in written if isinstance(written, list) else [written]:
        kind = named.get(member, member) if isinstance(member, str) else member
        match inner, kind:
            case {"type": "record"}, {"type": "record"}:
                theirs = fields_of(kind)
                read = ((name, of["type"]) for of in inner["fields"] if (name := _name_in(theirs, of)) is not None)
                found = next(filter(None, (_read_as_amount(of, theirs[name], named, name) for name, of in read)), "")
            case ({"type": "array", "items": of}, {"type": "array", "items": theirs}) | (
                {"type": "map", "values": of},
                {"type": "map", "values": theirs},
            ):
                found = _read_as_amount(of, theirs, named, field)
            case _:
                is_raw = simple_name(kind) in ("bytes", "fixed", "string")
                found = field if is_raw and simple_name(inner) == "decimal" else ""
        if found:
            return found
    return ""


def _name_in(written: Mapping[str, Any], field: Schema) -> str | None:
    """Returns by which name or alias a record has a reader's field; None if it lacks it."""
    return next((name for name in (field["name"], *field.get("aliases", ())) if name in written), None)


def _is_text(kind: Any) -> bool:
    return bool((kind.get("type") if isinstance(kind, dict) else kind) == "string")


def _named_in(kind: Any, found: dict[str, Any]) -> dict[str, Any]:
    """Adds the definitions of a type, by name as they have it."""
    match kind:
        case list():
            for member in kind:
                _named_in(member, found)
        case {"type": "array", "items": inner} | {"type": "map", "values": inner} | {"type": dict() | list() as inner}:
            _named_in(inner, found)
        case {"name": str(name)}:
            found[name] = kind
            for field in kind.get("fields", ()):
                _named_in(field["type"], found)
    return found


def _moment(number: int, of_microsecond: int, zone: tzinfo | None) -> datetime:
    return _EPOCH.replace(tzinfo=zone) + timedelta(microseconds=number // of_microsecond)


def _nanos(zone: tzinfo | None) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def read(number: int, _written: Any = None, _wanted: Any = None) -> datetime:
        return _moment(number, _NANOS_OF_MICRO, zone)

    def write(value: Any, _schema: Any = None) -> Any:
        if not isinstance(value, datetime) or (value.tzinfo is None) != (zone is None):
            return value
        return (value - _EPOCH.replace(tzinfo=zone)) // timedelta(microseconds=1) * _NANOS_OF_MICRO

    return read, write


def _of_connect(plain: str, logical: str) -> Callable[..., Any]:
    as_time = LOGICAL_READERS[f"{plain}-{logical}"]

    def read(number: int, written: Any = None, wanted: Any = None) -> Any:
        wish, _ = without_null(written if wanted is None else wanted)
        if wanted is not None and not is_time(wish):
            return number
        moment = as_time(number, written, wanted)
        return moment.replace(tzinfo=None) if simple_name(wish).startswith("local-") else moment

    return read


def _exact(data: bytes, written: Any = None, wanted: Any = None) -> Decimal:
    """Returns an amount at the reader's scale; at the writer's if there is no reader."""
    if not data:
        raise PoisonRecordError("body-undecodable", "a decimal has no digits")
    precision, scale = written["precision"], written.get("scale", 0)
    number = int.from_bytes(data, "big", signed=True)
    if len(data) > _MOST_BYTES:
        raise _loses(f"decimal({precision},{scale})")
    if wanted is not None:
        wish, _ = without_null(wanted)
        if not isinstance(wish, dict) or wish.get("logicalType") != "decimal":
            raise PoisonRecordError("schema-incompatible", f"a decimal is not read as {simple_name(wish)}")
        more = wish.get("scale", 0) - scale
        if number and (abs(number) >= 10 ** min(precision, _MOST_DIGITS) or -more > _MOST_DIGITS):
            raise _loses(f"decimal({precision},{scale})")
        number, rest = (number * 10**more, 0) if more >= 0 else divmod(number, 10**-more)
        scale += more
        if rest or abs(number) >= 10**_DIGITS:
            raise _loses(f"decimal({_DIGITS},{scale})")
    return _EXACT.scaleb(Decimal(number), -scale)


def _loses(kind: str) -> PoisonRecordError:
    return PoisonRecordError("decimal-loses-digits", f"an amount has more digits than {kind}")


def _uuid_text(value: bytes, _written: Any = None, _wanted: Any = None) -> Any:
    return str(UUID(bytes=value)) if len(value) == UUID_BYTES else value


def _uuid_bytes(value: Any, _schema: Any = None) -> Any:
    return UUID(str(value)).bytes if isinstance(value, str | UUID) else value


LOGICAL_READERS["long-timestamp-nanos"], LOGICAL_WRITERS["long-timestamp-nanos"] = _nanos(UTC)
LOGICAL_READERS["long-local-timestamp-nanos"], LOGICAL_WRITERS["long-local-timestamp-nanos"] = _nanos(None)
LOGICAL_READERS[f"bytes-{_EXACT_DECIMAL}"] = LOGICAL_READERS[f"fixed-{_EXACT_DECIMAL}"] = _exact
LOGICAL_READERS["fixed-uuid"], LOGICAL_WRITERS["fixed-uuid"] = _uuid_text, _uuid_bytes
for _plain, _logical in set(_TIMES.values()):
    LOGICAL_READERS[f"{_plain}-{_OF_CONNECT}{_logical}"] = _of_connect(_plain, _logical)
