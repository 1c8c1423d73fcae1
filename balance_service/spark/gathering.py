"""Decides how many of the arriving events are committed together, and when.

On an idle partition, an event is committed as soon as it arrives. Under load, commits begin 10 to 25 ms apart,
depending on how long one takes: a transaction has a fixed cost, which all events in it share. If a commit holds
hundreds of events, commits begin up to 60 ms apart: broker and queries need the CPU more than those events need lower
latency. While a task is behind, the events that are known to be available are committed together, up to the bounds
below: most of the cost of a commit is per key, and many events have far fewer keys. The events are combined part by
part as they arrive, so that memory holds keys, not events.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow as pa

from balance_service.process.failpoints import part_size
from balance_service.spark.combine import end_of, merged

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping, Sequence

    from balance_service.engine.batch import PartitionUpdates
    from balance_service.model.standard_fold import Combination

_LEAST_PACE_SECONDS = 0.010
_MOST_PACE_SECONDS = 0.025
_PACE_BY_COMMIT = 1.5
# Above this number of events within the pace (8,000 per second), a partition keeps the longest distance of commits.
_MANY_ROWS = 200
_PACE_OF_MANY_SECONDS = 0.060
# While behind: small messages cost as much to receive as large ones.
_BETWEEN_PULLS_SECONDS = 0.02
# A pause of this length means that nothing more arrives: the rest below the end may be control records. Far from the
# end, it is Spark that pauses.
_PAUSE_SECONDS = 0.05
_FAR_ROWS = 10_000
_FAR_PAUSE_SECONDS = 0.5
# Bounds how long pulled events stay invisible.
_GATHER_SECONDS = 10.0
# The least number of events that are combined in one step. Of events that are not combined, so many are committed at a
# time: outputs are Python objects, which take many times as much memory as columns. A fold of one's own without outputs
# leaves states only, and most of what a batch costs is for each key.
_PART_ROWS = 65_536
_PART_ROWS_SINGLY = 8_192
_PART_ROWS_FOLDED = 32_768
_PART_BYTES = 8 << 20
# A transaction must end before its timeout, and the records that it writes are in memory more than once.
_MOST_KEYS = 1_000_000
_MOST_LETTER_BYTES = 8 << 20
# A dead letter as a Python object.
_LETTER_BYTES = 500


@dataclass(slots=True)
class Gathering:
    """The pace of one partition. It outlives the tasks, so that a failed commit is not retried unchanged."""

    most_rows: int
    combine: Mapping[str, Combination] | None
    leaves_states: bool = False
    """Whether events are folded by the read model's own code, and make no outputs."""
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _part_by_part: bool = field(init=False, default=False)
    _next: float = field(init=False, default=0.0)
    _rows: int = field(init=False, default=0)

    def gather(
        self,
        pull: Callable[[float], pa.RecordBatch | None],
        timeout_seconds: float,
        known_end: int | None,
        part: Callable[[pa.Table], PartitionUpdates],
        interrupted: threading.Event,
    ) -> list[PartitionUpdates]:
        """Returns the parts to commit next, in order; empty if no event arrived in time.

        Args:
            pull: timeout in seconds → all rows that have arrived since the last pull; None if there are none.
            known_end: the partition's end as last read.
            part: events in offset order → their updates. An error that it raises ends the gathering.
            interrupted: stops pulling once it is set.
        """
        self.sleep(max(0.0, self._next - self.clock()))
        batch = pull(timeout_seconds)
        if batch is None:
            return []
        gathered: list[PartitionUpdates] = []
        pending, rows, end, until = [batch], batch.num_rows, end_of(batch), self.clock() + _GATHER_SECONDS
        while known_end is not None and end < known_end and rows < self.most_rows and self.clock() < until:
            if interrupted.is_set():
                break
            if self._is_part(pending, gathered):
                gathered, pending = self._with(gathered, part(pa.Table.from_batches(pending))), []
                if self._part_by_part or self.combine is None or len(gathered) > 1:
                    return gathered
            self.sleep(_BETWEEN_PULLS_SECONDS)
            batch = pull(_FAR_PAUSE_SECONDS if known_end - end > _FAR_ROWS else _PAUSE_SECONDS)
            if batch is None:
                break
            pending.append(batch)
            rows, end = rows + batch.num_rows, end_of(batch)
        if known_end is not None and end >= known_end:
            self._part_by_part = False
        self._rows = rows
        return self._with(gathered, part(pa.Table.from_batches(pending))) if pending else gathered

    def committed(self, began: float) -> None:
        """Sets the pace after a commit that began at `began`, by the clock."""
        took = self.clock() - began
        by_commit = min(max(_PACE_BY_COMMIT * took, _LEAST_PACE_SECONDS), _MOST_PACE_SECONDS)
        by_rows = min(_MOST_PACE_SECONDS * self._rows / _MANY_ROWS, _PACE_OF_MANY_SECONDS)
        self._next = began + max(by_commit, by_rows)

    def failed(self) -> None:
        """Gathers part by part until the known end is reached: the failed commit may have been too large."""
        self._part_by_part = True

    def _with(self, gathered: list[PartitionUpdates], later: PartitionUpdates) -> list[PartitionUpdates]:
        both = merged(gathered[-1], later, self.combine) if gathered else None
        if both is None or both.keys > _MOST_KEYS or _letter_bytes(both) > _MOST_LETTER_BYTES:
            return [*gathered, later]
        return [*gathered[:-1], both]

    def _is_part(self, batches: Sequence[pa.RecordBatch], gathered: Sequence[PartitionUpdates]) -> bool:
        rows, size = (sum(counts) for counts in zip(*((b.num_rows, b.nbytes) for b in batches), strict=True))
        singly = _PART_ROWS_FOLDED if self.leaves_states else _PART_ROWS_SINGLY
        least_rows = part_size(singly if self.combine is None else _PART_ROWS)
        least_bytes = _PART_BYTES
        if gathered and (before := gathered[-1].combined) is not None:
            # A part is as large as the one it is merged with: smaller ones would sort all keys again for few events.
            least_rows, least_bytes = max(least_rows, before.num_rows), max(least_bytes, before.nbytes)
        return bool(rows >= least_rows or size >= least_bytes)


def _letter_bytes(updates: PartitionUpdates) -> int:
    """Returns about how many bytes the dead letters take as Python objects."""
    return sum(_LETTER_BYTES + len(one.key or b"") + len(one.value or b"") for one in updates.dead_letters)
