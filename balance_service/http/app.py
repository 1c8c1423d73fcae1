"""The HTTP server of an instance: routes, middlewares, listeners, access control and connections to peers."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from typing import TYPE_CHECKING, Any

import structlog
from aiohttp import web
from opentelemetry.trace import SpanKind

from balance_service.errors import ConfigurationError, FatalError
from balance_service.http.access.authentication import AUTHENTICATOR_FILES
from balance_service.http.access.authorization import KNOWS, ON_BEHALF_OF, Access, access_of, guarded
from balance_service.http.access.cross_origin import named_origin, preflights
from balance_service.http.answer import ON_EVERY_ANSWER, Answer, Problem, problems
from balance_service.http.console.files import console_routes
from balance_service.http.dead_letters import DEAD_LETTER_ROUTES
from balance_service.http.declared_queries import declared_routes
from balance_service.http.generations import GENERATION_ROUTES
from balance_service.http.instances import INSTANCE_ROUTES
from balance_service.http.model_routes import MODEL_ROUTES
from balance_service.http.openapi import DOCUMENT, document_json
from balance_service.http.operations import OPERATIONS_ROUTES, Operations
from balance_service.http.peers.proxy import Proxy
from balance_service.http.peers.trust import CLIENT_HEADER, FORWARDED_HEADER, PROOF_HEADER, PeerTrust
from balance_service.http.route import Handlers, RouteTable
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
from balance_service.http.server.listening import Listener, Slots, bind
from balance_service.http.server.plain import PlainQueries
from balance_service.http.server.reloading import LOOK_SECONDS, follow
from balance_service.http.server.tls import tls_of
from balance_service.http.streams.event_stream import Streams
from balance_service.http.streams.link import PeerStreams
from balance_service.http.table_queries import TABLE_ROUTES
from balance_service.observability.tracing import UNTRACED, W3C, fail, open_span

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from aiohttp.typedefs import Middleware
    from opentelemetry.trace import Tracer

    from balance_service.http.commands import Command
    from balance_service.http.operations import Operable
    from balance_service.http.route import Route
    from balance_service.http.server.ahead_of_aiohttp import AnswerAhead
    from balance_service.http.server.listening import AcceptedSocket
    from balance_service.http.server.reloading import Reloaded
    from balance_service.http.server.tls import Tls
    from balance_service.model.read_model import ReadModel
    from balance_service.settings import Settings

log = structlog.get_logger(__name__)

_SHUTDOWN_SECONDS = 1.0
_SWEEP_SECONDS = 0.5
_FAILED = 500
_CERTIFICATE = "certificate"
_REQUEST_HEADROOM_SECONDS = 5.0
# Probes are few, and must not use up the file descriptors that clients' connections need.
_HEALTH_LIMITS = Limits(max_concurrent_requests=10)


def routes_of(models: Sequence[ReadModel], commands: Iterable[Command], files: Iterable[Route] = ()) -> RouteTable:
    """The routes of an instance. They determine what it answers, guards, traces and documents.

    Args:
        files: the routes of the console.

    Raises:
        ConfigurationError: two routes have the same method and path.
    """
    own = [*(command.route for command in commands), *declared_routes(models)]
    try:
        for_operators = (*GENERATION_ROUTES, *DEAD_LETTER_ROUTES, *INSTANCE_ROUTES, *OPERATIONS_ROUTES)
        return RouteTable((*own, *MODEL_ROUTES, *TABLE_ROUTES, *for_operators, *files))
    except ValueError as error:
        raise ConfigurationError(f"BALANCE_MODELS: {error}") from None


def make_app(
    handlers: Handlers,
    routes: RouteTable,
    limits: Limits | None = None,
    trust: PeerTrust | None = None,
    access: Access | None = None,
    tracer: Tracer = UNTRACED,
    under_way: UnderWay | None = None,
) -> web.Application:
    """The application that answers routes, and describes them at `/openapi.json`.

    Args:
        under_way: counts requests in progress, if other parts than this application answer some.
        trust: checks forwarded queries; by default they need no proof.
        access: checks clients; by default they need no token.
    """
    trust, access, limits = trust or PeerTrust(), access or Access(), limits or Limits()
    # Even the no-op tracer would pass a request's context to its record and to peers.
    spans = [] if tracer is UNTRACED else [traced(tracer, routes)]
    app = web.Application(
        middlewares=[
            *spans,
            preflights(access),
            _proven(trust),
            problems,
            reserved(routes, peers_are_proven=trust.demands_proof),
            guarded(access, routes, peers_are_proven=trust.demands_proof),
            limited(limits, under_way or UnderWay(limits), routes),
        ],
        client_max_size=MAX_BODY_BYTES,
    )
    app.on_response_prepare.extend((_complete, named_origin(access)))

    def describe() -> str:
        return document_json(
            routes, authorises=access.authenticator is not None, limits_rate=access.rate_limit is not None
        )

    app[DOCUMENT] = describe
    app[KNOWS] = access.knows
    routes.add_to(app, handlers)
    return app


def make_health_app(
    handlers: Handlers, routes: RouteTable, limits: Limits | None = None, *, tells_strangers: bool = True
) -> web.Application:
    """The application for a port of probes alone, which cannot meet the requirements for clients.

    Args:
        tells_strangers: whether any client may read why the instance is not ready.
    """
    limits, probes = limits or Limits(), routes.probes
    middlewares = [problems, limited(limits, UnderWay(limits), probes)]
    app = web.Application(middlewares=middlewares, client_max_size=MAX_BODY_BYTES)
    app.on_response_prepare.append(_complete)
    app[KNOWS] = lambda _: tells_strangers
    probes.add_to(app, handlers)
    return app


async def _complete(_request: web.Request, response: web.StreamResponse) -> None:
    """Adds the headers of every answer to a response that was not made from an `Answer`."""
    for name, value in ON_EVERY_ANSWER.items():
        response.headers.setdefault(name, value)


def _proven(trust: PeerTrust) -> Middleware:
    """Middleware that accepts forwarded requests from peers only, and signs the answers to them."""

    @web.middleware
    async def prove(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        mark = request.headers.get(FORWARDED_HEADER)
        if mark is None:
            return await handler(request)
        try:
            trust.check(mark, f"{request.method} {request.raw_path}")
            client = trust.client_of(request.headers.get(CLIENT_HEADER), mark)
            if client is not None:
                request[ON_BEHALF_OF] = client
        except Problem as problem:
            # Not signed: a client that gets proofs for marks of its choice could answer in our name.
            return problem.answer().response()
        response = await handler(request)
        if isinstance(response, web.Response) and isinstance(response.body, bytes):
            answer = Answer(response.status, response.body, response.content_type, response.headers)
            proof = trust.proof_of(answer, mark)
            if proof is not None:
                response.headers[PROOF_HEADER] = proof
        return response

    return prove


def traced(tracer: Tracer, routes: RouteTable) -> Middleware:
    """Middleware that makes a span of each query and command. It must be outermost, to see every status."""

    @web.middleware
    async def trace(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        route = routes.of(request)
        if route is None or route.is_of_operations or route.is_stream(request):
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


class Site:
    """An application that answers on a socket."""

    def __init__(self, runner: web.AppRunner, listener: Listener, limits: Limits) -> None:
        self._runner = runner
        self._listener = listener
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._sweeping = self._loop.call_later(_SWEEP_SECONDS, self._sweep)

    @property
    def connections(self) -> int:
        """The number of connections that are open or hold bytes that their clients have not acknowledged."""
        return len(self._listener.slots)

    def listen(self, tls: ssl.SSLContext | None = None) -> None:
        """Accepts new connections, under TLS if given. Existing connections do not change."""
        self._listener.listen(tls)

    def limit_connections(self, most: int) -> None:
        """Sets the maximum number of connections."""
        self._listener.slots.resize(most)

    async def cleanup(self) -> None:
        """Stops accepting connections, waits briefly for requests in progress, and closes."""
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
    listener: socket.socket,
    limits: Limits | None = None,
    tls: ssl.SSLContext | None = None,
    ahead: AnswerAhead | None = None,
    trusted_proxies: Sequence[str] = (),
) -> Site:
    """Starts to answer, until `cleanup()` of the result.

    Args:
        listener: a listening socket; the site closes it.
        ahead: answers some requests before they reach the application.
        trusted_proxies: addresses and networks whose connections have no limit per client.
    """
    limits = limits or Limits()
    loop = asyncio.get_running_loop()
    runner = web.AppRunner(app, shutdown_timeout=_SHUTDOWN_SECONDS)
    await runner.setup()
    server = runner.server
    if server is None:
        raise FatalError("aiohttp set up no server")
    server.request_handler = watched(without_expectations(server.request_handler))
    slots = Slots(limits.max_connections, trusted_proxies, loop.time)

    def connection(accepted: AcceptedSocket) -> Connection:
        return Connection(server, accepted, slots, ahead, loop=loop, access_log=None, **limits.of_connections)

    site = Site(runner, Listener(listener, slots, connection, loop), limits)
    site.listen(tls)
    return site


class HttpServer:
    """The HTTP side of one instance. Listens once created, answers between `open` and `close`.

    Belongs to the event loop.
    """

    def __init__(
        self,
        settings: Settings,
        instance: Operable,
        models: Sequence[ReadModel],
        commands: Iterable[Command] = (),
        look_seconds: float = LOOK_SECONDS,
        tracer: Tracer = UNTRACED,
        on_refused: Callable[[], None] = lambda: None,
    ) -> None:
        """Reads the files that security depends on, and binds the ports.

        Args:
            instance: shown to operators from the beginning.
            models: read models that this instance answers for, itself or through its peers.
            look_seconds: the interval at which those files are checked for changes.
            on_refused: called for each request that is refused because too many are in progress.

        Raises:
            ConfigurationError: a port is in use, a file cannot be used, or other machines would get access without
                authorization.
        """
        self.streams = Streams(settings.max_streams)
        self.handlers = Handlers(Operations(instance, self.streams))
        """Those that need the engine are added when it exists."""
        self._models = models
        self._routes = routes_of(models, commands, console_routes() if settings.console else ())
        self._look_seconds = look_seconds
        self._tracer = tracer
        self._on_refused = on_refused
        self._tls = tls_of(settings)
        self._access = access_of(settings)
        self._limits = Limits(
            settings.max_concurrent_requests, settings.read_timeout_seconds + _REQUEST_HEADROOM_SECONDS
        )
        self._trusted_proxies = settings.trusted_proxies
        secret = settings.peer_secret
        self.trust = PeerTrust(secret.get_secret_value() if secret else None, settings.peer_allow_list)
        """Checks peers, and identifies this instance to them."""
        self._listener = bind(settings.http_host, settings.http_port)
        self._require_access(settings)
        self._health_listener: socket.socket | None = None
        if settings.health_port is not None:
            host = settings.health_host or settings.http_host
            self._health_listener = bind(host, settings.health_port, "BALANCE_HEALTH_PORT")
        self._admits_anonymous = settings.admits_anonymous
        self._proxy: Proxy | None = None
        self._sites: list[Site] = []
        self._following: list[asyncio.Task[None]] = []

    @property
    def port(self) -> int:
        return self.addresses[0][1]

    @property
    def health_port(self) -> int | None:
        return None if self._health_listener is None else self.addresses[1][1]

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """The IP addresses and ports that it is bound to: the API's, then the health port's, if any."""
        listeners = (self._listener, self._health_listener)
        return [listener.getsockname()[:2] for listener in listeners if listener is not None]

    async def open(self) -> Proxy:
        """Starts to answer. Returns the client for requests to peers."""
        self._warn_if_open_to_all()
        tls = self._tls
        under_way = UnderWay(self._limits, self._on_refused)
        app = make_app(self.handlers, self._routes, self._limits, self.trust, self._access, self._tracer, under_way)
        # Requests that have spans need the application's middlewares.
        plain = PlainQueries(self.handlers, self.trust, under_way, self._access, self._models)
        ahead = plain.answer if self._tracer is UNTRACED else None
        server_tls = None if tls is None else tls.value.server
        self._sites.append(await serve(app, self._listener, self._limits, server_tls, ahead, self._trusted_proxies))
        if self._health_listener is not None:
            told = self._admits_anonymous
            health = make_health_app(self.handlers, self._routes, _HEALTH_LIMITS, tells_strangers=told)
            self._sites.append(await serve(health, self._health_listener, _HEALTH_LIMITS))
        for file in self._files.values():
            renew = self._renew if file is tls else None
            self._following.append(asyncio.create_task(follow(file, renew, self._look_seconds)))
        self._proxy = Proxy(self.trust, tls, self._tracer)
        return self._proxy

    def limit_connections(self, connections: int) -> None:
        """Sets the maximum number of connections, including those to peers; the engine needs the other descriptors."""
        # The rest is for the connections to peers and for the health port.
        self._sites[0].limit_connections(min(self._limits.max_connections, connections // 2))
        self.streams.limit(connections // 4)

    async def close(self) -> None:
        """Stops accepting connections, waits briefly for requests in progress, and closes everything."""
        self.streams.close()
        if (peers := self.handlers.find(PeerStreams)) is not None:
            await peers.close()
        for task in self._following:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        for site in self._sites:
            await site.cleanup()
        if self._proxy is not None:
            await self._proxy.close()
        for listener in (self._listener, self._health_listener):
            if listener is not None:
                listener.close()

    async def _renew(self, tls: Tls) -> None:
        self._sites[0].listen(tls.server)

    @property
    def stale_files(self) -> Mapping[str, bool]:
        """For each file that security depends on, whether it is unusable now and its previous content is in use."""
        files = self._files
        return {name: name in files and files[name].is_stale for name in (_CERTIFICATE, *AUTHENTICATOR_FILES)}

    @property
    def _files(self) -> Mapping[str, Reloaded[Any]]:
        files: dict[str, Reloaded[Any]] = {} if self._tls is None else {_CERTIFICATE: self._tls}
        authenticator = self._access.authenticator
        return files if authenticator is None else {**files, **authenticator.files}

    @property
    def _address(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
        return ipaddress.ip_address(self._listener.getsockname()[0])

    def _require_access(self, settings: Settings) -> None:
        if self._address.is_loopback or not settings.admits_anonymous or settings.allow_anonymous:
            return
        self._listener.close()
        raise ConfigurationError(
            f"BALANCE_HTTP_HOST {settings.http_host} accepts connections from other machines, and clients need neither "
            "a token nor a certificate; set BALANCE_TOKENS_FILE, BALANCE_JWKS_FILE or BALANCE_TLS_CLIENT_CA, or, if "
            "every client may read and write everything, BALANCE_ALLOW_ANONYMOUS=true"
        )

    def _warn_if_open_to_all(self) -> None:
        address = self._address
        lacking = {
            "encryption (BALANCE_TLS_CERTIFICATE)": self._tls is None,
            "authorisation (BALANCE_TOKENS_FILE or BALANCE_JWKS_FILE)": self._access.authenticator is None,
        }
        missing = [name for name, lacks in lacking.items() if lacks]
        if missing and not address.is_loopback:
            log.warning("listening beyond this machine", address=str(address), without=missing)
