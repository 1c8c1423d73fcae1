"""Scans take turns, so that no client keeps other clients waiting, nor queries for one key.

An asker, which is a client or a peer, has a few questions answered at once; its next ones wait, and those beyond its
share are refused. A thread reads for one asker after the other, a slice of a few milliseconds at a time. The event loop
starts each slice, after it has handled the requests that arrived during the last one: until then the thread is idle and
does not compete for the interpreter. Clients and peers have separate shares and alternate turns, because a peer has
bounded its own clients already. The event loop's thread runs everything but the slices.
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

    from aiohttp import web

T = TypeVar("T")
# Of the thread's own time: where processors are scarce, a slice that ends by the clock reads next to nothing.
_SLICE_SECONDS = 0.005


class Asker(NamedTuple):
    """The client or peer that asks: the name of a client's token, or else an address."""

    name: str
    is_peer: bool = False


def asker_of(request: web.Request) -> Asker:
    """The asker of a request. A peer passes on questions of many clients."""
    if FORWARDED_HEADER in request.headers:
        return Asker(anonymous_name(request.remote), is_peer=True)
    return Asker(request.get(CLIENT) or anonymous_name(request.remote))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How many questions are answered at once, and how many wait: of one asker, and of all."""

    at_once: int
    at_once_of_all: int
    waiting: int
    waiting_of_all: int


CLIENTS = Bounds(at_once=2, at_once_of_all=16, waiting=32, waiting_of_all=128)
PEERS = Bounds(at_once=16, at_once_of_all=64, waiting=64, waiting_of_all=256)
"""An instance asks each peer on behalf of all clients that it has admitted."""


@dataclass(slots=True)
class _Share:
    """One asker's part; kept while it has questions."""

    at_once: int = 0
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)


class Shares:
    """Admits questions, those of each asker in their order, and the askers in turn. Belongs to the event loop."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._shares: dict[str, _Share] = {}
        self._at_once = 0

    @asynccontextmanager
    async def of(self, asker: str, seconds: float) -> AsyncIterator[None]:
        """Wait until a question may be asked; the block is the question.

        Raises:
            Problem: 503, too many wait already, or it has waited for some seconds.
        """
        share = self._shares.setdefault(asker, _Share())
        try:
            await self._admitted(share, seconds)
            try:
                yield
            finally:
                self._at_once -= 1
                share.at_once -= 1
        finally:
            # Others come first the next time.
            self._shares.pop(asker, None)
            if share.at_once or share.waiting:
                self._shares[asker] = share
            self._admit()

    async def _admitted(self, share: _Share, seconds: float) -> None:
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
                # Admitted at the moment when it was given up.
                self._at_once -= 1
                share.at_once -= 1
            if isinstance(error, TimeoutError):
                raise self._refusal(share) from None
            raise

    def _may_begin(self, share: _Share) -> bool:
        return share.at_once < self._bounds.at_once and self._at_once < self._bounds.at_once_of_all

    def _begin(self, share: _Share) -> None:
        share.at_once += 1
        self._at_once += 1

    def _admit(self) -> None:
        """Admit what may begin by now: first the question of an asker that has the fewest under way."""
        while self._at_once < self._bounds.at_once_of_all:
            waiting = [share for share in self._shares.values() if share.waiting and self._may_begin(share)]
            if not waiting:
                return
            share = min(waiting, key=lambda share: share.at_once)
            turn = share.waiting.popleft()
            if not turn.done():
                self._begin(share)
                turn.set_result(None)

    def _make_room(self, share: _Share) -> None:
        """Refuse one that waits if too many do: this one, unless another asker has more that wait."""
        if len(share.waiting) >= self._bounds.waiting:
            raise self._refusal(share)
        if sum(len(other.waiting) for other in self._shares.values()) < self._bounds.waiting_of_all:
            return
        longest = max(self._shares.values(), key=lambda other: len(other.waiting))
        if len(longest.waiting) <= len(share.waiting) + 1:
            raise unavailable("too many scans of other clients are under way here; ask again later")
        refused = longest.waiting.pop()
        if not refused.done():
            refused.set_exception(self._refusal(longest))

    def _refusal(self, share: _Share) -> Problem:
        if share.at_once < self._bounds.at_once:
            return unavailable("too many scans of other clients are under way here; ask again later")
        return unavailable(
            f"this client's share of scans is used up: {share.at_once} of its scans are under way here and "
            f"{len(share.waiting)} wait; ask again when some are answered"
        )


@dataclass(slots=True, eq=False)
class _Reading:
    """Something that is read; `ended` is cancelled when its asker has given it up."""

    asker: Asker
    steps: Generator[None, None, Any]
    ended: asyncio.Future[Any]


class _Lane:
    """What clients, or what peers want read: of each asker in turn."""

    def __init__(self) -> None:
        # The asker that has had its turn last is at the end.
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


class Turns:
    """Reads what askers want in turn, a slice at a time."""

    def __init__(self, name: str, threads: int = 1, clients: Bounds = CLIENTS, peers: Bounds = PEERS) -> None:
        """Args:
        name: of the threads.
        threads: how many slices run at once: more than one only where they mostly wait.
        """
        self._pool = ThreadPoolExecutor(threads, name)
        self._free = threads
        self._shares = {False: Shares(clients), True: Shares(peers)}
        self._lane_of = {False: _Lane(), True: _Lane()}
        # The one at the end has had its turn last.
        self._lanes = deque(self._lane_of.values())

    @asynccontextmanager
    async def admitted(self, asker: Asker, seconds: float) -> AsyncIterator[None]:
        """Wait for a place, at most for some seconds. The block is the question, and reads by `run` alone.

        Raises:
            Problem: 503, the asker's share is used up, or too many others wait.
        """
        async with self._shares[asker.is_peer].of(asker.name, seconds):
            yield

    async def run(self, asker: Asker, steps: Generator[None, None, T]) -> T:
        """The result of some reading that yields where it may be interrupted; raises as that does.

        If this is cancelled, the reading ends with its present step.
        """
        reading = _Reading(asker, steps, asyncio.get_running_loop().create_future())
        self._lane_of[asker.is_peer].add(reading)
        self._go_on()
        result: T = await reading.ended
        return result

    def _go_on(self) -> None:
        """Begin as many slices as there are threads."""
        while self._free and any(self._lanes):
            lane = self._lanes[0]
            self._lanes.rotate(-1)
            if lane:
                reading = lane.take()
                self._free -= 1
                sliced = reading.ended.get_loop().run_in_executor(self._pool, _slice, reading)
                sliced.add_done_callback(partial(self._sliced, reading))

    def _sliced(self, reading: _Reading, sliced: asyncio.Future[_Ended | None]) -> None:
        self._free += 1
        error = asyncio.CancelledError() if sliced.cancelled() else sliced.exception()
        if reading.ended.done():
            reading.steps.close()
        elif error is not None:
            reading.ended.set_exception(error)
        elif (end := sliced.result()) is not None:
            reading.ended.set_result(end.result)
        else:
            self._lane_of[reading.asker.is_peer].add(reading)
        self._go_on()


def in_one_step(work: Callable[..., T], *arguments: object) -> Generator[None, None, T]:
    """Work that cannot be interrupted, for `Turns.run`."""
    yield
    return work(*arguments)


def _slice(reading: _Reading) -> _Ended | None:
    """Read on until the slice is over; None if there is more to read."""
    until = time.thread_time() + _SLICE_SECONDS
    try:
        while not reading.ended.done() and time.thread_time() < until:
            next(reading.steps)
    except StopIteration as end:
        return _Ended(end.value)
    return None
