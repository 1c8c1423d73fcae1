"""The records of a partition that a task commits together, from Spark's rows to the fold."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa

from balance_service.avro.arrow_rows import rows_of
from balance_service.errors import TaskMigratedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from numpy.typing import NDArray

    from balance_service.engine.dead_letter import Letter
    from balance_service.engine.records import DeadLetter

# As Python objects, keys and states take a multiple of their bytes, so they are created in slices.
_SLICE_KEYS = 20_000


class KeyedUpdate(NamedTuple):
    """The update of one key by one event, or by several combined events.

    Attributes:
        record: the event's record; None if several events are combined, or if the record was not kept.
        idempotency_key: names the event to its producer, so that repeated events count once. Such an event has its
            record.
        offset: of the event; of the newest one if several are combined by an `Upsert`; else -1.
        timestamp_ms: of the event; -1 if several are combined, or if a model with standard folds emits nothing.
    """

    key: bytes
    update: Mapping[str, Any]
    record: DeadLetter | None = None
    idempotency_key: bytes | None = None
    offset: int = -1
    timestamp_ms: int = -1


def _not_given(_keys: Sequence[bytes]) -> Sequence[KeyedUpdate]:
    # No events would look as if the keys had none, and the position would pass over them.
    raise NotImplementedError("these updates do not know how their events are read again")


@dataclass(frozen=True, slots=True)
class PartitionUpdates:
    """The updates by some records of a partition, those of each key combined where that is exact.

    Attributes:
        end: the offset after the last record.
        combined: `key` and the columns that change: one row for each key without an entry in `events`, sorted by key.
            In a stage without states, one row for each event, in offset order; keys may repeat or be null. The same
            if each event makes an output of the state after it (`ReadModel.emits_steps`), without the keys of `events`.
            None without rows.
        events: the events of the other keys, one by one, in offset order.
        applied: how many events there are that are neither ignored nor dead letters.
        ignored: how many records the stage does not take, by the name of their record: those of other types; with an
            empty name, events that a condition excludes.
        dead_letters: the records that could not be decoded.
        singles: reads the events of some keys again, with their records. The commit calls it if an update without
            its record cannot be applied.
        traces: the `traceparent` headers of some of the sampled events.
    """

    end: int
    combined: pa.Table | None = None
    events: Sequence[KeyedUpdate] = ()
    applied: int = 0
    ignored: Mapping[str, int] = field(default_factory=dict)
    dead_letters: Sequence[DeadLetter] = ()
    singles: Callable[[Sequence[bytes]], Sequence[KeyedUpdate]] = field(repr=False, compare=False, default=_not_given)
    traces: Sequence[str] = ()

    @property
    def keys(self) -> int:
        """The number of rows in `combined`."""
        return 0 if self.combined is None else int(self.combined.num_rows)

    def slices(self) -> list[pa.RecordBatch]:
        """Returns `combined` in parts that may become Python objects, one after the other."""
        return [] if self.combined is None else self.combined.to_batches(max_chunksize=_SLICE_KEYS)


def updates_in(combined: pa.RecordBatch, rows: Sequence[int]) -> list[KeyedUpdate]:
    """Returns the updates in some rows of a slice."""
    taken = combined.take(pa.array(rows, pa.int64()))
    keys, updates = taken["key"].to_pylist(), rows_of(taken.drop_columns(["key"]))
    return [
        KeyedUpdate(key, update, offset=update.pop("offset", -1)) for key, update in zip(keys, updates, strict=True)
    ]


def events_in(rows: pa.Table) -> list[KeyedUpdate]:
    """Returns the events of rows that are not combined, without their records."""
    envelope = [rows[name].to_pylist() for name in ("key", "offset", "timestamp")]
    changed = rows_of(rows.drop_columns(["key", "offset", "timestamp"]))
    return [
        KeyedUpdate(key, update, offset=at, timestamp_ms=timestamp_ms)
        for key, at, timestamp_ms, update in zip(*envelope, changed, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class TaskBatch:
    """The source offsets `[start, end)`, which a task commits together.

    Attributes:
        updates: what their records, or those of the dead letters that are retried, change.
        retried: the offsets of dead letters whose records the batch applies again. `start` and `end` are then the
            position.
        forgotten: closed dead letters that expire with this commit.
        left_out: offsets of `[start, end)` that the batch lacks, because their dead letters are open or discarded.
        unsent: offsets of records below the position whose outputs were never sent.
        is_silent: whether another generation sends the outputs.
        given_up: returns whether the task was told to close, so that nothing of the batch is wanted any more.
    """

    start: int
    updates: PartitionUpdates
    retried: frozenset[int] = frozenset()
    forgotten: Sequence[Letter] = ()
    left_out: frozenset[int] = frozenset()
    unsent: frozenset[int] = frozenset()
    is_silent: bool = False
    given_up: Callable[[], bool] = field(default=lambda: False, repr=False, compare=False)

    @property
    def end(self) -> int:
        return self.updates.end

    def require_wanted(self) -> None:
        """Raises TaskMigratedError if the batch was given up. A fold may take seconds, so it calls this often."""
        if self.given_up():
            raise TaskMigratedError("the task was closed while it folded a batch")

    def is_to_be_sent(self, offset: int, sent_before: int) -> bool:
        """Returns whether a record's outputs are sent. Those below `sent_before` were sent, except `unsent`."""
        return not self.is_silent and (offset >= sent_before or offset in self.unsent)

    def are_to_be_sent(self, offsets: NDArray[np.int64], sent_before: int) -> NDArray[np.bool_]:
        """As `is_to_be_sent`, for many records."""
        if self.is_silent:
            return np.zeros(len(offsets), dtype=bool)
        return np.asarray((offsets >= sent_before) | np.isin(offsets, [*self.unsent]))
