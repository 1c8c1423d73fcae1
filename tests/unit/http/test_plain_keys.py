"""Plain queries for one key of any read model, in each form in which they come: aiohttp would answer the same bytes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest

from balance_service.avro.codec import AvroCodec
from balance_service.http.model_queries import ModelAnswers, ModelQueries
from balance_service.http.server.plain import key_targets
from balance_service.kafka.partitioner import partition_of
from balance_service.model.routes import Collection
from balance_service.read_models.balance import Balance
from balance_service.read_models.leaderboard import Leaderboard
from balance_service.read_models.rewards import Rewards
from balance_service.testing.fakes import FakeRegistry
from tests.support.querying import PARTITION, PARTITIONS, Instance
from tests.unit.http.plain_queries import question, serving

if TYPE_CHECKING:
    from pathlib import Path

    from balance_service.http.peers.proxy import Proxy
    from balance_service.http.queries import Queries
    from balance_service.model.read_model import ReadModel
    from balance_service.observability.metrics import Metrics

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
EVERY_PATH = [(model, path) for model, paths in PATHS.items() for path in paths]


@dataclass
class Host(Instance):
    """An instance that hosts one read model, with a state under each of its first ten keys on the partition."""

    read_model: ReadModel = field(default_factory=Balance)

    def __post_init__(self) -> None:
        super().__post_init__()
        schema = self.read_model.state_schema
        self.codec = AvroCodec(FakeRegistry(), "states", schema)
        frame = self.codec.encode(STATES[self.read_model.name])
        self.store.write([(self.read_model.key_type.parse(text), frame) for text in self.texts(PARTITION)[:10]], 1)

    def texts(self, partition: int) -> list[str]:
        """Keys on a partition, as queries name them."""
        parse = self.read_model.key_type.parse
        return [text for text in map(str, range(99)) if partition_of(parse(text), PARTITIONS) == partition]

    def models(self, proxy: Proxy, metrics: Metrics | None = None) -> ModelQueries:
        queries: Queries = self.queries(proxy, metrics)
        queries.view = lambda frame: self.read_model.view(self.codec.decode(frame))
        answers = ModelAnswers(queries, self.scatter("/"), self.read_model.description())
        name = self.read_model.name
        return ModelQueries({name: self.read_model}, {name: answers}, dict, lambda _name, _partitions: answers)


@pytest.fixture(params=[Balance(), Rewards(), Leaderboard()], ids=lambda read_model: read_model.name)
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Host:
    return Host(tmp_path / "store", read_model=request.param)


def both_ways(host: Host, *targets: str) -> tuple[bytes, int, int]:
    """What is answered last on one connection, with plain queries and without; how many answers aiohttp had no part in.

    Those are told apart: at once, and later.
    """

    async def run(*, is_plain: bool) -> tuple[bytes, int, int]:
        async with serving(host, is_plain=is_plain) as server:
            *_, answer = await server.exchange(*map(question, targets), answers=len(targets))
            return answer, len(server.at_once), len(server.later)

    with_plain, without = asyncio.run(run(is_plain=True)), asyncio.run(run(is_plain=False))
    assert with_plain[0] == without[0]
    return with_plain


def test_the_owner_answers_at_once(host: Host) -> None:
    known, *_, unknown = host.texts(PARTITION)
    for path in PATHS[host.read_model.name]:
        answer, at_once, _ = both_ways(host, path + known)
        assert (answer[:12], at_once) == (b"HTTP/1.1 200", 1)
        assert (f'"key":"{known}"'.encode() in answer) == ("/keys/" in path)

        answer, at_once, _ = both_ways(host, path + unknown)
        assert (answer[:12], at_once) == (b"HTTP/1.1 404", 1)


def test_a_view_that_raises_is_a_500_and_the_connection_goes_on(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def view(_state: object) -> object:
        raise KeyError("absent")

    monkeypatch.setattr(host.read_model, "view", view, raising=False)
    known = host.texts(PARTITION)[0]
    for path in PATHS[host.read_model.name]:
        answer, at_once, _ = both_ways(host, path + known, path + known)
        assert (answer[:12], at_once) == (b"HTTP/1.1 500", 0)


def test_for_a_key_of_another_instance_peers_are_asked(host: Host) -> None:
    elsewhere = host.texts(1 - PARTITION)[0]
    for path in PATHS[host.read_model.name]:
        answer, at_once, later = both_ways(host, path + elsewhere)

        # What peers say of one key of a collection, aiohttp's handler puts into its form.
        assert (answer[:12], at_once, later) == (b"HTTP/1.1 503", 0, path != "/leaderboard/")


@pytest.mark.parametrize("key", ["", "a%20b", "..", ".", "x" * 257, "1/2", "1=2", "1?maxLag=5", "1&maxLag=5"])
def test_what_is_no_plain_key_is_left_to_aiohttp(host: Host, key: str) -> None:
    for path in PATHS[host.read_model.name]:
        if path.endswith("=") and set(key) == {"."}:
            continue  # that is a key
        assert both_ways(host, path + key)[1:] == (0, 0)


def test_a_text_may_be_a_route_of_its_own_so_a_collection_by_text_is_left_to_aiohttp() -> None:
    class Things(Rewards):
        name = "test-things"
        queries = Collection("/things", key="id", noun="thing")  # type: ignore[assignment]

    assert [each.path for each in key_targets([Things()])] == ["/api/models/test-things/keys"]
    assert "/leaderboard" in [each.path for each in key_targets([Leaderboard()])]


@pytest.mark.parametrize(
    "target", ["/leaderboard/count", "/leaderboard/07", "/leaderboard/1/2", "/leaderboard", "/api/models/nope/keys/1"]
)
def test_other_routes_are_left_to_aiohttp(tmp_path: Path, target: str) -> None:
    assert both_ways(Host(tmp_path / "store", read_model=Leaderboard()), target)[1:] == (0, 0)
