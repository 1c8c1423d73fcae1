"""A thread that does one thing again and again."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Worker:
    """Calls `work` every so many seconds, the first time at once, until it is stopped.

    What `work` raises ends the thread, and with it the process.
    """

    def __init__(self, name: str, every_seconds: float, work: Callable[[], None]) -> None:
        self._every_seconds = every_seconds
        self._work = work
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()

    def stop(self, timeout_seconds: float) -> None:
        """End, within the bound."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._work()
            self._stopping.wait(self._every_seconds)
