"""A server on a real socket, and clients that write raw bytes to it."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiohttp import web

from balance_service.http.app import make_app, serve
from balance_service.http.model_queries import ModelQueries
from balance_service.http.operations import Operations
from balance_service.http.route import Handlers
from balance_service.http.server.limits import Limits
from balance_service.http.server.listening import bind
from balance_service.http.streams.event_stream import Streams
from balance_service.read_models.add_funds import AddFundsHandler
from tests.support.api import ADD_FUNDS, GET_BALANCE
from tests.support.fakes import IdleInstance
from tests.support.shipped import ROUTES

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from balance_service.http.app import Site
    from balance_service.http.peers.trust import PeerTrust

QUICK = Limits(request_seconds=0.5, head_seconds=0.5, body_seconds=0.5, unsent_seconds=0.5)
QUESTION = b"GET " + GET_BALANCE.encode() + b"?customerId=c1 HTTP/1.1\r\nHost: x\r\n\r\n"
LIVE = b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"
COMMAND = b"POST " + ADD_FUNDS.encode() + b" HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"


def answering(answer: Callable[[web.Request], Awaitable[web.Response]]) -> Handlers:
    """Handlers that answer queries and commands with `answer`."""

    class AnyQueries(ModelQueries):
        def __init__(self) -> None:
            """Has no read models."""

        async def key(self, request: web.Request, *_: object) -> web.Response:
            return await answer(request)

    class AnyCommand(AddFundsHandler):
        def __init__(self) -> None:
            """Has no publisher."""

        async def answer(self, request: web.Request) -> web.Response:
            return await answer(request)

    idle = IdleInstance({"filler": "x" * 100_000})
    return Handlers(Operations(idle, Streams(10)), AnyQueries(), AnyCommand())


async def echo(request: web.Request) -> web.Response:
    return web.json_response({"bytes": len(await request.read())})


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def detail(self) -> str:
        assert self.headers["content-type"].startswith("application/problem+json"), self
        problem = json.loads(self.body)
        assert problem["status"] == self.status
        return str(problem["detail"])


@dataclass
class Client:
    """One connection, byte by byte."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    began: float = field(default_factory=time.monotonic)

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> Answer:
        head = (await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 10)).decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        body = await self.reader.readexactly(int(headers.get("content-length", "0")))
        return Answer(int(head[0].split()[1]), headers, body)

    async def ask(self, data: bytes) -> Answer:
        await self.send(data)
        return await self.answer()

    async def is_closed_within(self, seconds: float) -> bool:
        """Whether the server closes the connection; ignores the data before."""
        try:
            async with asyncio.timeout(seconds):
                while await self.reader.read(65536):
                    pass
        except ConnectionError:
            return True
        except TimeoutError:
            return False
        return True


@dataclass
class Server:
    port: int
    http: Site | None = None

    @property
    def connections(self) -> int:
        """Open connections."""
        assert self.http is not None
        return self.http.connections

    @asynccontextmanager
    async def client(self, address: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> AsyncIterator[Client]:
        """Connects from a loopback address."""
        reader, writer = await asyncio.open_connection(
            "127.0.0.1",
            self.port,
            local_addr=(address, 0),
            ssl=tls,
            server_hostname=None if tls is None else "127.0.0.1",
        )
        try:
            yield Client(reader, writer)
        finally:
            writer.transport.abort()


@asynccontextmanager
async def serving(
    limits: Limits = QUICK,
    answer: Callable[[web.Request], Awaitable[web.Response]] = echo,
    tls: ssl.SSLContext | None = None,
    trust: PeerTrust | None = None,
) -> AsyncIterator[Server]:
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    server = await serve(make_app(answering(answer), ROUTES, limits, trust), listener, limits, tls)
    try:
        yield Server(port, server)
    finally:
        await server.cleanup()


def ask(data: bytes, limits: Limits = QUICK) -> Answer:
    """Sends bytes on a new connection."""

    async def run() -> Answer:
        async with serving(limits) as server, server.client() as client:
            return await client.ask(data)

    return asyncio.run(run())


def question(url_bytes: int = 0, headers: Sequence[tuple[str, str]] = ()) -> bytes:
    # Probes may have any parameters.
    url = "/health/live?x=".ljust(url_bytes, "x") if url_bytes else f"{GET_BALANCE}?customerId=c1&maxLag=9"
    head = "".join(f"{name}: {value}\r\n" for name, value in (("Host", "x"), *headers))
    return f"GET {url} HTTP/1.1\r\n{head}\r\n".encode()
