"""Accepting connections: binding, slots, and real sockets, many at a time."""

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

from balance_service.errors import ConfigurationError
from balance_service.http.app import serve
from balance_service.http.peers.trust import FORWARDED_HEADER, Peer, PeerTrust
from balance_service.http.server import listening
from balance_service.http.server.limits import Limits
from balance_service.http.server.listening import AcceptedSocket, Listener, Slot, Slots, bind
from tests.support.waiting import until
from tests.unit.http.raw_http import LIVE, QUESTION, Answer, Server, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from balance_service.http.server.tls import Tls


SOON = 10.0
# More than the small buffer of the client holds, and less than the server's.
FITS_THE_SERVERS_BUFFER = 40_000


@dataclass(frozen=True, slots=True)
class Few(Limits):
    """A server of 32 slots, two of them reserved."""

    @property
    def max_connections(self) -> int:
        return 32


async def last_answer(_request: web.Request) -> web.Response:
    response = web.Response(body=b"x" * FITS_THE_SERVERS_BUFFER)
    response.force_close()
    return response


@asynccontextmanager
async def reading_nothing(server: Server) -> AsyncIterator[socket.socket]:
    """A client that reads one byte of an answer after which the server closes."""
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", server.port))
        await loop.sock_sendall(client, QUESTION)
        await loop.sock_recv(client, 1)
        yield client


def test_a_closed_connection_holds_its_slot_until_all_data_is_acknowledged() -> None:
    async def run() -> tuple[int, int]:
        async with serving(Limits(), last_answer) as server, reading_nothing(server) as client:
            await asyncio.sleep(1.0)
            held, size = server.connections, 1
            while data := await asyncio.get_running_loop().sock_recv(client, 1 << 16):
                size += len(data)
            await until(lambda: server.connections == 0, "its slot is free")
            return held, size

    held, size = asyncio.run(run())

    assert held == 1
    assert size > FITS_THE_SERVERS_BUFFER


def test_a_closed_connection_that_the_client_does_not_read_is_reset_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> tuple[float, int]:
        async with serving(Limits(), last_answer) as server:
            # After `bind`, so that the timeout of the kernel stays at its default.
            monkeypatch.setattr(listening, "UNACKNOWLEDGED_SECONDS", 0.5)
            async with reading_nothing(server) as client:
                began = time.monotonic()
                await until(lambda: server.connections == 0, "its slot is free")
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


@pytest.mark.parametrize("is_tls", [False, True], ids=["plain", "TLS"])
def test_idle_connections_from_one_address_block_no_other_client(tls: Tls, is_tls: bool) -> None:
    server_tls, client_tls = (tls.server, tls.client) if is_tls else (None, None)

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


@pytest.mark.shows("floods")
def test_idle_connections_from_many_addresses_block_no_client() -> None:
    async def run() -> list[int]:
        async with serving(Few()) as server, AsyncExitStack() as silent:
            for number in range(60):
                await silent.enter_async_context(server.client(f"127.0.1.{number + 1}"))
            async with server.client("127.0.0.2") as client:
                return [(await client.ask(LIVE)).status for _ in range(3)]

    assert asyncio.run(run()) == [200, 200, 200]


SECRET = "a secret of all instances"


