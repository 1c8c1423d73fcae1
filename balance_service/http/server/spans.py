"""The middleware that makes a span of each query and command, part of the trace that it came with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web
from opentelemetry.trace import SpanKind

from balance_service.observability.tracing import W3C, fail, open_span

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aiohttp.typedefs import Middleware
    from opentelemetry.trace import Tracer

    from balance_service.http.api.route import Routes

_FAILED = 500


def traced(tracer: Tracer, routes: Routes) -> Middleware:
    """The middleware; outside of the one that answers errors, so that it sees every status."""

    @web.middleware
    async def trace(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        route = routes.of(request)
        if route is None or route.is_of_operations:
            return await handler(request)
        attributes = {"http.request.method": request.method, "http.route": route.path}
        name = f"{request.method} {route.path}"
        with open_span(tracer, name, SpanKind.SERVER, attributes, parent=W3C.extract(request.headers)) as span:
            answer = await handler(request)
            span.set_attribute("http.response.status_code", answer.status)
            if answer.status >= _FAILED:
                fail(span, str(answer.status))
            return answer

    return trace
