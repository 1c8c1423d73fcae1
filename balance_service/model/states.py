"""Dataclass states and events: derives the Avro schema of a dataclass, and converts between its instances and records.

Source: Avro 1.12 specification, "Complex Types", "Logical Types", "Names".
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from dataclasses import MISSING, Field, InitVar, dataclass, replace
from datetime import UTC, date, datetime, timedelta
from decimal import Context, Decimal, InvalidOperation, Rounded
from enum import Enum, Flag
from functools import lru_cache, partial
from operator import attrgetter
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, Union, get_args, get_origin, get_type_hints, is_typeddict

from balance_service.avro.schemas import full_name
from balance_service.errors import ConfigurationError, PoisonRecordError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from balance_service.avro.schemas import Schema

# The cause for a state that does not fit its schema, from all checks.
_UNFIT = "state-does-not-fit"
_TYPES = (
    "str, int, float, bool, bytes, date, datetime, Annotated[Decimal, scale(2)], an Enum, another dataclass, list[X], "
    "dict[str, X] or X | None"
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NAMESPACE = re.compile(rf"(?:{_NAME.pattern}(?:\.{_NAME.pattern})*)?")
_STATE, _VIEW = "a state", "a view"
_PRIMITIVES = frozenset({"null", "boolean", "int", "long", "float", "double", "bytes", "string"})
_LONG_LIMIT = 2**63
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
class StateConverter:
    """Converts between a read model's states, or its events, and Avro records. Thread-safe."""

    schema: Schema
    to_record: Callable[[Any], dict[str, Any]]
    """Returns the record of an instance, for an AvroCodec of the schema.

    Raises PoisonRecordError (`state-does-not-fit`) if a field's type cannot hold a value exactly. Values that no codec
    encodes, such as a number beyond 64 bits, or text in a field for bytes, are left to the codec.
    """
    from_record: Callable[[Mapping[str, Any]], Any]
    """Returns the instance of a decoded record, without sharing mutable objects with it.

    Fields that the record lacks get the dataclass's default.
    """


def converter_of(state: type, name: str) -> StateConverter:
    """Returns the converter for a dataclass whose instances are the states of a read model.

    The schema is called `<read model>.State`, a type in it `<read model>.<class>`, so classes may move between modules.
    A dataclass default becomes an Avro default, for states that were written without the field. There is no Avro
    default for NaN and infinities, nor for factories other than `list`, `dict` and a dataclass whose fields all have
    defaults.

    Raises:
        ConfigurationError: the class cannot be a state; the message says where it is, why, and what to do.
    """
    return _converter(state, name.replace("-", "_"), "State", _STATE)


def _converter(owner: type, namespace: str, name: str, use: str) -> StateConverter:
    kind = _Compiler(namespace, use).record(owner, name)
    return StateConverter(kind.schema, kind.write, kind.read)


@lru_cache
def record_converter(owner: type) -> StateConverter:
    """Returns the converter for a dataclass whose instances are events, rows, or records that a read model sends.

    The schema has the name of the class, and its `__namespace__`, or none.

    Raises:
        ConfigurationError: as `converter_of`.
    """
    place, name, namespace = _Place(owner, "a record"), owner.__name__, getattr(owner, "__namespace__", "")
    if not isinstance(namespace, str) or not _NAMESPACE.fullmatch(namespace):
        place.refuse(f"has the `__namespace__` {namespace!r}: use names with dots between them")
    if not _is_name(name):
        place.refuse("has a name that Avro does not allow: use ASCII letters, digits and _, and no type's name")
    return _converter(owner, namespace, name, place.use)


def record_of(value: Any) -> Any:
    """Returns the record of an instance of a dataclass; any other value unchanged.

    Raises:
        ConfigurationError: the class cannot be a record.
        ValueError: a field's type cannot hold its value exactly.
    """
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    try:
        return record_converter(type(value)).to_record(value)
    except PoisonRecordError as error:
        raise ValueError(str(error)) from None


def annotated_type(annotation: Any, function: Any) -> Any:
    """Returns an annotation of a function as a type.

    Raises:
        Exception: of any type; the annotation cannot be resolved.
    """
    # Of the annotations, only this one: others may be of types that are not imported.
    alone = type("Alone", (), {"__annotations__": {"annotation": annotation}})
    return get_type_hints(alone, getattr(_code_of(function), "__globals__", {}), include_extras=True)["annotation"]


