"""Figures: what was measured, by measure, case, name and side; several values of one figure give its median."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass

from bench.sides import OURS, THEIRS


@dataclass(frozen=True, slots=True)
class Key:
    """Which figure: e.g. `replay`, `100,000 customers`, `events/s`."""

    measure: str
    case: str
    name: str


class Figures:
    """All that was measured, in the order in which it was first measured."""

    def __init__(self, peer: str = THEIRS) -> None:
        self.peer = peer
        """The side that ours is compared with."""
        self._values: dict[Key, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.notes: list[str] = []
        """Sentences for the report."""

    def add(self, side: str, measure: str, case: str, **figures: float | None) -> None:
        """Add values of one run; names are as in `NAMES`, None is what could not be measured."""
        for name, value in figures.items():
            if value is not None:
                self._values[Key(measure, case, NAMES[name])][side].append(value)

    def measured(self) -> list[Key]:
        """Every figure that has a value."""
        return list(self._values)

    def values(self, key: Key, side: str) -> list[float]:
        """All values of one side."""
        return list(self._values.get(key, {}).get(side, ()))

    def median(self, key: Key, side: str) -> float | None:
        """None if there is no value."""
        values = self.values(key, side)
        return statistics.median(values) if values else None

    def ratio(self, key: Key) -> float | None:
        """Ours by the peer's, of the medians."""
        ours, theirs = self.median(key, OURS), self.median(key, self.peer)
        return ours / theirs if ours is not None and theirs else None


NAMES = {
    "rate": "events/s",
    "rate_with_start": "events/s, process start included",
    "rate_after_commit": "events/s after the first commit",
    "evenness": "rate, second half / first",
    "cpu": "CPU-s per million events, start apart",
    "cpu_with_start": "CPU-s per million events",
    "cpu_event": "CPU, µs per event",
    "memory": "peak memory, MB",
    "memory_growth": "memory, last quarter / second",
    "ready": "start to ready, s",
    "p50": "p50, ms",
    "p99": "p99, ms",
    "requests": "requests/s",
    "idle": "idle, % of a core",
    "keys": "keys/s",
    "first_answer": "start to first answer, s",
    "silence": "longest silence, ms",
}
"""The figures' names as people read them."""
