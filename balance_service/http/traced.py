"""The middleware that makes a span of each query and command, part of the trace that it came with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from balance_service.http import commands, queries
from balance_service.tracing import SpanKind

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aiohttp.typedefs import Middleware

    from balance_service.tracing import Tracing

# Not health and metrics, which are asked for all the time and tell nothing by how they are answered.
_TRACED = frozenset({queries.PATH, commands.PATH})
_FAILED = 500


def traced(tracing: Tracing) -> Middleware:
    """The middleware; outside of the one that answers errors, so that it sees every status."""

    @web.middleware
    async def trace(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.path not in _TRACED:
            return await handler(request)
        attributes = {"http.request.method": request.method, "http.route": request.path, "url.path": request.path}
        name = f"{request.method} {request.path}"
        with tracing.span(name, SpanKind.SERVER, attributes, came_with=request.headers) as span:
            answer = await handler(request)
            span.tell("http.response.status_code", answer.status)
            if answer.status >= _FAILED:
                span.fail(str(answer.status))
            return answer

    return trace
