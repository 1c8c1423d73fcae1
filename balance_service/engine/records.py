"""The values that Spark's side, the tasks and the queries exchange."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from balance_service.errors import ConfigurationError
from balance_service.model.generations import Comparison
from balance_service.model.stream import Partitioner
from balance_service.structs import Struct

if TYPE_CHECKING:
    from typing import Any, Self


RESERVED_PREFIX = b"\xff"
"""The first byte of keys that are not keys of states. It does not occur in UTF-8."""

POSITION_KEY = RESERVED_PREFIX + b"position"

_POSITION_FORMAT = 2
# Format 1 had no `inherited`. A version that writes it would take a silent generation for one that sends.
_READABLE_FORMATS = (1, _POSITION_FORMAT)

MISPLACED = "key-not-of-this-partition"
"""The dead-letter cause of a record whose key belongs to another partition by its topic's partitioner."""

Record = tuple[bytes, bytes | None]
"""A changelog record: key and framed value; None deletes the key."""


STANDS_AFTER_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class TaskId:
    """A stage and a partition of its source, written as `balance_0`."""

    stage: str
    partition: int

    def __str__(self) -> str:
        return f"{self.stage}_{self.partition}"


class Role(Enum):
    """An active task folds the source and commits; a standby copies the active task's commits."""

    ACTIVE = "ACTIVE"
    STANDBY = "STANDBY"


NEVER = -1
"""As `Position.inherited`."""
_FORMERLY_SILENT = 2**63 - 1
"""`emittedUpTo` of a generation that did not send, in records without `inherited`."""


@dataclass(frozen=True, slots=True)
class Position(Struct, names={"stream_time_ms": "streamTime", "seen_to_ms": "seenTo"}, beside=("source", "offset")):
    """The position that a store's states belong to: every event below `offset` of `source` is applied.

    Attributes:
        source: topic and partition, such as `balance:0`.
        offset: the next source offset to apply.
        epoch: rises with every task that owns the partition; its holder wins over holders of lower epochs.
        source_topic_id: distinguishes the source from a later topic with the same name.
        changelog_topic_id: the same for the changelog; empty in old records that lack it.
        stream_time_ms: the greatest timestamp of an applied event with an idempotency key, which expires such keys;
            -1 if there is none.
        keys: the number of keys with a state.
        emitted_up_to: outputs of events below this offset were sent by another generation, or before the stage started
            from scratch, and are not sent again, except those of open dead letters.
        inherited: the number of the state of the generations since which this one sends the outputs, which it took
            over from the others; -1 if it never did.
        letters: the number of dead letters by cause and status.
        partitioner: the function that checked that the states' keys belong to the partition.
        owner: the `Stage.mark` of the stage that the changelog belongs to; empty in old records that lack it.
        seen_to_ms: of a compacted source, the latest known time of day, in ms, when the states had everything in it, or
            were begun; -1 for other sources, and if it is not known.
    """

    offset: int
    epoch: int
    source_topic_id: str
    stream_time_ms: int = -1
    changelog_topic_id: str = ""
    source: str = ""
    keys: int = 0
    emitted_up_to: int = 0
    inherited: int = NEVER
    letters: Mapping[str, int] = field(default_factory=dict)
    partitioner: Partitioner = "murmur2"
    owner: str = ""
    seen_to_ms: int = NEVER

    def record(self) -> dict[str, Any]:
        """Returns the Avro record `Position`."""
        return {"format": _POSITION_FORMAT, "offsets": {self.source: self.offset}, **Struct.record(self)}

    @classmethod
    def of(cls, record: Mapping[str, Any], **beside: Any) -> Self:
        """Returns the position in an Avro record `Position`.

        Raises:
            ConfigurationError: a newer version wrote the record.
        """
        if record["format"] not in _READABLE_FORMATS:
            raise ConfigurationError(
                f"a position has format {record['format']}, this version knows {_POSITION_FORMAT}; "
                "run the version that wrote it, or rebuild the read model"
            )
        if record["emittedUpTo"] == _FORMERLY_SILENT:
            record = {**record, "emittedUpTo": 0, "inherited": NEVER}
        ((source, offset),) = record["offsets"].items()
        return super(Position, cls).of(record, source=source, offset=offset, **beside)


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A source record that could not be applied, with the cause. Key and value are the source's bytes.

    `detail` is a sentence for operators about this record, if the cause alone does not say what to do; else empty.
    """

    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    cause: str
    detail: str = ""


BY_KEY = -1
"""The partition of an output whose producer chooses the partition by the key."""


class Output(NamedTuple):
    """A record that a commit sends to another topic; `offset` is that of the source record that it was made from."""

    offset: int
    topic: str
    partition: int
    key: bytes | None
    value: bytes | None
    timestamp_ms: int
    headers: list[tuple[str, bytes | None]]


class Difference(NamedTuple):
    """A key whose state differs, with both states as queries show them; None where there is no state.

    A state without its class is shown as stored.
    """

    key: bytes
    serving: object
    building: object


@dataclass(frozen=True, slots=True)
class Compared:
    """The result for a partition at a position of its source, with the first differences."""

    position: int
    counts: Comparison
    differences: tuple[Difference, ...]


@dataclass(frozen=True, slots=True)
class StoreSizes:
    """The sizes of a store. `keys` is RocksDB's estimate. The block cache is shared, so it is not included."""

    file_bytes: int = 0
    memtable_bytes: int = 0
    table_reader_bytes: int = 0
    keys: int = 0

    @property
    def store_bytes(self) -> int:
        """Bytes of live table files and of memtables."""
        return self.file_bytes + self.memtable_bytes


