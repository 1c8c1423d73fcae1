"""Fair scheduling of scans, so that no client delays other clients, or queries for one key.

Each asker has a few scans in progress; its next ones wait, and those beyond its share are refused (`Shares`).
A thread runs the scans of the askers in turn, in time slices of a few milliseconds. The event loop starts each slice
after it has handled the requests that arrived during the previous one: until then the thread is idle and does not
compete for the interpreter. Clients that ask here and those that ask through peers have separate shares and alternate,
because a peer has already bounded its own clients. Everything except the slices runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from balance_service.http.shares import Shares

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from contextlib import AbstractAsyncContextManager

    from balance_service.http.shares import Asker

T = TypeVar("T")
# Of CPU time: on a busy machine, a slice of wall-clock time would read next to nothing.
_SLICE_SECONDS = 0.005
# A peer that shares no secret does not prove whose scans it forwards, so that it has one share for all its clients.
_RUNNING, _RUNNING_OF_PEER = 2, 16
_WAITING, _WAITING_OF_PEER = 32, 64


@dataclass(slots=True, eq=False)
class _Reading:
    """A scan in progress. Its asker cancels it by cancelling `ended`."""

    asker: Asker
    steps: Generator[None, None, Any]
    ended: asyncio.Future[Any]


class _RoundRobin:
    """The scans of all clients, or of all peers: a round robin over the askers."""

    def __init__(self) -> None:
        # Ends with the asker whose slice was last.
        self._lines: dict[str, deque[_Reading]] = {}

    def __bool__(self) -> bool:
        return bool(self._lines)

    def add(self, reading: _Reading) -> None:
        self._lines.setdefault(reading.asker.name, deque()).append(reading)

    def take(self) -> _Reading:
        asker, line = next(iter(self._lines.items()))
        del self._lines[asker]
        reading = line.popleft()
        if line:
            self._lines[asker] = line
        return reading


@dataclass(frozen=True, slots=True)
class _Ended:
    result: Any


class FairScheduler:
    """Runs the scans of askers in turn, one time slice after another."""

    def __init__(
        self,
        name: str,
        threads: int = 1,
        slice_seconds: float = _SLICE_SECONDS,
    ) -> None:
        """Args:
        name: of the threads.
        threads: slices that run at once: more than one only if they mostly wait.
        """
        self._pool = ThreadPoolExecutor(threads, name)
        self._free = threads
        self._slice_seconds = slice_seconds
        self._shares_of = {
            False: Shares("scans", 16, of_each=_RUNNING, waiting=_WAITING, waiting_of_all=128),
            True: Shares("scans", 64, of_each=_RUNNING_OF_PEER, waiting=_WAITING_OF_PEER, waiting_of_all=256),
        }
        # Streams leave a client its share of scans, and wait in line for as long as it takes.
        self._snapshots = Shares("snapshots", 16, of_each=_RUNNING)
        self._queue_of = {False: _RoundRobin(), True: _RoundRobin()}
        # Ends with the queue whose slice was last.
        self._queues = deque(self._queue_of.values())

    def admitted(self, asker: Asker, seconds: float) -> AbstractAsyncContextManager[None]:
        """Waits until a scan may begin, at most `seconds`. Within the block, the scan runs by `run`.

        Raises:
            Problem: 503, as `Shares.wait`.
        """
        return self._shares_of[asker.is_peer].place(asker.name, seconds)

    def in_line(self, asker: Asker) -> AbstractAsyncContextManager[None]:
        """Waits until a page of a stream's snapshot may be read, however long; the rest is as for a scan."""
        return self._snapshots.place(asker.name)

    async def run(self, asker: Asker, steps: Generator[None, None, T]) -> T:
        """Runs a scan that yields where it may be interrupted; returns its result or raises its exception.

        Cancellation ends the scan after its current step.
        """
        reading = _Reading(asker, steps, asyncio.get_running_loop().create_future())
        self._queue_of[asker.is_peer].add(reading)
        self._start_slices()
        try:
            result: T = await reading.ended
        finally:
            # An error that is raised here has this frame, whose reading has the error: a cycle, which would keep the
            # views of the scan until a collection.
            del reading
        return result

    def _start_slices(self) -> None:
        """Starts a slice on each idle thread."""
        while self._free and any(self._queues):
            queue = self._queues[0]
            self._queues.rotate(-1)
            if queue:
                reading = queue.take()
                self._free -= 1
                sliced = reading.ended.get_loop().run_in_executor(self._pool, _slice, reading, self._slice_seconds)
                sliced.add_done_callback(partial(self._slice_ended, reading))

    def _slice_ended(self, reading: _Reading, sliced: asyncio.Future[_Ended | None]) -> None:
        self._free += 1
        error = asyncio.CancelledError() if sliced.cancelled() else sliced.exception()
        if reading.ended.done():
            reading.steps.close()
        elif error is not None:
            reading.ended.set_exception(error)
        elif (end := sliced.result()) is not None:
            reading.ended.set_result(end.result)
        else:
            self._queue_of[reading.asker.is_peer].add(reading)
        self._start_slices()


def in_one_step(work: Callable[..., T], *arguments: object) -> Generator[None, None, T]:
    """Wraps work that cannot be interrupted, for `FairScheduler.run`."""
    yield
    return work(*arguments)


def _slice(reading: _Reading, seconds: float) -> _Ended | None:
    """Runs a scan until the slice ends; returns None if the scan is unfinished."""
    until = time.thread_time() + seconds
    try:
        while not reading.ended.done() and time.thread_time() < until:
            next(reading.steps)
    except StopIteration as end:
        return _Ended(end.value)
    finally:
        # As in `FairScheduler.run`.
        del reading
    return None
