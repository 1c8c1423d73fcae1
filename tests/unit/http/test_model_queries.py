"""Queries for one key of a read model, through the application: every valid key is found at its path."""

from __future__ import annotations

import asyncio
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer
from yarl import URL

from balance_service.cluster.directory import PublishedModel
from balance_service.http.app import make_app
from balance_service.http.declared_queries import key_route
from balance_service.http.model_queries import ModelAnswers, ModelQueries, description_of
from balance_service.http.operations import Operations
from balance_service.http.peers.proxy import Proxy
from balance_service.http.route import Handlers, RouteTable
from balance_service.http.streams.event_stream import Streams
from balance_service.kafka.partitioner import partition_of
from balance_service.model.read_model import Routes
from balance_service.read_models.leaderboard import Leaderboard
from tests.support.fakes import IdleInstance
from tests.support.querying import PARTITION, PARTITIONS, STATES, Instance
from tests.support.shipped import KNOWN, ROUTES

if TYPE_CHECKING:
    from pathlib import Path


def put(instance: Instance, key: bytes) -> None:
    """Stores 1.00 for a key of the one partition that the instance has."""
    assert partition_of(key, PARTITIONS) == PARTITION
    instance.store.write([(key, STATES.encode({"customerId": "any", "amount": Decimal("1.00")}))], 1)
    instance.move_to(11)


def asked(instance: Instance, model: str, *targets: str, routes: RouteTable = ROUTES) -> list[tuple[int, str]]:
    """The status and body of each answer of an instance that hosts a read model."""

    async def run() -> list[tuple[int, str]]:
        proxy = Proxy()
        handlers = Handlers(Operations(IdleInstance(), Streams(10)))
        queries, scatter, changes = instance.queries(proxy), instance.scatter(""), instance.changes(proxy)
        answers = ModelAnswers(queries, scatter, changes, description_of(model, KNOWN))
        handlers.add(ModelQueries(KNOWN, {model: answers}, dict, lambda *_: answers, {}, Streams(10)))
        found = []
        async with TestServer(make_app(handlers, routes)) as server, ClientSession() as client:
            for target in targets:
                async with client.get(URL(f"http://{server.host}:{server.port}{target}", encoded=True)) as answer:
                    found.append((answer.status, await answer.text()))
        await answers.scatter.proxy.close()
        await proxy.close()
        return found

    return asyncio.run(run())


def asked_of_owner(folder: Path, body: str, model: str, target: str, *, is_hosted: bool = True) -> tuple[int, str]:
    """The status and body of the answer of an instance whose peer owns the partition, and answers with a body."""
    instance = Instance(folder / "store", owns=False, hosts=is_hosted)

    async def answer(request: web.Request) -> web.Response:
        told = {"Balance-Application-Server": request.host, "Balance-Position": f"{PARTITION}:9"}
        # Of a query for all keys, it lists the roles of partitions.
        told["Balance-Role"] = f"{PARTITION}:active" if "partitions" in request.query else "active"
        return web.Response(body=body.encode(), content_type="application/json", headers=told)

    async def run() -> tuple[int, str]:
        peer = web.Application()
        peer.router.add_get("/{any:.*}", answer)
        async with TestServer(peer) as server:
            instance.hear_of_owner(f"127.0.0.1:{server.port}")
            ((status, told),) = await asyncio.to_thread(asked, instance, model, target)
            return status, told

    return asyncio.run(run())


def ours(key: str) -> str:
    """The key with a suffix that puts it into the partition of the instance."""
    return next(text for n in range(99) if partition_of((text := f"{key}{n}").encode(), PARTITIONS) == PARTITION)


@pytest.mark.parametrize("key", ["a{b}", "{", "}{", "a/{key}", "100%7B", "Zoë \"'", "c"])
def test_a_key_of_any_characters_is_found_at_its_path(tmp_path: Path, key: str) -> None:
    instance = Instance(tmp_path / "store")
    key = ours(key)
    put(instance, key.encode())

    ((status, body),) = asked(instance, "balance", f"/api/models/balance/keys/{quote(key, safe='')}")

    assert status == 200
    assert '"value":{"amount":1.00}' in body


def test_a_numeric_key_is_found_at_the_declared_path_of_its_read_model(tmp_path: Path) -> None:
    key_type = Leaderboard().key_type
    number = next(n for n in range(-99, 0) if partition_of(key_type.of({"product_id": n}), PARTITIONS) == PARTITION)
    instance = Instance(tmp_path / "store")
    put(instance, key_type.of({"product_id": number}))
    declared = key_route(Leaderboard(), Routes("/api/games.getScores", key="gameId", noun="game"))

    at_declared, at_generic, no_number = asked(
        instance,
        "leaderboard",
        f"/api/games.getScores?gameId={number}",
        f"/api/models/leaderboard/keys/{number}",
        "/api/games.getScores?gameId=c1",
        routes=RouteTable([*ROUTES, declared]),
    )

    assert at_declared == (200, '{"amount":1.00}')
    assert at_generic == (200, f'{{"key":"{number}","value":{{"amount":1.00}}}}')
    assert no_number[0] == 400
    assert "must be a number" in no_number[1]
    assert [key_type.parse(str(one)) for one in declared.parameters.model_fields["key"].examples or ()]


@pytest.mark.parametrize(
    "value", ['{"scores":[1.50,-0.00,1e-07,1e+16]}', '"Zoë \\"1\\""', "null", "12345678901234567890.10"]
)
def test_a_collection_shows_the_value_that_a_peer_answers_with_digit_by_digit(tmp_path: Path, value: str) -> None:
    number = next(
        n for n in range(99) if partition_of(Leaderboard().key_type.of({"product_id": n}), PARTITIONS) == PARTITION
    )
    body = f'{{"key":"{number}","value":{value}}}'

    assert asked_of_owner(tmp_path, body, "leaderboard", f"/leaderboard/{number}") == (200, value)


@pytest.mark.parametrize("body", ['["no object"]', "{", '{"key":"1"}', '"\\ud800"', '{"value":"\\ud800"}'])
def test_a_malformed_answer_of_a_peer_is_refused(tmp_path: Path, body: str) -> None:
    number = next(
        n for n in range(99) if partition_of(Leaderboard().key_type.of({"product_id": n}), PARTITIONS) == PARTITION
    )

    status, told = asked_of_owner(tmp_path, body, "leaderboard", f"/leaderboard/{number}")

    assert status == 503
    assert "does not have the form" in told


def test_a_top_of_a_read_model_that_only_peers_host_is_theirs(tmp_path: Path) -> None:
    body = '{"entries":[{"key":"c1","value":{"amount":12.30}}]}'

    found = asked_of_owner(tmp_path, body, "balance", "/api/models/balance/top?by=amount&partial=true", is_hosted=False)

    assert found == (200, body)


@pytest.mark.parametrize(("has_number_keys", "key"), [(True, b"\x80" + bytes(6) + b"*"), (False, b"42")])
def test_keys_of_a_model_that_only_peers_know_are_looked_for_as_the_peers_do(
    *, has_number_keys: bool, key: bytes
) -> None:
    published = PublishedModel("board.g2", PARTITIONS, "murmur2", has_number_keys)
    asked_for: list[object] = []

    def of_peers(*of: object) -> Any:
        asked_for.extend(of)

    models = ModelQueries({}, {}, lambda: {"board.g2": published}, of_peers, {}, Streams(10), lambda _model: 2)

    models.of("board")

    assert models.key_type_of("board").parse("42") == key
    assert asked_for == ["board.g2", published.partitioning, models.key_type_of("board")]
