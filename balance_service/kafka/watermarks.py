"""The high watermarks of a topic, which lag is measured against."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from balance_service.errors import BalanceServiceError
from balance_service.process.runtime import elapsed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

log = structlog.get_logger(__name__)


class Watermarks:
    """The end offset of each partition as last read. One thread refreshes it; any thread may read it."""

    def __init__(self, read: Callable[[], Mapping[int, int]], clock: Callable[[], float] = elapsed) -> None:
        """Args:
        read: returns the end offset of each partition; raises BalanceServiceError if the broker does not respond.
        """
        self._read = read
        self._clock = clock
        self._known: tuple[Mapping[int, int], float] = ({}, float("-inf"))

    def refresh(self) -> None:
        read_at = self._clock()
        try:
            self._known = (self._read(), read_at)
        except BalanceServiceError as error:
            log.warning("the source's end is not known", error=str(error))

    @property
    def age_seconds(self) -> float:
        return self._clock() - self._known[1]

    def end(self, partition: int) -> int | None:
        """Returns the end offset of a partition, or None before the first refresh."""
        return self._known[0].get(partition)

    def lag(self, partition: int, position: int) -> int | None:
        """Returns the number of records from a position to the end; None if either is unknown."""
        end = self.end(partition)
        return None if end is None or position < 0 else max(0, end - position)
