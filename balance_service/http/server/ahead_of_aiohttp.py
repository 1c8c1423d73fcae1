"""The one seam to aiohttp: requests that its parser has read are offered to `AnswersAhead` before aiohttp answers them.

aiohttp's own parser reads every byte. aiohttp queues what has been read, and begins with it once the future is done on
which it waits for a request. So as long as it waits there, everything before is answered, and it begins with nothing
behind our back if that future is out of its sight. Attributes that aiohttp does not document are touched here and
nowhere else: `pyproject.toml` bounds the version, and `tests/unit/http/test_ahead_of_aiohttp.py` names what another one
has changed. Everything runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from aiohttp import EMPTY_PAYLOAD, hdrs, web
from aiohttp.http import RawRequestMessage

from balance_service.http.access.clients import whereabouts

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator


def body_of(request: web.BaseRequest) -> bytes:
    """The body, as far as a handler has read it."""
    return request._read_bytes or b""


def loses_what_follows(request: web.BaseRequest) -> bool:
    """Whether aiohttp's parser loses what came in one piece with this request, behind it.

    It does where the request asks for a protocol that aiohttp does not speak.
    """
    return request._message.upgrade and request.headers.get(hdrs.UPGRADE, "").lower() != "websocket"


class AnswersAhead(Protocol):
    """Answers some requests before aiohttp does, with the bytes that go over the wire."""

    def answer(
        self, request: RawRequestMessage, connection: AheadOfAiohttp
    ) -> bytes | Coroutine[Any, Any, bytes] | None:
        """The answer to a request without a body, or what will have it; None if aiohttp is to answer."""


class AheadOfAiohttp(web.RequestHandler):
    """A connection on which a request may be answered ahead of aiohttp, but never ahead of an earlier request.

    A request is offered only if it is the one request that is not answered. What the client sends while an answer is
    not there yet is held, unread, and dealt with after that answer.
    """

    def __init__(self, server: web.Server, ahead: AnswersAhead | None, **bounds: Any) -> None:
        """Args:
        ahead: what answers before aiohttp; without it, aiohttp answers everything.
        """
        super().__init__(server, **bounds)
        self._ahead = ahead
        self._answering: asyncio.Task[None] | None = None
        self._held: list[bytes] = []
        self._ending: asyncio.Task[Any] | None = None

    def connection_lost(self, exc: BaseException | None) -> None:
        """Cancel the request that nobody waits for any more, if it ends with its connection."""
        if self._ending is not None:
            self._ending.cancel()
        super().connection_lost(exc)

    @contextmanager
    def ending(self) -> Iterator[None]:
        """The request that the current task answers is cancelled within this block once the connection is closed."""
        self._ending = asyncio.current_task()
        try:
            yield
        finally:
            self._ending = None

    def data_received(self, data: bytes) -> None:
        """Have aiohttp's parser read on, and decide which side answers what it has read."""
        if self._answering is not None:
            self._held.append(data)
            if self.transport is not None:
                self.transport.pause_reading()
            return
        waiter = self._waiter
        if self._ahead is None or waiter is None or waiter.done():
            # aiohttp is at a request, or about to be: whatever comes is behind that one.
            super().data_received(data)
            return
        self._waiter = None
        try:
            super().data_received(data)
        finally:
            self._waiter = waiter
        if self._messages and not self._is_answered():
            waiter.set_result(None)

    async def shutdown(self, timeout: float | None = 15.0) -> None:
        """Let the answer that is under way be sent, within the bound, and close the connection."""
        if self._answering is not None:
            await asyncio.wait([self._answering], timeout=timeout)
        if self._answering is not None:
            self._answering.cancel()
        await super().shutdown(timeout)

    @property
    def whereabouts(self) -> str:
        """The address of the client, as `Client.name` of one without a token."""
        peer = self.peername
        return whereabouts(peer[0] if isinstance(peer, tuple) else None)

    def belongs_to(self, client: str) -> None:
        """A request on this connection was authenticated: `client` is the name of the token's holder."""

    def request_answered(self) -> None:
        """A request was read and answered at once."""

    def request_began(self) -> None:
        """A request's head is complete."""

    def request_ended(self) -> None:
        """Its answer is about to be sent."""

    def _is_answered(self) -> bool:
        """Whether the one request that is queued is answered ahead of aiohttp, now or later; it leaves the queue."""
        transport, parser, ahead = self.transport, self._parser, self._ahead
        request, body = self._messages[0]
        if len(self._messages) > 1 or body is not EMPTY_PAYLOAD or not isinstance(request, RawRequestMessage):
            return False
        # A client that leaves answers unread is left to aiohttp, which waits until they are read.
        if ahead is None or parser is None or transport is None or transport.get_write_buffer_size():
            return False
        answer = ahead.answer(request, self)
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
        """Send the answer when it is there, and go on with what has come meanwhile."""
        try:
            answer = await answering
        finally:
            self.request_ended()
            self._answering = None
        transport = self.transport
        if transport is None:  # the client has not waited for it
            return
        transport.write(answer)
        if self._held:
            held, self._held = b"".join(self._held), []
            transport.resume_reading()
            self.data_received(held)


@contextmanager
def ending_with(request: web.Request) -> Iterator[None]:
    """Within this block, a request is cancelled once its client has closed the connection."""
    connection = request.protocol
    if isinstance(connection, AheadOfAiohttp):
        with connection.ending():
            yield
    else:
        yield
