"""A route: one value, which the application, authorisation, limits, spans and the OpenAPI document all read."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiohttp import hdrs, web

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from balance_service.http.access.clients import Scope
    from balance_service.http.api.declarations import Answer, Body, Parameter

_GET = hdrs.METH_GET

Answering = Callable[[Any, web.Request], Awaitable[web.StreamResponse]]
"""An instance's handlers (`http.handlers`, which this must not know: they know routes) and a request → the answer."""


@dataclass(frozen=True, slots=True)
class Tag:
    """A group of routes, as the document shows them."""

    name: str
    description: str


OPERATIONS = Tag("operations", "For people and orchestrators.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A method and a path, what answers there, and all that is said of it.

    `path` may hold `{names}`: parameters whose place is the path.
    """

    name: str
    """The document's `operationId`."""
    method: str
    path: str
    answer: Answering
    tag: Tag
    scopes: frozenset[Scope]
    """A client needs one of these. Without any, the route is a probe's: open to all, and on the health port too."""
    summary: str
    description: str
    parameters: tuple[Parameter[Any], ...] = ()
    body: Body | None = None
    answers: tuple[Answer, ...]
    is_never_refused: bool = False
    """It is answered however many requests are in flight."""
    is_forwarded: bool = False
    """Peers pass it on to one another."""

    @property
    def is_open(self) -> bool:
        """Whether it is answered without a token, and however often."""
        return not self.scopes

    @property
    def is_of_operations(self) -> bool:
        """Whether it is about the service, not its data. Such requests are frequent and have no spans."""
        return self.tag is OPERATIONS


class Routes:
    """The routes of one application. Raises ValueError if two of them would answer the same request."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._routes: dict[tuple[str, str], Route] = {}
        for route in routes:
            if self._routes.setdefault((route.method, route.path), route) is not route:
                raise ValueError(f"{route.method} {route.path} is declared twice; give one of the two another path")

    def __iter__(self) -> Iterator[Route]:
        return iter(self._routes.values())

    @property
    def probes(self) -> Routes:
        """Those that are open."""
        return Routes(route for route in self if route.is_open)

    def of(self, request: web.Request) -> Route | None:
        """The route that a request was matched to; None if there is nothing at its path, or not by its method.

        By the match, not by the path as it was sent: no way of writing a path gets around a check.
        """
        matched = request.match_info.route
        if matched.resource is None:
            return None
        method = _GET if matched.method == hdrs.METH_HEAD else matched.method
        return self._routes[method, matched.resource.canonical]

    def add_to(self, app: web.Application, handlers: Any) -> None:
        """Have an application answer them; HEAD as GET, without the body (RFC 9110, section 9.3.2)."""
        for route in self:
            # By itself aiohttp would find no parameter that has a brace in it.
            path = re.sub(r"\{(\w+)\}", r"{\1:[^/]+}", route.path)
            handler = _handler(route.answer, handlers)
            for method in (_GET, hdrs.METH_HEAD) if route.method == _GET else (route.method,):
                app.router.add_route(method, path, handler)


def _handler(answer: Answering, handlers: Any) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handle(request: web.Request) -> web.StreamResponse:
        return await answer(handlers, request)

    return handle
