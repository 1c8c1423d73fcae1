"""Bounds on the cost of a client: bytes, time, concurrent requests, connections.

aiohttp bounds the lines of a request. The middlewares here bound a request that has been read. `Connection` bounds the
time before a request and after its answer: it closes a connection whose client sends too slowly, is idle, or does not
read. Everything here runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import random
import resource
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import structlog
from aiohttp import hdrs, http_exceptions, web

from balance_service.http.answer import Problem, unavailable
from balance_service.http.peers.trust import FORWARDED_HEADER
from balance_service.http.server.ahead_of_aiohttp import AheadOfAiohttp, body_of, loses_what_follows
from balance_service.http.shares import Shares, asker_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from aiohttp.typedefs import Middleware

    from balance_service.http.route import RouteTable
    from balance_service.http.server.ahead_of_aiohttp import AnswerAhead
    from balance_service.http.server.listening import AcceptedSocket, Slots

log = structlog.get_logger(__name__)

T = TypeVar("T")
MAX_BODY_BYTES = 16 << 10
MAX_URL_BYTES = 4 << 10
MAX_HEADERS_BYTES = 16 << 10
MAX_HEADERS = 64
# They differ so that an error tells which of them was exceeded.
MAX_LINE_BYTES = 8 << 10
MAX_FIELD_BYTES = 8_000
_FIELDS_THAT_FIT = MAX_HEADERS_BYTES // MAX_FIELD_BYTES
_LEAST_IN_LINE_SECONDS, _MOST_IN_LINE_SECONDS = 0.5, 1.5
_CONTINUE = "100-continue"
_IDENTITY = "identity"
_LINGERING_SECONDS = 2.0
# `Connection` enforces the idle time-out itself: aiohttp does not see all answers.
_NEVER_SECONDS = 10 * 365 * 86_400.0
_END_OF_HEAD = b"\r\n\r\n"
# The end of the latest data, long enough to tell whether a request ends with it.
_LAST_BYTES = 64


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one HTTP server."""

    max_concurrent_requests: int = 1_000
    request_seconds: float = 10.0
    """From a complete request to its answer: longer than the deadline of any query or command."""
    head_seconds: float = 8.0
    """From the first byte of a request to the end of its headers; for the first request, from accept."""
    body_seconds: float = 5.0
    """From the headers of a request to the end of its body."""
    unsent_seconds: float = 10.0
    """How long a client may leave an answer unread. asyncio hides what it has encrypted: over TLS, the kernel closes
    an open connection after UNACKNOWLEDGED_SECONDS."""
    # Longer than load balancers keep theirs, so that they close first and no request meets a closing connection.
    idle_seconds: float = 75.0
    """How long a connection without requests stays open."""

    @property
    def max_connections(self) -> int:
        """Enough for all requests and some idle connections, but at most half of the process's open files."""
        wanted = 4 * self.max_concurrent_requests + 100
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return wanted if files == resource.RLIM_INFINITY else min(wanted, max(files // 2, 1))

    @property
    def of_connections(self) -> dict[str, Any]:
        """The arguments of aiohttp's request handler."""
        return {
            "max_line_size": MAX_LINE_BYTES,
            "max_field_size": MAX_FIELD_BYTES,
            "max_headers": MAX_HEADERS,
            "keepalive_timeout": _NEVER_SECONDS,
            "lingering_time": _LINGERING_SECONDS,
            # Decompression could inflate a small body before the client is authenticated.
            "auto_decompress": False,
        }


def seconds_in_line() -> float:
    """How long a request waits for a place. A client that repeats what is refused at once costs more than it does.

    By chance, so that a thousand are not refused at one moment.
    """
    return random.uniform(_LEAST_IN_LINE_SECONDS, _MOST_IN_LINE_SECONDS)  # noqa: S311  (no secret)


class UnderWay:
    """Bounds the number and the duration of the requests in progress."""

    def __init__(self, limits: Limits, on_refused: Callable[[], None] = lambda: None) -> None:
        """Args:
        on_refused: called for each refused request, which no other metric counts.
        """
        self._on_refused = on_refused
        self._seconds = limits.request_seconds
        most, setting = limits.max_concurrent_requests, "BALANCE_MAX_CONCURRENT_REQUESTS"
        self._requests = Shares("requests", most, has_reserve=True, setting=setting)
        # Queries that wait for a position use nothing but memory, for seconds.
        self._waiting = Shares("requests that wait for a position", most, setting=setting)

    async def run(
        self, client: str, answer: Callable[[], Awaitable[T]], *, waits: bool = False, is_operator: bool = False
    ) -> T:
        """Awaits an answer within the limits.

        Args:
            client: whose share it uses.
            waits: whether the answer may wait for a position.
            is_operator: whether it may use the places that are reserved for operators.

        Raises:
            Problem: 503, too many requests are in progress, or this one took too long.
        """
        shares = self._waiting if waits else self._requests
        if not shares.take(client, is_operator=is_operator):
            try:
                await shares.wait(client, seconds_in_line())
            except Problem:
                self._on_refused()
                raise
        try:
            async with asyncio.timeout(self._seconds) as deadline:
                return await answer()
        except TimeoutError:
            if not deadline.expired():
                raise
            raise unavailable(
                f"the request took more than {self._seconds:g} s; if it was a command, the event may have been "
                "written, and an operator's request may still be carried out: look before you send it again"
            ) from None
        finally:
            shares.release(client)


def limited(limits: Limits, under_way: UnderWay, routes: RouteTable) -> Middleware:
    """The middleware that refuses requests beyond the limits. It must run inside the one that answers problems."""

    @web.middleware
    async def limit(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        _check_head(request)
        route = routes.of(request)
        if route is not None and route.is_never_refused:
            return await handler(request)
        # Before the request counts as in progress, so that a slow client does not block others.
        if request.body_exists:
            await _read_body(request, limits.body_seconds)
        if route is not None and route.is_stream(request):
            return await handler(request)
        waits, is_operator = (False, False) if route is None else (route.waits(request), route.is_for_operators)
        client = asker_of(request).name
        return await under_way.run(client, lambda: handler(request), waits=waits, is_operator=is_operator)

    return limit


def reserved(routes: RouteTable, *, peers_are_proven: bool) -> Middleware:
    """The middleware that serves only probes and proven peers on connections in reserved slots.

    It must run inside the one that checks the marks of peers.
    """

    @web.middleware
    async def serve_reserved(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        connection = request.protocol
        if isinstance(connection, Connection) and connection.slot.is_reserved:
            route = routes.of(request)
            is_probe = route is not None and route.is_probe
            if not is_probe and not (peers_are_proven and FORWARDED_HEADER in request.headers):
                problem = unavailable("all connections are busy here; this request was not processed")
                response = problem.answer().response()
                response.force_close()
                return response
        return await handler(request)

    return serve_reserved


def without_expectations(
    handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
) -> Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]:
    """Wraps a server's handler to refuse any expectation other than `100-continue`.

    aiohttp reads the header Expect before any middleware, and fails if it is not UTF-8.
    """

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        if request.headers.get("Expect", _CONTINUE).lower() != _CONTINUE:
            return Problem(417, f"the header Expect supports only {_CONTINUE}").answer().response()
        return await handler(request)

    return handle


def headers_fit(raw_headers: Sequence[tuple[bytes, bytes]]) -> bool:
    """Whether the headers of a request are within their bound."""
    # Each field has its own bound, so that a few fields, such as a peer's, always fit.
    if len(raw_headers) <= _FIELDS_THAT_FIT:
        return True
    return sum([len(name) + len(value) for name, value in raw_headers]) <= MAX_HEADERS_BYTES


def _check_head(request: web.Request) -> None:
    if len(request.raw_path) > MAX_URL_BYTES:
        raise _url_too_long()
    if not headers_fit(request.raw_headers):
        raise Problem(431, f"the headers have more than {MAX_HEADERS_BYTES} bytes")
    if request.headers.get(hdrs.CONTENT_ENCODING, _IDENTITY).lower() != _IDENTITY:
        raise Problem(415, "no route takes a compressed body; send it without Content-Encoding")


def _url_too_long() -> Problem:
    return Problem(414, f"the URL has more than {MAX_URL_BYTES} characters")


async def _read_body(request: web.Request, seconds: float) -> None:
    """Reads the body into memory, where handlers find it."""
    try:
        async with asyncio.timeout(seconds):
            await request.read()
    except TimeoutError:
        raise Problem(408, f"the body did not arrive within {seconds:g} s") from None
    except (web.RequestPayloadError, OSError):  # of TLS too
        raise Problem(400, "the body ended early, or is not encoded as its headers say") from None


class Connection(AheadOfAiohttp):
    """One connection of the server, in its slot."""

    def __init__(
        self,
        server: web.Server,
        accepted: AcceptedSocket,
        slots: Slots,
        ahead: AnswerAhead | None = None,
        **bounds: Any,
    ) -> None:
        """Args:
        ahead: see `AheadOfAiohttp`.
        bounds: `Limits.of_connections`.
        """
        self.slot = accepted.slot
        # In a reserved slot, the middleware must check every request.
        super().__init__(server, None if self.slot.is_reserved else ahead, **bounds)
        self._accepted = accepted
        self._slots = slots
        self._requests = 0
        # The time limit of the first head begins at accept.
        self._head_since: float | None = self.slot.idle_since
        self._unsent_since: float | None = None
        self._last = b""
        self._heads = 0
        # aiohttp drops its own reference on closing, when data may still be unsent.
        self._wire: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._wire = self.transport
        self.slot.close_now = self.reset

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        # They refer to this connection: with its buffers, it would stay until the garbage collector runs.
        self._wire = None
        self.slot.close_now = self._accepted.reset

    def data_received(self, data: bytes) -> None:
        """Records when a request begins to arrive. Data during a request is usually its body."""
        if data:  # aiohttp passes b"" to make itself continue
            self._last = data[-_LAST_BYTES:]
            self._heads = data.count(_END_OF_HEAD)
            if self._head_since is None and not self._requests:
                self._head_since = self._slots.now()
        super().data_received(data)

    def becomes_stream(self) -> None:
        super().becomes_stream()
        # Streams have a limit of their own.
        self._slots.release(self.slot)

    async def drained(self) -> None:
        await super().drained()
        # The next event has its own time limit, even if no sweep sees the buffer empty.
        self._unsent_since = None

    def belongs_to(self, client: str) -> None:
        self._slots.attribute(self.slot, client)

    def request_answered(self) -> None:
        self._note_end(b"")

    def request_began(self) -> None:
        self._requests += 1
        self._head_since = self.slot.idle_since = None

    def request_ended(self, body: bytes = b"") -> None:
        self._requests -= 1
        self._note_end(body)

    def may_have_lost(self, request: web.BaseRequest) -> bool:
        """Whether aiohttp's parser has lost data that the client sent after this request."""
        return loses_what_follows(request) and (self._heads > 1 or self._is_followed(body_of(request)))

    def reset(self) -> None:
        """Closes the connection at once; discards data that the client has not read."""
        wire = self._wire
        if wire is not None:
            self._accepted.reset()
            if wire.is_closing():
                # A TLS transport that was closed twice does nothing on `abort`.
                with suppress(OSError):
                    self._accepted.shutdown(socket.SHUT_RDWR)
            wire.abort()

    def sweep(self, now: float, limits: Limits) -> None:
        """Closes the connection if it exceeds a time limit."""
        wire = self._wire
        if wire is None:
            return
        # One that closes has unsent bytes, or waits for the client; a TLS transport no longer tells how many.
        if not wire.is_closing() and not wire.get_write_buffer_size():
            self._unsent_since = None
        elif self._unsent_since is None:
            self._unsent_since = now
        elif now - self._unsent_since > limits.unsent_seconds:
            self.reset()
            return
        idle_since = self.slot.idle_since
        if self._head_since is not None and now - self._head_since > limits.head_seconds:
            # Without any data, the client may have opened the connection in advance, as browsers do.
            if self._last and not wire.is_closing():
                wire.write(_HEAD_TOO_SLOW)
            self.force_close()
        elif self._head_since is None and idle_since is not None and now - idle_since > limits.idle_seconds:
            self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answers malformed HTTP with a problem, and does not log it as an error of the service."""
        if not isinstance(exc, http_exceptions.HttpProcessingError):
            return super().handle_error(request, status, exc, message)
        log.debug("not HTTP", reason=exc.message)
        answer = _problem_of(exc).answer().response()
        answer.force_close()
        return answer

    def _note_end(self, body: bytes) -> None:
        now = self._slots.now()
        self.slot.idle_since = now
        # A head that has begun after the request may bring no more data, so its time limit begins now.
        self._head_since = now if self._is_followed(body) else None

    def _is_followed(self, body: bytes) -> bool:
        """Whether the latest data extends beyond the request with this body."""
        if not body:
            return not self._last.endswith(_END_OF_HEAD)
        # A chunked body ends as a head does.
        last = body[-_LAST_BYTES:]
        return not (self._last.endswith((last, _END_OF_HEAD)) or last.endswith(self._last))


def watched(
    handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
) -> Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]:
    """Wraps a server's handler to notify each connection of its requests. It must be outermost, to see every answer."""

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        if not isinstance(connection, Connection):
            return await handler(request)
        connection.request_began()
        try:
            answer = await handler(request)
        finally:
            connection.request_ended(body_of(request))
        # Otherwise the rest of the body would count as a slow request.
        if request.can_read_body or connection.may_have_lost(request):
            answer.force_close()
        return answer

    return handle


def _problem_of(error: http_exceptions.HttpProcessingError) -> Problem:
    if isinstance(error, http_exceptions.LineTooLong):
        if error.args[1] == MAX_LINE_BYTES:
            return _url_too_long()
        return Problem(431, f"a header has more than {MAX_FIELD_BYTES} bytes")
    if error.message.startswith("Too many headers"):
        return Problem(431, f"there are more than {MAX_HEADERS} headers")
    reason = " ".join(error.message.split())[:200]
    return Problem(400, f"this is not an HTTP request: {reason}")


_HEAD_TOO_SLOW = Problem(408, "the request's head did not arrive in time").answer().raw(b"Connection: close\r\n")