def _code_of(function: Any) -> Any:
    """Returns what has the code of a callable, which may be a wrapper, a partial function, a class or an object."""
    function = inspect.unwrap(function)
    while isinstance(function, partial):
        function = inspect.unwrap(function.func)
    if isinstance(function, type):
        return function.__init__  # type: ignore[misc]
    return function if hasattr(function, "__globals__") else type(function).__call__


def returned_by(view: Any, name: str, *, has_fields: bool) -> StateConverter | None:
    """Returns the converter for what a read model's view returns; None if it is annotated with no type that has fields.

    A dataclass is converted to a record; the value of a TypedDict is one.

    Args:
        has_fields: whether the model names the fields, so that an annotation may name what only a type checker imports.

    Raises:
        ConfigurationError: as `converter_of`, or the annotation cannot be resolved.
    """
    try:
        returned = annotated_type(view.__annotations__.get("return"), view)
    except Exception as error:  # An annotation may be any expression.
        if has_fields:
            return None
        raise ConfigurationError(
            f"the return type of {view.__qualname__} cannot be resolved ({error}): import it at run time, or give "
            "`fields`"
        ) from error
    if not isinstance(returned, type) or not (dataclasses.is_dataclass(returned) or is_typeddict(returned)):
        return None
    owner = returned
    if is_typeddict(returned):
        owner = dataclasses.make_dataclass(returned.__name__, [*_hints(_Place(returned, _VIEW)).items()])
        owner.__module__, owner.__qualname__ = returned.__module__, returned.__qualname__
    of_view = _converter(owner, name.replace("-", "_"), "View", _VIEW)
    return StateConverter(of_view.schema, of_view.to_record if owner is returned else _same, _same)


def unconverted(schema: Schema) -> StateConverter:
    """Returns a converter that leaves records unchanged, for a read model that names a schema."""
    return StateConverter(schema, _same, _same)


class _NoDefaultError(Exception):
    """Avro cannot represent the default."""


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """An Avro type with the conversions of its values."""

    schema: Any
    write: Callable[[Any], Any]
    """Converts a value to the form that is encoded. Raises PoisonRecordError."""
    read: Callable[[Any], Any] = _same
    """Converts a decoded value, or a default in the form of the schema: fastavro returns those unconverted."""
    default: Callable[[Any], Any]
    """Converts a value to a default in a schema. Raises _NoDefaultError."""
    needs_write: bool = True
    """Whether `write` is required: without it, a codec would accept a wrong value, or refuse a right one."""
    written_as_is: type | None = None
    """The type of values that `write` returns unchanged."""
    beside_null: _Kind | None = None
    """The non-null type, if the value may be None."""
    has_defaults: bool = False
    """Whether the type is a record whose fields all have defaults in its schema."""


@dataclass(frozen=True, slots=True)
class _Place:
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
        consequence = "the state cannot be kept: " if self.use == _STATE else ""
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


def _is_name(text: str) -> bool:
    """Whether Avro allows a name for a record or an enum."""
    return _NAME.fullmatch(text) is not None and text not in _PRIMITIVES


def _type_text(hint: Any) -> str:
    return hint.__qualname__ if isinstance(hint, type) else repr(hint).replace("typing.", "")


