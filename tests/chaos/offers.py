"""Fail points that all instances share: the first instance to reach one dies there.

The group decides which partitions an instance gets, and some partitions have no work for some points. A point armed in
a single instance may never be reached. A shared point strikes the instance that has the work.
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

# The number of times a process passes a point before it dies there, so that each of its stages has committed.
_TURNS = (4, 16)
# Three instances share ten partitions: each opens at least three tasks.
_FEW_TURNS = (1, 3)
_RARE_POINTS = {*OPENING_POINTS, "letters-read"}


class Offers:
    """The fail points of one round, offered one at a time.

    With two at a time, a rare point would wait, because processes would die at the other one first.
    """

    def __init__(self, folder: Path, points: Iterable[str], chooser: random.Random) -> None:
        """Args:
        folder: created here; holds a file for the offered point.
        """
        folder.mkdir()
        self._folder = folder
        self.left = list(points)
        """The points that have not struck yet; the first is offered now or next."""
        self._chooser = chooser
        self._offered_at: float | None = None

    @property
    def in_parts(self) -> bool:
        """Whether started instances must use small parts, so that the point between two parts is reached."""
        return PARTS_POINT in self.left

    def offer(self) -> None:
        """Offers the next point. Call it before an instance starts, because tasks are opened mostly then."""
        if self.left and self._offered_at is None:
            self._offered_at = time.time()
            (self._folder / self.left[0]).touch()

    def specification(self) -> str:
        """Returns the setting that makes a process die at any offered point."""
        turns = {point: self._chooser.randint(*(_FEW_TURNS if point in _RARE_POINTS else _TURNS)) for point in POINTS}
        return ",".join([*(f"{point}=kill@{turn}" for point, turn in turns.items()), f"claims={self._folder}"])

    def taken(self, strike: Strike) -> float:
        """Records a strike; returns the seconds since the point was offered."""
        point, offered_at = self.left.pop(0), self._offered_at
        assert point == strike.point
        assert offered_at is not None
        self._offered_at = None
        return strike.at - offered_at
