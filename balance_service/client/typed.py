"""Reads answers into dataclasses, by the types of their fields."""

from __future__ import annotations

import base64
import binascii
import dataclasses
from datetime import date, datetime, time
from decimal import Decimal, InvalidOperation
from enum import Enum
from functools import lru_cache
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin, get_type_hints
from uuid import UUID

from balance_service.client.errors import InvalidCallError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_SHOWN_CHARACTERS = 60
_NOT_FINITE = ("nan", "inf", "-inf")
# A bool is an int, and a datetime a date.
_TEXTS: Mapping[Any, Callable[[str], Any]] = {
    str: str,
    datetime: datetime.fromisoformat,
    date: date.fromisoformat,
    time: time.fromisoformat,
    UUID: UUID,
    bytes: lambda text: base64.b64decode(text, validate=True),
}


def read(into: Any, value: Any, key: Mapping[str, str | int] | None = None) -> Any:
    """Returns a value of an answer as a type says: a dataclass, a list, dict or union of types, or a plain type.

    Decimals and floats are read from numbers, times from ISO 8601, bytes from base64, an Enum from the name or value of
    a member. Fields that the answer lacks have the default of their dataclass; other fields of the answer are ignored.

    Args:
        key: the key's columns, which a state has and the answer for its key lacks: the text of a key of one column.

    Raises:
        InvalidCallError: the answer does not fit; the message names the field.
    """
    return _read(into, value, getattr(into, "__name__", str(into)), key)


def lacks(into: Any, value: Any) -> bool:
    """Whether a dataclass needs a field that an answer does not have: it may be that of the key."""
    if not dataclasses.is_dataclass(into) or not isinstance(value, dict):
        return False
    return any(field.name not in value and _is_required(field) for field in dataclasses.fields(into))


def _read(into: Any, value: Any, where: str, key: Mapping[str, str | int] | None = None) -> Any:
    origin, arguments = get_origin(into), get_args(into)
    if into is Any:
        return value
    if origin is Annotated:
        return _read(arguments[0], value, where)
    if origin in (Union, UnionType):
        return _of_union(arguments, value, where)
    if origin is list and isinstance(value, list):
        return [_read(arguments[0], item, f"{where}[{number}]") for number, item in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        return {name: _read(arguments[1], item, f"{where}[{name!r}]") for name, item in value.items()}
    if dataclasses.is_dataclass(into) and isinstance(into, type) and isinstance(value, dict):
        return _of_dataclass(into, value, where, key)
    try:
        return _plain(into, value)
    except (TypeError, ValueError, KeyError, InvalidOperation, binascii.Error):
        raise InvalidCallError(f"{where} is {_named(into)}, and the answer has {_shown(value)} there") from None


def _of_dataclass(into: type, value: Mapping[str, Any], where: str, key: Mapping[str, str | int] | None) -> Any:
    hints, given = _hints(into), dict(value)
    for column, text in (key or {}).items():
        # Numbers are keys too.
        given.setdefault(column, int(text) if hints.get(column) is int else text)
    read_of = {}
    for field in dataclasses.fields(into):
        at = f"{where}.{field.name}"
        if field.name in given:
            read_of[field.name] = _read(hints[field.name], given[field.name], at)
        elif _is_required(field):
            raise InvalidCallError(f"{at} has no default, and the answer has only {', '.join(given) or 'no field'}")
    return into(**read_of)


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.init and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


@lru_cache
def _hints(into: type) -> Mapping[str, Any]:
    return get_type_hints(into, include_extras=True)


def _of_union(members: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and NoneType in members:
        return None
    found = [member for member in members if member is not NoneType]
    for member in found[:-1]:
        try:
            return _read(member, value, where)
        except InvalidCallError:
            continue
    return _read(found[-1], value, where)


def _plain(into: Any, value: Any) -> Any:
    """Raises TypeError, ValueError, KeyError or InvalidOperation if the value is not of the type."""
    if into in _TEXTS and isinstance(value, str):
        return _TEXTS[into](value)
    is_number = isinstance(value, int | Decimal) and not isinstance(value, bool)
    if into is Decimal and is_number:
        return Decimal(value)
    if into is float and (is_number or value in _NOT_FINITE):
        return float(value)
    if (into is int and is_number and not isinstance(value, Decimal)) or (into is bool and isinstance(value, bool)):
        return value
    if isinstance(into, type) and issubclass(into, Enum):
        return into[value] if value in into.__members__ else into(value)
    if into is NoneType and value is None:
        return None
    raise TypeError


def _named(into: Any) -> str:
    return into.__qualname__ if isinstance(into, type) else str(into).replace("typing.", "")


def _shown(value: Any) -> str:
    text = "null" if value is None else format(value, "f") if isinstance(value, Decimal) else repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
