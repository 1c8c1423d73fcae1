"""Notes how far the tasks of a stage are, and which of them stand still: they have records to apply, and apply none."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from balance_service.engine.records import Stand
from balance_service.process.runtime import elapsed, now_ms

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_MOST_ERROR_CHARACTERS = 500


class Seen(NamedTuple):
    """The position and the lag of a task.

    `lag` is the number of records that it may apply now, None if that is unknown. A task that restores is not expected
    to move.
    """

    position: int
    lag: int | None
    restores: bool


@dataclass(frozen=True, slots=True)
class _Noted:
    position: int
    since: float
    since_ms: int
    lag: int = 0
    error: str = ""
    is_read: bool = False
    """Whether a query has read the partition since the error."""


class Progress:
    """The progress of the tasks of one stage, by partition. It outlives the tasks. Any thread may call it."""

    def __init__(self, clock: Callable[[], float] = elapsed, now_ms: Callable[[], int] = now_ms) -> None:
        self._clock = clock
        self._now_ms = now_ms
        self._lock = threading.Lock()
        self._looked_at = clock()
        self._noted: dict[int, _Noted] = {}

    def failed(self, partition: int, position: int, error: str) -> None:
        """Notes that the query failed that should read the record at the position.

        It is a problem until the position has moved, or until a query reads and nothing is left to apply.
        """
        with self._lock:
            noted = self._at(partition, position)
            self._noted[partition] = replace(noted, error=error[:_MOST_ERROR_CHARACTERS], is_read=False)

    def reads(self, partition: int) -> None:
        """Notes that a query reads the partition."""
        noted = self._noted.get(partition)
        if noted is None or not noted.error or noted.is_read:
            return
        with self._lock:
            # Another thread may have forgotten the partition since.
            if (noted := self._noted.get(partition)) is not None:
                self._noted[partition] = replace(noted, is_read=True)

    def look(self, seen: Mapping[int, Seen]) -> None:
        """Notes the owned tasks by partition, and forgets all others."""
        with self._lock:
            now, passed = self._clock(), self._clock() - self._looked_at
            self._looked_at = now
            self._noted = {partition: noted for partition, noted in self._noted.items() if partition in seen}
            for partition, task in seen.items():
                # Between two tasks of a partition, its position is unknown.
                if task.position < 0:
                    continue
                noted = self._at(partition, task.position)
                noted = replace(noted, lag=noted.lag if task.lag is None else task.lag)
                if noted.lag == 0:
                    noted = replace(noted, since=now, since_ms=self._now_ms())
                    noted = replace(noted, error="") if noted.is_read else noted
                elif task.restores:
                    noted = replace(noted, since=noted.since + passed, since_ms=noted.since_ms + int(passed * 1000))
                self._noted[partition] = noted

    def stand(self, partition: int, position: int) -> Stand | None:
        """Returns how a task stands; None if its position moves, or if it has nothing to apply and no query failed.

        Args:
            position: of the task now; -1 while it has no open store.
        """
        noted = self._noted.get(partition)
        if noted is None or position not in (-1, noted.position) or not (noted.lag or noted.error):
            return None
        return Stand(noted.position, noted.lag, self._clock() - noted.since, noted.since_ms, noted.error)

    def _at(self, partition: int, position: int) -> _Noted:
        noted = self._noted.get(partition)
        if noted is None or noted.position != position:
            return _Noted(position, self._clock(), self._now_ms())
        return noted
