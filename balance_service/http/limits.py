"""What a client may cost: bytes, time, requests under way, connections.

aiohttp bounds lines and idle connections. The rest is here, in two places: a middleware, for what is known of a
request, and the connections themselves, for what costs before there is a request or after it. Everything runs on the
event loop's thread.
"""

from __future__ import annotations

import asyncio
import resource
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog
from aiohttp import http_exceptions, web

from balance_service.http.problems import Problem, response, unavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aiohttp.typedefs import Middleware

log = structlog.get_logger(__name__)

# Probes must be answered above all when there is too much to do.
EXEMPT_PATHS = frozenset({"/health/live", "/health/ready", "/metrics"})
MAX_BODY_BYTES = 16 << 10
MAX_URL_BYTES = 4 << 10
MAX_HEADERS_BYTES = 16 << 10
MAX_HEADERS = 64
# Two figures, so that it can be told which of them was exceeded.
_MAX_LINE_BYTES = 8 << 10
_MAX_FIELD_BYTES = 8_000
_CONTINUE = "100-continue"
_LINGERING_SECONDS = 2.0
# Longer than load balancers keep theirs, so that these close first and no request meets a closing connection.
_IDLE_SECONDS = 75.0
_SWEEP_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one HTTP server."""

    max_concurrent_requests: int = 1_000
    request_seconds: float = 10.0
    """From a request read in full to its answer: above the deadlines of those who answer."""
    head_seconds: float = 8.0
    """From the first byte of a request to the last of its headers."""
    body_seconds: float = 5.0
    """From the headers of a request to the end of its body."""
    unsent_seconds: float = 10.0
    """How long a client may leave an answer unread."""

    @property
    def max_connections(self) -> int:
        """Open connections: what the requests need and idle ones besides, but never most of the files we may open."""
        wanted = 4 * self.max_concurrent_requests + 100
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return wanted if files == resource.RLIM_INFINITY else min(wanted, max(files // 2, 1))

    @property
    def of_connections(self) -> dict[str, Any]:
        """The bounds that aiohttp sees to, as arguments of its request handler."""
        return {
            "max_line_size": _MAX_LINE_BYTES,
            "max_field_size": _MAX_FIELD_BYTES,
            "max_headers": MAX_HEADERS,
            "keepalive_timeout": _IDLE_SECONDS,
            "lingering_time": _LINGERING_SECONDS,
        }


class Connection(web.RequestHandler):
    """A connection that is closed when its client sends a request too slowly or does not read the answer."""

    def __init__(self, server: web.Server, connections: Connections, **bounds: Any) -> None:
        super().__init__(server, **bounds)
        self._connections = connections
        self._requests = 0
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
        if data and self._head_since is None and not self._requests:
            self._head_since = self._connections.now()
        super().data_received(data)

    def request_began(self) -> None:
        """A request's head is complete."""
        self._requests += 1
        self._head_since = None

    def request_ended(self) -> None:
        """Its answer is about to be sent."""
        self._requests -= 1

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
        if self._head_since is not None and now - self._head_since > limits.head_seconds:
            transport.write(_HEAD_TOO_SLOW)
            self.force_close()

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


def limited(limits: Limits) -> Middleware:
    """The middleware that refuses what is too big, too slow or too much. Raises problems: it belongs within them."""
    under_way = 0

    @web.middleware
    async def limit(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        nonlocal under_way
        _check_sizes(request)
        if request.path in EXEMPT_PATHS:
            return await handler(request)
        # Before it counts as under way: a slow client takes nobody's place.
        await _read_body(request, limits.body_seconds)
        if under_way >= limits.max_concurrent_requests:
            raise unavailable(
                f"{limits.max_concurrent_requests} requests are under way here; this one was certainly not begun"
            )
        under_way += 1
        try:
            async with asyncio.timeout(limits.request_seconds) as deadline:
                return await handler(request)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise unavailable(
                f"the request took more than {limits.request_seconds:g} s; if it was a command, the event may have "
                "been written"
            ) from None
        finally:
            under_way -= 1

    return limit


def without_expectations(
    handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
) -> Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]:
    """A server's handler that is asked for nothing but `100-continue` in the header Expect.

    aiohttp looks at it before any middleware, and fails where it is not UTF-8.
    """

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        if request.headers.get("Expect", _CONTINUE).lower() != _CONTINUE:
            return response(Problem(417, f"of the header Expect only {_CONTINUE} is understood"))
        return await handler(request)

    return handle


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


def _check_sizes(request: web.Request) -> None:
    if len(request.raw_path) > MAX_URL_BYTES:
        raise _url_too_long()
    if sum(len(name) + len(value) for name, value in request.raw_headers) > MAX_HEADERS_BYTES:
        raise Problem(431, f"the headers have more than {MAX_HEADERS_BYTES} bytes")


def _url_too_long() -> Problem:
    return Problem(414, f"the URL has more than {MAX_URL_BYTES} characters")


async def _read_body(request: web.Request, seconds: float) -> None:
    """Have the body in memory, where a handler finds it."""
    try:
        async with asyncio.timeout(seconds):
            await request.read()
    except TimeoutError:
        raise Problem(408, f"the body did not arrive within {seconds:g} s") from None
    except (web.RequestPayloadError, ConnectionResetError):
        raise Problem(400, "the body ended early, or is not encoded as its headers say") from None


def _problem_of(error: http_exceptions.HttpProcessingError) -> Problem:
    if isinstance(error, http_exceptions.LineTooLong):
        if error.args[1] == _MAX_LINE_BYTES:
            return _url_too_long()
        return Problem(431, f"a header has more than {_MAX_FIELD_BYTES} bytes")
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
