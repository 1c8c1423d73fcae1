"""Plain queries: answered ahead of aiohttp with exactly the bytes that aiohttp would send."""

from __future__ import annotations

import asyncio
import itertools
import socket
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from balance_service.avro.codec import AvroCodec
from balance_service.engine.records import Role
from balance_service.engine.store import StoreView
from balance_service.errors import StoreCorruptedError
from balance_service.http.access.authorization import Access, Browsers
from balance_service.http.app import HttpServer
from balance_service.http.key_target import key_targets
from balance_service.http.model_queries import ModelAnswers, ModelQueries
from balance_service.http.peers.connections import AnswerReader
from balance_service.http.peers.trust import FORWARDED_HEADER, PeerTrust
from balance_service.http.peers.trust import Peer as Address
from balance_service.http.server.limits import Limits
from balance_service.http.streams.event_stream import Streams
from balance_service.kafka.partitioner import partition_of
from balance_service.model.read_model import Collection
from balance_service.observability.metrics import Metrics
from balance_service.read_models.balance import Balance
from balance_service.read_models.leaderboard import Leaderboard
from balance_service.read_models.rewards import Rewards
from balance_service.settings import Settings
from balance_service.testing.fakes import FakeRegistry
from tests.support.api import GET_BALANCE
from tests.support.fakes import IdleInstance
from tests.support.querying import PARTITION, PARTITIONS, Instance, Peer, answering, proving
from tests.support.shipped import MODELS
from tests.support.waiting import until
from tests.unit.http.plain_queries import (
    CUSTOMER,
    ELSEWHERE,
    INGRESS,
    LIVE,
    POST,
    SECRET,
    TARGET,
    Server,
    both_ways,
    exchange,
    next_answer,
    question,
    raw,
    serving,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from pathlib import Path

    from balance_service.http.peers.proxy import Proxy
    from balance_service.http.queries import Queries
    from balance_service.model.read_model import ReadModel

ACTIVE = {
    "Balance-Position": f"{PARTITION}:7",
    "Balance-Epoch": "3",
    "Balance-Lag": "0",
    "X-Of-The-Owner": "secret",
}
AT_OWNER = answering(headers=ACTIVE)
# It says that a request of the length of a plain query follows.
POST_AROUND = b"POST /nope HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(question())


@pytest.fixture
def other(tmp_path: Path) -> Instance:
    """Does not own the partition of CUSTOMER."""
    return Instance(tmp_path / "other-store", owns=False)


def slow(
    seconds: float = 0.1, answer: Callable[[web.Request], Awaitable[web.StreamResponse]] = AT_OWNER
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handle(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(seconds)
        return await answer(request)

    return handle


# --- answered by the owner


@pytest.mark.parametrize(
    "headers",
    [
        "Host: x:1\r\n",
        "Host: x:1\r\nUser-Agent: curl/8\r\nAccept: */*\r\n",
        "Host: x:1\r\nConnection: keep-alive\r\nX-Request-ID: 1 2\r\n",
        "Host: x:1\r\nContent-Length: 0\r\nX:\tno space before the colon, but a tab after it \r\n",
        f"User-Agent: curl/8\r\n{INGRESS}Host: balance.example.com\r\n",
    ],
)
def test_the_owner_answers_with_the_bytes_of_aiohttp(instance: Instance, headers: str) -> None:
    (answer,), at_once, _ = both_ways(instance, raw(headers))

    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.endswith(b'{"amount":12.34}')
    assert at_once == 1


def test_the_owner_answers_without_a_lag_if_the_watermark_is_stale(instance: Instance) -> None:
    instance.clock.now += 4
    instance.lease.renew(instance.clock.now)
    (answer,), at_once, _ = both_ways(instance, question())

    assert b"Balance-Lag" not in answer
    assert at_once == 1


@pytest.mark.parametrize(
    "target",
    [
        f"{GET_BALANCE}?customerId={ELSEWHERE}",
        f"{GET_BALANCE}?customerId=",
        f"{GET_BALANCE}?customerId={'x' * 257}",
        f"{GET_BALANCE}?customerId=a%00b",
        f"{GET_BALANCE}?customerId={CUSTOMER}&customerId=b",
        f"{GET_BALANCE}?customerId={CUSTOMER}&minPosition={PARTITION}:10",
        f"{GET_BALANCE}?customerId={CUSTOMER}&maxLag=1",
        f"{GET_BALANCE}/?customerId={CUSTOMER}",
        GET_BALANCE,
        "/health/live",
        "//" + TARGET,
        "/nope",
    ],
)
def test_other_targets_are_not_answered_at_once(instance: Instance, target: str) -> None:
    assert both_ways(instance, question(target)).at_once == 0


@pytest.mark.parametrize(
    "data",
    [
        question(headers="Connection: close\r\n"),
        question(headers="Connection: Upgrade\r\nUpgrade: h2c\r\n"),
        question(headers="Connection: Upgrade\r\nUpgrade: websocket\r\n"),
        question(headers="Content-Length: 2\r\n") + b"{}",
        question(headers="Transfer-Encoding: chunked\r\n") + b"0\r\n\r\n",
        question(headers="Expect: something\r\n"),
        question(headers=f"X: {'x' * 7_000}\r\n" * 3),
        question(headers="X: x\r\n" * 100),
        question(headers="Host: y\r\n"),
        question().replace(b"HTTP/1.1", b"HTTP/1.0"),
        question().replace(b"HTTP/1.1", b"HTTP/1.0").replace(b"Host", b"Connection: keep-alive\r\nHost"),
        question().replace(b"GET", b"POST"),
        question().replace(b"GET /", b"GET http://x:1/"),
    ],
)
def test_aiohttp_answers_requests_whose_headers_matter(instance: Instance, data: bytes) -> None:
    assert both_ways(instance, data).at_once == 0


@pytest.mark.parametrize(
    "other",
    [
        "Origin: https://elsewhere.example\r\n",
        "Host: rebound.example\r\n",
        "Expect: something\r\n",
        "Accept: text/event-stream\r\n",
        "Content-Encoding: gzip\r\n",
    ],
)
def test_headers_are_judged_again_when_they_differ_from_those_of_the_last_request(
    instance: Instance, other: str
) -> None:
    host = "" if other.startswith("Host") else "Host: 127.0.0.1:1\r\n"
    requests = [raw("Host: 127.0.0.1:1\r\n"), raw("Host: 127.0.0.1:1\r\n"), raw(host + other)]

    answers, at_once, _ = both_ways(
        instance, *requests, requests[0], answers=4, access=lambda: Access(browsers=Browsers(["x"]))
    )

    assert at_once == 3
    assert answers[0] == answers[1] == answers[3]


def test_each_answer_tells_the_position_and_the_lag_of_its_own_state(instance: Instance) -> None:
    async def run() -> list[bytes]:
        found = []
        async with serving(instance) as server:
            for position, now in ((10, 1000.0), (20, 1000.0), (20, 1004.0)):
                instance.move_to(position)
                instance.clock.now = now
                instance.lease.renew(now)
                found += await server.exchange(question(), question(), answers=2)
        return found

    first, again, moved, moved_again, stale, _ = asyncio.run(run())

    assert first == again
    assert moved == moved_again
    assert f"Balance-Position: {PARTITION}:10\r\n".encode() in first
    assert f"Balance-Position: {PARTITION}:20\r\n".encode() in moved
    assert b"Balance-Lag: 90\r\n" in first
    assert b"Balance-Lag: 80\r\n" in moved
    assert b"Balance-Lag" not in stale


@pytest.mark.parametrize("is_owner", [True, False])
def test_a_mark_is_judged_each_time_though_its_headers_are_repeated(
    instance: Instance, other: Instance, *, is_owner: bool
) -> None:
    forwarded = question(headers="Balance-Forwarded: peer:1\r\n")

    answers, _, later = both_ways(
        instance if is_owner else other,
        question(),
        forwarded,
        forwarded,
        answers=3,
        owner=None if is_owner else answering(),
    )

    assert later == (0 if is_owner else 1)
    assert answers[1] == answers[2]


@pytest.mark.parametrize("spoil", [lambda i: setattr(i, "role", Role.STANDBY), lambda i: i.lease.revoke()])
def test_only_the_owner_answers_at_once(instance: Instance, spoil: Callable[[Instance], object]) -> None:
    spoil(instance)

    assert both_ways(instance, question()).at_once == 0


def test_a_damaged_store_is_reported_once_for_each_query(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_view: StoreView, _key: bytes) -> bytes:
        raise StoreCorruptedError("bad block")

    monkeypatch.setattr(StoreView, "get", fail)
    (answer,), at_once, later = both_ways(instance, question())

    assert answer.startswith(b"HTTP/1.1 503")
    assert b"the local store is damaged" in answer
    # One query on each of both ways.
    assert (at_once, later, instance.damaged) == (0, 1, [PARTITION] * 2)


@pytest.mark.parametrize("is_owner", [True, False], ids=["local", "proxied"])
def test_metrics_count_each_answer_once_on_both_ways(tmp_path: Path, *, is_owner: bool) -> None:
    instance, metrics, peer = Instance(tmp_path / "s", owns=is_owner), Metrics(), Peer(AT_OWNER)
    instance.put("12.34", CUSTOMER)
    asked = question(), question(f"{TARGET}&maxLag=100"), question()

    _, at_once, later = exchange(instance, *asked, answers=3, owner=peer, metrics=metrics)

    assert (at_once, later) == ((2, 0) if is_owner else (0, 2))
    answered = "local" if is_owner else "proxied"
    counted = f'balance_query_duration_seconds_count{{answered="{answered}",read_model="balance",status="200"}} 3.0'
    text = metrics.text().decode()
    assert counted in text
    assert ('balance_proxied_requests_total{outcome="answered"' in text) == (not is_owner)


@pytest.mark.parametrize(
    "variables", [{}, {"rate_limit": 0.001, "rate_limit_burst": 1, "peer_secret": SECRET}], ids=["free", "limited"]
)
@pytest.mark.parametrize("is_owner", [True, False], ids=["local", "proxied"])
def test_the_rate_limit_counts_plain_queries(tmp_path: Path, *, is_owner: bool, variables: dict[str, Any]) -> None:
    instance = Instance(tmp_path / "s", owns=is_owner)
    instance.put("12.34", CUSTOMER)

    async def run() -> list[bytes]:
        front = HttpServer(Settings(http_port=0, allowed_hosts=("x",), **variables), IdleInstance(), MODELS)
        front.handlers.add(instance.models(await front.open()))
        async with TestServer(Peer(proving(AT_OWNER, SECRET)).app()) as owner:
            instance.hear_of_owner(f"127.0.0.1:{owner.port}")
            answers = await Server(front.port).exchange(question(), question(), answers=2)
        await front.close()
        return [answer[:12] for answer in answers]

    assert asyncio.run(run()) == [b"HTTP/1.1 200", b"HTTP/1.1 429" if variables else b"HTTP/1.1 200"]


# --- several requests on one connection


@pytest.mark.parametrize(
    "segments",
    [(question() + LIVE + question(),), (LIVE, question(), LIVE), (question()[:30], question()[30:] + question())],
)
def test_answers_come_in_the_order_of_requests(instance: Instance, segments: Sequence[bytes]) -> None:
    answers = b"".join(segments).count(b"HTTP/1.1")
    both_ways(instance, *segments, question(), answers=answers + 1)


def test_a_query_that_waits_is_answered_before_a_later_plain_query(instance: Instance) -> None:
    instance.timeout_seconds = 0.2
    waits = question(f"{TARGET}&minPosition={PARTITION}:99")
    answers = both_ways(instance, waits, question(), answers=2).answers

    assert [answer[:12] for answer in answers] == [b"HTTP/1.1 503", b"HTTP/1.1 200"]


def test_plain_queries_after_an_answer_of_aiohttp_are_answered_at_once(instance: Instance) -> None:
    assert both_ways(instance, LIVE, question(), LIVE, question(), answers=4).at_once == 2


@pytest.mark.parametrize(
    "before",
    [
        b"GET /health/live HTTP/1.1\r\nHost: x\r\nX: ",
        LIVE + b"GET /health/live HTTP/1.1\r\nHost: x\r\nX: ",
        POST_AROUND,
        b"POST /nope HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % len(question()),
    ],
)
def test_a_query_inside_another_request_is_not_answered(instance: Instance, before: bytes) -> None:
    end = b"\r\n0\r\n\r\n" if b"chunked" in before else b""

    assert both_ways(instance, before, question(), end, answers=1 + before.startswith(LIVE)).at_once == 0


REQUESTS = [
    question(),
    raw(f"{INGRESS}Host: x\r\n"),
    question(f"{GET_BALANCE}?customerId={CUSTOMER}0"),
    LIVE,
    question(f"{TARGET}&minPosition={PARTITION}:99"),
    POST_AROUND + question(),
    question(headers="Content-Length: 2\r\n") + b"{}",
    question(headers="Connection: Upgrade\r\nUpgrade: websocket\r\n"),
]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=25)
@given(
    st.lists(st.sampled_from(REQUESTS), min_size=2, max_size=5),
    st.lists(st.floats(0, 1), max_size=4),
    st.booleans(),
)
def test_requests_in_any_order_and_segments_are_answered_as_by_aiohttp(
    instance: Instance, requests: list[bytes], cuts: list[float], are_cut_between: bool
) -> None:
    instance.timeout_seconds = 0.05
    data = b"".join(requests)
    ends = [0, *sorted(int(cut * len(data)) for cut in cuts), len(data)]
    segments = requests if are_cut_between else [data[start:end] for start, end in itertools.pairwise(ends)]

    both_ways(instance, *filter(None, segments), answers=len(requests))


NAMES = ["Host", "Accept", "accept", "X-Forwarded-Host", "Via", "User-Agent", "Balance-Forwarded", "Connection"]
NAMES += ["Content-Length", "Transfer-Encoding", "Content-Encoding", "Expect", "Upgrade", "Sec-WebSocket-Key1"]
VALUES = ["x", "*/*", "keep-alive", "close", "Upgrade", "0", "1", "chunked", "gzip", "100-continue", "websocket", "h2c"]
VALUES += [" ", "a\tb", "é", ""]
LINES = st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(VALUES)), max_size=4)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(
    st.sampled_from(["GET", "get", "POST", "PUT"]),
    st.sampled_from(["HTTP/1.1", "HTTP/1.0", "HTTP/2.0", "http/1.1"]),
    LINES,
    st.sampled_from(["\r\n", "\n", "\r", ""]),
)
@example("GET", "HTTP/1.1", [("User-Agent", "x"), ("User-Agent", "x")], "\r\n")
@example("GET", "HTTP/1.1", [("Accept", "*/*")] * 70, "\r\n")
@example("GET", "HTTP/1.1", [("Accept", "x" * 7_000)] * 3, "\r\n")
@example("GET", "HTTP/1.1", [("Connection", "Upgrade"), ("Upgrade", "websocket")], "\r\n")
@example("GET", "HTTP/1.1", [("Transfer-Encoding", "chunked")], "\r\n0\r\n\r\n")
def test_requests_of_any_form_are_answered_as_by_aiohttp(
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
                return await next_answer(reader)
            except (asyncio.IncompleteReadError, ConnectionError):
                return b"closed"
            finally:
                writer.transport.abort()
                await asyncio.sleep(0)

    assert asyncio.run(run(is_plain=True)) == asyncio.run(run(is_plain=False))


def test_a_connection_is_closed_only_after_it_was_idle(instance: Instance) -> None:
    async def run() -> tuple[int, float]:
        async with serving(instance, Limits(idle_seconds=2.0)) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            for _ in range(8):
                writer.write(question())
                assert (await next_answer(reader)).startswith(b"HTTP/1.1 200")
                await asyncio.sleep(0.3)
            began = asyncio.get_running_loop().time()
            assert await asyncio.wait_for(reader.read(), 30) == b""
            writer.transport.abort()
            await asyncio.sleep(0)
            return len(server.at_once), asyncio.get_running_loop().time() - began

    at_once, seconds = asyncio.run(run())

    assert at_once == 8
    assert seconds > 0.3


def test_a_client_that_does_not_read_plain_answers_is_disconnected(instance: Instance) -> None:
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
                await until(lambda: server.at_once, "the first query is answered")
                with pytest.raises(ConnectionError):
                    await asyncio.wait_for(flood(), 30)
            return len(server.at_once)

    assert asyncio.run(run()) >= 1


# --- all forms of target


ENTRY = {"playerId": 3, "productId": 1, "playerName": "Zoë", "gameName": "Go", "score": 4000.0, "scoredAt": 1}
STATES: dict[str, dict[str, Any]] = {
    "balance": {"customerId": "c", "amount": Decimal("12.30")},
    "rewards": {"customerCardNo": "c", "points": Decimal("-0.0100")},
    "leaderboard": {"entries": [ENTRY, {**ENTRY, "score": 1e300}]},
}
PATHS = {
    "balance": ["/api/customers.getBalance?customerId=", "/api/models/balance/keys/"],
    "rewards": ["/api/customers.getRewards?customerCardNo=", "/api/models/rewards/keys/"],
    "leaderboard": ["/leaderboard/", "/api/models/leaderboard/keys/"],
}


@dataclass
class Host(Instance):
    """Hosts one read model, with a state under each of its first ten keys on the partition."""

    read_model: ReadModel = field(default_factory=Balance)

    def __post_init__(self) -> None:
        super().__post_init__()
        schema = self.read_model.state_schema
        self.codec = AvroCodec(FakeRegistry(), "states", schema)
        frame = self.codec.encode(STATES[self.read_model.name])
        self.store.write([(self.read_model.key_type.parse(text), frame) for text in self.texts(PARTITION)[:10]], 1)

    @property
    def paths(self) -> list[str]:
        return PATHS[self.read_model.name]

    def texts(self, partition: int) -> list[str]:
        """Keys on a partition, in the form of a query."""
        parse = self.read_model.key_type.parse
        return [text for text in map(str, range(99)) if partition_of(parse(text), PARTITIONS) == partition]

    def models(self, proxy: Proxy, metrics: Metrics | None = None) -> ModelQueries:
        queries: Queries = self.queries(proxy, metrics)
        queries.routing.view = lambda frame: self.read_model.view(self.codec.decode(frame))
        answers = ModelAnswers(queries, self.scatter("/"), self.changes(proxy), self.read_model.description())
        name, known = self.read_model.name, {self.read_model.name: self.read_model}
        return ModelQueries(known, {name: answers}, dict, lambda *_: answers, {}, Streams(10))


@pytest.fixture(params=[Balance(), Rewards(), Leaderboard()], ids=lambda read_model: read_model.name)
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Host:
    return Host(tmp_path / "store", read_model=request.param)


def test_the_owner_answers_every_form_of_target_at_once(host: Host) -> None:
    known, *_, unknown = host.texts(PARTITION)
    for path in host.paths:
        (answer,), at_once, _ = both_ways(host, question(path + known))
        assert (answer[:12], at_once) == (b"HTTP/1.1 200", 1)
        assert (f'"key":"{known}"'.encode() in answer) == ("/keys/" in path)

        (answer,), at_once, _ = both_ways(host, question(path + unknown))
        assert (answer[:12], at_once) == (b"HTTP/1.1 404", 1)


def test_a_view_that_raises_is_a_500_and_the_connection_stays_open(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def view(_state: object) -> object:
        raise KeyError("absent")

    monkeypatch.setattr(host.read_model, "view", view, raising=False)
    known = host.texts(PARTITION)[0]
    for path in host.paths:
        answers, at_once, _ = both_ways(host, *[question(path + known)] * 2, answers=2)
        assert ([answer[:12] for answer in answers], at_once) == ([b"HTTP/1.1 500"] * 2, 0)


def test_a_key_of_another_instance_is_proxied(host: Host) -> None:
    elsewhere = host.texts(1 - PARTITION)[0]
    for path in host.paths:
        (answer,), at_once, later = both_ways(host, question(path + elsewhere))

        assert (answer[:12], at_once, later) == (b"HTTP/1.1 503", 0, 1)


class AtAnyTarget(Peer):
    """A peer that answers at the targets of all read models."""

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/{tail:.*}", self.answer)
        return app


@pytest.mark.parametrize("status", [200, 404])
@pytest.mark.parametrize("read_model", [Balance(), Rewards(), Leaderboard()], ids=lambda read_model: read_model.name)
def test_what_a_peer_answers_is_the_same_on_both_ways(tmp_path: Path, read_model: ReadModel, status: int) -> None:
    host = Host(tmp_path / "store", owns=False, read_model=read_model)
    elsewhere = host.texts(PARTITION)[0]
    value = '{"amount":12.340}' if status == 200 else ""
    for path in host.paths:

        async def answer(request: web.Request) -> web.StreamResponse:
            # Only peers' targets with the key in the path show it next to the value.
            body = f'{{"key":"{elsewhere}","value":{value}}}' if "/keys/" in request.path else value
            return await answering(status, body or "{}", headers=ACTIVE)(request)

        short, long = (
            exchange(host, question(path + elsewhere), owner=AtAnyTarget(answer), is_plain=is_plain)
            for is_plain in (True, False)
        )
        (answer_here,) = short.answers

        assert short.answers == long.answers
        assert (answer_here[:12], short.later, long.later) == (f"HTTP/1.1 {status}".encode(), 1, 0)
        if status == 200:
            shown = f'{{"key":"{elsewhere}","value":{value}}}' if "/keys/" in path else value
            assert answer_here.endswith(f"\r\n\r\n{shown}".encode())


@pytest.mark.parametrize("key", ["", "a%20b", "..", ".", "x" * 257, "1/2", "1=2", "1?maxLag=5", "1&maxLag=5"])
def test_aiohttp_answers_keys_that_need_the_full_parser(host: Host, key: str) -> None:
    for path in host.paths:
        if path.endswith("=") and set(key) == {"."}:
            continue  # this is a valid key
        assert both_ways(host, question(path + key))[1:] == (0, 0)


def test_aiohttp_answers_for_a_collection_by_text_because_a_key_may_be_the_name_of_a_route() -> None:
    class Things(Rewards):
        name = "test-things"
        queries = Collection("/things", key="id", noun="thing")  # type: ignore[assignment]

    assert [target.path for target in key_targets([Things()])] == ["/api/models/test-things/keys"]
    assert "/leaderboard" in [target.path for target in key_targets([Leaderboard()])]


@pytest.mark.parametrize(
    "target", ["/leaderboard/count", "/leaderboard/07", "/leaderboard/1/2", "/leaderboard", "/api/models/nope/keys/1"]
)
def test_aiohttp_answers_other_routes_of_a_collection(tmp_path: Path, target: str) -> None:
    assert both_ways(Host(tmp_path / "store", read_model=Leaderboard()), question(target))[1:] == (0, 0)


# --- forwarded by a peer


@pytest.mark.parametrize("is_plain", [True, False])
def test_a_forwarded_query_is_answered_once_with_a_proof_if_its_own_proof_is_right(
    instance: Instance, *, is_plain: bool
) -> None:
    trust = PeerTrust(SECRET)

    def mark(target: str = TARGET) -> str:
        return trust.mark("peer:1", Address("x:1", trust.incarnation), f"GET {target}")

    async def run(*marks: str) -> tuple[list[int], list[bool], int]:
        statuses, proven = [], []
        async with serving(instance, None, trust, is_plain=is_plain) as server:
            for one in marks:
                (sent,) = await server.exchange(question(headers=f"Balance-Forwarded: {one}\r\n"))
                received = AnswerReader().feed(sent)
                assert received is not None
                statuses.append(received.answer.status)
                proven.append(trust.is_proven(received.answer, one, received.proof))
            return statuses, proven, len(server.at_once)

    used = mark()

    assert asyncio.run(run(used, used, mark(TARGET + "0"), "peer:1", mark())) == (
        [200, 403, 403, 403, 200],
        [True, False, False, False, True],
        2 if is_plain else 0,
    )


def test_a_forwarded_query_left_to_aiohttp_uses_its_mark_once_and_is_answered_with_a_proof(instance: Instance) -> None:
    trust = PeerTrust(SECRET)
    instance.owns = False
    mark = trust.mark("peer:1", Address("x:1", trust.incarnation), f"GET {TARGET}")

    (sent,), *_ = exchange(instance, question(headers=f"Balance-Forwarded: {mark}\r\n"), trust=trust)

    received = AnswerReader().feed(sent)
    assert received is not None
    assert received.answer.status == 421
    assert trust.is_proven(received.answer, mark, received.proof)


def test_a_forwarded_query_is_never_forwarded_again(instance: Instance, other: Instance) -> None:
    forwarded = "Balance-Forwarded: peer:1\r\n"
    (answer,), at_once, _ = both_ways(instance, question(f"{GET_BALANCE}?customerId={ELSEWHERE}", forwarded))
    assert (answer[:12], at_once) == (b"HTTP/1.1 421", 0)

    peer = Peer(AT_OWNER)
    (answer,), _, later = exchange(other, question(headers=forwarded), owner=peer)
    assert (answer[:12], later, peer.asked) == (b"HTTP/1.1 421", 0, [])


# --- proxied to the owner


@pytest.mark.parametrize(
    ("status", "headers", "first"),
    [
        (200, ACTIVE, b"HTTP/1.1 200 OK"),
        (404, ACTIVE, b"HTTP/1.1 404 Not Found"),
        (503, {"Retry-After": "1"}, b"HTTP/1.1 503 Service Unavailable"),
        (500, {}, b"HTTP/1.1 500 Internal Server Error"),
    ],
)
def test_the_answer_of_the_owner_is_forwarded_with_the_bytes_of_aiohttp(
    other: Instance, status: int, headers: Mapping[str, str], first: bytes
) -> None:
    (answer,), _, later = both_ways(other, question(), owner=answering(status, headers=headers))

    assert answer.startswith(first + b"\r\n")
    assert b"X-Of-The-Owner" not in answer
    assert later == 1


def test_without_an_owner_the_answer_is_a_503_problem(other: Instance) -> None:
    (answer,), _, later = both_ways(other, question())

    assert answer.startswith(b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\n")
    assert b"no instance answers for partition" in answer
    assert later == 1


def test_an_owner_that_has_lost_the_partition_gets_two_requests(other: Instance) -> None:
    peer = Peer(answering(421, text="{}"))
    (answer,), _, later = exchange(other, question(), owner=peer)

    assert answer.startswith(b"HTTP/1.1 503")
    assert b"no longer owns partition" in answer
    assert (later, len(peer.asked)) == (1, 2)


def test_the_owner_gets_one_request_with_a_mark_and_no_header_of_the_client(other: Instance) -> None:
    peer = Peer(AT_OWNER)
    exchange(other, question(headers="User-Agent: curl/8\r\nX-Request-ID: 1\r\n"), owner=peer)

    (asked,) = peer.asked
    assert asked.raw_path == TARGET
    assert asked.headers[FORWARDED_HEADER] == "asker:1;to=i"
    assert set(asked.headers) == {"Host", FORWARDED_HEADER}


def test_an_instance_that_has_become_the_owner_answers_itself(other: Instance) -> None:
    async def lose(_request: web.Request) -> web.StreamResponse:
        other.owns = True
        return web.json_response({}, status=421)

    other.put("12.34", CUSTOMER)
    (answer,), _, later = exchange(other, question(), owner=Peer(lose))

    assert b"Balance-Application-Server: asker:1" in answer
    assert later == 1


@pytest.mark.parametrize("role", [Role.ACTIVE, Role.STANDBY])
def test_an_instance_without_a_lease_asks_the_owner(instance: Instance, role: Role) -> None:
    instance.role = role
    instance.lease.revoke()
    (answer,), _, later = exchange(instance, question(), owner=Peer(AT_OWNER))

    assert b"Balance-Application-Server: owner:1" in answer
    assert later == 1


def test_an_unexpected_error_is_a_500_problem_and_is_logged(
    other: Instance,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(_routing: object, _partition: int, **_takes: bool) -> None:
        raise RuntimeError("of no kind")

    monkeypatch.setattr("balance_service.http.routing.Routing.candidates", fail)
    (answer, _), _, later = both_ways(other, question(), LIVE, answers=2)

    assert answer.startswith(b"HTTP/1.1 500")
    assert b"of no kind" not in answer
    assert later == 1
    # By `caplog` if a command has configured logging in this process, otherwise by structlog's default, which prints.
    assert "of no kind" in "".join([*capsys.readouterr(), caplog.text])


# --- while the owner has not answered


@pytest.mark.parametrize(
    "segments",
    [
        (question(), question(), question()),
        (question(), LIVE, question()),
        (question(), POST, question()),
        (question(), LIVE + question()),
        (question(), question()[:30], question()[30:], LIVE),
    ],
)
def test_later_requests_are_answered_after_a_proxied_query_in_order(
    other: Instance, segments: tuple[bytes, ...]
) -> None:
    answers = b"".join(segments).count(b" HTTP/1.1\r\n")

    first, *others = both_ways(other, *segments, answers=answers, owner=slow()).answers

    assert first.endswith(b'{"amount":12.34}')
    assert len(others) == answers - 1


def test_a_client_that_sends_without_end_is_not_read_during_a_proxied_query(other: Instance) -> None:
    async def run() -> None:
        async with serving(other) as server, TestServer(Peer(slow(0.5)).app()) as owner:
            other.hear_of_owner(f"127.0.0.1:{owner.port}")
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(question())
            await asyncio.sleep(0.05)
            writer.write(LIVE * 1_000_000)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(writer.drain(), 0.3)
            assert (await next_answer(reader)).startswith(b"HTTP/1.1 200")
            assert (await next_answer(reader)).startswith(b"HTTP/1.1 200")
            writer.transport.abort()
            await asyncio.sleep(0.01)

    asyncio.run(run())


def test_a_client_that_disconnects_during_a_proxied_query_affects_no_other_client(other: Instance) -> None:
    peer = Peer(slow())

    async def run() -> list[bytes]:
        async with serving(other) as server, TestServer(peer.app()) as owner:
            other.hear_of_owner(f"127.0.0.1:{owner.port}")
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(question())
            await until(lambda: peer.asked, "the owner has the query")
            writer.transport.abort()
            return await server.exchange(question(), answers=1)

    (answer,) = asyncio.run(run())
    assert answer.startswith(b"HTTP/1.1 200")
    assert len(peer.asked) == 2


def test_proxied_queries_count_as_concurrent_requests(other: Instance) -> None:
    other.timeout_seconds = 30
    refused = asyncio.Event()

    async def wait(request: web.Request) -> web.StreamResponse:
        await refused.wait()
        return await AT_OWNER(request)

    async def run() -> list[bytes]:
        limits, peer = Limits(max_concurrent_requests=2, request_seconds=60), Peer(wait)
        async with serving(other, limits) as server, TestServer(peer.app()) as owner:
            other.hear_of_owner(f"127.0.0.1:{owner.port}")
            in_progress = [asyncio.ensure_future(server.exchange(question())) for _ in range(2)]
            await until(lambda: len(peer.asked) == 2, "two queries are in progress")
            third = await server.exchange(question())
            refused.set()
            return [answer for (answer,) in [*await asyncio.gather(*in_progress), third]]

    answers = asyncio.run(run())

    assert [answer[:12] for answer in answers] == [b"HTTP/1.1 200", b"HTTP/1.1 200", b"HTTP/1.1 503"]
    assert b"2 of its requests are in progress here" in answers[2]


def test_a_proxied_query_that_takes_too_long_is_a_problem(other: Instance) -> None:
    peer = Peer(slow(1.0))
    (answer,), _, later = exchange(other, question(), owner=peer, limits=Limits(request_seconds=0.1))

    assert b"the request took more than 0.1 s" in answer
    assert later == 1


def test_the_idle_timeout_does_not_run_during_a_proxied_query(other: Instance) -> None:
    other.timeout_seconds = 5
    (answer,), *_ = exchange(other, question(), owner=Peer(slow(1.5)), limits=Limits(idle_seconds=0.1))

    assert answer.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("is_in_time", [True, False])
def test_a_server_that_stops_waits_for_proxied_queries_for_a_while(
    other: Instance, monkeypatch: pytest.MonkeyPatch, *, is_in_time: bool
) -> None:
    other.timeout_seconds = 30
    if is_in_time:
        monkeypatch.setattr("balance_service.http.app._SHUTDOWN_SECONDS", 30.0)
    peer = Peer(slow(0.3 if is_in_time else 60))

    async def run() -> tuple[bytes, float]:
        async with TestServer(peer.app()) as owner:
            other.hear_of_owner(f"127.0.0.1:{owner.port}")
            async with serving(other) as server:
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
                writer.write(question())
                await until(lambda: peer.asked, "the owner has the query")
                began = asyncio.get_running_loop().time()
            received = await reader.read()
            writer.close()
            return received, asyncio.get_running_loop().time() - began

    received, seconds = asyncio.run(run())

    assert received[:12] == (b"HTTP/1.1 200" if is_in_time else b"")
    assert is_in_time or seconds < 20
