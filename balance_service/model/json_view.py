"""Views as JSON, with every digit of every number."""

from __future__ import annotations

import base64
import json
import math
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

# `json.dumps` would make an encoder for each text.
_text = json.JSONEncoder(ensure_ascii=False).encode


def exact_json(value: Any) -> str:
    """A view, or any value of an Avro type, as JSON without white space.

    Decimals are numbers with exactly their digits. Times are ISO 8601, in UTC with `Z` if they name a moment, with
    three digits of a second, or six where they have microseconds. Bytes are base64. A double that is no number is a
    string.

    Raises:
        TypeError: JSON has no form for it.
    """
    write = _FORMS.get(type(value))
    if write is None:
        # A value may be of a subclass, such as the enum that a fold made.
        write = next((form for kind, form in _FORMS.items() if isinstance(value, kind)), None)
    if write is None:
        raise TypeError(f"a view holds {value!r}, of type {type(value).__name__}, which JSON has no form for")
    return write(value)


def _object(value: Mapping[str, Any]) -> str:
    return "{" + ",".join([f"{_text(name)}:{exact_json(member)}" for name, member in value.items()]) + "}"


def _array(value: Sequence[Any]) -> str:
    return "[" + ",".join([exact_json(member) for member in value]) + "]"


def _double(value: float) -> str:
    return repr(value) if math.isfinite(value) else f'"{value}"'


def _moment(value: datetime) -> str:
    digits = "microseconds" if value.microsecond % 1000 else "milliseconds"
    if value.tzinfo is None:
        return f'"{value.isoformat(timespec=digits)}"'
    return f'"{value.astimezone(UTC).replace(tzinfo=None).isoformat(timespec=digits)}Z"'


def _time(value: time) -> str:
    return f'"{value.isoformat(timespec="microseconds" if value.microsecond % 1000 else "milliseconds")}"'


# A subclass stands before what it is one of: a bool is an int, a moment a date.
_FORMS: Mapping[type, Callable[[Any], str]] = {
    dict: _object,
    Decimal: lambda value: format(value, "f"),
    str: _text,
    bool: lambda value: "true" if value else "false",
    int: str,
    float: _double,
    type(None): lambda _value: "null",
    list: _array,
    tuple: _array,
    bytes: lambda value: f'"{base64.b64encode(value).decode()}"',
    datetime: _moment,
    date: lambda value: f'"{value.isoformat()}"',
    time: _time,
}
