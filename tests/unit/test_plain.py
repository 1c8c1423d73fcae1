"""Plain queries: answered before aiohttp sees them, with the very bytes that it would have answered."""

from __future__ import annotations

import asyncio
import re
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from balance_service.cluster.partitioner import partition_of
from balance_service.errors import StoreCorruptedError
from balance_service.http import queries
from balance_service.http.app import Handlers, bind, make_app, serve
from balance_service.http.front import Front
from balance_service.http.limits import Limits, UnderWay
from balance_service.http.operations import Operations
from balance_service.http.peers import PeerTrust
from balance_service.http.plain import PlainQueries, whole_request
from balance_service.http.proxy import Proxy
from balance_service.metrics import Metrics
from balance_service.settings import Settings
from balance_service.state.records import Role
from balance_service.state.store import StoreView
from tests.unit.fakes import Nobody
from tests.unit.querying import PARTITION, PARTITIONS, Instance

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Sequence
    from pathlib import Path

    from balance_service.http.plain import WholeRequest

SECRET = "a secret of all instances"
CUSTOMER = next(f"c-{n}" for n in range(99) if partition_of(f"c-{n}".encode(), PARTITIONS) == PARTITION)
ELSEWHERE = next(f"c-{n}" for n in range(99) if partition_of(f"c-{n}".encode(), PARTITIONS) != PARTITION)
TARGET = f"{queries.PATH}?customerId={CUSTOMER}"
LIVE = b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"
HEADS = ["", "User-Agent: curl/8\r\nAccept: */*\r\n", "Connection: keep-alive\r\nX-Request-ID: 1 2\r\n"]


def question(target: str = TARGET, headers: str = "") -> bytes:
    return f"GET {target} HTTP/1.1\r\nHost: x:1\r\n{headers}\r\n".encode()


class Plain(PlainQueries):
    """Keeps what was not left to aiohttp."""

    def __init__(self, handlers: Handlers, trust: PeerTrust, under_way: UnderWay) -> None:
        super().__init__(handlers, trust, under_way)
        self.answered_at_once: list[WholeRequest] = []
        self.answered_later: list[WholeRequest] = []

    def at_once(self, request: WholeRequest) -> bytes | None:
        answer = super().at_once(request)
        if answer is not None:
            self.answered_at_once.append(request)
        return answer

    def later(self, request: WholeRequest) -> Coroutine[Any, Any, bytes] | None:
        answering = super().later(request)
        if answering is not None:
            self.answered_later.append(request)
        return answering


class Server:
    """An instance behind a real socket, and what of its answers did not come from aiohttp."""

    def __init__(self, port: int, plain: Plain | None = None) -> None:
        self.port = port
        self.at_once = [] if plain is None else plain.answered_at_once
        self.later = [] if plain is None else plain.answered_later

    async def exchange(self, *segments: bytes, answers: int = 1) -> list[bytes]:
        """What is answered to some bytes on one connection; each segment is sent a moment after the one before."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            for segment in segments:
                writer.write(segment)
                await writer.drain()
                await asyncio.sleep(0.02)
            return [await _answer(reader) for _ in range(answers)]
        finally:
            writer.transport.abort()
            await asyncio.sleep(0)


async def _answer(reader: asyncio.StreamReader) -> bytes:
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    length = re.search(rb"Content-Length: (\d+)", head)
    assert length is not None
    return re.sub(rb"Date: [^\r]*", b"Date: now", head) + await reader.readexactly(int(length[1]))


@asynccontextmanager
async def serving(
    instance: Instance, limits: Limits | None = None, trust: PeerTrust | None = None, *, is_plain: bool = True
) -> AsyncIterator[Server]:
    trust = trust or PeerTrust()
    limits = limits or Limits()
    under_way = UnderWay(limits)
    proxy = Proxy(trust)
    handlers = Handlers(Operations(Nobody()))
    handlers.queries = instance.queries(proxy)
    listener = bind("127.0.0.1", 0)
    plain = Plain(handlers, trust, under_way)
    server = Server(listener.getsockname()[1], plain)
    app = make_app(handlers, limits, trust, under_way=under_way)
    http = await serve(app, listener, limits, None, plain if is_plain else None)
    try:
        yield server
    finally:
        await http.cleanup()
        await proxy.close()


@pytest.fixture
def instance(tmp_path: Path) -> Instance:
    made = Instance(tmp_path / "store")
    made.put("12.34", CUSTOMER)
    return made


def both_ways(
    instance: Instance, *segments: bytes, trust: PeerTrust | None = None, answers: int = 1
) -> tuple[list[bytes], int]:
    """What is answered, the same with plain queries and without; and how many answers were not aiohttp's."""

    async def run(*, is_plain: bool) -> tuple[list[bytes], int]:
        async with serving(instance, None, trust, is_plain=is_plain) as server:
            return await server.exchange(*segments, answers=answers), len(server.at_once)

    with_plain, at_once = asyncio.run(run(is_plain=True))
    without, _ = asyncio.run(run(is_plain=False))
    assert with_plain == without
    return with_plain, at_once