@pytest.mark.shows("floods")
def test_while_all_connections_are_busy_only_probes_and_proven_peers_are_answered() -> None:
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
    """A listening socket that fails to accept a few times for lack of descriptors."""

    refusals = 3

    def accept(self) -> tuple[socket.socket, tuple[str, int]]:
        if self.refusals:
            self.refusals -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_without_file_descriptors_accepting_pauses_and_logs_once() -> None:
    async def run() -> float:
        loop, opened = asyncio.get_running_loop(), asyncio.Event()

        class Opened(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                opened.set()
                transport.close()

        bound = Exhausted(fileno=bind("127.0.0.1", 0).detach())

        def connection(_: AcceptedSocket) -> asyncio.Protocol:
            return Opened()

        listener = Listener(bound, Slots(10, (), loop.time), connection, loop, pause_seconds=0.1)
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


def test_closing_the_server_closes_connections_during_their_handshake(
    tls: Tls,
) -> None:
    async def run() -> bytes:
        async with AsyncExitStack() as clients:
            async with serving(Limits(), tls=tls.server) as server:
                client = await clients.enter_async_context(server.client())
                await until(lambda: server.connections == 1, "it is accepted")
            return await asyncio.wait_for(client.reader.read(), SOON)

    assert asyncio.run(run()) == b""


# --- a renewed certificate


LINE = b"HTTP/1.1 200 OK\r\n"


async def answer(_request: web.Request) -> web.Response:
    return web.Response()


async def first_line(client: socket.socket) -> bytes:
    reader, writer = await asyncio.open_connection(sock=client)
    try:
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        return await asyncio.wait_for(reader.readline(), 10)
    except (OSError, TimeoutError) as error:
        return repr(error).encode()
    finally:
        writer.close()


def test_a_connection_accepted_during_a_renewal_of_the_certificate_is_answered() -> None:
    async def run() -> list[bytes]:
        app = web.Application()
        app.router.add_get("/", answer)
        listener = bind("127.0.0.1", 0)
        server = await serve(app, listener)
        lines = []
        for turns in range(40):
            # In the backlog: the loop accepts it some iterations later, before, during or after the next `listen`.
            client = socket.create_connection(listener.getsockname())
            client.setblocking(False)
            for _ in range(turns % 4):
                await asyncio.sleep(0)
            server.listen()
            lines.append(await first_line(client))
        await server.cleanup()
        return lines

    assert set(asyncio.run(run())) == {LINE}


# --- binding


@pytest.mark.parametrize("host", ["a..b", ".a", "a" * 64, "ü" * 64])
def test_an_invalid_host_name_is_refused(host: str) -> None:
    with pytest.raises(
        ConfigurationError, match=f"BALANCE_HTTP_HOST {host} is neither an address nor a host name; name"
    ):
        bind(host, 0)


def test_a_port_in_use_is_refused_and_its_setting_named() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]

        with pytest.raises(ConfigurationError, match=f"port {port} on 127.0.0.1 is in use; .* set BALANCE_HEALTH_PORT"):
            bind("127.0.0.1", port, "BALANCE_HEALTH_PORT")


# --- slots


class Crowd:
    """160 slots, ten of them reserved, and a clock that the test moves."""

    def __init__(self, trusted_proxies: tuple[str, ...] = ()) -> None:
        self.time = 0.0
        self.closed: list[Slot] = []
        self.slots = Slots(160, trusted_proxies, lambda: self.time)

    def take(self, address: str) -> Slot | None:
        self.time += 1
        slot = self.slots.take(address)
        if slot is not None:
            slot.close_now = lambda: self.closed.append(slot)
        return slot

    def take_all(self, count: int, address: str = "10.{}.0.1", *, busy: bool = False) -> list[Slot]:
        """Takes slots, each for another address if `address` has a placeholder."""
        taken = [self.take(address.format(number)) for number in range(count)]
        slots = [slot for slot in taken if slot is not None]
        assert len(slots) == count
        for slot in slots:
            if busy:
                slot.idle_since = None
        return slots


def test_one_address_may_exceed_its_share_while_there_are_free_slots() -> None:
    crowd = Crowd()

    crowd.take_all(113, "10.0.0.1")

    assert crowd.closed == []


def test_an_address_beyond_its_share_loses_its_longest_idle_connection() -> None:
    crowd = Crowd()
    others = crowd.take_all(80)
    own = crowd.take_all(37, "192.0.2.1")

    crowd.take_all(2, "192.0.2.1")

    assert crowd.closed == own[:2]
    assert len(crowd.slots) == 117
    assert not set(others).intersection(crowd.closed)


