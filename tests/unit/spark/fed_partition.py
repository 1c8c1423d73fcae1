"""A partition whose rows arrive as a test specifies, and a clock that only `sleep` advances."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import pyarrow as pa

from balance_service.engine.batch import KeyedUpdate, PartitionUpdates
from balance_service.engine.records import DeadLetter
from balance_service.model.standard_fold import Combine
from balance_service.spark.gathering import Gathering

IDLE_SECONDS = 0.25
SUM = {"amount": Combine.SUM}


@dataclass
class Time:
    """A clock that only `sleep` advances."""

    now: float = 1000.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += seconds


@dataclass
class Arrivals:
    """Rows of one partition that arrive at given times; a pull returns all that have arrived."""

    time: Time
    pulls: list[float] = field(default_factory=list)
    _coming: list[tuple[float, int]] = field(default_factory=list)
    _next: int = 0

    def add(self, rows: int, after: float = 0.0) -> int:
        """Adds rows, some seconds after the previous ones; returns the offset after the last."""
        since = self._coming[-1][0] if self._coming else self.time.now
        self._coming.append((max(since, self.time.now) + after, rows))
        return self._next + sum(rows for _, rows in self._coming)

    def pull(self, timeout_seconds: float) -> pa.RecordBatch | None:
        until = self.time.now + timeout_seconds
        if not self._coming or self._coming[0][0] > until:
            self.time.now = until
            return None
        self.time.now = max(self.time.now, self._coming[0][0])
        self.pulls.append(self.time.now)
        rows = sum(rows for at, rows in self._coming if at <= self.time.now)
        self._coming = [later for later in self._coming if later[0] > self.time.now]
        offsets = pa.array(range(self._next, self._next + rows), pa.int64())
        self._next += rows
        return pa.record_batch({"offset": offsets})


@dataclass
class Partition:
    """A partition with its gathering."""

    most_rows: int = 1_000_000
    time: Time = field(default_factory=Time)
    parts: list[list[int]] = field(default_factory=list)
    """The offsets of each part that was combined."""
    letters_of: int = 0
    """Bytes of the dead letter of each part; 0 for none."""
    singly: bool = False
    """Whether the events of a part stay single."""
    each_its_key: bool = False
    """Whether every event has its own key."""
    combine: dict[str, Combine] | None = field(default_factory=SUM.copy)
    interrupted: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.arrivals = Arrivals(self.time)
        self.gathering = Gathering(self.most_rows, self.combine, clock=self.time.clock, sleep=self.time.sleep)

    def begin_again(self) -> None:
        """Starts another query from the beginning."""
        self.arrivals = Arrivals(self.time)

    def part(self, table: pa.Table) -> PartitionUpdates:
        offsets = table["offset"].to_pylist()
        self.parts.append(offsets)
        letters = [DeadLetter(offsets[0], 0, b"", bytes(self.letters_of), "")] if self.letters_of else []
        events = [KeyedUpdate(b"a", {})] if self.singly else []
        keys = pa.array([b"%d" % offset for offset in offsets] if self.each_its_key else [], pa.binary())
        combined = pa.table({"key": keys, "amount": pa.array([1] * len(keys), pa.int64())})
        return PartitionUpdates(
            offsets[-1] + 1,
            combined if len(keys) else None,
            events,
            len(offsets),
            dead_letters=letters,
            singles=lambda keys: [KeyedUpdate(key, {}) for key in keys],
            traces=[str(offsets[0])],
        )

    def gathered(self, known_end: int | None = None) -> list[PartitionUpdates]:
        return self.gathering.gather(self.arrivals.pull, IDLE_SECONDS, known_end, self.part, self.interrupted)

    def gather(self, known_end: int | None = None) -> list[int]:
        """Returns the offsets to commit next."""
        known = len(self.parts)
        found = self.gathered(known_end)
        offsets = [offset for part in self.parts[known:] for offset in part]
        assert sum(one.applied for one in found) == len(offsets)
        assert [one.end for one in found][-1:] == [offset + 1 for offset in offsets[-1:]]
        return offsets

    def commit(self, seconds: float) -> None:
        began = self.time.now
        self.time.sleep(seconds)
        self.gathering.committed(began)
