"""The types of values that states and events hold: for each, its Avro schema, and how its values are converted.

Source: Avro 1.12 specification, "Complex Types", "Logical Types".
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from decimal import Context, Decimal, InvalidOperation, Rounded
from typing import TYPE_CHECKING, Any, NoReturn

from balance_service.errors import ConfigurationError, PoisonRecordError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

STATE, VIEW = "a state", "a view"
"""What the instances of a dataclass can be for."""
# The cause for a state that does not fit its schema, from all checks.
_UNFIT = "state-does-not-fit"
LONG_LIMIT = 2**63
_MOST_DIGITS = 38
_DAY_0 = date(1970, 1, 1)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class Scale:
    """The number of digits of a Decimal: after the decimal point, and in total."""

    digits: int
    precision: int = _MOST_DIGITS


def scale(digits: int, *, precision: int = _MOST_DIGITS) -> Scale:
    """Annotates a Decimal in a state or an event with its digits after the decimal point.

    `Annotated[Decimal, scale(2)]` has two.
    """
    return Scale(digits, precision)


@dataclass(frozen=True, slots=True)
class JsonForm:
    """Another form of values in JSON documents than the default of their type."""

    name: str
    of: type
    """The type that it annotates."""


EPOCH_MILLIS = JsonForm("epoch-millis", datetime)
"""Annotates a datetime that JSON documents have as a number, the milliseconds since 1970."""
EPOCH_MICROS = JsonForm("epoch-micros", datetime)
"""Annotates a datetime that JSON documents have as a number, the microseconds since 1970."""
EPOCH_DAYS = JsonForm("epoch-days", date)
"""Annotates a date that JSON documents have as a number, the days since 1970."""
BASE64 = JsonForm("base64", Decimal)
"""Annotates a Decimal that JSON documents have as the base64 of its digits as one number, without its point.

It is what Kafka Connect's JsonConverter writes: two's complement, the most significant byte first.
"""
DIGITS = JsonForm("digits", Decimal)
"""Annotates a Decimal that JSON documents have as a string of digits, and never as a number."""
NUMERIC = JsonForm("numeric", Decimal)
"""Annotates a Decimal that JSON documents have as a number with all digits of its scale, as no double is written."""


class NoDefaultError(Exception):
    """Avro cannot represent the default."""


def same(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueType:
    """An Avro type with the conversions of its values."""

    schema: Any
    write: Callable[[Any], Any]
    """Converts a value to the form that is encoded. Raises PoisonRecordError."""
    read: Callable[[Any], Any] = same
    """Converts a decoded value, or a default in the form of the schema: fastavro returns those unconverted."""
    default: Callable[[Any], Any]
    """Converts a value to a default in a schema. Raises NoDefaultError."""
    needs_write: bool = True
    """Whether `write` is required: without it, a codec would accept a wrong value, or refuse a right one."""
    written_as_is: type | None = None
    """The type of values that `write` returns unchanged."""
    lasting: type | None = None
    """The type of values that cannot change, and that a codec returns unchanged if it takes them.

    It takes all whose range it has and, of text, whose characters UTF-8 has.
    """
    beside_null: ValueType | None = None
    """The non-null type, if the value may be None."""
    columns_of: Callable[[Sequence[Any]], Sequence[Sequence[Any]]] | None = None
    """Of a dataclass: see `lasting`."""
    read_all: Callable[[Mapping[str, Sequence[Any]]], list[Any]] | None = None
    """Of a dataclass: makes an instance of each row of columns of decoded values, as `read` does of a record."""
    has_defaults: bool = False
    """Whether the type is a record whose fields all have defaults in its schema."""


@dataclass(frozen=True, slots=True)
class Place:
    """A dataclass or its field. `refuse` raises ConfigurationError, `unfit` and `mistyped` raise PoisonRecordError."""

    owner: Any
    use: str
    """What the instances of the dataclass are for."""
    field: str = ""

    def refuse(self, why: str) -> NoReturn:
        subject = f"its field '{self.field}'" if self.field else "it"
        raise ConfigurationError(f"the dataclass {located(self.owner)} cannot be {self.use}: {subject} {why}")

    def unfit(self, why: str) -> NoReturn:
        subject = f"{self.owner.__qualname__}.{self.field}".removesuffix(".")
        consequence = "the state cannot be kept: " if self.use == STATE else ""
        raise PoisonRecordError(_UNFIT, f"{consequence}{subject} {why}")

    def mistyped(self, wanted: str, value: Any) -> NoReturn:
        self.unfit(f"has a value of type {type(value).__name__}, and {wanted} is expected")


def located(owner: Any) -> str:
    """Returns a class's name with its file and line; without these, with its module."""
    name = getattr(owner, "__qualname__", repr(owner))
    try:
        return f"{name} ({inspect.getsourcefile(owner)}:{inspect.getsourcelines(owner)[1]})"
    except Exception:  # Classes that are built in, made at run time or typed at a prompt fail in different ways.
        module = getattr(owner, "__module__", "")
        return f"{name} (module {module})" if module else name


def nullable(kind: ValueType) -> ValueType:
    inner_write, inner_read = kind.write, kind.read

    def write(value: Any) -> Any:
        return None if value is None else inner_write(value)

    def read(value: Any) -> Any:
        return None if value is None else inner_read(value)

    def default(value: Any) -> None:
        if value is not None:
            raise NoDefaultError

    return ValueType(
        schema=["null", kind.schema],
        write=write,
        read=same if inner_read is same else read,
        default=default,
        needs_write=kind.needs_write,
        beside_null=kind,
    )


