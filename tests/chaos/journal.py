"""What was done to the cluster and when, told as it happens."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import NamedTuple


class Entry(NamedTuple):
    """One fault, at a moment of the monotonic clock."""

    at: float
    fault: str
    member: str
    partitions: frozenset[int]
    """What the instance owned then, as far as the readers knew."""


class Journal:
    """Any thread may write; lines go to standard output at once."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self.entries: list[Entry] = []
        self.counts: Counter[str] = Counter()
        self.strange: list[str] = []
        """What nobody did and nobody expected, such as a process that ended by itself."""

    def say(self, text: str) -> None:
        """A line of progress."""
        with self._lock:
            print(f"{time.monotonic() - self._began:7.1f} s  {text}", flush=True)

    def fault(self, fault: str, member: str = "", partitions: set[int] | None = None, told: str = "") -> None:
        """A fault has been done."""
        entry = Entry(time.monotonic(), fault, member, frozenset(partitions or ()))
        with self._lock:
            self.entries.append(entry)
            self.counts[fault] += 1
        owned = f", owner of {sorted(entry.partitions)}" if entry.partitions else ""
        self.say(" ".join(filter(None, (fault, member + owned, told))))

    def wonder(self, text: str) -> None:
        """Something nobody did has happened."""
        with self._lock:
            self.strange.append(text)
        self.say(f"STRANGE: {text}")
