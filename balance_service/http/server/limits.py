"""What a client may cost: bytes, time, requests under way, connections.

aiohttp bounds lines. What is known of a request is bounded by the middleware here, what costs before there is a request
or after it by `connections`. Everything runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import resource
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from aiohttp import hdrs, web

from balance_service.http.answer import Problem, unavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from aiohttp.typedefs import Middleware

    from balance_service.http.api.route import Routes

T = TypeVar("T")
MAX_BODY_BYTES = 16 << 10
MAX_URL_BYTES = 4 << 10
MAX_HEADERS_BYTES = 16 << 10
MAX_HEADERS = 64
# Two figures, so that it can be told which of them was exceeded.
MAX_LINE_BYTES = 8 << 10
MAX_FIELD_BYTES = 8_000
_FIELDS_THAT_FIT = MAX_HEADERS_BYTES // MAX_FIELD_BYTES
_CONTINUE = "100-continue"
_IDENTITY = "identity"
_LINGERING_SECONDS = 2.0
# `Connection` closes itself when it is idle: aiohttp does not see all that is answered.
_NEVER_SECONDS = 10 * 365 * 86_400.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one HTTP server."""

    max_concurrent_requests: int = 1_000
    request_seconds: float = 10.0
    """From a request read in full to its answer: longer than the deadline of any query or command."""
    head_seconds: float = 8.0
    """From the first byte of a request to the last of its headers; of the first request, from when it is accepted."""
    body_seconds: float = 5.0
    """From the headers of a request to the end of its body."""
    unsent_seconds: float = 10.0
    """How long a client may leave an answer unread."""
    # Longer than load balancers keep theirs, so that these close first and no request meets a closing connection.
    idle_seconds: float = 75.0
    """How long a connection is kept on which nothing is asked."""

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
            "max_line_size": MAX_LINE_BYTES,
            "max_field_size": MAX_FIELD_BYTES,
            "max_headers": MAX_HEADERS,
            "keepalive_timeout": _NEVER_SECONDS,
            "lingering_time": _LINGERING_SECONDS,
            # A small body could become a large one, before anybody knows who sent it.
            "auto_decompress": False,
        }


class UnderWay:
    """The requests that are being answered: how many at once, and for how long at most. Belongs to the event loop."""

    def __init__(self, limits: Limits, on_refused: Callable[[], None] = lambda: None) -> None:
        """Args:
        on_refused: told of each request that is not begun, which is in no other figure.
        """
        self._on_refused = on_refused
        self._most = limits.max_concurrent_requests
        self._seconds = limits.request_seconds
        self._count = 0

    async def run(self, answer: Callable[[], Awaitable[T]]) -> T:
        """Answer a request within the limits.

        Raises:
            Problem: 503, too many are under way, or it took too long.
        """
        if self._count >= self._most:
            self._on_refused()
            raise unavailable(f"{self._most} requests are under way here; this one was certainly not begun")
        self._count += 1
        try:
            async with asyncio.timeout(self._seconds) as deadline:
                return await answer()
        except TimeoutError:
            if not deadline.expired():
                raise
            raise unavailable(
                f"the request took more than {self._seconds:g} s; if it was a command, the event may have been written"
            ) from None
        finally:
            self._count -= 1


def limited(limits: Limits, under_way: UnderWay, routes: Routes) -> Middleware:
    """The middleware that refuses what is too big, too slow or too much. Raises problems: it belongs within them."""

    @web.middleware
    async def limit(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        _check_head(request)
        route = routes.of(request)
        if route is not None and route.is_never_refused:
            return await handler(request)
        # Before it counts as under way: a slow client takes nobody's place.
        if request.body_exists:
            await _read_body(request, limits.body_seconds)
        return await under_way.run(lambda: handler(request))

    return limit


def without_expectations(
    handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
) -> Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]:
    """A server's handler that is asked for nothing but `100-continue` in the header Expect.

    aiohttp looks at it before any middleware, and fails where it is not UTF-8.
    """

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        if request.headers.get("Expect", _CONTINUE).lower() != _CONTINUE:
            return Problem(417, f"of the header Expect only {_CONTINUE} is understood").answer().response()
        return await handler(request)

    return handle


def _check_head(request: web.Request) -> None:
    if len(request.raw_path) > MAX_URL_BYTES:
        raise url_too_long()
    if not headers_fit(request.raw_headers):
        raise Problem(431, f"the headers have more than {MAX_HEADERS_BYTES} bytes")
    if request.headers.get(hdrs.CONTENT_ENCODING, _IDENTITY).lower() != _IDENTITY:
        raise Problem(415, "no route takes a compressed body; send it without Content-Encoding")


def headers_fit(raw_headers: Sequence[tuple[bytes, bytes]]) -> bool:
    """Whether the headers of a request are within their bound."""
    # A few fields cannot be too much, each within its own bound: such as those of a peer.
    if len(raw_headers) <= _FIELDS_THAT_FIT:
        return True
    return sum([len(name) + len(value) for name, value in raw_headers]) <= MAX_HEADERS_BYTES


def url_too_long() -> Problem:
    """414."""
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
