"""Where a read model's events come from, and which way they take, as values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from balance_service.model.conditions import checked
from balance_service.model.joins import Join

if TYPE_CHECKING:
    from collections.abc import Mapping

    from balance_service.model.conditions import Condition
    from balance_service.model.joins import Missing, Table


@dataclass(frozen=True, slots=True)
class Where:
    """A step that leaves out the events for which a condition does not hold."""

    condition: Condition


@dataclass(frozen=True, slots=True)
class By:
    """A step that passes each record on by the value of a column as its key; joined, as a record of another type."""

    column: str
    record: str | None = None


@dataclass(frozen=True, slots=True)
class Select:
    """A step that names the columns of the events that are read."""

    columns: frozenset[str]


Step = Where | By | Join | Select


@dataclass(frozen=True, slots=True, init=False)
class Stream:
    """The events of some record types on one topic, each known by the simple name of its schema.

    With `tombstones`, a record without a value deletes the state of its key; else it is a dead letter.
    """

    topic: str
    records: tuple[str, ...]
    steps: tuple[Step, ...]
    """What happens to them on the way, in order."""
    tombstones: bool

    def __init__(self, topic: str, *records: str, tombstones: bool = False) -> None:
        object.__setattr__(self, "topic", topic)
        object.__setattr__(self, "records", records)
        object.__setattr__(self, "tombstones", tombstones)
        object.__setattr__(self, "steps", ())

    def where(self, condition: Condition) -> Stream:
        """Those for which a condition (`conditions.col`) holds; the others are ignored, and counted so."""
        return self._with(Where(checked(condition)))

    def by(self, column: str, record: str | None = None) -> Stream:
        """The same records on a topic of our own, each with the value of a column as its key.

        Text is written as UTF-8, an int or a long so that its bytes sort as numbers do (`keys`); before a `Table`,
        whose keys are text, as its digits.

        Args:
            record: after joins, the simple name of the schema of what an event and its rows make together.
        """
        return self._with(By(column, record))

    def select(self, *columns: str) -> Stream:
        """Of the events these columns alone, and those that the stream, the key, conditions and standard folds name.

        The others are skipped, and an event whose other columns mean nothing to us is no dead letter. Records that are
        passed on stay whole. Not for a stream with joins: the record that these make says what is kept.
        """
        return self._with(Select(frozenset(columns)))

    def join(self, table: Table, *, on: str, take: Mapping[str, str], missing: Missing = "dead-letter") -> Stream:
        """The events with some columns of a table's row, as that was at the event's time.

        Args:
            on: the event's column whose value, as text, is the row's key.
            take: column of the row → its name in the joined record.
            missing: what becomes of an event without a row.
        """
        return self._with(Join(table=table, on=on, take=take, missing=missing))

    def _with(self, step: Step) -> Stream:
        longer = Stream(self.topic, *self.records, tombstones=self.tombstones)
        object.__setattr__(longer, "steps", (*self.steps, step))
        return longer
