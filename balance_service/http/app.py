"""The HTTP application: routes, what stands before all of them, and one server on one port."""

from __future__ import annotations

import asyncio
import errno
import socket
from typing import TYPE_CHECKING

from aiohttp import web

from balance_service.errors import ConfigurationError, FatalError
from balance_service.http import commands, queries
from balance_service.http.authorization import Access, guarded
from balance_service.http.connections import Connection, Connections, watched
from balance_service.http.limits import MAX_BODY_BYTES, Limits, UnderWay, limited, without_expectations
from balance_service.http.peers import PeerTrust
from balance_service.http.problems import problems, unavailable
from balance_service.http.proxy import FORWARDED_HEADER
from balance_service.http.traced import traced
from balance_service.tracing import UNTRACED

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable

    from aiohttp.typedefs import Middleware

    from balance_service.http.commands import Commands
    from balance_service.http.connections import AnswersPlainQueries
    from balance_service.http.operations import Operations
    from balance_service.http.queries import Queries
    from balance_service.tracing import Tracing

_SHUTDOWN_SECONDS = 1.0
_BACKLOG = 1024
# A connection is one of ours, with its limits, only once its handshake is done.
_HANDSHAKE_SECONDS = 5.0


class Handlers:
    """Queries and commands of an instance, once it has them: the server answers before the engine is up."""

    def __init__(self, operations: Operations) -> None:
        self.operations = operations
        self.queries: Queries | None = None
        self.commands: Commands | None = None

    async def get_balance(self, request: web.Request) -> web.Response:
        """See `Queries.get_balance`."""
        if self.queries is None:
            raise unavailable("this instance is starting")
        return await self.queries.get_balance(request)

    async def add_funds(self, request: web.Request) -> web.Response:
        """See `Commands.add_funds`."""
        if self.commands is None:
            raise unavailable("this instance is starting; the event was certainly not written")
        return await self.commands.add_funds(request)


def make_app(
    handlers: Handlers,
    limits: Limits | None = None,
    trust: PeerTrust | None = None,
    access: Access | None = None,
    tracing: Tracing = UNTRACED,
    under_way: UnderWay | None = None,
) -> web.Application:
    """All routes of the contract.

    Args:
        under_way: what bounds the requests that are answered, if others are than by this application.
        trust: what a forwarded query must prove; without it, nothing.
        access: what clients must show; without it, nothing.
    """
    trust, access, limits = trust or PeerTrust(), access or Access(), limits or Limits()
    spans = [traced(tracing)] if tracing.is_on else []
    guards = [] if access.is_free else [guarded(access, peers_are_proven=trust.demands_proof)]
    app = web.Application(
        middlewares=[
            watched,
            *spans,
            problems,
            _proven(trust),
            *guards,
            limited(limits, under_way or UnderWay(limits)),
        ],
        client_max_size=MAX_BODY_BYTES,
    )
    operations = handlers.operations
    app.add_routes(
        [
            web.get(queries.PATH, handlers.get_balance, allow_head=False),
            web.post(commands.PATH, handlers.add_funds),
            *_probes(handlers),
            web.get("/metrics", operations.metrics, allow_head=False),
            web.get("/api/status", operations.status, allow_head=False),
            web.get("/openapi.json", operations.openapi, allow_head=False),
        ]
    )
    return app


def make_health_app(handlers: Handlers, limits: Limits | None = None) -> web.Application:
    """What probes ask, alone: for a port of its own, where probes cannot do what clients must."""
    limits = limits or Limits()
    app = web.Application(
        middlewares=[watched, problems, limited(limits, UnderWay(limits))], client_max_size=MAX_BODY_BYTES
    )
    app.add_routes(_probes(handlers))
    return app


def bind(host: str, port: int, setting: str = "BALANCE_HTTP_PORT") -> socket.socket:
    """A listening socket.

    Args:
        setting: where the port is from.

    Raises:
        ConfigurationError: the port is in use, or the address is not ours.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigurationError(
                f"port {port} on {host} is in use; stop what listens there or set {setting}"
            ) from None
        raise ConfigurationError(
            f"BALANCE_HTTP_HOST {host} cannot be listened on: {error.strerror}; name an address of this machine"
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
        previous = self._listening
        # A copy of one socket: while one takes the other's place, no connection is refused.
        self._listening = await asyncio.get_running_loop().create_server(
            self._connection,
            sock=self._listener.dup(),
            backlog=_BACKLOG,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else _HANDSHAKE_SECONDS,
            ssl_shutdown_timeout=None if tls is None else _SHUTDOWN_SECONDS,
        )
        if previous is not None:
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
    plain: AnswersPlainQueries | None = None,
) -> HttpServer:
    """Begin to answer; `cleanup()` of what is returned ends it.

    Args:
        plain: what answers plain queries before they come to the application.
    """
    limits = limits or Limits()
    loop = asyncio.get_running_loop()
    runner = web.AppRunner(app, shutdown_timeout=_SHUTDOWN_SECONDS)
    await runner.setup()
    server = runner.server
    if server is None:
        raise FatalError("the HTTP server was set up and is not there")
    server.request_handler = without_expectations(server.request_handler)
    connections = Connections(limits, loop)
    answering = HttpServer(
        runner,
        listener,
        connections,
        lambda: Connection(server, connections, plain, loop=loop, access_log=None, **limits.of_connections),
    )
    await answering.listen(tls)
    return answering


def _probes(handlers: Handlers) -> list[web.RouteDef]:
    operations = handlers.operations
    return [
        web.get("/health/live", operations.live, allow_head=False),
        web.get("/health/ready", operations.ready, allow_head=False),
    ]


def _proven(trust: PeerTrust) -> Middleware:
    """The middleware that takes forwarded requests from peers only."""

    @web.middleware
    async def check(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        mark = request.headers.get(FORWARDED_HEADER)
        if mark is not None:
            trust.check(mark, request.raw_path)
        return await handler(request)

    return check