@dataclass(frozen=True, slots=True)
class _Compiler:
    namespace: str
    use: str
    _classes: dict[str, type] = dataclasses.field(default_factory=dict)
    """By their Avro names."""
    _records: dict[type, _Kind] = dataclasses.field(default_factory=dict)

    def record(self, owner: type, name: str) -> _Kind:
        """Builds the type of a dataclass that has not been seen before."""
        self._classes[name] = owner
        place = _Place(owner, self.use)
        names, hints = [field.name for field in _checked_fields(place)], _hints(place)
        kinds: dict[str, _Kind] = {}
        schemas: list[Any] = []
        for field in dataclasses.fields(owner):
            of_field = replace(place, field=field.name)
            kinds[field.name], default = _with_default(self._of(hints[field.name], of_field), field, of_field)
            schemas.append({"name": field.name, "type": kinds[field.name].schema, **default})

        def as_default(value: Any) -> Any:
            return {name: kind.default(getattr(value, name)) for name, kind in kinds.items()}

        writes = [(name, kind.write) for name, kind in kinds.items() if kind.needs_write]
        reads = [(name, kind.read) for name, kind in kinds.items() if kind.read is not _same]
        self._records[owner] = kind = _Kind(
            schema={"type": "record", **self._named(name), "fields": schemas},
            write=_writing(place, names, writes),
            read=_reading(owner, reads),
            default=as_default,
            has_defaults=all("default" in schema for schema in schemas),
        )
        return kind

    def _of(self, hint: Any, place: _Place) -> _Kind:
        origin, arguments = get_origin(hint), get_args(hint)
        if origin is Annotated:
            return self._annotated(arguments, place)
        if origin in (Union, UnionType):
            return self._nullable(hint, arguments, place)
        if hint in (list, dict) or (origin in (list, dict) and not arguments):
            place.refuse(f"is a {_type_text(hint)} without item type: write `list[X]` or `dict[str, X]`")
        if origin is list:
            return _array(self._of(arguments[0], place), place)
        if origin is dict:
            if arguments[0] is not str:
                place.refuse(f"is a {_type_text(hint)}, but keys of Avro maps are text: use dict[str, X]")
            return _map(self._of(arguments[1], place), place)
        if hint is Decimal:
            place.refuse("is a Decimal without its digits after the point: write `Annotated[Decimal, scale(2)]`")
        if isinstance(hint, type):
            if (plain := _PLAIN.get(hint)) is not None:
                return plain(place)
            if issubclass(hint, Enum):
                return self._enum(hint, place)
            if dataclasses.is_dataclass(hint):
                return self._nested(hint, place)
        return place.refuse(f"is of type {_type_text(hint)}, which Avro does not have: use {_TYPES}")

    def _annotated(self, arguments: tuple[Any, ...], place: _Place) -> _Kind:
        base, *marks = arguments
        scales = [mark for mark in marks if isinstance(mark, Scale)]
        if base is Decimal and len(scales) == 1:
            return _decimal(scales[0], place)
        if scales:
            place.refuse(
                f"has `scale` on {_type_text(base)}: write `Annotated[Decimal, scale(2)]`, and any `| None` after it"
            )
        return self._of(base, place)

    def _nullable(self, hint: Any, arguments: tuple[Any, ...], place: _Place) -> _Kind:
        others = [argument for argument in arguments if argument is not NoneType]
        if len(others) != 1:
            place.refuse(f"is {_type_text(hint)}, which allows several types: use X or X | None")
        return _nullable(self._of(others[0], place))

    def _nested(self, owner: type, place: _Place) -> _Kind:
        name = self._name(owner, place)
        if (known := self._records.get(owner)) is not None:
            return replace(known, schema=full_name(self._named(name)))
        if owner in self._classes.values():
            place.refuse(f"contains {owner.__qualname__} recursively: keep the key of the other one instead")
        return self.record(owner, name)

    def _enum(self, owner: type[Enum], place: _Place) -> _Kind:
        name, members = self._name(owner, place), owner.__members__
        if issubclass(owner, Flag):
            place.refuse(f"is the Flag {name}, whose values combine several members: use a list of an Enum")
        if not members:
            place.refuse(f"is the Enum {name}, which has no members: give it one")
        for symbol, member in members.items():
            if symbol != member._name_:
                place.refuse(f"is the Enum {name}, where {symbol} is an alias of {member._name_}: remove one of them")
            if not _NAME.fullmatch(symbol):
                place.refuse(f"is the Enum {name}, but Avro allows no symbol {symbol}: use ASCII letters, digits and _")

        def write(value: Any) -> str:
            if value.__class__ is not owner:
                place.mistyped(f"a member of {name}", value)
            symbol: str = value._name_
            return symbol

        schema: Any = {"type": "enum", **self._named(name), "symbols": [*members]}
        if name in self._classes:
            schema = full_name(self._named(name))
        self._classes[name] = owner
        return _Kind(schema=schema, write=write, read=members.__getitem__, default=write)

    def _named(self, name: str) -> dict[str, str]:
        return {"name": name, **({"namespace": self.namespace} if self.namespace else {})}

    def _name(self, owner: type, place: _Place) -> str:
        name = owner.__name__
        if not _is_name(name):
            place.refuse(f"is of type {name}, a name that Avro does not allow: rename the class")
        # A second use of the state's class is recursion, which `_nested` refuses.
        if self._classes.get(name, owner) is not owner and owner is not self._classes.get("State"):
            place.refuse(
                f"is of type {name}, the name of another class in this state or of the state: rename the class"
            )
        return name


