"""Tables, and how a stream is joined with them, as values."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from balance_service.avro.schemas import fields_of, type_name, without_null

if TYPE_CHECKING:
    from collections.abc import Mapping

    from balance_service.avro.schemas import Schema

Missing = Literal["dead-letter", "drop", "null"]
"""What becomes of an event without a row: a dead letter, nothing, or a record with null in its place."""


def days(count: int) -> timedelta:
    """So many days, for a history."""
    return timedelta(days=count)


@dataclass(frozen=True, slots=True)
class Table:
    """The rows of a compacted topic: of each key the newest record, and those before it as far back as `history`.

    A key is the text of what is looked up by, an id or a string. The topic has as many partitions as the stream that
    is joined with it, so each instance follows the partitions that it works on.
    """

    topic: str
    record: str
    """The simple name of its rows' schema."""
    history: timedelta = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Global(Table):
    """A table that every instance follows whole, so that a stream is joined with it by any column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Columns of a table's row for each event, as the row was at the event's time."""

    table: Table
    on: str
    """The event's column whose value is the row's key."""
    take: Mapping[str, str]
    """Column of the row → its name in the joined record."""
    missing: Missing

    @property
    def version_header(self) -> str:
        """The header that names the row's version, such as `playerVersion`."""
        return f"{self.table.record[:1].lower()}{self.table.record[1:]}Version"

    def key_of(self, value: Any) -> bytes:
        """The row's key for a value of the event's column."""
        return str(value).encode()


def misfit(joined: Schema, event: Schema, joins: tuple[Join, ...], rows: Mapping[str, Schema]) -> str:
    """Why a record cannot be made of an event and what joins take; empty if it can.

    Args:
        rows: the records of the tables, by simple name.
    """
    sources = {name: (kind, event["name"]) for name, kind in fields_of(event).items()}
    for join in joins:
        row = fields_of(rows[join.table.record])
        for column, name in join.take.items():
            if column not in row:
                return f"takes '{column}' of {join.table.record}, which has no such column"
            kind = row[column]
            sources[name] = (["null", kind] if join.missing == "null" else kind), join.table.record
    for name, kind in fields_of(joined).items():
        if name not in sources:
            return f"makes {joined['name']}, whose '{name}' neither {event['name']} nor a table has"
        (found, is_nullable), (wanted, takes_null) = without_null(sources[name][0]), without_null(kind)
        if type_name(found) != type_name(wanted) or (is_nullable and not takes_null):
            return (
                f"makes {joined['name']}, whose '{name}' is of type {type_name(kind)}, "
                f"of {sources[name][1]}, where it is {type_name(sources[name][0])}"
            )
    return ""
