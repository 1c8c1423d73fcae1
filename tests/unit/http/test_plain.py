"""Plain queries: answered ahead of aiohttp, with the very bytes that it would have answered."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from balance_service.engine.records import Role
from balance_service.engine.store import StoreView
from balance_service.errors import StoreCorruptedError
from balance_service.http.peers.connections import AnswerReader
from balance_service.http.peers.trust import Peer, PeerTrust
from balance_service.http.server.limits import Limits
from balance_service.kafka.partitioner import partition_of
from balance_service.observability.metrics import Metrics
from tests.support.api import GET_BALANCE
from tests.support.querying import PARTITION, PARTITIONS, Instance
from tests.unit.http.plain_queries import (
    CUSTOMER,
    ELSEWHERE,
    HEADS,
    INGRESS,
    LIVE,
    SECRET,
    TARGET,
    next_answer,
    question,
    raw,
    serving,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from balance_service.http.peers.connections import Received


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
    (answer,), at_once = both_ways(instance, raw(headers))

    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.endswith(b'{"amount":12.34}')
    assert at_once == 1


def test_so_is_that_for_an_unknown_customer(instance: Instance) -> None:
    unknown = next(f"n{n}" for n in range(99) if partition_of(f"n{n}".encode(), PARTITIONS) == PARTITION)
    (answer,), at_once = both_ways(instance, question(f"{GET_BALANCE}?customerId={unknown}"))

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


def test_a_query_that_waits_is_answered_before_the_plain_one_that_comes_after_it(instance: Instance) -> None:
    instance.timeout_seconds = 0.2
    waits = question(f"{TARGET}&minPosition={PARTITION}:99")
    answers, _ = both_ways(instance, waits, question(), answers=2)

    assert [answer[:12] for answer in answers] == [b"HTTP/1.1 503", b"HTTP/1.1 200"]


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
def test_a_request_that_means_more_than_its_target_is_left_to_aiohttp(instance: Instance, data: bytes) -> None:
    _, at_once = both_ways(instance, data)

    assert at_once == 0


REQUESTS = [
    question(),
    raw(f"{INGRESS}Host: x\r\n"),
    question(f"{GET_BALANCE}?customerId={CUSTOMER}0"),
    LIVE,
    question(f"{TARGET}&minPosition={PARTITION}:99"),
    b"POST /nope HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(question()) + question(),
    question(headers="Content-Length: 2\r\n") + b"{}",
    question(headers="Connection: Upgrade\r\nUpgrade: websocket\r\n"),
]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=25)
@given(
    st.lists(st.sampled_from(REQUESTS), min_size=2, max_size=5),
    st.lists(st.floats(0, 1), max_size=4),
    st.booleans(),
)
def test_requests_in_whatever_order_and_pieces_are_answered_as_aiohttp_does(
    instance: Instance, requests: list[bytes], cuts: list[float], are_cut_between: bool
) -> None:
    instance.timeout_seconds = 0.05
    data = b"".join(requests)
    ends = [0, *sorted(int(cut * len(data)) for cut in cuts), len(data)]
    segments = requests if are_cut_between else [data[start:end] for start, end in itertools.pairwise(ends)]

    both_ways(instance, *filter(None, segments), answers=len(requests))


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


@pytest.mark.parametrize("is_plain", [True, False])
def test_a_query_passed_on_is_answered_once_with_a_proof_if_its_own_is_right(
    instance: Instance, *, is_plain: bool
) -> None:
    trust = PeerTrust(SECRET)

    def mark(target: str = TARGET) -> str:
        return trust.mark("peer:1", Peer("x:1", trust.incarnation), f"GET {target}")

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


def test_a_query_that_is_left_to_aiohttp_has_its_mark_used_once_and_its_answer_proven(instance: Instance) -> None:
    trust = PeerTrust(SECRET)
    instance.owns = False
    mark = trust.mark("peer:1", Peer("x:1", trust.incarnation), f"GET {TARGET}")

    async def run() -> Received | None:
        async with serving(instance, None, trust) as server:
            (sent,) = await server.exchange(question(headers=f"Balance-Forwarded: {mark}\r\n"))
            return AnswerReader().feed(sent)

    received = asyncio.run(run())

    assert received is not None
    assert received.answer.status == 421
    assert trust.is_proven(received.answer, mark, received.proof)


def test_one_for_another_instance_is_misdirected(instance: Instance) -> None:
    asked = question(f"{GET_BALANCE}?customerId={ELSEWHERE}", "Balance-Forwarded: peer:1\r\n")
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

    async def run() -> int:
        async with serving(instance, metrics=metrics) as server:
            await server.exchange(question(), question(f"{TARGET}&maxLag=100"), question(), answers=3)
            return len(server.at_once)

    assert asyncio.run(run()) == 2
    assert (
        b'balance_query_duration_seconds_count{answered="local",read_model="balance",status="200"} 3.0'
        in metrics.text()
    )


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
                return await next_answer(reader)
            except (asyncio.IncompleteReadError, ConnectionError):
                return b"closed"
            finally:
                writer.transport.abort()
                await asyncio.sleep(0)

    assert asyncio.run(run(is_plain=True)) == asyncio.run(run(is_plain=False))