@pytest.mark.parametrize("headers", HEADS)
def test_the_owners_answer_is_aiohttps_byte_for_byte(instance: Instance, headers: str) -> None:
    (answer,), at_once = both_ways(instance, question(headers=headers))

    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.endswith(b'{"amount": 12.34}')
    assert at_once == 1


def test_so_is_that_for_an_unknown_customer(instance: Instance) -> None:
    unknown = next(f"n{n}" for n in range(99) if partition_of(f"n{n}".encode(), PARTITIONS) == PARTITION)
    (answer,), at_once = both_ways(instance, question(f"{queries.PATH}?customerId={unknown}"))

    assert answer.startswith(b"HTTP/1.1 404 Not Found\r\n")
    assert at_once == 1


def test_so_is_one_whose_lag_is_not_known(instance: Instance) -> None:
    instance.clock.now += 4
    instance.lease.renew(instance.clock.now)
    (answer,), at_once = both_ways(instance, question())

    assert b"Balance-Lag" not in answer
    assert at_once == 1


@pytest.mark.parametrize(
    "target",
    [
        f"{queries.PATH}?customerId={ELSEWHERE}",
        f"{queries.PATH}?customerId=",
        f"{queries.PATH}?customerId={'x' * 257}",
        f"{queries.PATH}?customerId=a%00b",
        f"{queries.PATH}?customerId={CUSTOMER}&customerId=b",
        f"{queries.PATH}?customerId={CUSTOMER}&minPosition={PARTITION}:10",
        f"{queries.PATH}?customerId={CUSTOMER}&maxLag=1",
        f"{queries.PATH}/?customerId={CUSTOMER}",
        queries.PATH,
        "/health/live",
        "//" + TARGET,
        "/nope",
    ],
)
def test_whatever_else_is_asked_is_left_to_aiohttp(instance: Instance, target: str) -> None:
    _, at_once = both_ways(instance, question(target))

    assert at_once == 0


@pytest.mark.parametrize(
    "segments",
    [(question() + LIVE + question(),), (LIVE, question(), LIVE), (question()[:30], question()[30:] + question())],
)
def test_answers_come_in_the_order_of_their_requests(instance: Instance, segments: Sequence[bytes]) -> None:
    answers = b"".join(segments).count(b"HTTP/1.1")
    both_ways(instance, *segments, question(), answers=answers + 1)


def test_after_an_answer_of_aiohttps_plain_queries_are_answered_at_once_again(instance: Instance) -> None:
    _, at_once = both_ways(instance, LIVE, question(), LIVE, question(), answers=4)

    assert at_once == 2


@pytest.mark.parametrize(
    "before",
    [
        b"GET /health/live HTTP/1.1\r\nHost: x\r\nX: ",
        LIVE + b"GET /health/live HTTP/1.1\r\nHost: x\r\nX: ",
        b"POST /nope HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(question()),
        b"POST /nope HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % len(question()),
    ],
)
def test_what_is_within_another_request_is_no_query(instance: Instance, before: bytes) -> None:
    end = b"\r\n0\r\n\r\n" if b"chunked" in before else b""
    _, at_once = both_ways(instance, before, question(), end, answers=1 + before.startswith(LIVE))

    assert at_once == 0


def test_a_query_passed_on_is_answered_at_once_if_its_proof_is_right(instance: Instance) -> None:
    trust = PeerTrust(SECRET, now=lambda: 1e9)

    def passed_on(mark: str) -> tuple[bytes, int]:
        (answer,), at_once = both_ways(instance, question(headers=f"Balance-Forwarded: {mark}\r\n"), trust=trust)
        return answer.split(b"\r\n")[0], at_once

    assert passed_on(trust.mark("peer:1", TARGET)) == (b"HTTP/1.1 200 OK", 1)
    assert passed_on(trust.mark("peer:1", TARGET + "0")) == (b"HTTP/1.1 403 Forbidden", 0)
    assert passed_on("peer:1") == (b"HTTP/1.1 403 Forbidden", 0)


def test_one_for_another_instance_is_misdirected(instance: Instance) -> None:
    asked = question(f"{queries.PATH}?customerId={ELSEWHERE}", "Balance-Forwarded: peer:1\r\n")
    (answer,), at_once = both_ways(instance, asked)

    assert (answer[:12], at_once) == (b"HTTP/1.1 421", 0)


def test_who_is_not_the_owner_does_not_answer_at_once(instance: Instance) -> None:
    instance.role = Role.STANDBY
    assert both_ways(instance, question())[1] == 0
    instance.role = Role.ACTIVE
    instance.lease.revoke()
    assert both_ways(instance, question())[1] == 0