@dataclass(frozen=True, slots=True)
class Stand:
    """A task that has records to apply, or whose query failed, and how long its position has not moved."""

    position: int
    lag: int
    seconds: float
    since_ms: int
    """When the position moved last, or records came for it. In ms since 1970."""
    error: str
    """Why the query failed that should read the record at the position; empty if none has."""

    @property
    def is_still(self) -> bool:
        """Whether the position should have moved long ago."""
        return self.lag > 0 and self.seconds >= STANDS_AFTER_SECONDS

    def told(self, task_id: TaskId, why: str) -> str:
        """Returns the sentence for operators.

        Args:
            why: the last error, or where to find it; may be empty.
        """
        if not self.is_still:
            return f"{task_id} is not folded: {why}"
        since = datetime.fromtimestamp(self.since_ms / 1000, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        told = f"{task_id} stands still: partition {task_id.partition} has been at position {self.position}"
        return f"{told} since {since}, and is {self.lag} records behind" + (f": {why}" if why else "")


@dataclass(frozen=True, slots=True)
class FailedAt:
    """Where a read model's own code failed, so that its task halted. It may quote the event.

    `line` names file, line and function, and has the line's text; empty if it is not known. `error` is the exception.
    """

    key: bytes | None
    line: str
    error: str


@dataclass(frozen=True, slots=True)
class Waited:
    """Since when a task has waited, in ms since 1970, and why."""

    since_ms: int
    reason: str


@dataclass(frozen=True, slots=True)
class TaskSnapshot(
    Struct,
    names={"stage": "readModel", "since_ms": "since"},
    beside=("sizes", "answers", "stand", "failed_at", "waited", "state_since_ms", "again_up_to"),
):
    """The state of a task: the record `PublishedTask` of the directory, and what only its instance knows.

    The fields are those of the record, in its order, and then those of `beside`. A task of another instance has their
    defaults.
    """

    stage: str
    partition: int
    role: Role
    state: str
    epoch: int
    position: int
    reason: str = ""
    restored: int = 0
    """Of the last restore, as `to_restore` and `seconds_left`."""
    to_restore: int = 0
    seconds_left: float | None = None
    dead_letters: Mapping[str, int] = field(default_factory=dict)
    """The number of open ones by `cause/status`."""
    since_ms: int = 0
    """When the task came into its state or began to stand still, in ms since 1970; 0 if that is not known.

    One that is opened again after a failure is in its state since the first failure until it runs.
    """
    sends_as_of: int = 0
    """`Position.inherited` of a task that sends the outputs, else -1."""
    comparison: Comparison | None = None
    """Of a generation that is built with the serving one, once it has caught up."""
    sizes: StoreSizes = field(default_factory=StoreSizes)
    answers: bool = False
    """Whether the task answers queries in its role, without regard to the owner's lease."""
    stand: Stand | None = None
    """How an owner stands that has records to apply, or whose query failed; `Tasks.snapshots` adds it."""
    failed_at: FailedAt | None = None
    """Where the model's own code failed that halted the task."""
    waited: Waited | None = None
    """The wait before, of a task that was resumed and has committed nothing since."""
    state_since_ms: int = 0
    """When the task came into its state, in ms since 1970."""
    again_up_to: int = 0
    """The source offset up to which a compacted source was applied before, of an owner that folds it again; else 0."""

    @property
    def task_id(self) -> TaskId:
        return TaskId(self.stage, self.partition)
