"""Where a read model's events come from and which way they take, as values; and the legs of that way.

A leg is the work of one stage: it reads a topic, and either passes the records on by another key, which ends it, or is
the last, which folds or emits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from balance_service.avro.schemas import Schema, full_name, load_schema
from balance_service.model.conditions import checked
from balance_service.model.joins import Global, Join

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

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
    """The events of some record types on one topic, each known by the simple name of its shipped schema.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """The work of one stage on the way of a read model's events."""

    name: str
    """The stage's. Of the last leg, the read model's; else that of the topic it writes, but for the application id."""
    topic: str
    """What it reads: a topic as the read model calls it; of every leg but the first, the name of the leg before."""
    is_first: bool
    records: tuple[str, ...]
    """The types that it reads, by their simple names; none: of a stage of retries, which takes all as they are."""
    conditions: tuple[Condition, ...] = ()
    by: str | None = None
    """The column whose value is the key of what it passes on; None: it is the last."""
    key: str | None = None
    """The column that is the key of what it reads; None where that may be anything."""
    joins: tuple[Join, ...] = ()
    makes: str | None = None
    """The record type of what it passes on, where that is joined; None: records go on as they are."""
    next_table: str | None = None
    """The topic of the table by whose keys it passes records on; None: keys of numbers are as `keys` has them."""
    columns: frozenset[str] | None = None
    """Those of its records that are read; None: all."""

    @property
    def event_schemas(self) -> Mapping[str, Schema]:
        """The records that it reads: Avro full name → their shipped schema."""
        return {full_name(schema): schema for schema in map(load_schema, self.records)}

    @property
    def wanted_schemas(self) -> Mapping[str, Schema]:
        """The same records, in the schemas that they are wanted in: with the columns alone that are read."""
        return {name: self._wanted(schema) for name, schema in self.event_schemas.items()}

    def _wanted(self, schema: Schema) -> Schema:
        columns = self.columns
        if columns is None:
            return schema
        return {**schema, "fields": [field for field in schema["fields"] if field["name"] in columns]}


def legs_of(name: str, source: Stream, needed: Iterable[str] = ()) -> tuple[Leg, ...]:
    """The legs of the way of a read model's events, in order; at least one.

    Args:
        needed: columns that are read, be they selected or not.
    """
    legs: list[Leg] = []
    columns: frozenset[str] | None = None
    used = set(needed)
    leg = Leg(name=name, topic=source.topic, is_first=True, records=source.records)
    for step in source.steps:
        match step:
            case Select():
                columns = step.columns
            case Where(condition):
                used |= condition.columns
                leg = replace(leg, conditions=(*leg.conditions, condition))
            case Join():
                leg = replace(leg, joins=(*leg.joins, step))
                if legs and not isinstance(step.table, Global):
                    legs[-1] = replace(legs[-1], next_table=step.table.topic)
            case By(column, record):
                used.add(column)
                done = replace(leg, name=f"{name}-by-{column}", by=column, makes=record)
                legs.append(done)
                records = leg.records if record is None else (record,)
                leg = Leg(name=name, topic=done.name, is_first=False, records=records, key=column)
    # The same in all of them: what cannot be decoded in the end becomes a dead letter where it comes in.
    return tuple(replace(leg, columns=None if columns is None else columns | used) for leg in (*legs, leg))
