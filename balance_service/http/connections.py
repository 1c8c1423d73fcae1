"""The connections of a server: what bounds them, and the plain queries that they answer themselves.

aiohttp reads and answers requests. Around it are bounds on what costs before there is a request or after it. Before it
is a shorter way for plain queries, open only while aiohttp holds nothing of the connection: no byte that it has not
taken for a request, no request that it has not answered. What comes while a plain query waits for a peer's answer is
held, unread, until that is sent. Everything runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

import structlog
from aiohttp import http_exceptions, web

from balance_service.http.limits import MAX_FIELD_BYTES, MAX_HEADERS, MAX_LINE_BYTES, url_too_long
from balance_service.http.plain import whole_request
from balance_service.http.problems import Problem, response

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from balance_service.http.limits import Limits
    from balance_service.http.plain import WholeRequest

log = structlog.get_logger(__name__)

_SWEEP_SECONDS = 0.5


class AnswersPlainQueries(Protocol):
    """Whoever answers plain queries, as they go over the wire."""

    def at_once(self, request: WholeRequest) -> bytes | None:
        """The answer; None if it is not known here and now."""

    def later(self, request: WholeRequest) -> Coroutine[Any, Any, bytes] | None:
        """What will have the answer, which may be an error; None if aiohttp is to answer."""


class Connection(web.RequestHandler):
    """A connection that is closed when its client sends a request too slowly, or none, or does not read the answer."""

    def __init__(
        self,
        server: web.Server,
        connections: Connections,
        plain: AnswersPlainQueries | None = None,
        **bounds: Any,
    ) -> None:
        """Args:
        plain: answers plain queries; without it, aiohttp answers everything.
        """
        super().__init__(server, **bounds)
        self._connections = connections
        self._plain = plain
        self._requests = 0
        self._left_to_aiohttp = 0
        self._answering: asyncio.Task[None] | None = None
        self._held: list[bytes] = []
        self._is_to_close = False
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
        """Answer a plain query. Otherwise note when a request begins to arrive.

        What arrives while one is under way is most often its body.
        """
        if not data:  # aiohttp asks itself to go on
            super().data_received(data)
            return
        self._active_at = self._connections.now()
        if self._answering is not None:
            self._held.append(data)
            if self.transport is not None:
                self.transport.pause_reading()
            return
        if self._plain is not None and self._answered(self._plain, data):
            return
        if self._head_since is None and not self._requests:
            self._head_since = self._active_at
        super().data_received(data)

    def request_began(self) -> None:
        """A request's head is complete."""
        self._requests += 1
        self._head_since = None

    def request_ended(self) -> None:
        """Its answer is about to be sent."""
        self._requests -= 1
        self._active_at = self._connections.now()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send the answer, after which aiohttp may hold nothing of this connection."""
        finished = await super().finish_response(request, resp, start_time)
        self._left_to_aiohttp -= 1
        return finished

    def close(self) -> None:
        """Close the connection, after the answer that is under way."""
        if self._answering is None:
            super().close()
        self._is_to_close = True

    async def shutdown(self, timeout: float | None = 15.0) -> None:
        """Let the answer that is under way be sent, within the bound, and close the connection."""
        if self._answering is not None:
            await asyncio.wait([self._answering], timeout=timeout)
        if self._answering is not None:
            self._answering.cancel()
        await super().shutdown(timeout)

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
            self.force_close()
        elif self._head_since is not None and now - self._head_since > limits.head_seconds:
            transport.write(_HEAD_TOO_SLOW)
            self.force_close()

    def _answered(self, plain: AnswersPlainQueries, data: bytes) -> bool:
        """Whether these bytes are one plain query, which is answered then, or will be."""
        request = whole_request(data)
        if request is None:
            # They may end within a request: where the next one begins, aiohttp alone knows from now on.
            self._plain = None
            return False
        transport = self.transport
        if self._left_to_aiohttp == 0 and transport is not None and not transport.get_write_buffer_size():
            answer = plain.at_once(request)
            if answer is not None:
                transport.write(answer)
                return True
            answering = plain.later(request)
            if answering is not None:
                self._answering = self._loop.create_task(self._answer(answering))
                return True
        self._left_to_aiohttp += 1
        return False

    async def _answer(self, answering: Coroutine[Any, Any, bytes]) -> None:
        """Send the answer when it is there, and go on with what has come meanwhile."""
        self.request_began()
        try:
            answer = await answering
        finally:
            self.request_ended()
            self._answering = None
        transport = self.transport
        if transport is None:  # the client has not waited for it
            return
        transport.write(answer)
        if self._is_to_close:
            self.close()
        elif self._held:
            held, self._held = b"".join(self._held), []
            transport.resume_reading()
            self.data_received(held)

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
        answer = response(_problem_of(exc))
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


@web.middleware
async def watched(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """The middleware that tells a connection of its requests. Outermost: it sees the answer, whatever it is."""
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


def _problem_of(error: http_exceptions.HttpProcessingError) -> Problem:
    if isinstance(error, http_exceptions.LineTooLong):
        if error.args[1] == MAX_LINE_BYTES:
            return url_too_long()
        return Problem(431, f"a header has more than {MAX_FIELD_BYTES} bytes")
    if error.message.startswith("Too many headers"):
        return Problem(431, f"there are more than {MAX_HEADERS} headers")
    what = " ".join(error.message.split())[:200]
    return Problem(400, f"this is not an HTTP request that can be understood: {what}")


def _raw(problem: Problem) -> bytes:
    """A problem as it goes over the wire where there is no request to answer."""
    answer = response(problem)
    body = bytes(answer.body)  # type: ignore[arg-type]  # text given is bytes kept
    head = (
        f"HTTP/1.1 {problem.status} {answer.reason}\r\nContent-Type: {answer.content_type}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


_HEAD_TOO_SLOW = _raw(Problem(408, "the request's head did not arrive in time"))
