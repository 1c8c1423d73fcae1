"""A process that works concurrently with the measuring process, and counts."""

from __future__ import annotations

import multiprocessing
import time
from typing import TYPE_CHECKING, Any, Protocol, Self

from balance_service.errors import BalanceServiceError

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.synchronize import Event

_BEGIN_SECONDS = 120.0
_END_SECONDS = 10.0
_LOOK_EVERY_SECONDS = 0.05
_PACE_SECONDS = 0.005


class Count(Protocol):
    """The counter of the process, read by the measuring process."""

    value: int


class Background:
    """Runs `work` in a process, as a context manager."""

    def __init__(self, work: Callable[..., None], *arguments: Any, from_count: int = 0) -> None:
        """Args:
        work: called with the arguments, an `Event` to stop at, and a `Count`.
        from_count: `__enter__` waits until this count.
        """
        spawn = multiprocessing.get_context("spawn")
        self._stop: Event = spawn.Event()
        self._count: Count = spawn.Value("q", 0)
        self._from_count = from_count
        self._name = work.__name__.strip("_")
        self._process = spawn.Process(target=work, args=(*arguments, self._stop, self._count), daemon=True)

    def __enter__(self) -> Self:
        self._process.start()
        deadline = time.monotonic() + _BEGIN_SECONDS
        while self.count < self._from_count:
            if time.monotonic() > deadline or not self._process.is_alive():
                raise BalanceServiceError(f"{self._name} has not counted {self._from_count} in {_BEGIN_SECONDS:.0f} s")
            time.sleep(_LOOK_EVERY_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._process.join(_END_SECONDS)
        self._process.kill()

    @property
    def count(self) -> int:
        return self._count.value


def at_rate(rate: int, most: int, send: Callable[[int], None], stop: Event, count: Count) -> None:
    """Send at a rate, in parts of limited size, until `stopping` is set."""
    began = time.monotonic()
    while not stop.is_set():
        due = min(int((time.monotonic() - began) * rate) - count.value, most)
        if due > 0:
            send(due)
            count.value += due
        time.sleep(_PACE_SECONDS)
