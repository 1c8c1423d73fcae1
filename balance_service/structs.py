"""The service's own records: one frozen dataclass each, with its form in Avro, in JSON and in the OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from datetime import datetime
from enum import Enum
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_ABSENT: Any = object()
_SCALARS = frozenset({bool, bytes, datetime, float, int, str})
_FIELDS: dict[type, Sequence[_Field]] = {}


def _camel_case(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(map(str.capitalize, others))


def absent() -> Any:
    """The default factory of a field that a record lacks unless it is given."""
    return _ABSENT


class Struct:
    """The base of a frozen dataclass that is a record of a topic, an object of an answer, or both.

    A field is called as in Python, in camelCase, unless `names` calls it otherwise. Fields that are named in `beside`
    are not in the record: a topic's key has them, for example. The schema of an answer comes from the annotations, and
    the docstrings of its fields describe them to clients.
    """

    __slots__ = ()
    # A `pydantic.ConfigDict`. Modules that run without HTTP do not import pydantic.
    __pydantic_config__: ClassVar = {
        "extra": "forbid",
        "use_attribute_docstrings": True,
        "alias_generator": _camel_case,
    }
    _names: ClassVar[Mapping[str, str]] = {}
    _beside: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, *, names: Mapping[str, str] | None = None, beside: Iterable[str] = ()) -> None:
        """A dataclass with slots is made twice, the second time without arguments, but with what the first one set."""
        super().__init_subclass__()
        cls._names = {**cls._names, **(names or {})}
        cls._beside = cls._beside.union(beside)

    def record(self) -> dict[str, Any]:
        """Returns the record for an encoder of Avro or JSON."""
        record = {}
        for attribute, name, is_scalar, _ in _fields_of(type(self)):
            value = getattr(self, attribute)
            if value is not _ABSENT:
                record[name] = value if is_scalar else _plain(value)
        return record

    @classmethod
    def showing(cls, source: Any, /, **own: Any) -> Self:
        """Returns an answer of its own values, and otherwise of the source's fields with the same names."""
        shown = [one.attribute for one in _fields_of(cls) if one.attribute not in own]
        return cls(**own, **{name: getattr(source, name) for name in shown})

    @classmethod
    def of(cls, record: Mapping[str, Any], **beside: Any) -> Self:
        """Returns the instance of a decoded Avro record, with the fields that are not in it."""
        for attribute, name, _, read in _fields_of(cls):
            beside[attribute] = record[name] if read is None else read(record[name])
        return cls(**beside)


class _Field(NamedTuple):
    """A field of a dataclass that is in its records."""

    attribute: str
    name: str
    is_scalar: bool
    """Whether a record has the value as the dataclass has it."""
    read: Callable[[Any], Any] | None
    """Converts a value of a record; None if the dataclass has the same."""


def names_of(kind: type[Struct]) -> Mapping[str, str]:
    """Returns the fields of a dataclass that are in its records, in order, with their names there."""
    return {one.attribute: one.name for one in _fields_of(kind)}


def without_none(hint: Any) -> tuple[Any, bool]:
    """Returns a type without None, and whether it allows None."""
    if get_origin(hint) in (Union, UnionType):
        others = [one for one in get_args(hint) if one is not NoneType]
        return others[0], len(others) < len(get_args(hint))
    return hint, False


def _fields_of(kind: type[Struct]) -> Sequence[_Field]:
    found = _FIELDS.get(kind)
    if found is None:
        described: Any = kind
        hints, names = get_type_hints(kind), [one.name for one in fields(described) if one.name not in kind._beside]
        found = _FIELDS[kind] = [
            _field(name, kind._names.get(name) or _camel_case(name), hints[name]) for name in names
        ]
    return found


def _field(attribute: str, name: str, hint: Any) -> _Field:
    kind, _ = without_none(hint)
    return _Field(attribute, name, kind in _SCALARS or get_origin(kind) is Literal, _reader(hint))


def _plain(value: Any) -> Any:
    """Returns a value as encoders of Avro and JSON take it: records as dicts, members of enums as their values."""
    if isinstance(value, Struct):
        return value.record()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, list | tuple):
        return [*map(_plain, value)]
    if isinstance(value, Mapping):
        return {key: _plain(member) for key, member in value.items()}
    return value


def _reader(hint: Any) -> Callable[[Any], Any] | None:
    kind, is_nullable = without_none(hint)
    read = _reader_of(kind)
    return read if read is None or not is_nullable else lambda value: None if value is None else read(value)


def _reader_of(kind: Any) -> Callable[[Any], Any] | None:
    if get_origin(kind) is tuple:
        item = _reader(get_args(kind)[0])
        return tuple if item is None else lambda values: tuple(map(item, values))
    if isinstance(kind, type) and issubclass(kind, Struct):
        return kind.of
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind
    return None
