"""How much of what arrives is committed at once, and when.

Idle, an event is committed as soon as it arrives. Under load, commits begin 10 to 25 ms apart, by how long one takes: a
transaction has a price, and what arrives meanwhile shares it. Where a commit holds hundreds of events, they begin up to
60 ms apart: the broker, and queries here, need the processor more than those events need the difference. While a task
is behind, what is known to be there is committed together, as far as the bounds allow: most of a commit's price is per
key, and the keys of many events are far fewer than the events. The events are combined part by part as they come, so
that memory holds keys, not events.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa

from balance_service.process.failpoints import part_size
from balance_service.spark.combine import PartitionUpdates

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping, Sequence

    from balance_service.model.folds import Combination
    from balance_service.spark.combine import PartitionRows

_LEAST_PACE_SECONDS = 0.010
_MOST_PACE_SECONDS = 0.025
_PACE_BY_COMMIT = 1.5
# A partition with more events than this within the pace, 8,000 a second, goes on to commit as far apart as it may.
_MANY_ROWS = 200
_PACE_OF_MANY_SECONDS = 0.060
# While behind: small messages cost as much to receive as large ones.
_BETWEEN_PULLS_SECONDS = 0.02
# How long a pause means that nothing more comes: what is left below the end may be control records. So far from the
# end, it is Spark that pauses.
_PAUSE_SECONDS = 0.05
_FAR_ROWS = 10_000
_FAR_PAUSE_SECONDS = 0.5
# What has been pulled is not visible for so much longer.
_GATHER_SECONDS = 10.0
# Of events that are combined in one go: no fewer than this. Those that are not are Python's objects one by one, which
# take many times as much memory, and are committed so many at a time.
_PART_ROWS = 65_536
_PART_ROWS_SINGLY = 8_192
_PART_BYTES = 8 << 20
# A transaction has to end within its time, and what is written is in memory more than once.
_MOST_KEYS = 1_000_000
_MOST_LETTER_BYTES = 8 << 20


class Source(Protocol):
    """Where rows are pulled from."""

    def pull(self, timeout_seconds: float) -> pa.RecordBatch | None:
        """All rows that have arrived since the last pull; None if there is none in time."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """What some events of a partition come to, those below `end`."""

    updates: PartitionUpdates
    end: int
    traces: Sequence[str] = ()
    rows: PartitionRows | None = None
    """The events; None once they are combined with others: they would fill the memory."""

    def and_then(self, later: Gathered, combine: Mapping[str, Combination] | None) -> Gathered | None:
        """Both as one; None if they have to be committed one after the other."""
        both = self.updates.and_then(later.updates, combine)
        if both is None or both.keys > _MOST_KEYS or both.letter_bytes > _MOST_LETTER_BYTES:
            return None
        return replace(later, updates=both, traces=self.traces or later.traces, rows=None)


@dataclass(slots=True)
class Gathering:
    """The pace of one partition; outlives its tasks, so that a commit that failed is not tried again as it was."""

    most_rows: int
    combine: Mapping[str, Combination] | None
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _part_by_part: bool = field(init=False, default=False)
    _next: float = field(init=False, default=0.0)
    _rows: int = field(init=False, default=0)

    def gather(
        self,
        source: Source,
        timeout_seconds: float,
        known_end: int | None,
        part: Callable[[pa.Table], Gathered],
        interrupted: threading.Event,
    ) -> list[Gathered]:
        """What is to be committed next, in order; nothing if no event came in time.

        Args:
            known_end: the partition's end as far as it is known.
            part: events in offset order → what they come to. What it raises ends the gathering.
            interrupted: no more is pulled once it is set.
        """
        self.sleep(max(0.0, self._next - self.clock()))
        batch = source.pull(timeout_seconds)
        if batch is None:
            return []
        gathered: list[Gathered] = []
        pending, rows, end, until = [batch], batch.num_rows, end_of(batch), self.clock() + _GATHER_SECONDS
        while known_end is not None and end < known_end and rows < self.most_rows and self.clock() < until:
            if interrupted.is_set():
                break
            if self._is_part(pending, gathered):
                gathered, pending = self._with(gathered, part(pa.Table.from_batches(pending))), []
                if self._part_by_part or self.combine is None or len(gathered) > 1:
                    return gathered
            self.sleep(_BETWEEN_PULLS_SECONDS)
            batch = source.pull(_FAR_PAUSE_SECONDS if known_end - end > _FAR_ROWS else _PAUSE_SECONDS)
            if batch is None:
                break
            pending.append(batch)
            rows, end = rows + batch.num_rows, end_of(batch)
        if known_end is not None and end >= known_end:
            self._part_by_part = False
        self._rows = rows
        return self._with(gathered, part(pa.Table.from_batches(pending))) if pending else gathered

    def committed(self, began: float) -> None:
        """What was gathered is committed; `began` is when that began, by the clock."""
        took = self.clock() - began
        by_commit = min(max(_PACE_BY_COMMIT * took, _LEAST_PACE_SECONDS), _MOST_PACE_SECONDS)
        by_rows = min(_MOST_PACE_SECONDS * self._rows / _MANY_ROWS, _PACE_OF_MANY_SECONDS)
        self._next = began + max(by_commit, by_rows)

    def failed(self) -> None:
        """It could not be committed, perhaps for being too large: go part by part until the known end is reached."""
        self._part_by_part = True

    def _with(self, gathered: list[Gathered], later: Gathered) -> list[Gathered]:
        both = gathered[-1].and_then(later, self.combine) if gathered else None
        return [*gathered, later] if both is None else [*gathered[:-1], both]

    def _is_part(self, batches: Sequence[pa.RecordBatch], gathered: Sequence[Gathered]) -> bool:
        rows, size = (sum(counts) for counts in zip(*((b.num_rows, b.nbytes) for b in batches), strict=True))
        least = _PART_ROWS_SINGLY if self.combine is None else _PART_ROWS
        # A part is as large as what it is combined with. Smaller ones would have all keys sorted again for few events.
        before = gathered[-1].updates if gathered else PartitionUpdates()
        return bool(rows >= max(part_size(least), before.keys) or size >= max(_PART_BYTES, before.combined_bytes))


def end_of(rows: pa.RecordBatch | pa.Table) -> int:
    """The offset after the last row."""
    return int(rows["offset"][-1].as_py()) + 1
