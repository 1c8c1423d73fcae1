"""The HTTP application: routes, what stands before all of them, and one server on one port."""

from __future__ import annotations

import asyncio
import errno
import json
import socket
from typing import TYPE_CHECKING

from aiohttp import web

from balance_service.errors import ConfigurationError, FatalError
from balance_service.http.access.authorization import Access, guarded
from balance_service.http.answer import ON_EVERY_ANSWER, Answer
from balance_service.http.api.openapi import DOCUMENT, document
from balance_service.http.api.routes import ROUTES
from balance_service.http.peers.proxy import FORWARDED_HEADER
from balance_service.http.peers.trust import PROOF_HEADER, PeerTrust
from balance_service.http.server.connections import Connection, Connections, watched
from balance_service.http.server.limits import MAX_BODY_BYTES, Limits, UnderWay, limited, without_expectations
from balance_service.http.server.problems import Problem, problems
from balance_service.http.server.spans import traced
from balance_service.observability.tracing import UNTRACED

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable

    from aiohttp.typedefs import Middleware
    from opentelemetry.trace import Tracer

    from balance_service.http.api.route import Routes
    from balance_service.http.handlers import Handlers
    from balance_service.http.server.ahead_of_aiohttp import AnswersAhead

_SHUTDOWN_SECONDS = 1.0
_BACKLOG = 1024
# A connection is one of ours, with its limits, only once its handshake is done.
_HANDSHAKE_SECONDS = 5.0


def make_app(
    handlers: Handlers,
    limits: Limits | None = None,
    trust: PeerTrust | None = None,
    access: Access | None = None,
    tracer: Tracer = UNTRACED,
    under_way: UnderWay | None = None,
    routes: Routes = ROUTES,
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


def make_health_app(handlers: Handlers, limits: Limits | None = None) -> web.Application:
    """What probes ask, alone: for a port of its own, where probes cannot do what clients must."""
    limits, probes = limits or Limits(), ROUTES.probes
    middlewares = [problems, limited(limits, UnderWay(limits), probes)]
    app = web.Application(middlewares=middlewares, client_max_size=MAX_BODY_BYTES)
    app.on_response_prepare.append(_complete)
    probes.add_to(app, handlers)
    return app


def bind(host: str, port: int, setting: str = "BALANCE_HTTP_PORT") -> socket.socket:
    """A listening socket.

    Args:
        setting: where the port is from; the host is from the one beside it.

    Raises:
        ConfigurationError: the port is in use, or the address is not ours.
    """
    of_host = setting.replace("_PORT", "_HOST")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except UnicodeError:
        raise ConfigurationError(
            f"{of_host} {host} is no address and no host's name; name an address of this machine"
        ) from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigurationError(
                f"port {port} on {host} is in use; stop what listens there or set {setting}"
            ) from None
        raise ConfigurationError(
            f"{of_host} {host} cannot be listened on: {error.strerror}; name an address of this machine"
        ) from None
    listener.listen(_BACKLOG)
    return listener


class HttpServer:
    """An application that answers on a socket."""

    def __init__(
        self,
        runner: web.AppRunner,
        listener: socket.socket,
        connections: Connections,
        connection: Callable[[], Connection],
    ) -> None:
        self._runner = runner
        self._listener = listener
        self._connections = connections
        self._connection = connection
        self._listening: asyncio.Server | None = None

    async def listen(self, tls: ssl.SSLContext | None = None) -> None:
        """Take connections, under TLS if it is given; those taken before go on as they are."""
        loop, previous = asyncio.get_running_loop(), self._listening
        # A copy of one socket: while one takes the other's place, no connection is refused.
        self._listening = await loop.create_server(
            self._connection,
            sock=self._listener.dup(),
            backlog=_BACKLOG,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else _HANDSHAKE_SECONDS,
            ssl_shutdown_timeout=None if tls is None else _SHUTDOWN_SECONDS,
        )
        if previous is not None:
            # asyncio cuts off what a server has accepted and not begun with when that is closed.
            for listening in previous.sockets:
                loop.remove_reader(listening.fileno())
            await asyncio.sleep(0)
            previous.close()

    async def cleanup(self) -> None:
        """Take no more connections, let the requests under way end, briefly, and close."""
        if self._listening is not None:
            self._listening.close()
        self._listener.close()
        await self._runner.cleanup()
        self._connections.close()


async def serve(
    app: web.Application,
    listener: socket.socket,
    limits: Limits | None = None,
    tls: ssl.SSLContext | None = None,
    ahead: AnswersAhead | None = None,
) -> HttpServer:
    """Begin to answer; `cleanup()` of what is returned ends it.

    Args:
        ahead: what answers some requests before they come to the application.
    """
    limits = limits or Limits()
    loop = asyncio.get_running_loop()
    runner = web.AppRunner(app, shutdown_timeout=_SHUTDOWN_SECONDS)
    await runner.setup()
    server = runner.server
    if server is None:
        raise FatalError("the HTTP server was set up and is not there")
    server.request_handler = watched(without_expectations(server.request_handler))
    connections = Connections(limits, loop)
    answering = HttpServer(
        runner,
        listener,
        connections,
        lambda: Connection(server, connections, ahead, loop=loop, access_log=None, **limits.of_connections),
    )
    await answering.listen(tls)
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
