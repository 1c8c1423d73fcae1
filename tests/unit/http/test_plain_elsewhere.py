"""Plain queries for customers of other instances: passed on without aiohttp, answered with the bytes it would send."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from balance_service.engine.records import Role
from balance_service.engine.store import StoreView
from balance_service.errors import StoreCorruptedError
from balance_service.http.handlers import Handlers
from balance_service.http.operations import Operations
from balance_service.http.peers.trust import FORWARDED_HEADER
from balance_service.http.wiring import Front
from balance_service.observability.metrics import Metrics
from balance_service.settings import Settings, load_settings
from tests.support.fakes import Nobody
from tests.support.querying import PARTITION, Instance, Peer, answering, proving
from tests.support.shipped import MODELS
from tests.unit.http.passed_on import ACTIVE, both_ways, exchange
from tests.unit.http.plain_queries import CUSTOMER, LIVE, SECRET, TARGET, Server, question

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

POST = b"POST /nope HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"


@pytest.fixture
def instance(tmp_path: Path) -> Instance:
    return Instance(tmp_path / "store", owns=False)


@pytest.mark.parametrize(
    ("status", "headers", "first"),
    [
        (200, ACTIVE, b"HTTP/1.1 200 OK"),
        (404, ACTIVE, b"HTTP/1.1 404 Not Found"),
        (503, {"Retry-After": "1"}, b"HTTP/1.1 503 Service Unavailable"),
        (500, {}, b"HTTP/1.1 500 Internal Server Error"),
    ],
)
def test_the_owners_answer_is_passed_on_as_aiohttp_would_byte_for_byte(
    instance: Instance, status: int, headers: Mapping[str, str], first: bytes
) -> None:
    (answer,), later = both_ways(instance, answering(status, headers=headers), question())

    assert answer.startswith(first + b"\r\n")
    assert b"X-Of-The-Owner" not in answer
    assert later == 1


def test_so_is_the_problem_that_nobody_owns_the_partition(instance: Instance) -> None:
    (answer,), later = both_ways(instance, None, question())

    assert answer.startswith(b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\n")
    assert b"no instance is known to own partition" in answer
    assert later == 1


def test_so_is_the_problem_that_the_owner_no_longer_is_one(instance: Instance) -> None:
    peer = Peer(answering(421, text="{}"))
    (answer,), later = exchange(instance, peer, question())

    assert answer.startswith(b"HTTP/1.1 503")
    assert b"no longer owns partition" in answer
    assert (later, len(peer.asked)) == (1, 2)


def test_the_owner_is_asked_for_that_customer_once_with_a_mark(instance: Instance) -> None:
    peer = Peer(answering(headers=ACTIVE))
    exchange(instance, peer, question(headers="User-Agent: curl/8\r\nX-Request-ID: 1\r\n"))

    (asked,) = peer.asked
    assert asked.raw_path == TARGET
    assert asked.headers[FORWARDED_HEADER] == "asker:1"
    assert set(asked.headers) == {"Host", FORWARDED_HEADER}


def test_one_that_became_the_owner_meanwhile_answers_itself(instance: Instance) -> None:
    async def lose(_request: web.Request) -> web.StreamResponse:
        instance.owns = True
        return web.json_response({}, status=421)

    instance.put("12.34", CUSTOMER)
    (answer,), later = exchange(instance, Peer(lose), question())

    assert b"Balance-Application-Server: asker:1" in answer
    assert later == 1


def test_a_query_passed_on_is_never_passed_on_again(instance: Instance) -> None:
    peer = Peer(answering(headers=ACTIVE))
    (answer,), later = exchange(instance, peer, question(headers="Balance-Forwarded: peer:1\r\n"))

    assert (answer[:12], later, peer.asked) == (b"HTTP/1.1 421", 0, [])


def test_a_damaged_store_is_told_of(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_view: StoreView, _key: bytes) -> bytes:
        raise StoreCorruptedError("bad block")

    monkeypatch.setattr(StoreView, "get", fail)
    instance.owns = True
    (answer,), later = both_ways(instance, None, question())

    assert b"the local store is damaged" in answer
    assert (later, instance.damaged) == (1, [PARTITION] * 2)


def test_an_unexpected_error_is_a_problem_and_logged(
    instance: Instance, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_routing: object, _partition: int, *, takes_standbys: bool) -> None:
        raise RuntimeError("of no kind")

    monkeypatch.setattr("balance_service.http.routing.Routing.candidates", fail)
    (answer, _), later = both_ways(instance, None, question(), LIVE, answers=2)

    assert answer.startswith(b"HTTP/1.1 500")
    assert b"of no kind" not in answer
    assert later == 1
    assert "of no kind" in "".join(capsys.readouterr())


def test_a_query_passed_on_is_counted_once_whichever_way_it_takes(instance: Instance) -> None:
    async def run() -> bytes:
        metrics = Metrics()
        handlers = Handlers(Operations(Nobody()))
        front = Front(load_settings(http_port=0, allowed_hosts=("x",)), handlers, MODELS)
        handlers.models = instance.models(await front.open(), metrics)
        async with TestServer(Peer(answering(headers=ACTIVE)).app()) as owner:
            instance.hear_of_owner(f"127.0.0.1:{owner.port}")
            await Server(front.port).exchange(question(), question(headers="X-Y: 1\r\n"), answers=2)
        await front.close()
        return metrics.text()

    text = asyncio.run(run())

    assert b'balance_query_duration_seconds_count{answered="proxied",read_model="balance",status="200"} 2.0' in text
    assert re.search(rb'balance_proxied_requests_total\{outcome="answered",peer="127.0.0.1:\d+"\} 2.0', text)


@pytest.mark.parametrize("role", [Role.ACTIVE, Role.STANDBY])
def test_a_standby_and_one_whose_lease_has_run_out_ask_the_owner(instance: Instance, role: Role) -> None:
    instance.owns, instance.role = True, role
    instance.put("1.00", CUSTOMER)
    instance.lease.revoke()
    (answer,), later = exchange(instance, Peer(answering(headers=ACTIVE)), question())

    assert b"Balance-Application-Server: owner:1" in answer
    assert later == 1


@pytest.mark.parametrize("variables", [{}, {"rate_limit": 0.001, "rate_limit_burst": 1, "peer_secret": SECRET}])
def test_clients_that_are_counted_are_counted_for_queries_passed_on_too(
    instance: Instance, variables: dict[str, Any]
) -> None:
    async def run() -> list[bytes]:
        handlers = Handlers(Operations(Nobody()))
        front = Front(Settings(http_port=0, allowed_hosts=("x",), **variables), handlers, MODELS)
        handlers.models = instance.models(await front.open())
        async with TestServer(Peer(proving(answering(headers=ACTIVE), SECRET)).app()) as owner:
            instance.hear_of_owner(f"127.0.0.1:{owner.port}")
            answers = await Server(front.port).exchange(question(), question(), answers=2)
        await front.close()
        return [answer[:12] for answer in answers]

    assert asyncio.run(run()) == [b"HTTP/1.1 200", b"HTTP/1.1 429" if variables else b"HTTP/1.1 200"]
