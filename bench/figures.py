"""Figures: what was measured, by measure, case, name and side."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.sides import OURS, THEIRS

if TYPE_CHECKING:
    from collections.abc import Collection


@dataclass(frozen=True, slots=True)
class Key:
    """Which figure: e.g. `start`, `clean, jars present`, `start to ready, s`."""

    measure: str
    case: str
    name: str


class Figures:
    """All that was measured, in the order in which it was first measured."""

    def __init__(self, peer: str = THEIRS) -> None:
        self.peer = peer
        """The side that ours is compared with where a measure does not name another."""
        self._values: dict[Key, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.notes: list[str] = []
        """Sentences for the report."""

    def add(self, side: str, measure: str, case: str, **figures: float | None) -> None:
        """Add values of one run; names are as in `NAMES`, None is what could not be measured."""
        for name, value in figures.items():
            if value is not None:
                self._values[Key(measure, case, NAMES[name])][side].append(value)

    def take(self, others: Figures, names: Collection[str], measure: str = "", variant: str = "") -> None:
        """Add the values of others.

        Args:
            names: which, as in `NAMES`.
            measure: what they become figures of; else they keep their own.
            variant: what their case is of, besides.
        """
        wanted = {NAMES[name] for name in names}
        for key in others.measured():
            if key.name in wanted:
                case = f"{key.measure}, {key.case}: {variant}" if variant else key.case
                for side, values in others._values[key].items():
                    self._values[Key(measure or key.measure, case, key.name)][side].extend(values)

    def measured(self) -> list[Key]:
        """Every figure that has a value, those of one measure and case together, in the order of the first of them."""
        measures = list(dict.fromkeys(key.measure for key in self._values))
        cases = list(dict.fromkeys((key.measure, key.case) for key in self._values))
        return sorted(self._values, key=lambda k: (measures.index(k.measure), cases.index((k.measure, k.case))))

    def peer_of(self, key: Key) -> str:
        """The other side of this figure."""
        return next((side for side in self._values.get(key, {}) if side != OURS), self.peer)

    def values(self, key: Key, side: str) -> list[float]:
        """All values of one side, by repetition."""
        return list(self._values.get(key, {}).get(side, ()))

    def median(self, key: Key, side: str) -> float | None:
        """None if there is no value."""
        values = self.values(key, side)
        return statistics.median(values) if values else None

    def ratios(self, key: Key) -> list[float]:
        """Ours by the peer's, of each pair; that of the medians where a side lacks a value, and pairs are unknown."""
        peer = self.peer_of(key)
        ours, theirs = self.values(key, OURS), self.values(key, peer)
        if ours and theirs and len(ours) != len(theirs):
            ours, theirs = [statistics.median(ours)], [statistics.median(theirs)]
        return [one / other for one, other in zip(ours, theirs, strict=False) if other]

    def ratio(self, key: Key) -> float | None:
        """The median of `ratios`; None if there is none."""
        ratios = self.ratios(key)
        return statistics.median(ratios) if ratios else None


NAMES = {
    "rate": "events/s",
    "rate_with_start": "events/s, process start included",
    "second_half": "events/s, second half",
    "evenness": "rate, second half / first",
    "of_one": "events/s, of one instance's",
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
