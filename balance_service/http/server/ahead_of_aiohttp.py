"""Offers parsed requests to a faster path before aiohttp answers them. The only module that uses aiohttp's internals.

aiohttp's own parser reads every byte. aiohttp queues parsed requests, and takes the first one when the future on which
it waits for a request is done. While it waits, all earlier requests are answered; while that future is hidden from
aiohttp's parser, aiohttp cannot start on a request. `pyproject.toml` bounds the version of aiohttp, and
`tests/unit/http/server/test_ahead_of_aiohttp.py` names the internals that another version changes. Everything here runs
on the event loop's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from aiohttp import EMPTY_PAYLOAD, hdrs, web
from aiohttp.http import RawRequestMessage

from balance_service.http.access.clients import anonymous_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

AnswerAhead = Callable[[RawRequestMessage, "AheadOfAiohttp"], bytes | Coroutine[Any, Any, bytes] | None]
"""A request without a body → its answer as sent, or a coroutine that returns it; None leaves the request to aiohttp."""


def body_of(request: web.BaseRequest) -> bytes:
    """The part of the body that a handler has read."""
    return request._read_bytes or b""


def loses_what_follows(request: web.BaseRequest) -> bool:
    """Whether aiohttp's parser loses data received together with this request, after it.

    It does if the request asks for a protocol that aiohttp does not support.
    """
    return request._message.upgrade and request.headers.get(hdrs.UPGRADE, "").lower() != "websocket"


class AheadOfAiohttp(web.RequestHandler):
    """A connection whose requests may be answered ahead of aiohttp, but never ahead of an earlier request.

    A request is offered only if it is the single unanswered one. Data that arrives before its answer is held, unparsed,
    and processed after the answer.
    """

    def __init__(self, server: web.Server, ahead: AnswerAhead | None, **bounds: Any) -> None:
        """Args:
        ahead: None leaves all requests to aiohttp.
        """
        super().__init__(server, **bounds)
        self.admitted_headers: Sequence[tuple[bytes, bytes]] | None = None
        """Those of the last client's request that was admitted ahead of aiohttp for its headers alone."""
        self._ahead = ahead
        self._answering: asyncio.Task[None] | None = None
        self._held: list[bytes] = []
        self._is_stream = False
        self._ending: asyncio.Task[Any] | None = None

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._ending is not None:
            self._ending.cancel()
        super().connection_lost(exc)

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Within this block, closing the connection cancels the current task."""
        self._ending = asyncio.current_task()
        try:
            yield
        finally:
            self._ending = None

    def data_received(self, data: bytes) -> None:
        """Has aiohttp's parser read the data, and decides which side answers the parsed request."""
        if self._is_stream:
            # No request can follow, so nothing bounds what else comes.
            if data and self.transport is not None:
                self.transport.abort()
            return
        if self._answering is not None:
            self._held.append(data)
            if self.transport is not None:
                self.transport.pause_reading()
            return
        waiter = self._waiter
        if self._ahead is None or waiter is None or waiter.done():
            # aiohttp is at a request, or about to be: this data comes after that one.
            super().data_received(data)
            return
        self._waiter = None
        try:
            super().data_received(data)
        finally:
            self._waiter = waiter
        if self._messages and not self._answered_ahead():
            waiter.set_result(None)

    async def shutdown(self, timeout: float | None = 15.0) -> None:
        """Waits for the answer in progress, at most `timeout` seconds, and closes the connection."""
        if self._answering is not None:
            await asyncio.wait([self._answering], timeout=timeout)
        if self._answering is not None:
            self._answering.cancel()
        await super().shutdown(timeout)

    @property
    def anonymous_client(self) -> str:
        """`Client.name` of a client without a token."""
        peer = self.peername
        return anonymous_name(peer[0] if isinstance(peer, tuple) else None)

    def becomes_stream(self) -> None:
        """Called when the answer in progress is a stream, which ends with the connection."""
        if self.transport is not None:
            # asyncio's TLS pauses once it has as much as `high`: at 0 it would pause with an empty buffer, and every
            # second write would wait without end.
            self.transport.set_write_buffer_limits(high=1, low=0)
            # aiohttp stops to read after many requests, and asyncio's TLS would then not see the client leave.
            self._is_stream = True
            self.transport.resume_reading()

    async def drained(self) -> None:
        """Waits until the socket has taken what was written: of a stream all, else most.

        asyncio's transport below TLS takes 64 KiB, and the rest of one write, before the socket does.

        Raises:
            ConnectionError: it has gone.
        """
        await self._drain_helper()

    async def _drain_helper(self) -> None:
        # aiohttp keeps the future of a task that was cancelled while it waited, and would cancel the next one by it.
        if self._drain_waiter is not None and self._drain_waiter.cancelled():
            self._drain_waiter = None
        await super()._drain_helper()

    def belongs_to(self, client: str) -> None:
        """Called when a request was authenticated, with the name of its client."""

    def request_answered(self) -> None:
        """Called when a request was answered at once."""

    def request_began(self) -> None:
        """Called when the head of any other request is complete."""

    def request_ended(self) -> None:
        """Called before the answer to such a request is sent."""

    def _answered_ahead(self) -> bool:
        """Has the faster path answer the request, now or later. Returns whether it does; the queue is empty then."""
        transport, parser, ahead = self.transport, self._parser, self._ahead
        request, body = self._messages[0]
        if len(self._messages) > 1 or body is not EMPTY_PAYLOAD or not isinstance(request, RawRequestMessage):
            return False
        # aiohttp waits until a client has read earlier answers.
        if ahead is None or parser is None or transport is None or transport.get_write_buffer_size():
            return False
        answer = ahead(request, self)
        if answer is None:
            return False
        self._messages.clear()
        parser.message_consumed()
        if isinstance(answer, bytes):
            self.request_answered()
            transport.write(answer)
        else:
            self.request_began()
            self._answering = self._loop.create_task(self._answer(answer))
        return True

    async def _answer(self, answering: Coroutine[Any, Any, bytes]) -> None:
        """Sends the answer when it is ready, and processes the data held in the meantime."""
        try:
            answer = await answering
        finally:
            self.request_ended()
            self._answering = None
        transport = self.transport
        if transport is None:  # the client has closed the connection
            return
        transport.write(answer)
        if self._held:
            held, self._held = b"".join(self._held), []
            transport.resume_reading()
            self.data_received(held)


@contextmanager
def ending_with(request: web.Request) -> Iterator[None]:
    """Within this block, a request is cancelled when its client closes the connection."""
    connection = request.protocol
    if isinstance(connection, AheadOfAiohttp):
        with connection.ending():
            yield
    else:
        yield
