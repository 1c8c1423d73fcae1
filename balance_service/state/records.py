"""Plain values that cross between the stream, the tasks and those who ask."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

RESERVED_PREFIX = b"\xff"
"""First byte of keys that are no state's: it occurs in no UTF-8."""

POSITION_KEY = RESERVED_PREFIX + b"position"


@dataclass(frozen=True, slots=True)
class TaskId:
    """The work of one read model on one source partition, e.g. `balance_0`."""

    read_model: str
    partition: int

    def __str__(self) -> str:
        return f"{self.read_model}_{self.partition}"


@dataclass(frozen=True, slots=True)
class Position:
    """Everything below `offset` of the source partition is in the store; `epoch` fences the task.

    `source_topic_id` tells the source from another topic that took its name later.
    """

    offset: int
    epoch: int
    source_topic_id: str

    def record(self) -> dict[str, int | str]:
        """The Avro record `Position`."""
        return {"position": self.offset, "epoch": self.epoch, "sourceTopicId": self.source_topic_id}


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A record that could not be applied, kept with its cause; key and value are the source's bytes."""

    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    cause: str


class KeyedUpdate(NamedTuple):
    """What one event, or several combined, changes under one key."""

    key: bytes
    update: Mapping[str, Any]


class SingleUpdate(NamedTuple):
    """One event's update, with the record it came from."""

    record: DeadLetter
    keyed: KeyedUpdate


@dataclass(frozen=True, slots=True)
class TaskBatch:
    """One task's part of a micro-batch: the source offsets `[start, end)`.

    `singles` reads the events of some keys again, one by one in offset order; it is asked only where combined
    updates cannot be applied.
    """

    start: int
    end: int
    updates: Sequence[KeyedUpdate]
    applied: int
    ignored: int
    dead_letters: Sequence[DeadLetter]
    singles: Callable[[Sequence[bytes]], Sequence[SingleUpdate]] = field(repr=False)


@dataclass(frozen=True, slots=True)
class TaskSnapshot:
    """What a task says of itself, for the directory and for people."""

    task_id: TaskId
    role: str
    state: str
    epoch: int
    position: int
    reason: str
    restored: int
    to_restore: int
    store_bytes: int
