"""The source of a read model: a stream of events, and the steps that they pass, as values."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, get_args

from balance_service.avro.schemas import fields_of, type_name, without_null
from balance_service.model.conditions import checked, column_name, is_of_spark
from balance_service.model.events import DeclaredRecord
from balance_service.model.record_keys import RecordKey

if TYPE_CHECKING:
    # In a `Stream`, `type` is the name of a field.
    import builtins
    from collections.abc import Mapping

    from balance_service.avro.schemas import Schema
    from balance_service.model.conditions import Condition
    from balance_service.model.events import FormatName
    from balance_service.model.record_keys import KeyFormat


Partitioner = Literal["murmur2", "crc32", "fnv1a", "any"]
"""The function that the producers of a topic use to assign keys to partitions (`kafka.partitioner`).

`any` is none that the service knows, such as round robin: the records of a key may be on several partitions.
"""
PARTITIONERS: tuple[Partitioner, ...] = get_args(Partitioner)

Missing = Literal["dead-letter", "drop", "null"]
"""The treatment of an event without a row: make a dead letter, drop it, or join it with nulls."""


def days(count: int) -> timedelta:
    return timedelta(days=count)


_A_DAY = timedelta(days=1)


@dataclass(frozen=True, slots=True, init=False)
class Table:
    """The rows of a compacted topic: the newest record of each key, and older versions as far back as `history`.

    The key of a row is text: a string, or an id in decimal digits; or a number, if `key_format` is `int` or `long`, the
    serializer of the topic's producers. The topic has as many partitions as the stream that is joined with it, so each
    instance reads only the partitions that it owns.
    """

    topic: str
    record: str
    """The simple name of the rows' schema, or their dataclass."""
    history: timedelta
    partitioner: Partitioner
    """The function of the topic's producers. Only a `Global` may have another than murmur2."""
    key_format: KeyFormat
    format: FormatName

    def __init__(
        self,
        topic: str,
        record: str | type,
        history: timedelta = _A_DAY,
        partitioner: Partitioner = "murmur2",
        key_format: KeyFormat = "string",
        format: FormatName = "avro",  # noqa: A002  (the word of every source and output)
    ) -> None:
        object.__setattr__(self, "topic", topic)
        object.__setattr__(self, "record", DeclaredRecord.named(record))
        object.__setattr__(self, "history", history)
        object.__setattr__(self, "partitioner", partitioner)
        object.__setattr__(self, "key_format", key_format)
        object.__setattr__(self, "format", format)

    def key_of(self, value: str | int) -> bytes:
        """Returns the key of a row as the table's store has it, given the value of the column that is joined on."""
        if self.key_format == "string":
            # Any text is one, as rows may have it.
            return str(value).encode()
        return RecordKey.of_format(self.key_format).encode(value)

    def sent_key(self, value: str | int) -> bytes:
        """Returns the key of a row as the topic has it, and an event that is joined with the table."""
        return RecordKey.of_format(self.key_format).sent(self.key_of(value))


@dataclass(frozen=True, slots=True, init=False)
class Global(Table):
    """A table that every instance reads in full, so that a stream can be joined with it on any column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Adds columns of a table's row to each event, as the row was at the event's time."""

    table: Table
    on: str
    """The event's column whose value is the row's key."""
    take: Mapping[str, str]
    """Column of the row → its name in the joined record."""
    missing: Missing

    @property
    def version_header(self) -> str:
        """The header that holds the row's version, such as `playerVersion`."""
        return f"{self.table.record[:1].lower()}{self.table.record[1:]}Version"


@dataclass(frozen=True, slots=True)
class Where:
    """A step that drops the events for which a condition does not hold."""

    condition: Condition


@dataclass(frozen=True, slots=True)
class By:
    """A step that re-keys records by the values of columns; after joins, as another record type."""

    columns: tuple[str, ...]
    record: str | None = None
    unchanged: bool = False


@dataclass(frozen=True, slots=True)
class Select:
    columns: frozenset[str]


Step = Where | By | Join | Select


