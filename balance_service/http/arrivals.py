"""Queries that wait until a partition has reached a position. One look serves all of them.

A thousand queries that looked for themselves, a hundred times a second, would leave the event loop no time for others.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from balance_service.http.routing import ReadableTask, Routing

_LOOK_SECONDS = 0.01


class _Copy(NamedTuple):
    """A local copy: the task that answers for the partition, whether this instance owns it, and its position."""

    task: ReadableTask | None
    is_owned: bool
    offset: int


class Arrivals:
    """Wakes queries when the local copies of their partitions reach positions. Belongs to the event loop."""

    def __init__(self, routing: Routing) -> None:
        self._routing = routing
        self._waiting: dict[int, dict[asyncio.Future[None], int]] = {}
        self._seen: dict[int, _Copy] = {}
        self._looking: asyncio.TimerHandle | None = None

    async def wait(self, partition: int, offset: int, seconds: float) -> None:
        """Returns when a partition has reached an offset or has another copy or owner, or when `seconds` have passed.

        The caller has just looked, and found none of it.
        """
        loop = asyncio.get_running_loop()
        waiting = self._waiting.get(partition)
        if waiting is None:
            waiting = self._waiting[partition] = {}
            self._seen[partition] = self._copy(partition)
        arrived: asyncio.Future[None] = loop.create_future()
        waiting[arrived] = offset
        if self._looking is None:
            self._looking = loop.call_later(_LOOK_SECONDS, self._look)
        try:
            await asyncio.wait((arrived,), timeout=seconds)
        finally:
            waiting.pop(arrived, None)

    def _look(self) -> None:
        self._looking = None
        for partition, waiting in list(self._waiting.items()):
            if not waiting:
                del self._waiting[partition], self._seen[partition]
                continue
            before, now = self._seen[partition], self._copy(partition)
            if now == before:
                continue
            self._seen[partition] = now
            is_other = now[:2] != before[:2]
            for arrived, offset in waiting.items():
                if (is_other or offset <= now.offset) and not arrived.done():
                    arrived.set_result(None)
        if self._waiting:
            self._looking = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look)

    def _copy(self, partition: int) -> _Copy:
        copy = self._routing.copy(partition)
        if copy is None:
            return _Copy(None, False, -1)
        return _Copy(copy.task, self._routing.is_owned(copy), copy.position.offset)
