"""A connection of the server: it is closed when its client sends too slowly, asks nothing, or does not read.

aiohttp reads requests, and answers those that are not answered ahead of it. Here are the bounds on what costs before
there is a request or after it. Everything runs on the event loop's thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import structlog
from aiohttp import http_exceptions, web

from balance_service.http.answer import Problem, unavailable
from balance_service.http.peers.proxy import FORWARDED_HEADER
from balance_service.http.server.ahead_of_aiohttp import AheadOfAiohttp, body_of, loses_what_follows
from balance_service.http.server.limits import MAX_FIELD_BYTES, MAX_HEADERS, MAX_LINE_BYTES, url_too_long

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable

    from aiohttp.typedefs import Middleware

    from balance_service.http.api.route import Routes
    from balance_service.http.server.ahead_of_aiohttp import AnswersAhead
    from balance_service.http.server.limits import Limits
    from balance_service.http.server.listening import AcceptedSocket
    from balance_service.http.server.places import Places

log = structlog.get_logger(__name__)

_END_OF_HEAD = b"\r\n\r\n"
# Of what came last, as much as tells whether a request ends with it.
_LAST_BYTES = 64


class Connection(AheadOfAiohttp):
    """One connection, which holds a place from accept on."""

    def __init__(
        self,
        server: web.Server,
        accepted: AcceptedSocket,
        places: Places,
        ahead: AnswersAhead | None = None,
        **bounds: Any,
    ) -> None:
        """Args:
        ahead: what answers before aiohttp; without it, aiohttp answers everything.
        """
        self.place = accepted.place
        # In a reserved place, every request has to be looked at by the middleware.
        super().__init__(server, None if self.place.is_reserved else ahead, **bounds)
        self._accepted = accepted
        self._places = places
        self._requests = 0
        # The time of the first head counts from accept on.
        self._head_since: float | None = self.place.idle_since
        self._unsent_since: float | None = None
        self._last = b""
        self._heads = 0
        # aiohttp forgets its own where it closes it, though not all may be sent.
        self._wire: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is open, its TLS handshake done."""
        super().connection_made(transport)
        self._wire = self.transport
        self.place.cut = self.reset

    def data_received(self, data: bytes) -> None:
        """Note when a request begins to arrive. Data that arrives during a request is most often its body."""
        if data:  # otherwise aiohttp asks itself to go on
            self._last = data[-_LAST_BYTES:]
            self._heads = data.count(_END_OF_HEAD)
            if self._head_since is None and not self._requests:
                self._head_since = self._places.now()
        super().data_received(data)

    def belongs_to(self, client: str) -> None:
        """Count the connection for the holder of a token."""
        self._places.attribute(self.place, client)

    def request_answered(self) -> None:
        """A request without a body was read and answered at once."""
        self._note_end(b"")

    def request_began(self) -> None:
        """A request's head is complete."""
        self._requests += 1
        self._head_since = self.place.idle_since = None

    def request_ended(self, body: bytes = b"") -> None:
        """Its answer is about to be sent."""
        self._requests -= 1
        self._note_end(body)

    def may_have_lost(self, request: web.BaseRequest) -> bool:
        """Whether the client has sent something behind this request that aiohttp's parser loses."""
        return loses_what_follows(request) and (self._heads > 1 or self._is_followed(body_of(request)))

    def reset(self) -> None:
        """Close the connection at once; what the client has not read is thrown away."""
        wire = self._wire
        if wire is not None:
            self._accepted.reset()
            wire.abort()

    def sweep(self, now: float, limits: Limits) -> None:
        """Close the connection if its time is up."""
        wire = self._wire
        if wire is None:
            return
        if not wire.get_write_buffer_size():
            self._unsent_since = None
        elif self._unsent_since is None:
            self._unsent_since = now
        elif now - self._unsent_since > limits.unsent_seconds:
            self.reset()
            return
        idle_since = self.place.idle_since
        if self._head_since is not None and now - self._head_since > limits.head_seconds:
            # One that has sent nothing may have been opened in advance, as browsers do.
            if self._last:
                wire.write(_HEAD_TOO_SLOW)
            self.force_close()
        elif self._head_since is None and idle_since is not None and now - idle_since > limits.idle_seconds:
            self.force_close()

    def _note_end(self, body: bytes) -> None:
        now = self._places.now()
        self.place.idle_since = now
        # Of a head that begins behind a request nothing else is noticed before it goes on.
        self._head_since = now if self._is_followed(body) else None

    def _is_followed(self, body: bytes) -> bool:
        """Whether a request with this body does not end with what came last."""
        if not body:
            return not self._last.endswith(_END_OF_HEAD)
        # In chunks, a body ends as a head does.
        last = body[-_LAST_BYTES:]
        return not (self._last.endswith((last, _END_OF_HEAD)) or last.endswith(self._last))

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


def watched(
    handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
) -> Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]:
    """A server's handler that tells a connection of its requests. Outermost, so that it sees every answer."""

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        if not isinstance(connection, Connection):
            return await handler(request)
        connection.request_began()
        try:
            answer = await handler(request)
        finally:
            connection.request_ended(body_of(request))
        # The rest of the body would be taken for a slow request.
        if request.can_read_body or connection.may_have_lost(request):
            answer.force_close()
        return answer

    return handle


def reserved(routes: Routes, *, peers_are_proven: bool) -> Middleware:
    """The middleware that serves probes and proven peers alone on connections in reserved places.

    Belongs within the one that checks the marks of peers.
    """

    @web.middleware
    async def serve_reserved(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        connection = request.protocol
        if isinstance(connection, Connection) and connection.place.is_reserved:
            route = routes.of(request)
            is_probe = route is not None and route.is_open
            if not is_probe and not (peers_are_proven and FORWARDED_HEADER in request.headers):
                answer = unavailable("all connections are busy here; this request was certainly not begun").answer()
                response = answer.response()
                response.force_close()
                return response
        return await handler(request)

    return serve_reserved


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
