"""How far the restore of a store is, for people. Written by the task's thread; any thread may read."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

_SAY_EVERY_SECONDS = 2.0


class Restoration:
    """Progress from one changelog offset to another."""

    def __init__(self, log: FilteringBoundLogger) -> None:
        self._log = log
        self._start = self._at = self._end = 0
        self._began = self._said = 0.0
        self.restored = 0
        """Records applied since the replay began, or last began anew."""

    def begin(self, start: int, end: int) -> None:
        """A replay begins; offsets of the changelog."""
        self._start, self._at, self._end = start, start, end
        self._began = self._said = time.monotonic()
        self.restored = 0

    def advance(self, records: int, at: int) -> None:
        """Some more records are applied; says so now and then while a replay is under way."""
        self.restored += records
        self._at = at
        now = time.monotonic()
        if at < self._end and now - self._said >= _SAY_EVERY_SECONDS:
            self._said = now
            rate = self.restored / (now - self._began)
            self._log.info(
                "restoring", restored=self.restored, records_per_second=round(rate), seconds_left=self.seconds_left
            )

    @property
    def to_restore(self) -> int:
        """Offsets between the replay's start and its end."""
        return self._end - self._start

    @property
    def seconds_left(self) -> float | None:
        """How long the replay will take at the pace so far; None while nothing can be said."""
        done = self._at - self._start
        if done <= 0:
            return None
        elapsed = time.monotonic() - self._began
        return round(elapsed * max(0, self._end - self._at) / done, 1)
