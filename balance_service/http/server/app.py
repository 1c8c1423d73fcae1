"""The HTTP application: routes, what stands before all of them, and one server on one port."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

from aiohttp import web
from opentelemetry.trace import SpanKind

from balance_service.errors import FatalError
from balance_service.http.access.authorization import Access, guarded
from balance_service.http.answer import ON_EVERY_ANSWER, Answer, Problem, problems
from balance_service.http.api.openapi import DOCUMENT, document
from balance_service.http.peers.trust import FORWARDED_HEADER, PROOF_HEADER, PeerTrust
from balance_service.http.server.limits import (
    MAX_BODY_BYTES,
    Connection,
    Limits,
    UnderWay,
    limited,
    reserved,
    watched,
    without_expectations,
)
from balance_service.http.server.listening import Listener, Slots
from balance_service.observability.tracing import UNTRACED, W3C, fail, open_span

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Awaitable, Callable, Sequence

    from aiohttp.typedefs import Middleware
    from opentelemetry.trace import Tracer

    from balance_service.http.api.route import Routes
    from balance_service.http.handlers import Handlers
    from balance_service.http.server.ahead_of_aiohttp import AnswerAhead
    from balance_service.http.server.listening import AcceptedSocket

_SHUTDOWN_SECONDS = 1.0
_SWEEP_SECONDS = 0.5
_FAILED = 500


def make_app(
    handlers: Handlers,
    routes: Routes,
    limits: Limits | None = None,
    trust: PeerTrust | None = None,
    access: Access | None = None,
    tracer: Tracer = UNTRACED,
    under_way: UnderWay | None = None,
) -> web.Application:
    """The application that answers these routes, and describes them at `/openapi.json`.

    Args:
        under_way: what bounds the requests that are answered, if others are than by this application.
        trust: what a forwarded query must prove; without it, nothing.
        access: what clients must show; without it, nothing.
    """
    trust, access, limits = trust or PeerTrust(), access or Access(), limits or Limits()
    # Even the no-op tracer would hand a request's context on, to its record and its hop.
    spans = [] if tracer is UNTRACED else [traced(tracer, routes)]
    app = web.Application(
        middlewares=[
            *spans,
            _proven(trust),
            problems,
            reserved(routes, peers_are_proven=trust.demands_proof),
            guarded(access, routes, peers_are_proven=trust.demands_proof),
            limited(limits, under_way or UnderWay(limits), routes),
        ],
        client_max_size=MAX_BODY_BYTES,
    )
    app.on_response_prepare.append(_complete)
    described = document(routes, authorises=access.authenticator is not None, limits_rate=access.rate_limit is not None)
    app[DOCUMENT] = json.dumps(described, ensure_ascii=False, separators=(",", ":"))
    routes.add_to(app, handlers)
    return app


def make_health_app(handlers: Handlers, routes: Routes, limits: Limits | None = None) -> web.Application:
    """What probes ask, alone: for a port of its own, where probes cannot do what clients must."""
    limits, probes = limits or Limits(), routes.probes
    middlewares = [problems, limited(limits, UnderWay(limits), probes)]
    app = web.Application(middlewares=middlewares, client_max_size=MAX_BODY_BYTES)
    app.on_response_prepare.append(_complete)
    probes.add_to(app, handlers)
    return app


class HttpServer:
    """An application that answers on a socket."""

    def __init__(self, runner: web.AppRunner, listener: Listener, limits: Limits) -> None:
        self._runner = runner
        self._listener = listener
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._sweeping = self._loop.call_later(_SWEEP_SECONDS, self._sweep)

    @property
    def connections(self) -> int:
        """How many are open, or hold bytes that their clients have not acknowledged."""
        return len(self._listener.slots)

    def listen(self, tls: ssl.SSLContext | None = None) -> None:
        """Take connections, under TLS if it is given; those taken before go on as they are."""
        self._listener.listen(tls)

    def bound(self, most: int) -> None:
        """Keep at most so many connections from now on."""
        self._listener.slots.resize(most)

    async def cleanup(self) -> None:
        """Take no more connections, let the requests under way end, briefly, and close."""
        self._listener.close()
        await self._runner.cleanup()
        self._sweeping.cancel()

    def _sweep(self) -> None:
        self._sweeping = self._loop.call_later(_SWEEP_SECONDS, self._sweep)
        now = self._loop.time()
        self._listener.sweep(now)
        for connection in self._connections():
            connection.sweep(now, self._limits)

    def _connections(self) -> list[Connection]:
        server = self._runner.server
        return [] if server is None else [one for one in server.connections if isinstance(one, Connection)]


async def serve(
    app: web.Application,
    bound: socket.socket,
    limits: Limits | None = None,
    tls: ssl.SSLContext | None = None,
    ahead: AnswerAhead | None = None,
    trusted_proxies: Sequence[str] = (),
) -> HttpServer:
    """Begin to answer; `cleanup()` of what is returned ends it.

    Args:
        bound: a listening socket; closed in the end.
        ahead: what answers some requests before they come to the application.
        trusted_proxies: addresses and networks whose connections no share bounds.
    """
    limits = limits or Limits()
    loop = asyncio.get_running_loop()
    runner = web.AppRunner(app, shutdown_timeout=_SHUTDOWN_SECONDS)
    await runner.setup()
    server = runner.server
    if server is None:
        raise FatalError("the HTTP server was set up and is not there")
    server.request_handler = watched(without_expectations(server.request_handler))
    slots = Slots(limits.max_connections, trusted_proxies, loop.time)

    def connection(accepted: AcceptedSocket) -> Connection:
        return Connection(server, accepted, slots, ahead, loop=loop, access_log=None, **limits.of_connections)

    answering = HttpServer(runner, Listener(bound, slots, connection, loop), limits)
    answering.listen(tls)
    return answering


async def _complete(_request: web.Request, response: web.StreamResponse) -> None:
    """Add the headers of every answer to one that was not made of an `Answer`."""
    for name, value in ON_EVERY_ANSWER.items():
        response.headers.setdefault(name, value)


def _proven(trust: PeerTrust) -> Middleware:
    """The middleware that takes forwarded requests from peers only, and proves what is answered to them."""

    @web.middleware
    async def prove(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        mark = request.headers.get(FORWARDED_HEADER)
        if mark is None:
            return await handler(request)
        try:
            trust.check(mark, f"{request.method} {request.raw_path}")
        except Problem as problem:
            # Without a proof: whoever could have one for marks of its own choice could answer in our name.
            return problem.answer().response()
        response = await handler(request)
        if isinstance(response, web.Response) and isinstance(response.body, bytes):
            answer = Answer(response.status, response.body, response.content_type, response.headers)
            proof = trust.proof_of(answer, mark)
            if proof is not None:
                response.headers[PROOF_HEADER] = proof
        return response

    return prove


def traced(tracer: Tracer, routes: Routes) -> Middleware:
    """The middleware that makes a span of each query and command. It must be outermost, to see every status."""

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
