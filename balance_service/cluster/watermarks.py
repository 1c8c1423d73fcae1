"""High watermarks of a source: what lag is measured against. One thread refreshes them, any may ask."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from balance_service.errors import BalanceServiceError
from balance_service.process.clock import elapsed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

log = structlog.get_logger(__name__)


class Watermarks:
    """The end of each source partition, and how old that knowledge is."""

    def __init__(self, read: Callable[[], Mapping[int, int]], clock: Callable[[], float] = elapsed) -> None:
        """Args:
        read: asks the broker; raises BalanceServiceError if it does not answer.
        """
        self._read = read
        self._clock = clock
        self._known: tuple[Mapping[int, int], float] = ({}, float("-inf"))

    def refresh(self) -> None:
        """Ask the broker now."""
        asked_at = self._clock()
        try:
            self._known = (self._read(), asked_at)
        except BalanceServiceError as error:
            log.warning("the source's end is not known", error=str(error))

    @property
    def age_seconds(self) -> float:
        """How long ago the broker was asked."""
        return self._clock() - self._known[1]

    def end(self, partition: int) -> int | None:
        """A partition's end as last read; None while it is not known."""
        return self._known[0].get(partition)

    def lag(self, partition: int, position: int) -> int | None:
        """Records between a position and the end; None while the end is not known."""
        end = self.end(partition)
        return None if end is None or position < 0 else max(0, end - position)
