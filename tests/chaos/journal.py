"""What was done to the cluster and when, told as it happens."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterable


def own_time() -> float:
    """Seconds of the monotonic clock, less those for which other machines had this one's processors."""
    return time.monotonic() - getattr(psutil.cpu_times(), "steal", 0.0) / (psutil.cpu_count() or 1)


class Entry(NamedTuple):
    """One fault, at a moment of the monotonic clock."""

    at: float
    fault: str
    member: str
    partitions: frozenset[int]
    """What the instance owned then, as far as the readers knew."""
    stood_by: frozenset[int] = frozenset()
    """Of which another instance had a standby that was caught up."""


class Start(NamedTuple):
    """An instance that was started at a moment of the monotonic clock, and wanted queries so many seconds later."""

    at: float
    member: str
    seconds: float


class Journal:
    """Any thread may write; lines go to standard output at once."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self.entries: list[Entry] = []
        self.starts: list[Start] = []
        self.outages: list[tuple[float, float]] = []
        """From when to when there was no broker."""
        self.counts: Counter[str] = Counter()
        self._strange: list[str] = []

    def say(self, text: str) -> None:
        """A line of progress."""
        with self._lock:
            print(f"{time.monotonic() - self._began:7.1f} s  {text}", flush=True)

    def fault(
        self,
        fault: str,
        member: str = "",
        partitions: set[int] | None = None,
        told: str = "",
        at: float | None = None,
        stood_by: Iterable[int] = (),
    ) -> None:
        """A fault has been done, now or at another moment."""
        entry = Entry(at or time.monotonic(), fault, member, frozenset(partitions or ()), frozenset(stood_by))
        with self._lock:
            self.entries.append(entry)
            self.counts[fault] += 1
        owned = f", owner of {sorted(entry.partitions)}" if entry.partitions else ""
        self.say(" ".join(filter(None, (fault, member + owned, told))))

    def started(self, member: str, at: float) -> None:
        """An instance that was started then wants queries now."""
        with self._lock:
            self.starts.append(Start(at, member, time.monotonic() - at))

    def wonder(self, text: str) -> None:
        """Something has happened that nobody did or expected, such as the end of a process."""
        with self._lock:
            self._strange.append(text)
        self.say(f"STRANGE: {text}")

    def take_strange(self) -> list[str]:
        """What there was of that; it is kept no longer."""
        with self._lock:
            taken, self._strange = self._strange, []
        return taken
