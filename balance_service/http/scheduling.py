"""Fair scheduling of scans, so that no client delays other clients, or queries for one key.

Each asker, a client or a peer, has a few scans in progress; its next ones wait, and those beyond its share are refused.
A thread runs the scans of the askers in turn, in time slices of a few milliseconds. The event loop starts each slice
after it has handled the requests that arrived during the previous one: until then the thread is idle and does not
compete for the interpreter. Clients and peers have separate shares and alternate, because a peer has already bounded
its own clients. Everything except the slices runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from balance_service.http.access.authorization import CLIENT
from balance_service.http.access.clients import anonymous_name
from balance_service.http.answer import Problem, unavailable
from balance_service.http.peers.trust import FORWARDED_HEADER

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Generator
    from contextlib import AbstractAsyncContextManager

    from aiohttp import web

T = TypeVar("T")
# Of CPU time: on a busy machine, a slice of wall-clock time would read next to nothing.
_SLICE_SECONDS = 0.005


class Asker(NamedTuple):
    """A client or a peer, by the name of its token or its address."""

    name: str
    is_peer: bool = False


def asker_of(request: web.Request) -> Asker:
    if FORWARDED_HEADER in request.headers:
        return Asker(anonymous_name(request.remote), is_peer=True)
    return Asker(request.get(CLIENT) or anonymous_name(request.remote))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How many scans run and wait at once: of one asker, and of all."""

    running: int
    running_of_all: int
    waiting: int
    waiting_of_all: int


CLIENTS = Bounds(running=2, running_of_all=16, waiting=32, waiting_of_all=128)
PEERS = Bounds(running=16, running_of_all=64, waiting=64, waiting_of_all=256)
"""Larger, because an instance forwards the scans of all its clients."""


@dataclass(slots=True)
class _Share:
    """The scans of one asker; kept while there are any."""

    running: int = 0
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)


class Admission:
    """Admits scans: those of one asker in order of arrival, and the askers in turn."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._shares: dict[str, _Share] = {}
        self._running = 0

    @asynccontextmanager
    async def admitted(self, asker: str, seconds: float) -> AsyncIterator[None]:
        """Waits until a scan may begin. The scan runs within the block.

        Raises:
            Problem: 503, too many scans wait already, or this one has waited for `seconds`.
        """
        share = self._shares.setdefault(asker, _Share())
        try:
            await self._wait(share, seconds)
            try:
                yield
            finally:
                self._running -= 1
                share.running -= 1
        finally:
            # Moves the asker behind all others.
            self._shares.pop(asker, None)
            if share.running or share.waiting:
                self._shares[asker] = share
            self._admit()

    async def _wait(self, share: _Share, seconds: float) -> None:
        if not share.waiting and self._may_begin(share):
            self._begin(share)
            return
        self._make_room(share)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        share.waiting.append(turn)
        try:
            async with asyncio.timeout(seconds):
                await turn
        except BaseException as error:
            if turn in share.waiting:
                share.waiting.remove(turn)
            elif turn.done() and not turn.cancelled() and turn.exception() is None:
                # It was admitted at the same moment.
                self._running -= 1
                share.running -= 1
            if isinstance(error, TimeoutError):
                raise self._refusal(share) from None
            raise

    def _may_begin(self, share: _Share) -> bool:
        return share.running < self._bounds.running and self._running < self._bounds.running_of_all

    def _begin(self, share: _Share) -> None:
        share.running += 1
        self._running += 1

    def _admit(self) -> None:
        """Admits all scans that may begin, the asker with the fewest in progress first."""
        while self._running < self._bounds.running_of_all:
            waiting = [share for share in self._shares.values() if share.waiting and self._may_begin(share)]
            if not waiting:
                return
            share = min(waiting, key=lambda share: share.running)
            turn = share.waiting.popleft()
            if not turn.done():
                self._begin(share)
                turn.set_result(None)

    def _make_room(self, share: _Share) -> None:
        """Refuses a scan if too many wait: this one, unless another asker has more that wait."""
        if len(share.waiting) >= self._bounds.waiting:
            raise self._refusal(share)
        if sum(len(other.waiting) for other in self._shares.values()) < self._bounds.waiting_of_all:
            return
        longest = max(self._shares.values(), key=lambda other: len(other.waiting))
        if len(longest.waiting) <= len(share.waiting) + 1:
            raise unavailable("too many scans of other clients are in progress here; retry later")
        refused = longest.waiting.pop()
        if not refused.done():
            refused.set_exception(self._refusal(longest))

    def _refusal(self, share: _Share) -> Problem:
        if share.running < self._bounds.running:
            return unavailable("too many scans of other clients are in progress here; retry later")
        return unavailable(
            f"this client's share of scans is used up: {share.running} of its scans are in progress here and "
            f"{len(share.waiting)} wait; retry when some are finished"
        )


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
        clients: Bounds = CLIENTS,
        peers: Bounds = PEERS,
        slice_seconds: float = _SLICE_SECONDS,
    ) -> None:
        """Args:
        name: of the threads.
        threads: slices that run at once: more than one only if they mostly wait.
        """
        self._pool = ThreadPoolExecutor(threads, name)
        self._free = threads
        self._slice_seconds = slice_seconds
        self._admission_of = {False: Admission(clients), True: Admission(peers)}
        self._queue_of = {False: _RoundRobin(), True: _RoundRobin()}
        # Ends with the queue whose slice was last.
        self._queues = deque(self._queue_of.values())

    def admitted(self, asker: Asker, seconds: float) -> AbstractAsyncContextManager[None]:
        """See `Admission.admitted`. Within the block, the scan runs by `run`."""
        return self._admission_of[asker.is_peer].admitted(asker.name, seconds)

    async def run(self, asker: Asker, steps: Generator[None, None, T]) -> T:
        """Runs a scan that yields where it may be interrupted; returns its result or raises its exception.

        Cancellation ends the scan after its current step.
        """
        reading = _Reading(asker, steps, asyncio.get_running_loop().create_future())
        self._queue_of[asker.is_peer].add(reading)
        self._start_slices()
        result: T = await reading.ended
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
    return None