def test_a_damaged_store_is_told_of_once_a_query(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_view: StoreView, _key: bytes) -> bytes:
        raise StoreCorruptedError("bad block")

    monkeypatch.setattr(StoreView, "get", fail)
    (answer,), at_once = both_ways(instance, question())

    assert (answer[:12], at_once, len(instance.damaged)) == (b"HTTP/1.1 503", 0, 2)


def test_an_answer_is_counted_once_whichever_way_it_takes(instance: Instance) -> None:
    metrics = Metrics()

    async def run() -> None:
        handlers = Handlers(Operations(Nobody()))
        proxy = Proxy()
        handlers.queries = instance.queries(proxy, metrics)
        request = whole_request(question())
        assert request is not None
        for _ in range(3):
            assert PlainQueries(handlers, PeerTrust(), UnderWay(Limits())).at_once(request) is not None
        await proxy.close()

    asyncio.run(run())

    assert b'balance_query_duration_seconds_count{answered="local",status="200"} 3.0' in metrics.text()


NAMES = ["Host", "Accept", "accept", "X-Request-ID", "Connection", "Content-Length", "Transfer-Encoding", "Expect"]
VALUES = ["x", "*/*", "keep-alive", "close", "0", "1", "chunked", "100-continue", " ", "a\tb", "é", ""]
LINES = st.lists(st.tuples(st.sampled_from([*NAMES, "User-Agent", "Upgrade"]), st.sampled_from(VALUES)), max_size=4)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(
    st.sampled_from(["GET", "get", "POST", "PUT"]),
    st.sampled_from(["HTTP/1.1", "HTTP/1.0", "HTTP/2.0", "http/1.1"]),
    LINES,
    st.sampled_from(["\r\n", "\n", "\r", ""]),
)
@example("GET", "HTTP/1.1", [("User-Agent", "x"), ("User-Agent", "x")], "\r\n")
@example("GET", "HTTP/1.1", [("Accept", "*/*")] * 70, "\r\n")
def test_a_request_of_whatever_form_is_answered_as_aiohttp_does(
    instance: Instance, method: str, version: str, lines: list[tuple[str, str]], end: str
) -> None:
    head = "".join(f"{name}: {value}\r\n" for name, value in [("Host", "x"), *lines])
    data = f"{method} {TARGET} {version}\r\n{head}{end}".encode()

    async def run(*, is_plain: bool) -> bytes:
        limits = Limits(head_seconds=0.2, body_seconds=0.2)
        async with serving(instance, limits, is_plain=is_plain) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(data)
            try:
                return await _answer(reader)
            except (asyncio.IncompleteReadError, ConnectionError):
                return b"closed"
            finally:
                writer.transport.abort()
                await asyncio.sleep(0)

    assert asyncio.run(run(is_plain=True)) == asyncio.run(run(is_plain=False))


def test_a_connection_that_is_used_outlasts_the_idle_time_and_is_closed_after_it(instance: Instance) -> None:
    async def run() -> tuple[int, float]:
        async with serving(instance, Limits(idle_seconds=1.0)) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            for _ in range(8):
                writer.write(question())
                assert (await _answer(reader)).startswith(b"HTTP/1.1 200")
                await asyncio.sleep(0.3)
            began = asyncio.get_running_loop().time()
            assert await asyncio.wait_for(reader.read(), 5) == b""
            writer.transport.abort()
            await asyncio.sleep(0)
            return len(server.at_once), asyncio.get_running_loop().time() - began

    at_once, seconds = asyncio.run(run())

    assert at_once == 8
    assert 0.3 < seconds < 2


def test_a_client_that_reads_no_plain_answers_is_cut_off(instance: Instance) -> None:
    async def run() -> int:
        loop = asyncio.get_running_loop()
        async with serving(instance, Limits(unsent_seconds=0.5)) as server:
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.setblocking(False)
                await loop.sock_connect(client, ("127.0.0.1", server.port))

                async def flood() -> None:
                    while True:
                        await loop.sock_sendall(client, question())
                        await asyncio.sleep(0)

                await loop.sock_sendall(client, question())
                await asyncio.sleep(0.05)
                with pytest.raises(ConnectionError):
                    await asyncio.wait_for(flood(), 30)
            return len(server.at_once)

    assert asyncio.run(run()) >= 1


@pytest.mark.parametrize(
    "variables", [{}, {"rate_limit": 0.001, "rate_limit_burst": 1, "peer_secret": SECRET}], ids=["free", "limited"]
)
def test_clients_that_are_counted_are_counted_for_plain_queries_too(
    instance: Instance, variables: dict[str, Any]
) -> None:
    async def run() -> list[bytes]:
        handlers = Handlers(Operations(Nobody()))
        front = Front(Settings(http_port=0, **variables), handlers)
        handlers.queries = instance.queries(await front.open())
        try:
            answers = await Server(front.port).exchange(question(), question(), answers=2)
        finally:
            await front.close()
        return [answer[:12] for answer in answers]

    assert asyncio.run(run()) == [b"HTTP/1.1 200", b"HTTP/1.1 429" if variables else b"HTTP/1.1 200"]
