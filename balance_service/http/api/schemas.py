"""Schemas of what routes take and answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from balance_service.http.api.declarations import Component
from balance_service.model.keys import CONTROL_CHARACTERS, MAX_KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from balance_service.http.api.declarations import Schema

POSITION_PATTERN = "[0-9]{1,10}:[0-9]{1,18}"


def text(description: str, **keywords: Any) -> Mapping[str, Any]:
    """A string."""
    return {"type": "string", "description": description, **keywords}


def count(description: str, minimum: int = 0) -> Mapping[str, Any]:
    """An integer."""
    return {"type": "integer", "minimum": minimum, "description": description}


def exactly(
    properties: Mapping[str, Schema], *, optional: frozenset[str] = frozenset(), description: str = ""
) -> Mapping[str, Any]:
    """An object that has these properties and no others."""
    return {
        "type": "object",
        **({"description": description} if description else {}),
        "additionalProperties": False,
        "required": [name for name in properties if name not in optional],
        "properties": properties,
    }


def _schema(name: str, definition: Mapping[str, Any]) -> Component:
    return Component("schemas", name, definition)


KEY = _schema(
    "Key",
    text(
        f"1 to {MAX_KEY_BYTES} bytes of UTF-8 without control characters (U+0000 to U+001F, U+007F to U+009F). "
        "Bytes, not characters: 128 two-byte characters fit, 129 do not.",
        minLength=1,
        maxLength=MAX_KEY_BYTES,
        pattern=f"^[^{CONTROL_CHARACTERS}]+$",
        examples=["c1", "Zoë/42"],
    ),
)
NUMBER_KEY: Schema = {"type": "string", "pattern": "^(?:0|-?[1-9][0-9]{0,17})$"}
"""A key that is a number, as it is written in a URL."""
POSITION = _schema(
    "Position",
    text(
        "A source partition and the next offset to apply there: everything below it is in the store.",
        pattern=f"^{POSITION_PATTERN}$",
        examples=["1:42"],
    ),
)
ROLE = _schema(
    "Role",
    text(
        "`active`: the owner of the partition. `standby`: follows its changelog.",
        enum=["active", "standby"],
    ),
)
PROBLEM = _schema(
    "Problem",
    exactly(
        {
            "type": {"const": "about:blank", "description": "Nothing beyond the status."},
            "title": text("The status' name."),
            "status": {"type": "integer", "minimum": 400, "maximum": 599, "description": "The HTTP status."},
            "detail": text("One sentence for the caller.", minLength=1),
        },
        description="Problem details, RFC 9457.",
    ),
)
