"""Fail points that all instances are offered at once: the first of them to reach one dies there.

The group decides which partitions an instance is given, and some partitions have no work for some points. A point that
is armed in one instance alone may therefore never be reached. An offered point strikes the instance that has the work.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tests.chaos.plan import OPENING_POINTS, PARTS_POINT, POINTS

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable
    from pathlib import Path

    from tests.chaos.cluster import Strike

# A process passes a point so often before it is struck there, so that each of its stages has committed.
_TURNS = (4, 16)
# Three instances share ten partitions: each opens three tasks at least.
_FEW_TURNS = (1, 3)
_RARE_POINTS = {*OPENING_POINTS, "letters-read"}


class Offers:
    """The fail points of one round, in their order; a few are offered at a time."""

    def __init__(self, folder: Path, points: Iterable[str], at_once: int, chooser: random.Random) -> None:
        """Args:
        folder: made here; holds a file for each point that is offered.
        at_once: how many may be offered at a time.
        """
        folder.mkdir()
        self._folder = folder
        self._to_come = list(points)
        self._at_once = at_once
        self._chooser = chooser
        self._offered: dict[str, float] = {}

    @property
    def left(self) -> list[str]:
        """The points that have not struck yet: those that are offered, and those to come."""
        return [*self._offered, *self._to_come]

    @property
    def in_parts(self) -> bool:
        """Whether every instance that is started has to write in parts, so that the point between two is reached."""
        return PARTS_POINT in self.left

    def offer(self) -> None:
        """Offer the next points. To be called before an instance is started: tasks are opened then, and seldom else."""
        while len(self._offered) < self._at_once:
            point = next((point for point in self._to_come if point not in self._offered), None)
            if point is None:
                return
            self._to_come.remove(point)
            self._offered[point] = time.time()
            (self._folder / point).touch()

    def specification(self) -> str:
        """The setting that has a process die at any point that is offered."""
        turns = {point: self._chooser.randint(*(_FEW_TURNS if point in _RARE_POINTS else _TURNS)) for point in POINTS}
        return ",".join([*(f"{point}=kill@{turn}" for point, turn in turns.items()), f"claims={self._folder}"])

    def taken(self, strike: Strike) -> float:
        """Take down that a point has struck; returns how many seconds after it was offered."""
        return strike.at - self._offered.pop(strike.point)
