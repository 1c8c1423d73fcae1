"""Closing a client's connection cancels its scan, here and at peers, but not its command."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from aiohttp import web

from balance_service.http.app import make_app, serve
from balance_service.http.operations import Operations
from balance_service.http.peers.proxy import Proxy
from balance_service.http.peers.trust import FORWARDED_HEADER, Peer
from balance_service.http.route import Handlers
from balance_service.http.scan import TopScan
from balance_service.http.server.ahead_of_aiohttp import ending_with
from balance_service.http.server.listening import bind
from balance_service.http.shares import Asker, asker_of
from balance_service.http.streams.event_stream import Streams
from tests.support.fakes import IdleInstance
from tests.support.querying import Instance
from tests.support.shipped import ROUTES
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
    from pathlib import Path

    from balance_service.http.routing import LocalCopy
    from balance_service.http.scan import Page, Steps, View

TOP = "/api/models/balance/top?by=amount"


@asynccontextmanager
async def serving(app: web.Application) -> AsyncIterator[int]:
    """Serves; yields the port."""
    listener = bind("127.0.0.1", 0)
    port = int(listener.getsockname()[1])
    server = await serve(app, listener)
    try:
        yield port
    finally:
        await server.cleanup()


def app_of(handle: Callable[[web.Request], Awaitable[web.Response]]) -> web.Application:
    app = web.Application()
    app.router.add_get("/{tail:.*}", handle)
    return app


async def ask(port: int, target: str = "/") -> asyncio.StreamWriter:
    """Send a request, and read nothing."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    await writer.drain()
    return writer


class Endless:
    """Never answers; records its cancellation."""

    def __init__(self, *, ends_with_client: bool = True) -> None:
        self.began, self.ended = asyncio.Event(), asyncio.Event()
        self.go_on = asyncio.Event()
        self._ends = ends_with_client

    async def handle(self, request: web.Request) -> web.Response:
        self.began.set()
        try:
            if self._ends:
                with ending_with(request):
                    await self.go_on.wait()
            else:
                await self.go_on.wait()
        except asyncio.CancelledError:
            self.ended.set()
            raise
        return web.Response()


@pytest.mark.parametrize("ends", [True, False])
def test_a_request_is_cancelled_with_its_connection_only_within_the_block(ends: bool) -> None:
    async def run() -> None:
        endless = Endless(ends_with_client=ends)
        async with serving(app_of(endless.handle)) as port:
            client = await ask(port)
            await endless.began.wait()
            client.close()
            if ends:
                await until(endless.ended.is_set, "it is cancelled")
            else:
                await asyncio.sleep(0.2)
                assert not endless.ended.is_set()
            endless.go_on.set()

    asyncio.run(run())


def test_a_peer_cancels_a_forwarded_query_whose_client_has_disconnected() -> None:
    async def run() -> None:
        peer, proxy = Endless(), Proxy()
        async with serving(app_of(peer.handle)) as peer_port:

            async def ask_peer(request: web.Request) -> web.Response:
                with ending_with(request):
                    await proxy.get(Peer(f"127.0.0.1:{peer_port}", "i"), "/", {}, "asker:1", 60)
                return web.Response()

            async with serving(app_of(ask_peer)) as port:
                client = await ask(port)
                await peer.began.wait()
                client.close()
                await until(peer.ended.is_set, "the peer's is cancelled")
        await proxy.close()

    asyncio.run(run())


def test_a_scan_of_a_disconnected_client_is_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began, closed = threading.Event(), threading.Event()

    def endless(self: TopScan, copies: Sequence[LocalCopy], view: View) -> Steps[Page]:
        try:
            while True:
                began.set()
                yield
        finally:
            closed.set()

    monkeypatch.setattr(TopScan, "read", endless)

    async def run() -> None:
        instance, proxy = Instance(tmp_path / "store", timeout_seconds=60), Proxy()
        handlers = Handlers(Operations(IdleInstance({}), Streams(10)))
        models = instance.models(proxy)
        handlers.add(models)
        async with serving(make_app(handlers, ROUTES)) as port:
            client = await ask(port, TOP)
            await until(began.is_set, "it is read")
            assert not closed.is_set()
            client.close()
            await until(closed.is_set, "the reading ends")
        await models.hosted["balance"].scatter.proxy.close()
        await proxy.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("headers", "asker"),
    [
        ({}, Asker("address:127.0.0.1")),
        ({FORWARDED_HEADER: "a mark"}, Asker("address:127.0.0.1", is_peer=True)),
    ],
)
def test_an_asker_without_a_token_is_an_address_and_a_peer_is_not_a_client(
    headers: dict[str, str], asker: Asker
) -> None:
    async def run() -> None:
        asked: list[Asker] = []

        async def handle(request: web.Request) -> web.Response:
            asked.append(asker_of(request))
            return web.Response()

        async with serving(app_of(handle)) as port:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            writer.write(f"GET / HTTP/1.1\r\nHost: x\r\n{lines}\r\n".encode())
            await until(lambda: bool(asked), "the request arrives")
            writer.close()
        assert asked == [asker]

    asyncio.run(run())
