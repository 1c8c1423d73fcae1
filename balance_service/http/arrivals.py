"""Queries that wait until a partition has reached a position. One look serves all of them, and wakes a few at a time.

A thousand queries that looked for themselves, a hundred times a second, would leave the event loop no time for others;
so would a thousand that were answered at one moment.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from balance_service.http.routing import ReadableTask, Routing

_LOOK_SECONDS = 0.01
_AGAIN_SECONDS = 0.002
_AT_ONCE = 10
"""How many queries are woken by one look; the next one follows soon."""


class _Copy(NamedTuple):
    """A local copy: the task that answers for the partition, whether this instance owns it, and its position."""

    task: ReadableTask | None
    is_owned: bool
    offset: int


class _Waiting(NamedTuple):
    partition: int
    offset: int
    until: float
    by: tuple[ReadableTask | None, bool]
    """The task and the ownership that the query saw."""


class Arrivals:
    """Wakes queries when the local copies of their partitions reach positions. Belongs to the event loop."""

    def __init__(self, routing: Routing) -> None:
        self._routing = routing
        self._waiting: dict[asyncio.Future[None], _Waiting] = {}
        self._looking: asyncio.TimerHandle | None = None

    async def wait(self, partition: int, offset: int, seconds: float) -> None:
        """Returns when a partition has reached an offset or has another copy or owner, or when `seconds` have passed.

        The caller has just looked, and found none of it.
        """
        loop = asyncio.get_running_loop()
        arrived: asyncio.Future[None] = loop.create_future()
        self._waiting[arrived] = _Waiting(partition, offset, loop.time() + seconds, self._copy(partition)[:2])
        if self._looking is None:
            self._looking = loop.call_later(_LOOK_SECONDS, self._look)
        try:
            await arrived
        finally:
            self._waiting.pop(arrived, None)

    def _look(self) -> None:
        self._looking = None
        loop = asyncio.get_running_loop()
        now, woken = loop.time(), 0
        copies = {partition: self._copy(partition) for partition in {one.partition for one in self._waiting.values()}}
        for arrived, one in self._waiting.items():
            copy = copies[one.partition]
            if copy.offset >= one.offset or copy[:2] != one.by or now >= one.until:
                if woken == _AT_ONCE:
                    break
                if not arrived.done():
                    arrived.set_result(None)
                    woken += 1
        if self._waiting:
            self._looking = loop.call_later(_AGAIN_SECONDS if woken == _AT_ONCE else _LOOK_SECONDS, self._look)

    def _copy(self, partition: int) -> _Copy:
        copy = self._routing.copy(partition)
        if copy is None:
            return _Copy(None, False, -1)
        return _Copy(copy.task, self._routing.is_owned(copy), copy.position.offset)