def array(items: ValueType, place: Place) -> ValueType:
    item_write, item_read, alike = items.write, items.read, {items.written_as_is}

    def write(value: Any) -> list[Any]:
        if not isinstance(value, list):
            place.mistyped("a list", value)
        if not items.needs_write or alike.issuperset(map(type, value)):
            return value
        return [item_write(item) for item in value]

    def read(value: Any) -> list[Any]:
        # For a default, fastavro returns the schema's own list.
        return [*value] if item_read is same else [item_read(item) for item in value]

    return ValueType(schema={"type": "array", "items": items.schema}, write=write, read=read, default=_empty)


def mapping(values: ValueType, place: Place) -> ValueType:
    value_write, value_read, alike = values.write, values.read, {values.written_as_is}

    def write(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            place.mistyped("a dict", value)
        if not values.needs_write or alike.issuperset(map(type, value.values())):
            return value
        return {key: value_write(member) for key, member in value.items()}

    def read(value: Any) -> dict[str, Any]:
        return {**value} if value_read is same else {key: value_read(member) for key, member in value.items()}

    return ValueType(schema={"type": "map", "values": values.schema}, write=write, read=read, default=_empty)


def _empty(value: Any) -> Any:
    if value:
        raise NoDefaultError
    return value


def decimal(of: Scale, place: Place) -> ValueType:
    digits, precision = of.digits, of.precision
    if digits not in range(precision + 1) or precision not in range(1, _MOST_DIGITS + 1):
        place.refuse(f"has {of}: a Decimal has 1 to {_MOST_DIGITS} digits, and a scale from 0 to that number")
    # Rounded is trapped: it signals every dropped digit, even a 0, so an event is refused independently of its digits.
    exact, unit = Context(prec=precision, traps=[Rounded, InvalidOperation]), Decimal((0, (1,), -digits))

    def write(value: Any) -> Decimal:
        if not isinstance(value, Decimal):
            place.mistyped("a Decimal", value)
        try:
            if value.is_finite():
                return value.quantize(unit, context=exact)
        except (Rounded, InvalidOperation):
            pass
        return place.unfit(f"has a Decimal with more than {precision} digits, or more than {digits} after the point")

    def default(value: Decimal) -> str:
        number = int(write(value).scaleb(digits, exact))
        return number.to_bytes((number.bit_length() + 8) // 8, "big", signed=True).decode("latin-1")

    schema = {"type": "bytes", "logicalType": "decimal", "precision": precision, "scale": digits}
    return ValueType(schema=schema, write=write, default=default)


def _plain(schema: Any, kind: type, **more: Any) -> Callable[[Place], ValueType]:
    """Builds an Avro type whose values are all those of a Python type."""

    def of(place: Place) -> ValueType:
        def write(value: Any) -> Any:
            if not isinstance(value, kind):
                place.mistyped(kind.__name__, value)
            return value

        return ValueType(
            schema=schema, write=write, **{"default": write, "written_as_is": kind, "lasting": kind, **more}
        )

    return of


def _long(place: Place) -> ValueType:
    def write(value: Any) -> Any:
        if value.__class__ is int or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        return place.mistyped("int", value)

    def default(value: int) -> int:
        if not -LONG_LIMIT <= value < LONG_LIMIT:
            place.unfit("is beyond 64 bits")
        return int(value)

    return ValueType(schema="long", write=write, default=default, written_as_is=int, lasting=int)


def _double(place: Place) -> ValueType:
    def write(value: Any) -> Any:
        if isinstance(value, float):
            return value
        if not isinstance(value, int) or isinstance(value, bool):
            place.mistyped("float", value)
        # A fold that sums integers may start with one.
        try:
            nearest = float(value)
        except OverflowError:
            nearest = math.inf
        return nearest if nearest == value else place.unfit("has an int that no float represents exactly")

    def default(value: float) -> float:
        if not math.isfinite(value):
            raise NoDefaultError
        return float(value)

    return ValueType(schema="double", write=write, default=default, written_as_is=float)


def _moment(place: Place) -> ValueType:
    def write(value: Any) -> datetime:
        if not isinstance(value, datetime):
            place.mistyped("datetime", value)
        if value.tzinfo is UTC:
            return value
        if value.utcoffset() is None:
            place.unfit("has a datetime without a time zone: write `datetime.now(UTC)`, `datetime(..., tzinfo=UTC)`")
        try:
            return value.astimezone(UTC)
        except OverflowError:
            place.unfit("has a datetime outside of the years 1 to 9999 in UTC")

    return ValueType(
        schema={"type": "long", "logicalType": "timestamp-micros"},
        write=write,
        default=lambda value: (write(value) - _EPOCH) // _MICROSECOND,
    )


def _day(place: Place) -> ValueType:
    def write(value: Any) -> date:
        # A datetime would lose its time.
        if not isinstance(value, date) or isinstance(value, datetime):
            place.mistyped("date", value)
        return value

    schema = {"type": "int", "logicalType": "date"}
    return ValueType(schema=schema, write=write, default=lambda value: (value - _DAY_0).days, lasting=date)


def _text(place: Place) -> ValueType:
    kind = _plain("string", str, needs_write=False)(place)
    return replace(kind, default=lambda value: str.__str__(kind.write(value)))


def _bytes(place: Place) -> ValueType:
    kind = _plain("bytes", bytes, needs_write=False)(place)
    return replace(kind, default=lambda value: kind.write(value).decode("latin-1"))


PLAIN: Mapping[type, Callable[[Place], ValueType]] = {
    str: _text,
    int: _long,
    float: _double,
    bool: _plain("boolean", bool),
    bytes: _bytes,
    date: _day,
    datetime: _moment,
}
