"""Plain queries that wait for a peer: the order of answers, clients that go away, limits, and a server that stops."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from aiohttp.test_utils import TestServer

from balance_service.http.server.limits import Limits
from tests.support.querying import Instance, Peer, answering
from tests.support.waiting import until
from tests.unit.http.passed_on import ACTIVE, both_ways, exchange, slow
from tests.unit.http.plain_queries import LIVE, next_answer, question, serving

if TYPE_CHECKING:
    from pathlib import Path

    from aiohttp import web

POST = b"POST /nope HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"


@pytest.fixture
def instance(tmp_path: Path) -> Instance:
    return Instance(tmp_path / "store", owns=False)


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
def test_what_comes_while_a_query_is_under_way_is_answered_after_it_in_order(
    instance: Instance, segments: tuple[bytes, ...]
) -> None:
    answers = b"".join(segments).count(b" HTTP/1.1\r\n")

    (first, *others), _ = both_ways(instance, slow(answering(headers=ACTIVE)), *segments, answers=answers)

    assert first.endswith(b'{"amount":12.34}')
    assert len(others) == answers - 1


def test_a_client_that_sends_without_end_meanwhile_is_not_read(instance: Instance) -> None:
    peer = Peer(slow(answering(headers=ACTIVE), 0.5))

    async def run() -> None:
        async with serving(instance) as server, TestServer(peer.app()) as owner:
            instance.hear_of_owner(f"127.0.0.1:{owner.port}")
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


def test_one_that_goes_away_while_its_query_is_under_way_harms_nobody(instance: Instance) -> None:
    peer = Peer(slow(answering(headers=ACTIVE)))

    async def run() -> list[bytes]:
        async with serving(instance) as server, TestServer(peer.app()) as owner:
            instance.hear_of_owner(f"127.0.0.1:{owner.port}")
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(question())
            await until(lambda: peer.asked, "the query is under way")
            writer.transport.abort()
            return await server.exchange(question(), answers=1)

    (answer,) = asyncio.run(run())
    assert answer.startswith(b"HTTP/1.1 200")
    assert len(peer.asked) == 2


def test_queries_under_way_count_among_the_concurrent_requests(instance: Instance) -> None:
    instance.timeout_seconds = 30
    refused = asyncio.Event()

    async def wait(request: web.Request) -> web.StreamResponse:
        await refused.wait()
        return await answering(headers=ACTIVE)(request)

    async def run() -> list[bytes]:
        limits, peer = Limits(max_concurrent_requests=2, request_seconds=60), Peer(wait)
        async with serving(instance, limits) as server, TestServer(peer.app()) as owner:
            instance.hear_of_owner(f"127.0.0.1:{owner.port}")
            under_way = [asyncio.ensure_future(server.exchange(question())) for _ in range(2)]
            await until(lambda: len(peer.asked) == 2, "two queries are under way")
            third = await server.exchange(question())
            refused.set()
            return [answer for (answer,) in [*await asyncio.gather(*under_way), third]]

    answers = asyncio.run(run())

    assert [answer[:12] for answer in answers] == [b"HTTP/1.1 200", b"HTTP/1.1 200", b"HTTP/1.1 503"]
    assert b"2 requests are in progress here" in answers[2]


def test_a_query_that_takes_too_long_is_a_problem(instance: Instance) -> None:
    peer = Peer(slow(answering(), 1.0))
    limits = Limits(request_seconds=0.1)
    (answer,), later = exchange(instance, peer, question(), limits=limits)

    assert b"the request took more than 0.1 s" in answer
    assert later == 1


def test_an_idle_connection_is_not_closed_while_its_query_is_under_way(instance: Instance) -> None:
    instance.timeout_seconds = 5
    peer = Peer(slow(answering(headers=ACTIVE), 1.5))
    (answer,), _ = exchange(instance, peer, question(), limits=Limits(idle_seconds=0.1))

    assert answer.startswith(b"HTTP/1.1 200")


def test_a_query_under_way_is_answered_when_the_server_stops(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("balance_service.http.server.app._SHUTDOWN_SECONDS", 30.0)
    peer = Peer(slow(answering(headers=ACTIVE), 0.3))

    async def run() -> bytes:
        async with TestServer(peer.app()) as owner:
            instance.hear_of_owner(f"127.0.0.1:{owner.port}")
            async with serving(instance) as server:
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
                writer.write(question())
                await until(lambda: peer.asked, "the query is under way")
            answer = await next_answer(reader)
            assert await reader.read() == b""
            writer.close()
            return answer

    assert asyncio.run(run()).startswith(b"HTTP/1.1 200")


def test_one_that_outlasts_the_stopping_is_given_up(instance: Instance) -> None:
    instance.timeout_seconds = 30
    peer = Peer(slow(answering(), 60))

    async def run() -> float:
        async with TestServer(peer.app()) as owner:
            instance.hear_of_owner(f"127.0.0.1:{owner.port}")
            async with serving(instance) as server:
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
                writer.write(question())
                await until(lambda: peer.asked, "the query is under way")
                began = asyncio.get_running_loop().time()
            assert await reader.read() == b""
            writer.close()
            return asyncio.get_running_loop().time() - began

    assert asyncio.run(run()) < 20