@dataclass(frozen=True, slots=True, init=False)
class Stream:
    """The events of one or more record types on one topic.

    Each type is named by the simple name of its schema, or by the dataclass of the events.

    With `tombstones`, a record without a value deletes the state of its key; otherwise it becomes a dead letter.
    `partitioner` is how the topic's producers assign keys to partitions: `murmur2` is Java's default,
    `crc32` librdkafka's, `fnv1a` sarama's. After a re-key (`by`) it may be `any`. For a model with a `transform`,
    `keyed_by` is the column whose value is the records' key; by default, the model's key. For a model with
    `key = RECORD_KEY`, `key_format` is the serializer of the producers' keys, by default `string`.

    `format` is that of the values: Avro in the frame of a schema registry, or JSON, bare or in that frame, whose schema
    is the dataclass or a file. If a JSON topic has several records, `type` names the field that tells them, or the
    header, as `header:NAME`. A record is told by its name, or by the `__kind__` of its dataclass. Others are ignored.

    With `compacted`, the topic may have `cleanup.policy=compact`: Kafka keeps the newest record of each key, which is
    what `Upsert` and `Debezium` need, and no other fold.
    """

    topic: str
    records: tuple[str, ...]
    steps: tuple[Step, ...]
    """The steps that the events pass, in order."""
    tombstones: bool
    partitioner: Partitioner
    keyed_by: str | None
    key_format: KeyFormat | None
    format: FormatName
    type: str | None
    compacted: bool

    def __init__(
        self,
        topic: str,
        *records: str | builtins.type,
        tombstones: bool = False,
        partitioner: Partitioner = "murmur2",
        keyed_by: str | None = None,
        key_format: KeyFormat | None = None,
        format: FormatName = "avro",  # noqa: A002  (the word of every source and output)
        type: str | None = None,  # noqa: A002  (the word of CloudEvents and of most documents)
        compacted: bool = False,
    ) -> None:
        object.__setattr__(self, "topic", topic)
        object.__setattr__(self, "records", tuple(map(DeclaredRecord.named, records)))
        object.__setattr__(self, "tombstones", tombstones)
        object.__setattr__(self, "partitioner", partitioner)
        object.__setattr__(self, "keyed_by", keyed_by)
        object.__setattr__(self, "key_format", key_format)
        object.__setattr__(self, "format", format)
        object.__setattr__(self, "type", type)
        object.__setattr__(self, "compacted", compacted)
        object.__setattr__(self, "steps", ())

    def where(self, condition: Condition) -> Stream:
        """Keeps the events for which a condition (`col`) holds. The others are counted as ignored."""
        return self._with(Where(checked(condition)))

    def by(self, *columns: str, record: str | builtins.type | None = None, unchanged: bool = False) -> Stream:
        """Re-keys the records: writes each to an internal topic, with the value of a column, or of several, as its key.

        Text is encoded as UTF-8, an int or a long so that its bytes sort in numeric order; a composite key sorts as its
        columns do (`keys`). Before a join with a `Table`, the key is written as the table's keys are: by default, a
        number as decimal digits.

        Args:
            record: after joins, the simple name of the schema of the joined record, or its dataclass.
            unchanged: in a model with a `transform`, that the events themselves are passed on, by columns that they
                have, and the rows are made of them there. A changed `transform` then needs no other topic. By default,
                the rows are passed on, with the columns that are used.
        """
        for column in filter(is_of_spark, columns):
            column_name(column, "by")
        return self._with(By(columns, None if record is None else DeclaredRecord.named(record), unchanged))

    def select(self, *columns: str) -> Stream:
        """Reads only these columns, and those that the stream, the key, conditions and standard folds name.

        Other columns are not decoded, so a malformed value in one of them makes no dead letter. Re-keyed records keep
        all columns. Not allowed in a stream with joins: there, the joined record names the columns.
        """
        return self._with(Select(frozenset(column_name(column, "select") for column in columns)))

    def join(self, table: Table, *, on: str, take: Mapping[str, str], missing: Missing = "dead-letter") -> Stream:
        """Adds columns of a table's row to each event, as the row was at the event's time.

        Args:
            on: the event's column; its value, as text, is the row's key.
            take: column of the row → its name in the joined record.
            missing: the treatment of an event without a row.
        """
        return self._with(Join(table=table, on=on, take=take, missing=missing))

    def _with(self, step: Step) -> Stream:
        longer = Stream(
            self.topic,
            *self.records,
            tombstones=self.tombstones,
            partitioner=self.partitioner,
            keyed_by=self.keyed_by,
            key_format=self.key_format,
            format=self.format,
            type=self.type,
            compacted=self.compacted,
        )
        object.__setattr__(longer, "steps", (*self.steps, step))
        return longer


def join_misfit(joined: Schema, event: Schema, joins: tuple[Join, ...], rows: Mapping[str, Schema]) -> str:
    """Returns why a record cannot be made from an event and the columns of its joins; empty if it can.

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
            return f"makes {joined['name']}, but neither {event['name']} nor a table has its '{name}'"
        (found, is_nullable), (wanted, takes_null) = without_null(sources[name][0]), without_null(kind)
        if type_name(found) != type_name(wanted) or (is_nullable and not takes_null):
            return (
                f"makes {joined['name']}, whose '{name}' is of type {type_name(kind)}, but in {sources[name][1]} it is "
                f"{type_name(sources[name][0])}"
            )
    return ""
