"""The connections of a server, and what bounds them.

aiohttp reads requests, and answers those that nobody answers ahead of it. Around it are bounds on what costs before
there is a request or after it. Everything runs on the event loop's thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import structlog
from aiohttp import http_exceptions, web

from balance_service.http.server.ahead_of_aiohttp import AheadOfAiohttp
from balance_service.http.server.limits import MAX_FIELD_BYTES, MAX_HEADERS, MAX_LINE_BYTES, url_too_long
from balance_service.http.server.problems import Problem

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable

    from balance_service.http.server.ahead_of_aiohttp import AnswersAhead
    from balance_service.http.server.limits import Limits

log = structlog.get_logger(__name__)

_SWEEP_SECONDS = 0.5


class Connection(AheadOfAiohttp):
    """A connection that is closed when its client sends a request too slowly, or none, or does not read the answer."""

    def __init__(
        self,
        server: web.Server,
        connections: Connections,
        ahead: AnswersAhead | None = None,
        **bounds: Any,
    ) -> None:
        """Args:
        ahead: what answers before aiohttp; without it, aiohttp answers everything.
        """
        super().__init__(server, ahead, **bounds)
        self._connections = connections
        self._requests = 0
        self._active_at = connections.now()
        self._head_since: float | None = None
        self._unsent_since: float | None = None
        self._is_refused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Close it at once if there are too many."""
        if self._connections.take(self):
            super().connection_made(transport)
        else:
            self._is_refused = True
            transport.abort()  # type: ignore[attr-defined]  # a server's transports are asyncio.Transport

    def connection_lost(self, exc: BaseException | None) -> None:
        """Make room."""
        self._connections.release(self)
        if not self._is_refused:
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Note when a request begins to arrive. What arrives while one is under way is most often its body."""
        if data:  # otherwise aiohttp asks itself to go on
            self._active_at = self._connections.now()
            if self._head_since is None and not self._requests:
                self._head_since = self._active_at
        super().data_received(data)

    def request_answered(self) -> None:
        """A request was read and answered at once."""
        self._head_since = None

    def request_began(self) -> None:
        """A request's head is complete."""
        self._requests += 1
        self._head_since = None

    def request_ended(self) -> None:
        """Its answer is about to be sent."""
        self._requests -= 1
        self._active_at = self._connections.now()

    def sweep(self, now: float, limits: Limits) -> None:
        """Close the connection if its time is up."""
        transport = self.transport
        if transport is None:
            return
        if not transport.get_write_buffer_size():
            self._unsent_since = None
        elif self._unsent_since is None:
            self._unsent_since = now
        elif now - self._unsent_since > limits.unsent_seconds:
            transport.abort()
            return
        if not self._requests and self._head_since is None and now - self._active_at > limits.idle_seconds:
            self._end(transport)
        elif self._head_since is not None and now - self._head_since > limits.head_seconds:
            transport.write(_HEAD_TOO_SLOW)
            self._end(transport)

    def _end(self, transport: asyncio.Transport) -> None:
        self.force_close()
        # asyncio would wait until the client has read it all, and no sweep comes here again.
        if transport.get_write_buffer_size():
            transport.abort()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what is no HTTP as a problem: it is the client's fault, and nothing for the log."""
        if not isinstance(exc, http_exceptions.HttpProcessingError):
            return super().handle_error(request, status, exc, message)
        log.debug("not HTTP", reason=exc.message)
        answer = _problem_of(exc).answer().response()
        answer.force_close()
        return answer


class Connections:
    """All open connections of one server. Belongs to the event loop."""

    def __init__(self, limits: Limits, loop: asyncio.AbstractEventLoop) -> None:
        self._limits = limits
        self._max = limits.max_connections
        self._open: set[Connection] = set()
        self._loop = loop
        self.now = loop.time
        self._sweeping = loop.call_later(_SWEEP_SECONDS, self._sweep)

    def take(self, connection: Connection) -> bool:
        """Whether there is room for one more; it has it then."""
        if len(self._open) >= self._max:
            return False
        self._open.add(connection)
        return True

    def release(self, connection: Connection) -> None:
        """It is closed."""
        self._open.discard(connection)

    def close(self) -> None:
        """Look after them no longer; the server closes them."""
        self._sweeping.cancel()

    def _sweep(self) -> None:
        self._sweeping = self._loop.call_later(_SWEEP_SECONDS, self._sweep)
        now = self.now()
        for connection in list(self._open):
            connection.sweep(now, self._limits)


def watched(
    handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
) -> Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]:
    """A server's handler that tells a connection of its requests. Outermost: it sees the answer, whatever it is."""

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        if not isinstance(connection, Connection):
            return await handler(request)
        connection.request_began()
        try:
            answer = await handler(request)
        finally:
            connection.request_ended()
        # Whatever of the body is still to come would be taken for a slow request.
        if request.can_read_body:
            answer.force_close()
        return answer

    return handle


def _problem_of(error: http_exceptions.HttpProcessingError) -> Problem:
    if isinstance(error, http_exceptions.LineTooLong):
        if error.args[1] == MAX_LINE_BYTES:
            return url_too_long()
        return Problem(431, f"a header has more than {MAX_FIELD_BYTES} bytes")
    if error.message.startswith("Too many headers"):
        return Problem(431, f"there are more than {MAX_HEADERS} headers")
    what = " ".join(error.message.split())[:200]
    return Problem(400, f"this is not an HTTP request that can be understood: {what}")


_HEAD_TOO_SLOW = Problem(408, "the request's head did not arrive in time").answer().raw(b"Connection: close\r\n")
