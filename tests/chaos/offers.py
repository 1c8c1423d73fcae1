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
    """The fail points of one round, offered one after the other.

    Two at a time would keep a point that is seldom reached waiting: processes would die at the other one before.
    """

    def __init__(self, folder: Path, points: Iterable[str], chooser: random.Random) -> None:
        """Args:
        folder: made here; holds a file for the point that is offered.
        """
        folder.mkdir()
        self._folder = folder
        self.left = list(points)
        """The points that have not struck yet; the first is offered, or will be next."""
        self._chooser = chooser
        self._offered_at: float | None = None

    @property
    def in_parts(self) -> bool:
        """Whether every instance that is started has to write in parts, so that the point between two is reached."""
        return PARTS_POINT in self.left

    def offer(self) -> None:
        """Offer the next point. To be called before an instance is started: tasks are opened then, and seldom else."""
        if self.left and self._offered_at is None:
            self._offered_at = time.time()
            (self._folder / self.left[0]).touch()

    def specification(self) -> str:
        """The setting that has a process die at any point that is offered."""
        turns = {point: self._chooser.randint(*(_FEW_TURNS if point in _RARE_POINTS else _TURNS)) for point in POINTS}
        return ",".join([*(f"{point}=kill@{turn}" for point, turn in turns.items()), f"claims={self._folder}"])

    def taken(self, strike: Strike) -> float:
        """Take down that the point has struck; returns how many seconds after it was offered."""
        point, offered_at = self.left.pop(0), self._offered_at
        assert point == strike.point
        assert offered_at is not None
        self._offered_at = None
        return strike.at - offered_at
