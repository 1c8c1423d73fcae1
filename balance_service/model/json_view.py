"""Writes views as JSON, with all digits of every number, and reads such JSON."""

from __future__ import annotations

import base64
import json
import math
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from balance_service.structs import Struct

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

# `json.dumps` would create an encoder for each text.
_text = json.JSONEncoder(ensure_ascii=False).encode


class AsWritten(str):
    """A text that is JSON already."""


def exact_json(value: Any) -> str:
    """Returns a view, any value of an Avro type, or a dataclass of the service, as JSON without white space.

    Decimals are numbers with all their digits. Times are ISO 8601 with three fractional digits, or six if they have
    microseconds; times with a zone are in UTC, with `Z`. Bytes are base64. NaN and infinities are strings.

    Raises:
        TypeError: JSON cannot represent the value.
    """
    write = _FORMS.get(type(value))
    if write is None:
        # The value may be of a subclass, such as an enum of the model's fold.
        write = next((form for kind, form in _FORMS.items() if isinstance(value, kind)), None)
    if write is None:
        raise TypeError(f"a view holds {value!r}, of type {type(value).__name__}, which JSON cannot represent")
    return write(value)


def parsed_json(text: str) -> Any:
    """Parses what `exact_json` wrote: writing the result gives the same text.

    Raises ValueError or RecursionError if it is not JSON.
    """
    return json.loads(text, parse_float=_number)


def _number(digits: str) -> Decimal | float:
    # Only of a double does `exact_json` write an exponent.
    return float(digits) if "e" in digits or "E" in digits else Decimal(digits)


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


# A subclass precedes its base class: a bool is an int, and a datetime is a date.
_FORMS: Mapping[type, Callable[[Any], str]] = {
    dict: _object,
    Decimal: lambda value: format(value, "f"),
    AsWritten: str,
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
    Struct: lambda value: _object(value.record()),
}