def _checked_fields(place: _Place) -> Sequence[Field[Any]]:
    owner = place.owner
    if not isinstance(owner, type) or "__dataclass_fields__" not in vars(owner):
        raise ConfigurationError(f"the class {located(owner)} cannot be {place.use}: write `@dataclass` above it")
    if not vars(owner)["__dataclass_params__"].init:
        place.refuse("has no `__init__` of a dataclass: remove `init=False`")
    fields = dataclasses.fields(owner)
    for field in fields:
        if not field.init:
            replace(place, field=field.name).refuse(
                "is not an argument of the class: remove `init=False`, or use a property"
            )
        if not _NAME.fullmatch(field.name):
            replace(place, field=field.name).refuse(
                "has a name that Avro does not allow: use ASCII letters, digits and _"
            )
    if not fields:
        place.refuse("has no fields: give it one")
    return fields


def _hints(place: _Place) -> Mapping[str, Any]:
    try:
        hints = get_type_hints(place.owner, include_extras=True)
    except Exception as error:  # An annotation may be any expression.
        missing = getattr(error, "name", None) or ""
        named = re.compile(rf"\b{re.escape(missing)}\b")
        fields = [field for field in dataclasses.fields(place.owner) if missing and named.search(str(field.type))]
        remedy = "define or import it at the top of the module, and not only under TYPE_CHECKING"
        place = replace(place, field=fields[0].name if fields else "")
        place.refuse(f"has a type that cannot be resolved ({error}): {remedy}")
    for name, hint in hints.items():
        if hint is InitVar or isinstance(hint, InitVar):
            replace(place, field=name).refuse("is an InitVar, which instances do not keep: make it a field")
    return hints


def _with_default(kind: _Kind, field: Field[Any], place: _Place) -> tuple[_Kind, dict[str, Any]]:
    """Returns the type of a field, and the schema's entry for its default. Avro requires the default's type first."""
    value: Any = field.default
    factory: Any = field.default_factory
    held = kind.beside_null or kind
    # Other factories may return another value at each start of the service, which would change the schema.
    if factory in (list, dict) or (isinstance(factory, type) and held.has_defaults):
        value = factory()
    if value is MISSING:
        return kind, {}
    if kind.beside_null is not None and value is not None:
        kind = replace(kind, schema=kind.schema[::-1], default=held.default)
    try:
        kind.write(value)
        return kind, {"default": kind.default(value)}
    except _NoDefaultError:
        return kind, {}
    except PoisonRecordError as error:
        place.refuse(f"has a default that does not fit: {error}; use one of its type")


def _writing(place: _Place, names: Sequence[str], writes: Sequence[tuple[str, Callable[[Any], Any]]]) -> Any:
    owner, of_several = place.owner, attrgetter(*names)
    values = of_several if len(names) > 1 else lambda instance: (of_several(instance),)

    def to_record(instance: Any) -> dict[str, Any]:
        if instance.__class__ is not owner:
            place.mistyped(f"a {owner.__qualname__}", instance)
        record = dict(zip(names, values(instance), strict=True))
        for name, write in writes:
            record[name] = write(record[name])
        return record

    return to_record


def _reading(owner: type, reads: Sequence[tuple[str, Callable[[Any], Any]]]) -> Callable[[Any], Any]:
    def from_record(record: Mapping[str, Any]) -> Any:
        fields = {**record}
        for name, read in reads:
            if name in fields:
                fields[name] = read(fields[name])
        return owner(**fields)

    return from_record if reads else lambda record: owner(**record)


