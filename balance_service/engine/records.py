"""Plain values that cross between the stream, the tasks and those who ask."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from balance_service.avro.arrow_rows import rows_of
from balance_service.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from balance_service.engine.dead_letter import Letter

RESERVED_PREFIX = b"\xff"
"""First byte of keys that are no state's: it occurs in no UTF-8."""

POSITION_KEY = RESERVED_PREFIX + b"position"

_POSITION_FORMAT = 1

MISPLACED = "key-not-of-this-partition"
"""The cause of a record whose key, by murmur2, belongs to another partition."""

Record = tuple[bytes, bytes | None]
"""A record of a changelog: key and value, framed; no value deletes the key."""


@dataclass(frozen=True, slots=True)
class TaskId:
    """The work of one stage on one partition of its source, e.g. `balance_0`."""

    stage: str
    partition: int

    def __str__(self) -> str:
        return f"{self.stage}_{self.partition}"


class Role(Enum):
    """What a task does with its partition: fold the source into it, or copy what the one that does so commits."""

    ACTIVE = "ACTIVE"
    STANDBY = "STANDBY"


@dataclass(frozen=True, slots=True)
class Position:
    """Everything below `offset` of the source partition `source` is in the store; `epoch` fences the task.

    `source_topic_id` tells the source from another topic that took its name later, `changelog_topic_id` the changelog;
    that is empty in what was written before it was recorded. `stream_time_ms` is the greatest timestamp of an event
    with an idempotency key below `offset`, -1 if there is none: what makes such keys expire. `source` is the topic and
    its partition, such as `balance:0`; `keys` is how many keys have a state. What events below `emitted_up_to` come to
    was sent before the stage began anew, and is not sent again, those aside whose dead letters are open. `letters` is
    how many dead letters there are, by cause and status.
    """

    offset: int
    epoch: int
    source_topic_id: str
    stream_time_ms: int = -1
    changelog_topic_id: str = ""
    source: str = ""
    keys: int = 0
    emitted_up_to: int = 0
    letters: Mapping[str, int] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """The Avro record `Position`."""
        return {
            "format": _POSITION_FORMAT,
            "offsets": {self.source: self.offset},
            "epoch": self.epoch,
            "sourceTopicId": self.source_topic_id,
            "streamTime": self.stream_time_ms,
            "changelogTopicId": self.changelog_topic_id,
            "keys": self.keys,
            "emittedUpTo": self.emitted_up_to,
            "letters": dict(self.letters),
        }

    @staticmethod
    def of(record: Mapping[str, Any]) -> Position:
        """Of the Avro record `Position`.

        Raises:
            ConfigurationError: it was written by a newer version.
        """
        if record["format"] != _POSITION_FORMAT:
            raise ConfigurationError(
                f"a position has format {record['format']}, this version knows {_POSITION_FORMAT}; "
                "run the version that wrote it, or rebuild the read model"
            )
        ((source, offset),) = record["offsets"].items()
        return Position(
            offset,
            record["epoch"],
            record["sourceTopicId"],
            record["streamTime"],
            record["changelogTopicId"],
            source,
            record["keys"],
            record["emittedUpTo"],
            record["letters"],
        )


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A record that could not be applied, kept with its cause; key and value are the source's bytes."""

    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    cause: str


class KeyedUpdate(NamedTuple):
    """What one event, or several combined, changes under one key.

    `record` is the event's own; None where several are combined, or it was not kept. `idempotency_key` is what its
    producer named it by, so that of several with the same name one counts; such an event always has its record.
    `offset` is the record's, -1 where several are combined; so is `timestamp_ms`, and -1 too where a read model
    with standard folds emits nothing.
    """

    key: bytes
    update: Mapping[str, Any]
    record: DeadLetter | None = None
    idempotency_key: bytes | None = None
    offset: int = -1
    timestamp_ms: int = -1


class Output(NamedTuple):
    """A record to be sent to a topic in the transaction of a commit; it came of the source's record at `offset`.

    A `partition` of -1 stands for that of the key, which the producer tells.
    """

    offset: int
    topic: str
    partition: int
    key: bytes | None
    value: bytes | None
    timestamp_ms: int
    headers: list[tuple[str, bytes | None]]


class CombinedUpdates(NamedTuple):
    """One update of each of some keys, in columns: row for row, the keys (binary) and what changes under them.

    Of a stage without states, the events themselves, in offset order: a key may be there more than once, or be null.
    """

    keys: pa.Array
    columns: pa.RecordBatch

    def take(self, rows: Sequence[int]) -> list[KeyedUpdate]:
        """Some of them, one by one."""
        indices = pa.array(rows, pa.int64())
        keys, updates = (
            self.keys.take(indices).to_pylist(),
            rows_of(self.columns.take(indices)),
        )
        return [KeyedUpdate(key, update) for key, update in zip(keys, updates, strict=True)]


@dataclass(frozen=True, slots=True)
class TaskBatch:
    """What a task commits together: the source offsets `[start, end)`.

    `updates` are combined, one of each key in all slices together; `events` are those of other keys, singly, in offset
    order. `singles` reads the events of some keys again, as `events` with their records; it is asked only where an
    update without its record cannot be applied.

    Where `retried` names any, the batch is of the records of these dead letters, tried again, and `start` and `end` are
    the position. `forgotten` are closed letters of which nothing is kept any more. `unsent` are the records that were
    never applied before, though they lie below the position.
    """

    start: int
    end: int
    updates: Sequence[CombinedUpdates] = ()
    events: Sequence[KeyedUpdate] = ()
    applied: int = 0
    ignored: int = 0
    dead_letters: Sequence[DeadLetter] = ()
    singles: Callable[[Sequence[bytes]], Sequence[KeyedUpdate]] = field(repr=False, default=lambda _keys: ())
    retried: frozenset[int] = frozenset()
    forgotten: Sequence[Letter] = ()
    unsent: frozenset[int] = frozenset()

    def is_to_be_sent(self, offset: int, sent_before: int) -> bool:
        """Whether what comes of a record goes out; not if it has before, with all below `sent_before`."""
        return offset >= sent_before or offset in self.unsent


@dataclass(frozen=True, slots=True)
class StoreSizes:
    """How large a store is. `keys` is RocksDB's own estimate; the block cache is shared, and counted nowhere here."""

    file_bytes: int = 0
    memtable_bytes: int = 0
    table_reader_bytes: int = 0
    keys: int = 0

    @property
    def store_bytes(self) -> int:
        """Bytes of the live table files and of what is not written to one yet."""
        return self.file_bytes + self.memtable_bytes


@dataclass(frozen=True, slots=True)
class TaskSnapshot:
    """What a task says of itself, for the directory and for people."""

    task_id: TaskId
    role: Role
    state: str
    epoch: int
    position: int
    reason: str
    restored: int
    to_restore: int
    seconds_left: float | None
    sizes: StoreSizes
    answers: bool
    """Whether queries are answered from it, as its role allows; an owner's lease aside."""
    letters: Mapping[str, int] = field(default_factory=dict)
    """How many dead letters there are, by cause and status."""
