"""The service's own records: one frozen dataclass each, with its form in Avro, in JSON and in the OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, ClassVar, Self, Union, get_args, get_origin, get_type_hints

from pydantic import ConfigDict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_ABSENT: Any = object()
_NAMES: dict[type, Mapping[str, str]] = {}
_READING: dict[type, Mapping[str, tuple[str, Callable[[Any], Any]]]] = {}


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
    __pydantic_config__: ClassVar = ConfigDict(
        extra="forbid", use_attribute_docstrings=True, alias_generator=_camel_case
    )
    _names: ClassVar[Mapping[str, str]] = {}
    _beside: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, *, names: Mapping[str, str] | None = None, beside: Iterable[str] = ()) -> None:
        """A dataclass with slots is made twice, the second time without arguments, but with what the first one set."""
        super().__init_subclass__()
        cls._names = {**cls._names, **(names or {})}
        cls._beside = cls._beside.union(beside)

    def record(self) -> dict[str, Any]:
        """Returns the record for an encoder of Avro or JSON."""
        found = ((name, getattr(self, attribute)) for attribute, name in names_of(type(self)).items())
        return {name: plain(value) for name, value in found if value is not _ABSENT}

    @classmethod
    def showing(cls, source: Any, /, **own: Any) -> Self:
        """Returns an answer of its own values, and otherwise of the source's fields with the same names."""
        return cls(**{name: own[name] if name in own else getattr(source, name) for name in names_of(cls)})

    @classmethod
    def of(cls, record: Mapping[str, Any], **beside: Any) -> Self:
        """Returns the instance of a decoded Avro record, with the fields that are not in it."""
        return cls(**{attribute: read(record[name]) for attribute, (name, read) in _reading(cls).items()}, **beside)


def names_of(kind: type[Struct]) -> Mapping[str, str]:
    """Returns the fields of a dataclass that are in its records, in order, with their names there."""
    if kind not in _NAMES:
        described: Any = kind
        names = [one.name for one in fields(described) if one.name not in kind._beside]
        _NAMES[kind] = {name: kind._names.get(name) or _camel_case(name) for name in names}
    return _NAMES[kind]


def plain(value: Any) -> Any:
    """Returns a value as encoders of Avro and JSON take it: records as dicts, members of enums as their values."""
    if isinstance(value, Struct):
        return value.record()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, list | tuple):
        return [*map(plain, value)]
    if isinstance(value, Mapping):
        return {key: plain(member) for key, member in value.items()}
    return value


def without_none(hint: Any) -> tuple[Any, bool]:
    """Returns a type without None, and whether it allows None."""
    if get_origin(hint) in (Union, UnionType):
        others = [one for one in get_args(hint) if one is not NoneType]
        return others[0], len(others) < len(get_args(hint))
    return hint, False


def _reading(kind: type[Struct]) -> Mapping[str, tuple[str, Callable[[Any], Any]]]:
    """Returns the name in the record, and the conversion of its value, by field."""
    if kind not in _READING:
        hints = get_type_hints(kind)
        _READING[kind] = {field: (name, _reader(hints[field])) for field, name in names_of(kind).items()}
    return _READING[kind]


def _reader(hint: Any) -> Callable[[Any], Any]:
    kind, is_nullable = without_none(hint)
    read = _reader_of(kind)
    return (lambda value: None if value is None else read(value)) if is_nullable else read


def _reader_of(kind: Any) -> Callable[[Any], Any]:
    if get_origin(kind) is tuple:
        item = _reader(get_args(kind)[0])
        return lambda values: tuple(map(item, values))
    if isinstance(kind, type) and issubclass(kind, Struct):
        return kind.of
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind
    return lambda value: value