def test_an_address_whose_connections_are_all_busy_gets_no_more_than_its_share() -> None:
    crowd = Crowd()
    crowd.take_all(80)
    crowd.take_all(37, "192.0.2.1", busy=True)

    assert crowd.take("192.0.2.1") is None
    assert crowd.take("198.51.100.1") is not None
    assert crowd.closed == []


def test_addresses_of_one_ipv6_network_share_slots() -> None:
    crowd = Crowd()
    crowd.take_all(113, "2001:db8::{}")

    assert crowd.take("2001:db8::ffff") is not None
    assert len(crowd.closed) == 1


def test_without_free_slots_the_longest_idle_connection_is_closed() -> None:
    crowd = Crowd()
    slots = crowd.take_all(150)
    slots[0].idle_since = crowd.time
    slots[1].idle_since = None

    newcomer = crowd.take("198.51.100.1")

    assert newcomer is not None
    assert not newcomer.is_reserved
    assert crowd.closed == [slots[2]]


def test_a_candidate_that_was_used_since_is_not_closed() -> None:
    crowd = Crowd()
    slots = crowd.take_all(150)
    crowd.take("198.51.100.1")
    slots[1].idle_since = crowd.time

    crowd.take("198.51.100.2")

    assert crowd.closed == [slots[0], slots[2]]


def test_while_all_connections_are_busy_new_ones_take_the_reserved_slots() -> None:
    crowd = Crowd()
    crowd.take_all(150, busy=True)

    reserved = crowd.take_all(10, "198.51.{}.1", busy=True)

    assert all(slot.is_reserved for slot in reserved)
    assert crowd.take("203.0.113.1") is None


def test_an_idle_connection_in_a_reserved_slot_is_closed_for_a_new_one() -> None:
    crowd = Crowd()
    crowd.take_all(150, busy=True)
    silent = crowd.take_all(10, "198.51.{}.1")
    assert crowd.closed == []

    assert crowd.take("203.0.113.1") is not None
    assert crowd.closed == silent[:1]


def test_a_trusted_proxy_has_no_share() -> None:
    crowd = Crowd(("192.0.2.0/24",))

    crowd.take_all(150, "192.0.2.7")

    assert crowd.closed == []
    # Mapped into IPv6, as a dual-stack socket reports it.
    crowd.take_all(1, "::ffff:192.0.2.7")
    assert len(crowd.closed) == 1


def test_an_authenticated_connection_counts_for_its_token_and_not_for_its_address() -> None:
    crowd = Crowd()
    for slot in crowd.take_all(112, "192.0.2.1"):
        crowd.slots.attribute(slot, "token:billing")

    crowd.take_all(20, "192.0.2.1")

    assert crowd.closed == []


def test_a_token_beyond_its_share_loses_its_longest_idle_connection() -> None:
    crowd = Crowd(("192.0.2.1",))
    slots = crowd.take_all(120, "192.0.2.1")
    for slot in slots[:37]:
        crowd.slots.attribute(slot, "token:billing")

    crowd.slots.attribute(slots[60], "token:billing")

    assert crowd.closed == [slots[0]]
    assert len(crowd.slots) == 119


def test_a_slot_may_be_released_twice_and_is_free_again() -> None:
    crowd = Crowd()
    slots = crowd.take_all(150, busy=True)

    crowd.slots.release(slots[0])
    crowd.slots.release(slots[0])

    newcomer = crowd.take("198.51.100.1")
    assert newcomer is not None
    assert not newcomer.is_reserved
    assert len(crowd.slots) == 150


def test_reducing_the_number_of_slots_closes_the_longest_idle_connections() -> None:
    crowd = Crowd()
    busy, idle = crowd.take_all(10, busy=True), crowd.take_all(10, "198.51.{}.1")

    crowd.slots.resize(16)

    assert crowd.closed == idle[:5]
    crowd.slots.resize(2)
    assert crowd.closed == idle
    assert len(crowd.slots) == len(busy)
