"""Places that clients share: where an instance bounds a number, each client gets a share of it.

    most ─────────────────────────────────────┤
    ├─ held by one client: at most three times what is free ─┤─ free ─┤ reserve: operators alone ┤

A client may take a place while it holds less than three times as many as are free then. So one client alone holds at
most three quarters, and the next one finds places. As places are given back, clients that hold much get none, until all
that want more hold the same. No client has to be thrown out, and nothing is measured or configured for one.
Source: Choudhury and Hahne, "Dynamic Queue Length Thresholds for Shared-Memory Packet Switches", 1998.

Clients that find no place are refused, or wait in line: each client has a line of its own, and the next place goes to
the client that holds the fewest. Everything here belongs to the event loop.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

from balance_service.http.access.authorization import CLIENT, ON_BEHALF_OF
from balance_service.http.access.clients import anonymous_name
from balance_service.http.answer import Problem, unavailable
from balance_service.http.peers.trust import FORWARDED_HEADER

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aiohttp import web

_GREED = 3
_UNBOUNDED = 1 << 62
_RESERVE = 16


class Asker(NamedTuple):
    """A client, the client of a peer, or a peer that does not prove who its clients are. Each has a share.

    `name` is of the client's token, or its address; the peer's address; or, through a peer, a digest of the client's.
    """

    name: str
    is_peer: bool = False


def asker_of(request: web.Request) -> Asker:
    if FORWARDED_HEADER in request.headers:
        return Asker(request.get(ON_BEHALF_OF) or anonymous_name(request.remote), is_peer=True)
    return Asker(request.get(CLIENT) or anonymous_name(request.remote))


_Line = OrderedDict[asyncio.Future[None], None]


class Shares:
    """A number of places. Each client may hold a share of them."""

    def __init__(
        self,
        what: str,
        most: int,
        *,
        of_each: int = _UNBOUNDED,
        waiting: int = _UNBOUNDED,
        waiting_of_all: int = _UNBOUNDED,
        has_reserve: bool = False,
        setting: str = "",
    ) -> None:
        """Args:
        what: the plural of what takes a place, for refusals.
        most: the number of places.
        of_each: places that one client may hold, if that is less than its share.
        waiting: how many of one client may wait in line.
        waiting_of_all: how many may wait in all.
        has_reserve: whether one place in sixteen is for operators alone.
        setting: the one that sets `most`, for refusals.
        """
        self._what = what
        self._setting = setting
        self._has_reserve = has_reserve
        self._of_each = of_each
        self._waiting_of_each = waiting
        self._waiting_of_all = waiting_of_all
        self._taken = 0
        self._waiting = 0
        self._held: dict[str, int] = {}
        # Ends with the client that got a place last, or gave one back.
        self._lines: OrderedDict[str, _Line] = OrderedDict()
        self.resize(most)

    def __len__(self) -> int:
        """The number of places that are taken."""
        return self._taken

    def resize(self, most: int) -> None:
        """Sets the number of places; a client that holds one keeps it."""
        self._most = most
        self._reserve = most // _RESERVE if self._has_reserve else 0

    def take(self, client: str, *, is_operator: bool = False) -> bool:
        """Takes a place, unless the client's share is used up or others of the client wait for one."""
        if client in self._lines or not self._has_room(client, is_operator=is_operator):
            return False
        self._give(client)
        return True

    def release(self, client: str) -> None:
        """Gives a place back."""
        self._taken -= 1
        left = self._held.pop(client) - 1
        if left:
            self._held[client] = left
        if self._lines:
            if client in self._lines:
                self._lines.move_to_end(client)
            self._admit()

    async def wait(self, client: str, seconds: float | None = None) -> None:
        """Takes a place, as soon as there is one.

        Args:
            seconds: how long it may wait; None for as long as it takes.

        Raises:
            Problem: 503, too many wait already, or this one has waited for `seconds`.
        """
        if self.take(client):
            return
        self._make_room(client)
        line = self._lines.setdefault(client, OrderedDict())
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line[turn] = None
        self._waiting += 1
        try:
            if seconds is None:
                await turn
            else:
                async with asyncio.timeout(seconds):
                    await turn
        except BaseException as error:
            if turn in line:
                self._leave(client, line, turn)
            elif turn.done() and not turn.cancelled() and turn.exception() is None:
                # It got a place at the same moment.
                self.release(client)
            if isinstance(error, TimeoutError):
                raise self.refusal(client) from None
            raise

    @asynccontextmanager
    async def place(self, client: str, seconds: float | None = None) -> AsyncIterator[None]:
        """Holds a place within the block. Raises Problem as `wait`."""
        await self.wait(client, seconds)
        try:
            yield
        finally:
            self.release(client)

    def refusal(self, client: str) -> Problem:
        """The answer to a client that gets no place."""
        held, bound = self._held.get(client, 0), f"; {self._setting} is {self._most}" if self._setting else ""
        if not held:
            return unavailable(f"too many {self._what} of other clients are in progress here{bound}; retry later")
        line = self._lines.get(client)
        waiting = f" and {len(line)} wait" if line else ""
        return unavailable(
            f"this client's share of {self._what} is used up: {held} of its {self._what} are in progress "
            f"here{waiting}{bound}; retry when some are finished"
        )

    def _has_room(self, client: str, *, is_operator: bool = False) -> bool:
        free = self._most - self._taken - (0 if is_operator else self._reserve)
        held = self._held.get(client, 0)
        return held < _GREED * free and held < self._of_each

    def _give(self, client: str) -> None:
        self._taken += 1
        self._held[client] = self._held.get(client, 0) + 1

    def _leave(self, client: str, line: _Line, turn: asyncio.Future[None]) -> None:
        del line[turn]
        self._waiting -= 1
        if not line:
            del self._lines[client]

    def _admit(self) -> None:
        """Gives the free places to those who wait."""
        while (client := self._next()) is not None:
            line = self._lines[client]
            turn = next(iter(line))
            self._leave(client, line, turn)
            if line:
                self._lines.move_to_end(client)
            if not turn.done():
                self._give(client)
                turn.set_result(None)

    def _next(self) -> str | None:
        """The client in line that holds the fewest places, if there is one for it."""
        best, fewest = None, _UNBOUNDED
        for client in self._lines:
            held = self._held.get(client, 0)
            if held < fewest and self._has_room(client):
                best, fewest = client, held
            if not held:
                break
        return best

    def _make_room(self, client: str) -> None:
        """Refuses one that would wait if too many do: this one, unless another client has more that wait."""
        waiting = len(self._lines.get(client, ()))
        if waiting >= self._waiting_of_each:
            raise self.refusal(client)
        if self._waiting < self._waiting_of_all:
            return
        longest = max(self._lines, key=lambda other: len(self._lines[other]))
        line = self._lines[longest]
        if len(line) <= waiting + 1:
            raise self.refusal(client)
        refused = next(reversed(line))
        problem = self.refusal(longest)
        self._leave(longest, line, refused)
        if not refused.done():
            refused.set_exception(problem)
