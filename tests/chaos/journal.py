"""A journal of faults, starts and outages, printed as they happen."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterable


def unstolen_time() -> float:
    """Returns the monotonic time minus the time that a hypervisor gave to other machines."""
    return time.monotonic() - getattr(psutil.cpu_times(), "steal", 0.0) / (psutil.cpu_count() or 1)


class Entry(NamedTuple):
    """A fault; `at` is monotonic time."""

    at: float
    fault: str
    member: str
    partitions: frozenset[int]
    """The partitions that the instance owned, as far as the readers knew."""
    stood_by: frozenset[int] = frozenset()
    """The partitions with a tailing standby on another instance."""


class Start(NamedTuple):
    """The start of an instance at a monotonic time, and the seconds until it was ready."""

    at: float
    member: str
    seconds: float


class Journal:
    """Thread-safe. Prints each line at once."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self.entries: list[Entry] = []
        self.starts: list[Start] = []
        self.outages: list[tuple[float, float]] = []
        """Start and end of each broker outage."""
        self.counts: Counter[str] = Counter()
        self._unexpected: list[str] = []

    def say(self, text: str) -> None:
        """Prints a line of progress."""
        with self._lock:
            print(f"{time.monotonic() - self._began:7.1f} s  {text}", flush=True)

    def fault(
        self,
        fault: str,
        member: str = "",
        partitions: set[int] | None = None,
        detail: str = "",
        at: float | None = None,
        stood_by: Iterable[int] = (),
    ) -> None:
        """Records a fault, now or at another time."""
        entry = Entry(at or time.monotonic(), fault, member, frozenset(partitions or ()), frozenset(stood_by))
        with self._lock:
            self.entries.append(entry)
            self.counts[fault] += 1
        owned = f", owner of {sorted(entry.partitions)}" if entry.partitions else ""
        self.say(" ".join(filter(None, (fault, member + owned, detail))))

    def started(self, member: str, at: float) -> None:
        """Records that an instance started at a given time is ready now."""
        with self._lock:
            self.starts.append(Start(at, member, time.monotonic() - at))

    def record_unexpected(self, text: str) -> None:
        """Records an event that no fault explains, such as the end of a process."""
        with self._lock:
            self._unexpected.append(text)
        self.say(f"UNEXPECTED: {text}")

    def take_unexpected(self) -> list[str]:
        """Returns and clears the unexpected events."""
        with self._lock:
            taken, self._unexpected = self._unexpected, []
        return taken
