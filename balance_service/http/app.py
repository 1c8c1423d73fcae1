"""The HTTP application: routes, limits, and one server on one port."""

from __future__ import annotations

import errno
import socket
from typing import TYPE_CHECKING

from aiohttp import web

from balance_service.errors import ConfigurationError
from balance_service.http import commands, queries
from balance_service.http.problems import problems, unavailable

if TYPE_CHECKING:
    from balance_service.http.commands import Commands
    from balance_service.http.operations import Operations
    from balance_service.http.queries import Queries

_MAX_BODY_BYTES = 16 << 10
_SHUTDOWN_SECONDS = 1.0


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


def make_app(handlers: Handlers) -> web.Application:
    """All routes of the contract."""
    app = web.Application(middlewares=[problems], client_max_size=_MAX_BODY_BYTES)
    operations = handlers.operations
    app.add_routes(
        [
            web.get(queries.PATH, handlers.get_balance, allow_head=False),
            web.post(commands.PATH, handlers.add_funds),
            web.get("/health/live", operations.live, allow_head=False),
            web.get("/health/ready", operations.ready, allow_head=False),
            web.get("/metrics", operations.metrics, allow_head=False),
            web.get("/api/status", operations.status, allow_head=False),
            web.get("/openapi.json", operations.openapi, allow_head=False),
        ]
    )
    return app


def bind(host: str, port: int) -> socket.socket:
    """A listening socket.

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
                f"port {port} on {host} is in use; stop what listens there or set BALANCE_HTTP_PORT"
            ) from None
        raise ConfigurationError(
            f"BALANCE_HTTP_HOST {host} cannot be listened on: {error.strerror}; name an address of this machine"
        ) from None
    listener.listen(1024)
    return listener


async def serve(app: web.Application, listener: socket.socket) -> web.AppRunner:
    """Begin to answer; `cleanup()` of the runner ends it."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_SECONDS)
    await runner.setup()
    await web.SockSite(runner, listener).start()
    return runner
