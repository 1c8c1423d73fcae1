"""High watermarks of the source, read by a thread every second: what lag is measured against."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import structlog

from balance_service.clock import elapsed
from balance_service.errors import BalanceServiceError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

log = structlog.get_logger(__name__)

_EVERY_SECONDS = 1.0


class Watermarks:
    """The end of each source partition, and how old that knowledge is."""

    def __init__(self, read: Callable[[], Mapping[int, int]], clock: Callable[[], float] = elapsed) -> None:
        """Args:
        read: asks the broker; raises BalanceServiceError if it does not answer.
        """
        self._read = read
        self._clock = clock
        self._stopping = threading.Event()
        self._known: tuple[Mapping[int, int], float] = ({}, float("-inf"))
        self._thread = threading.Thread(target=self._run, name="watermarks", daemon=True)

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()

    def stop(self, timeout_seconds: float) -> None:
        """End, within the bound."""
        self._stopping.set()
        self._thread.join(timeout_seconds)

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

    def lag(self, partition: int, position: int) -> int | None:
        """Records between a position and the end; None while the end is not known."""
        end = self._known[0].get(partition)
        return None if end is None or position < 0 else max(0, end - position)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self.refresh()
            self._stopping.wait(_EVERY_SECONDS)
