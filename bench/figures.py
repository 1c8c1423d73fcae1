"""Measured values, by measure, case, name and side."""

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
    """Identifies a figure, such as `start`, `clean, jars present`, `start to ready, s`."""

    measure: str
    case: str
    name: str


class Figures:
    """All figures of a run, in the order of their first values."""

    def __init__(self, peer: str = THEIRS) -> None:
        self.peer = peer
        """The default side that ours is compared with."""
        self._values: dict[Key, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.notes: list[str] = []
        """Sentences for the report."""

    def add(self, side: str, measure: str, case: str, **figures: float | None) -> None:
        """Add the values of one repetition; names are as in `NAMES`, None if a value could not be measured."""
        for name, value in figures.items():
            if value is not None:
                self._values[Key(measure, case, NAMES[name])][side].append(value)

    def take(self, others: Figures, names: Collection[str], measure: str = "", variant: str = "") -> None:
        """Add values of other figures.

        Args:
            names: the names to add, as in `NAMES`.
            measure: the new measure; by default, the measure is kept.
            variant: appended to the case.
        """
        wanted = {NAMES[name] for name in names}
        for key in others.measured():
            if key.name in wanted:
                case = f"{key.measure}, {key.case}: {variant}" if variant else key.case
                for side, values in others._values[key].items():
                    self._values[Key(measure or key.measure, case, key.name)][side].extend(values)

    def measured(self) -> list[Key]:
        """All figures with a value, grouped by measure and case."""
        measures = list(dict.fromkeys(key.measure for key in self._values))
        cases = list(dict.fromkeys((key.measure, key.case) for key in self._values))
        return sorted(self._values, key=lambda k: (measures.index(k.measure), cases.index((k.measure, k.case))))

    def peer_of(self, key: Key) -> str:
        """The side that ours is compared with for this figure."""
        return next((side for side in self._values.get(key, {}) if side != OURS), self.peer)

    def values(self, key: Key, side: str) -> list[float]:
        """All values of one side, by repetition."""
        return list(self._values.get(key, {}).get(side, ()))

    def median(self, key: Key, side: str) -> float | None:
        """None if there is no value."""
        values = self.values(key, side)
        return statistics.median(values) if values else None

    def ratios(self, key: Key) -> list[float]:
        """Our value divided by the peer's, for each pair; the ratio of medians if a side lacks values."""
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
    "stall": "longest time without a new event, ms",
    "caught_up": "start to caught up, s",
    "cpu_start": "CPU-s until caught up",
    "threads": "threads",
    "new_id": "event under a new id to its answer, s",
    "restart": "restart to ready, s",
    "first_event": "start to first event visible, s",
    "after_ready": "first event after readiness, ms from its acknowledgement",
    "of_none": "events/s, second half, of that without listeners",
    "each": "memory of a listener, KiB",
    "of_most": "events/s, of --max-rate",
    "compared": "caught up to compared, s",
    "refused": "requests without an answer",
    "of_few": "start to first event visible, of that with one id",
}
"""The displayed names of figures."""
