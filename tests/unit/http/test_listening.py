"""How a server accepts connections, and how long each holds its place: real sockets, and many of them."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import structlog
from aiohttp import web

from balance_service.http.peers.trust import FORWARDED_HEADER, Peer, PeerTrust
from balance_service.http.server import listening
from balance_service.http.server.limits import Limits
from balance_service.http.server.listening import AcceptedSocket, Listener, Slots, bind
from balance_service.http.server.tls import TlsFiles, load_tls
from tests.support.credentials import Authority
from tests.support.waiting import until
from tests.unit.http.raw_http import LIVE, QUESTION, Answer, Server, serving

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator
    from pathlib import Path

SOON = 10.0
# More than the small buffer of a client takes, and less than the server's.
FITS_THE_SERVERS_BUFFER = 40_000


@dataclass(frozen=True, slots=True)
class Few(Limits):
    """A server of 32 places, two of them reserved."""

    @property
    def max_connections(self) -> int:
        return 32


async def last_answer(_request: web.Request) -> web.Response:
    response = web.Response(body=b"x" * FITS_THE_SERVERS_BUFFER)
    response.force_close()
    return response


@asynccontextmanager
async def reading_nothing(server: Server) -> AsyncIterator[socket.socket]:
    """A client that asks for what is then closed, and has read one byte of it."""
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", server.port))
        await loop.sock_sendall(client, QUESTION)
        await loop.sock_recv(client, 1)
        yield client


def test_a_connection_that_is_closed_holds_its_place_until_all_is_acknowledged() -> None:
    async def run() -> tuple[int, int]:
        async with serving(Limits(), last_answer) as server, reading_nothing(server) as client:
            await asyncio.sleep(1.0)
            held, size = server.connections, 1
            while data := await asyncio.get_running_loop().sock_recv(client, 1 << 16):
                size += len(data)
            await until(lambda: server.connections == 0, "its place is free")
            return held, size

    held, size = asyncio.run(run())

    assert held == 1
    assert size > FITS_THE_SERVERS_BUFFER


def test_a_closed_connection_that_is_not_read_is_reset_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> tuple[float, int]:
        async with serving(Limits(), last_answer) as server:
            # After the socket was bound: the kernel's own timeout is the usual one.
            monkeypatch.setattr(listening, "UNACKNOWLEDGED_SECONDS", 0.5)
            async with reading_nothing(server) as client:
                began = time.monotonic()
                await until(lambda: server.connections == 0, "its place is free")
                seconds, size = time.monotonic() - began, 1
                try:
                    while data := await asyncio.get_running_loop().sock_recv(client, 1 << 16):
                        size += len(data)
                except ConnectionResetError:
                    return seconds, size
                raise AssertionError("it was not reset")

    seconds, size = asyncio.run(run())

    assert seconds < 5
    assert size < FITS_THE_SERVERS_BUFFER


@pytest.fixture
def tls(tmp_path: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """The server's side and the client's."""
    authority = Authority(tmp_path)
    both = load_tls(TlsFiles(*authority.issue("server"), ca=authority.certificate))
    return both.server, both.client


@pytest.mark.parametrize("is_tls", [False, True], ids=["plain", "TLS"])
def test_silent_connections_of_one_address_keep_no_other_client_out(
    tls: tuple[ssl.SSLContext, ssl.SSLContext], is_tls: bool
) -> None:
    server_tls, client_tls = tls if is_tls else (None, None)

    async def run() -> tuple[int, list[int]]:
        async with serving(Few(), tls=server_tls) as server, AsyncExitStack() as silent:
            for _ in range(60):
                await silent.enter_async_context(server.client())
            await until(lambda: server.connections > 20, "they are accepted")
            statuses = []
            for number in range(2, 5):
                async with server.client(f"127.0.0.{number}", client_tls) as client:
                    statuses.append((await client.ask(LIVE)).status)
            return server.connections, statuses

    connections, statuses = asyncio.run(run())

    assert connections <= 32
    assert statuses == [200, 200, 200]


def test_silent_connections_of_many_addresses_keep_no_client_out() -> None:
    async def run() -> list[int]:
        async with serving(Few()) as server, AsyncExitStack() as silent:
            for number in range(60):
                await silent.enter_async_context(server.client(f"127.0.1.{number + 1}"))
            async with server.client("127.0.0.2") as client:
                return [(await client.ask(LIVE)).status for _ in range(3)]

    assert asyncio.run(run()) == [200, 200, 200]


SECRET = "a secret of all instances"


def test_where_all_are_busy_probes_and_proven_peers_are_answered_and_others_are_not() -> None:
    trust, go_on = PeerTrust(SECRET), asyncio.Event()
    begun: list[web.Request] = []

    async def wait(request: web.Request) -> web.Response:
        begun.append(request)
        if FORWARDED_HEADER not in request.headers:
            await go_on.wait()
        return web.json_response({})

    def marked(mark: str) -> bytes:
        return QUESTION.replace(b"Host: x", f"Host: x\r\n{FORWARDED_HEADER}: {mark}".encode())

    async def run() -> tuple[list[Answer], bool, Answer]:
        target = QUESTION.split()[1].decode()
        async with serving(Few(), wait, trust=trust) as server, AsyncExitStack() as busy:
            for number in range(30):
                client = await busy.enter_async_context(server.client(f"127.0.2.{number + 1}"))
                await client.send(QUESTION)
            await until(lambda: len(begun) == 30, "all are busy")
            proven = trust.mark("x:1", Peer("y:1", trust.incarnation), f"GET {target}")
            answers = []
            for data in (LIVE, marked(proven), marked("x:1"), QUESTION):
                async with server.client() as client:
                    answers.append(await client.ask(data))
                    is_closed = answers[-1].status != 503 or await client.is_closed_within(SOON)
            go_on.set()
            await until(lambda: server.connections < 32, "there is room")
            await asyncio.sleep(0.1)
            async with server.client() as client:
                return answers, is_closed, await client.ask(QUESTION)

    answers, is_closed, later = asyncio.run(run())

    assert [answer.status for answer in answers] == [200, 200, 403, 503]
    assert answers[-1].detail == "all connections are busy here; this request was not processed"
    assert is_closed
    assert later.status == 200


class Exhausted(socket.socket):
    """A listening socket for whose connections there is no descriptor for a while."""

    refusals = 3

    def accept(self) -> tuple[socket.socket, tuple[str, int]]:
        if self.refusals:
            self.refusals -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_where_no_descriptor_is_left_accepting_pauses_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "_PAUSE_SECONDS", 0.1)

    async def run() -> float:
        loop, opened = asyncio.get_running_loop(), asyncio.Event()

        class Opened(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                opened.set()
                transport.close()

        bound = Exhausted(fileno=bind("127.0.0.1", 0).detach())

        def connection(_: AcceptedSocket) -> asyncio.Protocol:
            return Opened()

        listener = Listener(bound, Slots(10, (), loop.time), connection, loop)
        listener.listen()
        with socket.create_connection(bound.getsockname()):
            began = loop.time()
            await asyncio.wait_for(opened.wait(), SOON)
            seconds = loop.time() - began
        await until(lambda: len(listener.slots) == 0, "it is closed")
        listener.close()
        return seconds

    with structlog.testing.capture_logs() as logs:
        seconds = asyncio.run(run())

    assert seconds > 0.25
    assert [entry["log_level"] for entry in logs] == ["error"]
    assert "raise the limit of open files" in logs[0]["event"]


def test_a_server_that_is_closed_closes_what_is_still_being_opened(tls: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    async def run() -> bytes:
        async with AsyncExitStack() as clients:
            async with serving(Limits(), tls=tls[0]) as server:
                client = await clients.enter_async_context(server.client())
                await until(lambda: server.connections == 1, "it is accepted")
            return await asyncio.wait_for(client.reader.read(), SOON)

    assert asyncio.run(run()) == b""
