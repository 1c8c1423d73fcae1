"""The HTTP side of one instance, put together: its listeners, its access control, its connections to peers."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from typing import TYPE_CHECKING, Any

import structlog

from balance_service.errors import ConfigurationError
from balance_service.http.access.authentication import AUTHENTICATOR_FILES
from balance_service.http.access.authorization import access_of
from balance_service.http.api.routes import routes_of
from balance_service.http.peers.proxy import Proxy
from balance_service.http.peers.trust import PeerTrust
from balance_service.http.server.app import HttpServer, make_app, make_health_app, serve
from balance_service.http.server.limits import Limits, UnderWay
from balance_service.http.server.listening import bind
from balance_service.http.server.plain import PlainQueries
from balance_service.http.server.reloading import LOOK_SECONDS, follow
from balance_service.http.server.tls import tls_of
from balance_service.observability.tracing import UNTRACED

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from opentelemetry.trace import Tracer

    from balance_service.http.commands import Command
    from balance_service.http.handlers import Handlers
    from balance_service.http.server.reloading import Reloaded
    from balance_service.http.server.tls import Tls
    from balance_service.model.read_model import ReadModel
    from balance_service.settings import Settings

log = structlog.get_logger(__name__)

_CERTIFICATE = "certificate"
_REQUEST_HEADROOM_SECONDS = 5.0
# Probes are few, and must not take the files that clients' connections need.
_HEALTH_LIMITS = Limits(max_concurrent_requests=10)


class Front:
    """Listens from the first on, answers between `open` and `close`. Belongs to the event loop."""

    def __init__(
        self,
        settings: Settings,
        handlers: Handlers,
        models: Sequence[ReadModel],
        commands: Iterable[Command] = (),
        look_seconds: float = LOOK_SECONDS,
        tracer: Tracer = UNTRACED,
        on_refused: Callable[[], None] = lambda: None,
    ) -> None:
        """Read the files that security rests on, and take the ports.

        Args:
            models: that this instance answers for, itself or by its peers.
            commands: that it takes.
            look_seconds: how often those files are looked at.
            on_refused: told of each request that is not begun because too many are under way.

        Raises:
            ConfigurationError: a port is in use, a file cannot be used, or other machines would be let in without
                authorisation.
        """
        self._handlers = handlers
        self._models = models
        self._routes = routes_of(models, commands)
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
        self._trust = PeerTrust(secret.get_secret_value() if secret else None, settings.peer_allow_list)
        self._listener = bind(settings.http_host, settings.http_port)
        self._require_access(settings)
        self._health_listener: socket.socket | None = None
        if settings.health_port is not None:
            host = settings.health_host or settings.http_host
            self._health_listener = bind(host, settings.health_port, "BALANCE_HEALTH_PORT")
        self._proxy: Proxy | None = None
        self._servers: list[HttpServer] = []
        self._following: list[asyncio.Task[None]] = []

    @property
    def trust(self) -> PeerTrust:
        """How this instance and its peers know each other."""
        return self._trust

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._listener.getsockname()[1])

    @property
    def health_port(self) -> int | None:
        """Where it listens for probes alone."""
        return None if self._health_listener is None else int(self._health_listener.getsockname()[1])

    async def open(self) -> Proxy:
        """Begin to answer; returns what asks peers."""
        self._warn_if_open_to_all()
        tls = self._tls
        under_way = UnderWay(self._limits, self._on_refused)
        app = make_app(self._handlers, self._routes, self._limits, self._trust, self._access, self._tracer, under_way)
        # Requests that have spans go through the application.
        is_plain = self._tracer is UNTRACED
        plain = (
            PlainQueries(self._handlers, self._trust, under_way, self._access, self._models).answer
            if is_plain
            else None
        )
        server_tls = None if tls is None else tls.value.server
        self._servers.append(await serve(app, self._listener, self._limits, server_tls, plain, self._trusted_proxies))
        if self._health_listener is not None:
            health = make_health_app(self._handlers, self._routes, _HEALTH_LIMITS)
            self._servers.append(await serve(health, self._health_listener, _HEALTH_LIMITS))
        for file in self._files.values():
            renew = self._renew if file is tls else None
            self._following.append(asyncio.create_task(follow(file, renew, self._look_seconds)))
        self._proxy = Proxy(self._trust, tls, self._tracer)
        return self._proxy

    def bound(self, connections: int) -> None:
        """Keep at most so many connections, those to peers among them: the other open files are the engine's."""
        # What is left over is for the connections to peers and for the probes' port.
        self._servers[0].bound(min(self._limits.max_connections, connections * 3 // 4))

    async def close(self) -> None:
        """Take no more connections, let the requests under way end, briefly, and close everything."""
        for task in self._following:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        for server in self._servers:
            await server.cleanup()
        if self._proxy is not None:
            await self._proxy.close()

    async def _renew(self, tls: Tls) -> None:
        self._servers[0].listen(tls.server)

    @property
    def stale_files(self) -> Mapping[str, bool]:
        """Whether a file that security rests on is not usable now, so that what it held before stays in force."""
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
            f"BALANCE_HTTP_HOST {settings.http_host} lets other machines in, and clients need neither a token nor a "
            "certificate; set BALANCE_TOKENS_FILE, BALANCE_JWKS_FILE or BALANCE_TLS_CLIENT_CA, or, if every client may "
            "read and write everything, BALANCE_ALLOW_ANONYMOUS=true"
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
