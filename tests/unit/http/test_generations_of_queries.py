"""Queries are answered by the serving generation, or by the one that they name."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

import pytest
from aiohttp import ClientSession
from aiohttp.test_utils import TestServer
from yarl import URL

from balance_service import api
from balance_service.cluster.directory import PublishedModel
from balance_service.http.app import make_app
from balance_service.http.model_queries import ModelAnswers, ModelQueries
from balance_service.http.operations import Operations
from balance_service.http.peers.proxy import Proxy
from balance_service.http.route import Handlers
from balance_service.http.streams.event_stream import Streams
from tests.support.fakes import IdleInstance
from tests.support.querying import BALANCE, CUSTOMER, PARTITIONS, Instance
from tests.support.shipped import KNOWN, ROUTES

if TYPE_CHECKING:
    from pathlib import Path

BY_KEY = f"/api/models/balance/keys/{quote(CUSTOMER, safe='')}"
DECLARED = f"/api/customers.getBalance?customerId={quote(CUSTOMER, safe='')}"
OF_ALL = ["/api/models/balance/entries?partial=true", "/api/models/balance/top?by=amount&partial=true"]


class Answer(NamedTuple):
    status: int
    text: str
    generation: str | None


class Two:
    """An instance that hosts two generations of `balance`, with another amount in each."""

    def __init__(self, folder: Path) -> None:
        self.serving = 1
        self.instances = {number: Instance(folder / str(number), generation=number) for number in (1, 2)}
        for number, instance in self.instances.items():
            instance.put(f"{number}.00")
        self.elsewhere: dict[str, PublishedModel] = {}
        self.asked_of_peers: list[str] = []

    def ask(self, *targets: str) -> list[Answer]:
        return asyncio.run(self._ask(targets))

    async def _ask(self, targets: tuple[str, ...]) -> list[Answer]:
        proxy = Proxy()
        answers = {number: self._answers(number, proxy) for number in (1, 2)}

        def of_peers(name: str, *_: object) -> ModelAnswers:
            self.asked_of_peers.append(name)
            return answers[2]

        handlers, found = Handlers(Operations(IdleInstance(), Streams(10))), []
        hosted = {"balance": answers[1], "balance.g2": answers[2]}
        models = ModelQueries(
            KNOWN, hosted, lambda: self.elsewhere, of_peers, {}, Streams(10), lambda _model: self.serving
        )
        handlers.add(models)
        async with TestServer(make_app(handlers, ROUTES)) as server, ClientSession() as client:
            for target in targets:
                async with client.get(URL(f"http://{server.host}:{server.port}{target}", encoded=True)) as answer:
                    found.append(Answer(answer.status, await answer.text(), answer.headers.get(api.GENERATION)))
        for one in answers.values():
            await one.scatter.proxy.close()
        await proxy.close()
        return found

    def _answers(self, number: int, proxy: Proxy) -> ModelAnswers:
        instance = self.instances[number]
        scatter = replace(instance.scatter(f"{api.MODELS}/balance"), generation=number)
        return ModelAnswers(instance.queries(proxy), scatter, instance.changes(proxy), BALANCE)


@pytest.fixture
def two(tmp_path: Path) -> Two:
    return Two(tmp_path)


def with_generation(target: str, number: int | str) -> str:
    return f"{target}{'&' if '?' in target else '?'}generation={number}"


@pytest.mark.parametrize("serving", [1, 2])
@pytest.mark.parametrize("target", [BY_KEY, DECLARED])
def test_the_serving_generation_answers_a_query_that_names_none(two: Two, target: str, serving: int) -> None:
    two.serving = serving

    ((status, text, generation),) = two.ask(target)

    assert (status, f'"amount":{serving}.00' in text, generation) == (200, True, str(serving))


@pytest.mark.parametrize("serving", [1, 2])
@pytest.mark.parametrize("named", [1, 2])
@pytest.mark.parametrize("target", [BY_KEY, DECLARED])
def test_the_named_generation_answers(two: Two, target: str, named: int, serving: int) -> None:
    two.serving = serving

    ((status, text, generation),) = two.ask(with_generation(target, named))

    assert (status, f'"amount":{named}.00' in text, generation) == (200, True, str(named))


@pytest.mark.parametrize("target", OF_ALL)
def test_an_answer_of_all_keys_names_its_generation(two: Two, target: str) -> None:
    first, second = two.ask(target, with_generation(target, 2))

    assert [(answer.status, answer.generation) for answer in (first, second)] == [(200, "1"), (200, "2")]
    assert [f"{number}.00" in answer.text for number, answer in ((1, first), (2, second))] == [True, True]


@pytest.mark.parametrize("target", [BY_KEY, DECLARED, *OF_ALL])
def test_a_generation_that_no_instance_hosts_is_answered_404(two: Two, target: str) -> None:
    ((status, text, _),) = two.ask(with_generation(target, 3))

    assert (status, "the read model 'balance' has no generation 3 here" in text) == (404, True)


@pytest.mark.parametrize("number", ["0", "01", "-1", "1.0", "two", "", "1234567890", "%D9%A2"])
@pytest.mark.parametrize("target", [BY_KEY, DECLARED, *OF_ALL])
def test_what_is_no_number_of_a_generation_is_answered_400(two: Two, target: str, number: str) -> None:
    ((status, text, _),) = two.ask(with_generation(target, number))

    assert (status, "generation must be the number of a generation, such as 2" in text) == (400, True)


def test_a_generation_that_only_peers_host_is_asked_of_them(two: Two) -> None:
    two.elsewhere = {"balance.g7": PublishedModel("balance.g7", PARTITIONS, "murmur2")}

    (answer,) = two.ask(with_generation(BY_KEY, 7))

    assert (answer.status, two.asked_of_peers) == (200, ["balance.g7"])


def test_all_generations_are_listed_as_one_read_model(two: Two) -> None:
    two.elsewhere = {"balance.g7": PublishedModel("balance.g7", PARTITIONS, "murmur2")}

    ((status, text, _),) = two.ask("/api/models")

    assert (status, text.count('"name":"balance"'), "balance.g" in text) == (200, 1, False)
