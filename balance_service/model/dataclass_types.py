"""Derives the Avro schema of a dataclass, and how its instances become records and records its instances.

Source: Avro 1.12 specification, "Complex Types", "Names".
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import MISSING, Field, InitVar, dataclass, replace
from decimal import Decimal
from enum import Enum, Flag
from operator import attrgetter
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin, get_type_hints

from balance_service.avro.schemas import full_name
from balance_service.errors import ConfigurationError, PoisonRecordError
from balance_service.model.lasting import lasting
from balance_service.model.value_types import (
    PLAIN,
    JsonForm,
    NoDefaultError,
    Place,
    Scale,
    ValueType,
    array,
    decimal,
    located,
    mapping,
    nullable,
    same,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_TYPES = (
    "str, int, float, bool, bytes, date, datetime, Annotated[Decimal, scale(2)], an Enum, another dataclass, list[X], "
    "dict[str, X] or X | None"
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NAMESPACE = re.compile(rf"(?:{_NAME.pattern}(?:\.{_NAME.pattern})*)?")
_PRIMITIVES = frozenset({"null", "boolean", "int", "long", "float", "double", "bytes", "string"})


def record_type(owner: type, namespace: str, name: str, use: str) -> ValueType:
    """Returns the type of a dataclass's instances, which its schema calls by a name.

    Args:
        use: the purpose of the instances, such as "a state".

    Raises:
        ConfigurationError: the class cannot be a record; the message says where it is, why, and what to do.
    """
    return _Compiler(namespace, use).record(owner, name)


def check_names(place: Place, namespace: Any, name: str) -> None:
    """Checks that Avro allows the names of a record. Raises ConfigurationError."""
    if not isinstance(namespace, str) or not _NAMESPACE.fullmatch(namespace):
        place.refuse(f"has the `__namespace__` {namespace!r}: use names with dots between them")
    if not _is_name(name):
        place.refuse("has a name that Avro does not allow: use ASCII letters, digits and _, and no type's name")


@dataclass(frozen=True, slots=True)
class _Compiler:
    namespace: str
    use: str
    _classes: dict[str, type] = dataclasses.field(default_factory=dict)
    """By their Avro names."""
    _records: dict[type, ValueType] = dataclasses.field(default_factory=dict)

    def record(self, owner: type, name: str) -> ValueType:
        """Builds the type of a dataclass that has not been seen before."""
        self._classes[name] = owner
        place = Place(owner, self.use)
        names, hints = [field.name for field in _checked_fields(place)], hints_of(place)
        kinds: dict[str, ValueType] = {}
        schemas: list[Any] = []
        for field in dataclasses.fields(owner):
            of_field = replace(place, field=field.name)
            kinds[field.name], default = _with_default(self._of(hints[field.name], of_field), field, of_field)
            schemas.append({"name": field.name, "type": kinds[field.name].schema, **default})

        def as_default(value: Any) -> Any:
            return {name: kind.default(getattr(value, name)) for name, kind in kinds.items()}

        writes = [(name, kind.write) for name, kind in kinds.items() if kind.needs_write]
        reads = [(name, kind.read) for name, kind in kinds.items() if kind.read is not same]
        self._records[owner] = kind = ValueType(
            schema={"type": "record", **self._named(name), "fields": schemas},
            write=_writing(place, names, writes),
            read=_reading(owner, reads),
            default=as_default,
            columns_of=lasting(owner, kinds),
            read_all=_reading_all(owner, names, reads),
            has_defaults=all("default" in schema for schema in schemas),
        )
        return kind

    def _of(self, hint: Any, place: Place) -> ValueType:
        origin, arguments = get_origin(hint), get_args(hint)
        if origin is Annotated:
            return self._annotated(arguments, place)
        if origin in (Union, UnionType):
            return self._nullable(hint, arguments, place)
        if hint in (list, dict) or (origin in (list, dict) and not arguments):
            place.refuse(f"is a {_type_text(hint)} without item type: write `list[X]` or `dict[str, X]`")
        if origin is list:
            return array(self._of(arguments[0], place), place)
        if origin is dict:
            if arguments[0] is not str:
                place.refuse(f"is a {_type_text(hint)}, but keys of Avro maps are text: use dict[str, X]")
            return mapping(self._of(arguments[1], place), place)
        if hint is Decimal:
            place.refuse("is a Decimal without its digits after the point: write `Annotated[Decimal, scale(2)]`")
        if isinstance(hint, type):
            if (plain := PLAIN.get(hint)) is not None:
                return plain(place)
            if issubclass(hint, Enum):
                return self._enum(hint, place)
            if dataclasses.is_dataclass(hint):
                return self._nested(hint, place)
        return place.refuse(f"is of type {_type_text(hint)}, which Avro does not have: use {_TYPES}")

    def _annotated(self, arguments: tuple[Any, ...], place: Place) -> ValueType:
        base, *marks = arguments
        if forms := [mark for mark in marks if isinstance(mark, JsonForm)]:
            rest = [mark for mark in marks if not isinstance(mark, JsonForm)]
            if len(forms) > 1 or base is not forms[0].of:
                place.refuse(
                    f"has {' and '.join(one.name for one in forms)} on {_type_text(base)}: a {forms[0].of.__name__} "
                    "may have one such form, and any `| None` is after it"
                )
            kind = self._annotated((base, *rest), place)
            return replace(kind, schema={**kind.schema, "json": forms[0].name})
        scales = [mark for mark in marks if isinstance(mark, Scale)]
        if base is Decimal and len(scales) == 1:
            return decimal(scales[0], place)
        if scales:
            place.refuse(
                f"has `scale` on {_type_text(base)}: write `Annotated[Decimal, scale(2)]`, and any `| None` after it"
            )
        return self._of(base, place)

    def _nullable(self, hint: Any, arguments: tuple[Any, ...], place: Place) -> ValueType:
        others = [argument for argument in arguments if argument is not NoneType]
        if len(others) != 1:
            place.refuse(f"is {_type_text(hint)}, which allows several types: use X or X | None")
        return nullable(self._of(others[0], place))

    def _nested(self, owner: type, place: Place) -> ValueType:
        name = self._name(owner, place)
        if (known := self._records.get(owner)) is not None:
            return replace(known, schema=full_name(self._named(name)))
        if owner in self._classes.values():
            place.refuse(f"contains {owner.__qualname__} recursively: keep the key of the other one instead")
        return self.record(owner, name)

    def _enum(self, owner: type[Enum], place: Place) -> ValueType:
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
        return ValueType(schema=schema, write=write, read=members.__getitem__, default=write, lasting=owner)

    def _named(self, name: str) -> dict[str, str]:
        return {"name": name, **({"namespace": self.namespace} if self.namespace else {})}

    def _name(self, owner: type, place: Place) -> str:
        name = owner.__name__
        if not _is_name(name):
            place.refuse(f"is of type {name}, a name that Avro does not allow: rename the class")
        # A second use of the state's class is recursion, which `_nested` refuses.
        if self._classes.get(name, owner) is not owner and owner is not self._classes.get("State"):
            place.refuse(
                f"is of type {name}, the name of another class in this state or of the state: rename the class"
            )
        return name


def _checked_fields(place: Place) -> Sequence[Field[Any]]:
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


def hints_of(place: Place) -> Mapping[str, Any]:
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


def _with_default(kind: ValueType, field: Field[Any], place: Place) -> tuple[ValueType, dict[str, Any]]:
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
    except NoDefaultError:
        return kind, {}
    except PoisonRecordError as error:
        place.refuse(f"has a default that does not fit: {error}; use one of its type")


def _writing(place: Place, names: Sequence[str], writes: Sequence[tuple[str, Callable[[Any], Any]]]) -> Any:
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


def _reading_all(
    owner: type, names: Sequence[str], reads: Sequence[tuple[str, Callable[[Any], Any]]]
) -> Callable[[Mapping[str, Sequence[Any]]], list[Any]]:
    """As `_reading`, of columns, of which there is at least one."""
    # Without names, a call takes a third of the time. An `__init__` of the author's may have another order.
    init = getattr(vars(owner).get("__init__"), "__code__", None)
    takes_places = (
        init is not None
        and init.co_filename == "<string>"
        and not any(field.kw_only for field in dataclasses.fields(owner))
    )

    def from_columns(columns: Mapping[str, Sequence[Any]]) -> list[Any]:
        columns = {**columns, **{name: [*map(read, columns[name])] for name, read in reads if name in columns}}
        if takes_places and columns.keys() == set(names):
            return [*map(owner, *(columns[name] for name in names))]
        return [owner(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]

    return from_columns


def _is_name(text: str) -> bool:
    """Whether Avro allows a name for a record or an enum."""
    return _NAME.fullmatch(text) is not None and text not in _PRIMITIVES


def _type_text(hint: Any) -> str:
    return hint.__qualname__ if isinstance(hint, type) else repr(hint).replace("typing.", "")
