"""What folds are given: events, and what these change; and what they keep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

State = Mapping[str, Any]
"""What is kept per key: an Avro record of the read model's state schema."""

Update = Mapping[str, Any]
"""What an event, or several combined, changes, by name of an update column.

There is a column for each standard fold, by the name of its field. Where a `fold` or an `emit` is told of events, there
is one for each record of the source, by its simple name: the event's fields, None where it is of another record.
"""


class Event(dict[str, Any]):
    """An event's fields, by name."""

    record: str
    """The simple name of its record."""
    timestamp_ms: int
    """Of its record in the topic, in ms since 1970."""

    def __init__(self, record: str, fields: Mapping[str, Any], timestamp_ms: int) -> None:
        super().__init__(fields)
        self.record = record
        self.timestamp_ms = timestamp_ms


def event_of(records: Iterable[str], update: Update, timestamp_ms: int) -> Event | None:
    """The event of an update that has events' fields; None of a tombstone.

    Args:
        records: the simple names of those that it may be of.
    """
    for record in records:
        if (fields := update.get(record)) is not None:
            return Event(record, fields, timestamp_ms)
    return None
