"""Answers to pages of the origins in BALANCE_ALLOWED_ORIGINS (CORS).

A browser shows an answer to a page of another origin only if the answer names that origin, and asks beforehand, in a
preflight, whether such a page may send a token or JSON. Tokens are in a header, so no answer allows credentials, which
are cookies and certificates. Other origins get neither, and `Browsers` refuses their requests.
Source: WHATWG Fetch, "CORS protocol".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import hdrs, web

from balance_service import api

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aiohttp.typedefs import Middleware

    from balance_service.http.access.authorization import Access

_PREFLIGHT_SECONDS = 600
_ALLOWED = {
    hdrs.ACCESS_CONTROL_ALLOW_METHODS: "GET, HEAD, POST",
    hdrs.ACCESS_CONTROL_ALLOW_HEADERS: ", ".join(
        (hdrs.AUTHORIZATION, hdrs.CONTENT_TYPE, api.IDEMPOTENCY_KEY, api.LAST_EVENT_ID, "traceparent", "tracestate")
    ),
    hdrs.ACCESS_CONTROL_MAX_AGE: str(_PREFLIGHT_SECONDS),
}
_EXPOSED = ", ".join(
    (
        api.APPLICATION_SERVER,
        api.ROLE,
        api.POSITION,
        api.EPOCH,
        api.LAG,
        api.AGE,
        api.GENERATION,
        api.MISSING,
        api.RETRY_AFTER,
        hdrs.WWW_AUTHENTICATE,
    )
)


def preflights(access: Access) -> Middleware:
    """Middleware that answers the preflights of listed origins. They carry no token."""

    @web.middleware
    async def answer_preflight(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        is_preflight = request.method == hdrs.METH_OPTIONS and hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers
        if is_preflight and access.allowed_origin(request.headers) is not None:
            return web.Response(status=204, headers=_ALLOWED)
        return await handler(request)

    return answer_preflight


def named_origin(access: Access) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """A signal handler that names the origin in each answer to a page of a listed one, also in errors and streams."""

    async def name_origin(request: web.Request, response: web.StreamResponse) -> None:
        origin = access.allowed_origin(request.headers)
        if origin is not None:
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = _EXPOSED
            response.headers[hdrs.VARY] = f"{hdrs.ACCEPT}, {hdrs.ORIGIN}"

    return name_origin
