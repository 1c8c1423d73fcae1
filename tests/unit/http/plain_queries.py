"""A server with or without the fast path for plain queries, and the requests to compare them by."""

from __future__ import annotations

import asyncio
import re
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from aiohttp.test_utils import TestServer

from balance_service.http.access.authorization import Access
from balance_service.http.app import make_app, serve
from balance_service.http.operations import Operations
from balance_service.http.peers.proxy import Proxy
from balance_service.http.peers.trust import PeerTrust
from balance_service.http.route import Handlers
from balance_service.http.server.limits import Limits, UnderWay
from balance_service.http.server.listening import bind
from balance_service.http.server.plain import PlainQueries
from balance_service.http.streams.event_stream import Streams
from balance_service.kafka.partitioner import partition_of
from tests.support.api import GET_BALANCE
from tests.support.fakes import IdleInstance
from tests.support.querying import PARTITION, PARTITIONS, Instance, Peer
from tests.support.shipped import MODELS, ROUTES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine

    from aiohttp import web
    from aiohttp.http import RawRequestMessage

    from balance_service.http.server.ahead_of_aiohttp import AheadOfAiohttp
    from balance_service.observability.metrics import Metrics

SECRET = "a secret of all instances"
CUSTOMER = next(f"c-{n}" for n in range(99) if partition_of(f"c-{n}".encode(), PARTITIONS) == PARTITION)
ELSEWHERE = next(f"c-{n}" for n in range(99) if partition_of(f"c-{n}".encode(), PARTITIONS) != PARTITION)
TARGET = f"{GET_BALANCE}?customerId={CUSTOMER}"
LIVE = b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /nope HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
# An nginx ingress adds these headers behind a load balancer of AWS.
INGRESS = (
    "X-Request-ID: 0123456789abcdef\r\nX-Real-IP: 10.0.0.1\r\nX-Forwarded-For: 10.0.0.1, 10.0.0.2\r\n"
    "X-Forwarded-Host: balance.example.com\r\nX-Forwarded-Port: 443\r\nX-Forwarded-Proto: https\r\n"
    "X-Forwarded-Scheme: https\r\nX-Scheme: https\r\nX-Amzn-Trace-Id: Root=1-67891233-abcdef\r\nVia: 1.1 proxy\r\n"
)


def question(target: str = TARGET, headers: str = "") -> bytes:
    return raw(f"Host: x:1\r\n{headers}", target)


def raw(headers: str, target: str = TARGET) -> bytes:
    return f"GET {target} HTTP/1.1\r\n{headers}\r\n".encode()


class Plain(PlainQueries):
    """Records the requests that are not left to aiohttp."""

    def __init__(self, handlers: Handlers, trust: PeerTrust, under_way: UnderWay, access: Access) -> None:
        super().__init__(handlers, trust, under_way, access, MODELS)
        self.answered_at_once: list[RawRequestMessage] = []
        self.answered_later: list[RawRequestMessage] = []

    def answer(
        self, request: RawRequestMessage, connection: AheadOfAiohttp
    ) -> bytes | Coroutine[Any, Any, bytes] | None:
        answer = super().answer(request, connection)
        if answer is not None:
            (self.answered_at_once if isinstance(answer, bytes) else self.answered_later).append(request)
        return answer


class Server:
    """An instance on a real socket, with the requests that aiohttp did not answer."""

    def __init__(self, port: int, plain: Plain | None = None) -> None:
        self.port = port
        self.at_once = [] if plain is None else plain.answered_at_once
        self.later = [] if plain is None else plain.answered_later

    async def exchange(self, *segments: bytes, answers: int = 1) -> list[bytes]:
        """Sends segments on one connection, each a moment after the previous one."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            for segment in segments:
                writer.write(segment)
                await writer.drain()
                await asyncio.sleep(0.02)
            return [await next_answer(reader) for _ in range(answers)]
        finally:
            writer.transport.abort()
            await asyncio.sleep(0)


async def next_answer(reader: asyncio.StreamReader) -> bytes:
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    while head.startswith(b"HTTP/1.1 100"):
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    length = re.search(rb"Content-Length: (\d+)", head)
    assert length is not None
    return re.sub(rb"Date: [^\r]*", b"Date: now", head) + await reader.readexactly(int(length[1]))


@asynccontextmanager
async def serving(
    instance: Instance,
    limits: Limits | None = None,
    trust: PeerTrust | None = None,
    *,
    is_plain: bool = True,
    metrics: Metrics | None = None,
    access: Access | None = None,
) -> AsyncIterator[Server]:
    trust, access, limits = trust or PeerTrust(), access or Access(), limits or Limits()
    under_way = UnderWay(limits)
    proxy = Proxy(trust)
    handlers = Handlers(Operations(IdleInstance(), Streams(10)))
    handlers.add(instance.models(proxy, metrics))
    listener = bind("127.0.0.1", 0)
    plain = Plain(handlers, trust, under_way, access)
    server = Server(listener.getsockname()[1], plain)
    app = make_app(handlers, ROUTES, limits, trust, access, under_way=under_way)
    http = await serve(app, listener, limits, None, plain.answer if is_plain else None)
    try:
        yield server
    finally:
        await http.cleanup()
        await proxy.close()


class Exchange(NamedTuple):
    """Answers, and how many of them aiohttp did not give: at once, and after a peer's answer."""

    answers: list[bytes]
    at_once: int
    later: int


def exchange(
    instance: Instance,
    *segments: bytes,
    answers: int = 1,
    owner: Peer | None = None,
    limits: Limits | None = None,
    trust: PeerTrust | None = None,
    access: Access | None = None,
    metrics: Metrics | None = None,
    is_plain: bool = True,
) -> Exchange:
    """Sends segments to an instance that takes `owner` for the owner of the partition."""

    async def run() -> Exchange:
        async with AsyncExitStack() as stack:
            serve = serving(instance, limits, trust, is_plain=is_plain, metrics=metrics, access=access)
            server = await stack.enter_async_context(serve)
            if owner is not None:
                address = f"127.0.0.1:{(await stack.enter_async_context(TestServer(owner.app()))).port}"
                instance.hear_of_owner(address)
            found = await server.exchange(*segments, answers=answers)
            if owner is not None:
                instance.servers.hear(address, None, live=True)
                found = [one.replace(f"-Server: {address}".encode(), b"-Server: owner:1") for one in found]
            return Exchange(found, len(server.at_once), len(server.later))

    return asyncio.run(run())


def both_ways(
    instance: Instance,
    *segments: bytes,
    answers: int = 1,
    owner: Callable[[web.Request], Awaitable[web.StreamResponse]] | None = None,
    trust: PeerTrust | None = None,
    access: Callable[[], Access] = Access,
) -> Exchange:
    """The exchange with plain queries, after a check that the answers are the same without them."""
    first, second = (
        exchange(
            instance,
            *segments,
            answers=answers,
            owner=None if owner is None else Peer(owner),
            trust=trust,
            access=access(),
            is_plain=is_plain,
        )
        for is_plain in (True, False)
    )
    assert first.answers == second.answers
    return first
