"""Server-sent events: answers that stay open, their number, and their end.

Source: WHATWG HTML, "Server-sent events".
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

import structlog
from aiohttp import hdrs, web

from balance_service import api
from balance_service.http.access.authorization import RECHECK
from balance_service.http.answer import ON_EVERY_ANSWER, compact_json
from balance_service.http.server.ahead_of_aiohttp import AheadOfAiohttp, ending_with
from balance_service.http.server.limits import seconds_in_line
from balance_service.http.shares import Shares, asker_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from balance_service.http.answer import Problem

log = structlog.get_logger(__name__)

_RECHECK_SECONDS = 5.0
_SWEEP_SECONDS = 1.0
# nginx collects an answer otherwise. Source: nginx, ngx_http_proxy_module, proxy_buffering.
_UNBUFFERED = {"X-Accel-Buffering": "no"}
_ALIVE = b": alive\n\n"


def rendered(event: str, data: str, event_id: str | None = None) -> bytes:
    """An event as sent.

    Args:
        data: without line breaks; compact JSON has none.
        event_id: what a client names to continue from here; an empty one makes it begin from the start.
    """
    of_id = "" if event_id is None else f"id: {event_id}\n"
    return f"event: {event}\n{of_id}data: {data}\n\n".encode()


def comment(text: str) -> bytes:
    """A line that is not an event, as sent."""
    return f": {text}\n\n".encode()


class EventStream:
    """One answer that stays open. A client is cut off if it does not read an event within `Limits.unsent_seconds`."""

    def __init__(self, request: web.Request, response: web.StreamResponse, deadline: asyncio.Timeout) -> None:
        self._request = request
        self._response = response
        self._deadline = deadline
        self._loop = asyncio.get_running_loop()
        self._sent_at = self._rechecked_at = self._loop.time()
        self._is_sending = False
        self._turn: tuple[asyncio.Timeout, Callable[[], bool]] | None = None
        self.refusal: Problem | None = None
        """Why the stream ends; None unless its client is no longer admitted."""

    async def send_while(self, holds: Callable[[], bool], sending: Awaitable[None]) -> None:
        """Awaits what sends the events; cancels it once `holds` is false, which a sweep finds out."""
        try:
            async with asyncio.timeout(None) as turn:
                self._turn = turn, holds
                await sending
        except TimeoutError:
            if not turn.expired():
                raise
        finally:
            self._turn = None

    async def send(self, events: bytes) -> None:
        """Sends rendered events; returns as `AheadOfAiohttp.drained`.

        Raises:
            ConnectionError: the client has gone.
        """
        self._sent_at = self._loop.time()
        self._is_sending = True
        try:
            await self._response.write(events)
            if isinstance(self._request.protocol, AheadOfAiohttp):
                await self._request.protocol.drained()
        finally:
            self._is_sending = False

    def sweep(self, now: float) -> None:
        """Ends what must not go on; shows an idle client that the stream is alive."""
        if now - self._rechecked_at >= _RECHECK_SECONDS:
            self._rechecked_at = now
            recheck = self._request.get(RECHECK)
            self.refusal = None if recheck is None else recheck()
            if self.refusal is not None:
                self.end()
                return
        if self._turn is not None:
            turn, holds = self._turn
            if not turn.expired() and not holds():
                turn.reschedule(now)
        if now - self._sent_at >= api.ALIVE_SECONDS and not self._is_sending:
            self._sent_at = now
            transport = self._request.transport
            if transport is not None and not transport.is_closing():
                # Only a socket that has taken everything gets it, so that it never waits.
                self._loop.create_task(self._say_alive())

    async def _say_alive(self) -> None:
        with suppress(ConnectionError):
            await self._response.write(_ALIVE)

    def end(self) -> None:
        """Ends the stream soon. Idempotent."""
        # The client may be slow to read the reason.
        if not self._deadline.expired():
            self._deadline.reschedule(self._loop.time())


class Streams:
    """The open streams of an instance. Belongs to the event loop."""

    def __init__(self, most: int) -> None:
        """Args:
        most: streams that may be open at once.
        """
        self.shares = Shares("streams", most, has_reserve=True, setting="BALANCE_MAX_STREAMS")
        """The places of streams, and of connections whose other side is not proven to be a peer."""
        self._most = most
        self._open: set[EventStream] = set()
        self._sweeping: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """The number of open streams."""
        return len(self._open)

    def limit(self, most: int) -> None:
        """Lowers the number of streams that may be open at once."""
        self._most = min(self._most, most)
        self.shares.resize(self._most)

    async def answer(
        self,
        request: web.Request,
        send: Callable[[EventStream], Awaitable[None]],
        *,
        is_operator: bool = False,
    ) -> web.StreamResponse:
        """Answers a request with a stream.

        Args:
            send: sends the events. It is cancelled when the client closes the connection or is no longer admitted, and
                when the instance stops.
            is_operator: whether it may use the places that are reserved for operators.

        Raises:
            Problem: 503, too many streams are open.
        """
        client = asker_of(request).name
        if not self.shares.take(client, is_operator=is_operator):
            with ending_with(request):
                await self.shares.wait(client, seconds_in_line())
        try:
            return await self._answer(request, send)
        finally:
            self.shares.release(client)

    async def _answer(self, request: web.Request, send: Callable[[EventStream], Awaitable[None]]) -> web.StreamResponse:
        headers = {hdrs.CONTENT_TYPE: api.EVENT_STREAM, **_UNBUFFERED, **ON_EVERY_ANSWER}
        response = web.StreamResponse(headers=headers)
        # The connection has given up its slot, so that it must not take further requests.
        response.force_close()
        if request.method == hdrs.METH_HEAD:
            return response
        deadline = asyncio.timeout(None)
        stream = EventStream(request, response, deadline)
        self._add(stream)
        try:
            with suppress(TimeoutError, ConnectionError), ending_with(request):
                async with deadline:
                    await response.prepare(request)
                    if isinstance(request.protocol, AheadOfAiohttp):
                        request.protocol.becomes_stream()
                    await send(stream)
        except Exception:
            if not response.prepared:
                raise
            # No other answer can follow. A model's own view may raise anything.
            log.exception("a stream failed", path=request.path)
        else:
            if stream.refusal is not None:
                with suppress(ConnectionError):
                    await stream.send(rendered("end", compact_json({"detail": stream.refusal.detail})))
        finally:
            self._open.discard(stream)
        return response

    def close(self) -> None:
        """Ends all streams, and opens no more."""
        self.limit(0)
        for stream in self._open:
            stream.end()

    def _add(self, stream: EventStream) -> None:
        self._open.add(stream)
        if self._sweeping is None:
            self._sweeping = asyncio.get_running_loop().call_later(_SWEEP_SECONDS, self._sweep)

    def _sweep(self) -> None:
        self._sweeping = None
        if not self._open:
            return
        loop = asyncio.get_running_loop()
        self._sweeping = loop.call_later(_SWEEP_SECONDS, self._sweep)
        for stream in self._open:
            stream.sweep(loop.time())
