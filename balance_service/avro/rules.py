"""The decoder's rules have a number. Under some schemas, records had other values by lower numbers.

Each generation of a read model has the number that it began under. Its states may have values of that number for events
below a position, and those of today's for later events.

1. Of Kafka Connect's times, only those with a `logicalType` are times. A reader that wants a time of any other takes
   its number for one in its own unit.
2. `connect.name` tells times too.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from balance_service.avro.logical_types import is_time, is_time_by_name
from balance_service.avro.named_types import expanded
from balance_service.avro.schemas import fields_of, simple_name, without_null

if TYPE_CHECKING:
    from collections.abc import Mapping

    from balance_service.avro.schemas import Schema

DECODER_RULES = 2
"""Rises when a record that was decoded before is decoded to other values."""


def rules_of(text: str, wanted: Mapping[str, Schema]) -> int:
    """Returns the rules since which a writer's records have the values of today; 1 if they always had.

    Args:
        text: `WriterSchema.text`.
        wanted: the reader's records by full name, each with named types in full at each use.
    """
    if not is_time_by_name(text):
        return 1
    try:
        written = expanded(json.loads(text))
        return 2 if any(_differs(schema, written) for schema in wanted.values()) else 1
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        # It is no valid Avro, or one of very many types.
        return 1


def _differs(wanted: Any, written: Any) -> bool:
    """Whether a time of a reader has another unit than its writer names by `connect.name` only."""
    wanted, _ = without_null(wanted)
    if isinstance(written, list):
        return any(_differs(wanted, member) for member in written)
    match wanted, written:
        case {"type": "array", "items": ours}, {"type": "array", "items": theirs}:
            return _differs(ours, theirs)
        case {"type": "map", "values": ours}, {"type": "map", "values": theirs}:
            return _differs(ours, theirs)
        case {"type": "record", "name": name}, {"type": "record"}:
            if written["name"].rpartition(".")[2] != name.rpartition(".")[2]:
                return False
            theirs = fields_of(written)
            return any(_differs(kind, theirs[field]) for field, kind in fields_of(wanted).items() if field in theirs)
        case dict(), dict() if is_time(wanted) and is_time_by_name(str(written.get("connect.name"))):
            return _unit(wanted) != _unit(written)
    return False


def _unit(kind: Any) -> str:
    return simple_name(kind).rpartition("-")[2]
