"""Whether a measure levels off: its slope over windows of time, with an interval, against what is promised.

A measure for which memory is reserved may fill it, and must stay within.

Of each window, the least sample counts: garbage comes and goes, and so do the stores of a generation that is built. The
slope is Sen's, the median of the slopes of all pairs of windows; its interval is that of Kendall's test (Sen 1968;
Hollander and Wolfe, Nonparametric Statistical Methods, 8.4).
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

_Z = 1.96
"""Of a two-sided interval of 95%."""
HORIZON_HOURS = 168.0
"""How long an instance must run before a measure reaches its capacity: a week."""


class Slope(NamedTuple):
    """A slope a unit of time, and the ends of its interval."""

    least: float
    middle: float
    most: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the samples of a measure say."""

    name: str
    unit: str
    level: float
    """The median of the windows."""
    slope: Slope
    """An hour."""
    bound: float
    """The greatest slope with which the capacity is reached after HORIZON_HOURS."""
    highest: float
    """The greatest least sample of a window."""
    limit: float | None
    """What is reserved for the measure, which may fill it; None if its slope is judged."""

    @property
    def levels_off(self) -> bool:
        """Whether the slope is not certainly beyond its bound, or the measure stays within its limit."""
        return self.slope.least <= self.bound if self.limit is None else self.highest <= self.limit

    def line(self) -> str:
        low, middle, high = self.slope
        verdict = "levels off" if self.levels_off else "GROWS"
        promised = f"bound {self.bound:+.2f}" if self.limit is None else f"{self.highest:.1f} of {self.limit:.1f}"
        return (
            f"{self.name:<34} {self.level:>9.1f} {self.unit:<8} {middle:>+8.2f} an hour ({low:+.2f} to {high:+.2f}), "
            f"{promised}: {verdict}"
        )


def judged(
    name: str,
    unit: str,
    samples: Sequence[tuple[float, float]],
    capacity: float,
    window_hours: float,
    warm_up: float,
    *,
    fills: bool = False,
) -> Verdict:
    """Judges a measure.

    Args:
        samples: hour and value, in order of time.
        capacity: what the value must stay below.
        warm_up: the hours at the start that do not count.
        fills: whether all of the capacity is reserved for it, so that it may grow until there.
    """
    lows = windows([sample for sample in samples if sample[0] >= warm_up], window_hours)
    level = statistics.median(value for _, value in lows)
    bound, highest = max(0.0, capacity - level) / HORIZON_HOURS, max(value for _, value in lows)
    return Verdict(name, unit, level, slope_of(lows), bound, highest, capacity if fills else None)


def windows(samples: Sequence[tuple[float, float]], hours: float) -> list[tuple[float, float]]:
    """Returns the middle of each whole window of time, and the least value in it."""
    began, found = samples[0][0], dict[int, float]()
    for at, value in samples:
        number = int((at - began) / hours)
        found[number] = min(value, found.get(number, math.inf))
    # The last one has few samples, so that its least may be one before a collection.
    return [(began + (number + 0.5) * hours, value) for number, value in sorted(found.items())][:-1]


def slope_of(points: Sequence[tuple[float, float]]) -> Slope:
    """Returns the slope of at least three points with its interval."""
    count = len(points)
    if count < 3:
        raise ValueError(f"{count} windows are too few for a slope: at least 3 are needed")
    slopes = sorted((later[1] - earlier[1]) / (later[0] - earlier[0]) for earlier, later in combinations(points, 2))
    spread = _Z * math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    low = max(0, math.floor((len(slopes) - spread) / 2))
    high = min(len(slopes) - 1, math.ceil((len(slopes) + spread) / 2))
    return Slope(slopes[low], statistics.median(slopes), slopes[high])