def _nullable(kind: _Kind) -> _Kind:
    inner_write, inner_read = kind.write, kind.read

    def write(value: Any) -> Any:
        return None if value is None else inner_write(value)

    def read(value: Any) -> Any:
        return None if value is None else inner_read(value)

    def default(value: Any) -> None:
        if value is not None:
            raise _NoDefaultError

    return _Kind(
        schema=["null", kind.schema],
        write=write,
        read=_same if inner_read is _same else read,
        default=default,
        needs_write=kind.needs_write,
        beside_null=kind,
    )


def _array(items: _Kind, place: _Place) -> _Kind:
    item_write, item_read, alike = items.write, items.read, {items.written_as_is}

    def write(value: Any) -> list[Any]:
        if not isinstance(value, list):
            place.mistyped("a list", value)
        if not items.needs_write or alike.issuperset(map(type, value)):
            return value
        return [item_write(item) for item in value]

    def read(value: Any) -> list[Any]:
        # For a default, fastavro returns the schema's own list.
        return [*value] if item_read is _same else [item_read(item) for item in value]

    return _Kind(schema={"type": "array", "items": items.schema}, write=write, read=read, default=_empty)


def _map(values: _Kind, place: _Place) -> _Kind:
    value_write, value_read, alike = values.write, values.read, {values.written_as_is}

    def write(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            place.mistyped("a dict", value)
        if not values.needs_write or alike.issuperset(map(type, value.values())):
            return value
        return {key: value_write(member) for key, member in value.items()}

    def read(value: Any) -> dict[str, Any]:
        return {**value} if value_read is _same else {key: value_read(member) for key, member in value.items()}

    return _Kind(schema={"type": "map", "values": values.schema}, write=write, read=read, default=_empty)


def _empty(value: Any) -> Any:
    if value:
        raise _NoDefaultError
    return value


def _decimal(of: Scale, place: _Place) -> _Kind:
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
    return _Kind(schema=schema, write=write, default=default)


def _plain(schema: Any, kind: type, **more: Any) -> Callable[[_Place], _Kind]:
    """Builds an Avro type whose values are all those of a Python type."""

    def of(place: _Place) -> _Kind:
        def write(value: Any) -> Any:
            if not isinstance(value, kind):
                place.mistyped(kind.__name__, value)
            return value

        return _Kind(schema=schema, write=write, **{"default": write, "written_as_is": kind, **more})

    return of


def _long(place: _Place) -> _Kind:
    def write(value: Any) -> Any:
        if value.__class__ is int or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        return place.mistyped("int", value)

    def default(value: int) -> int:
        if not -_LONG_LIMIT <= value < _LONG_LIMIT:
            place.unfit("is beyond 64 bits")
        return int(value)

    return _Kind(schema="long", write=write, default=default, written_as_is=int)


def _double(place: _Place) -> _Kind:
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
            raise _NoDefaultError
        return float(value)

    return _Kind(schema="double", write=write, default=default, written_as_is=float)


def _moment(place: _Place) -> _Kind:
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

    return _Kind(
        schema={"type": "long", "logicalType": "timestamp-micros"},
        write=write,
        default=lambda value: (write(value) - _EPOCH) // _MICROSECOND,
    )


def _day(place: _Place) -> _Kind:
    def write(value: Any) -> date:
        # A datetime would lose its time.
        if not isinstance(value, date) or isinstance(value, datetime):
            place.mistyped("date", value)
        return value

    schema = {"type": "int", "logicalType": "date"}
    return _Kind(schema=schema, write=write, default=lambda value: (value - _DAY_0).days)


def _text(place: _Place) -> _Kind:
    kind = _plain("string", str, needs_write=False)(place)
    return replace(kind, default=lambda value: str.__str__(kind.write(value)))


def _bytes(place: _Place) -> _Kind:
    kind = _plain("bytes", bytes, needs_write=False)(place)
    return replace(kind, default=lambda value: kind.write(value).decode("latin-1"))


_PLAIN: Mapping[type, Callable[[_Place], _Kind]] = {
    str: _text,
    int: _long,
    float: _double,
    bool: _plain("boolean", bool),
    bytes: _bytes,
    date: _day,
    datetime: _moment,
}
