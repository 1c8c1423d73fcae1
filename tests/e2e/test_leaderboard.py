"""The leaderboard on two instances: every route, kills, and scores that arrive before their player."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from balance_service.kafka.partitioner import partition_of
from tests.e2e.dead_letters import pages
from tests.integration.test_leaderboard import Games
from tests.support.observability import JOIN_METRICS_PREFIX, documented, exported
from tests.support.service import application, new_instance, retried, running, status
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from balance_service.devtools.local.stack import LocalInstance, LocalStack

_SECONDS = 60.0
ISABELLE, MITCH, ELYSE, NOOR = (random.randrange(1 << 40) for _ in range(4))
# Sorted as text, the second would come first.
SMASH, KART = random.randrange(9_000_000, 10_000_000), random.randrange(10_000_000, 20_000_000)
NAMES = {ISABELLE: "Isabelle", MITCH: "Mitch", ELYSE: "Elyse", NOOR: "Noor"}
GAMES = {SMASH: "Super Smash Bros", KART: "Mario Kart"}


def entry(game: int, player: int, score: float) -> dict[str, Any]:
    return {
        "playerId": player,
        "productId": game,
        "playerName": NAMES[player],
        "gameName": GAMES[game],
        "score": score,
    }


SMASHED = [entry(SMASH, ISABELLE, 4000.0), entry(SMASH, MITCH, 2000.0), entry(SMASH, ELYSE, 1000.0)]
DRIVEN = [entry(KART, ISABELLE, 9000.0), entry(KART, NOOR, 3000.0), entry(KART, MITCH, 2500.0)]


@pytest.fixture
def instances(stack: LocalStack) -> Iterator[Sequence[LocalInstance]]:
    settings = application(BALANCE_MODELS="leaderboard")
    first, second = new_instance(stack, settings), new_instance(stack, settings)
    with running(first, second):
        yield first, second


def get(instance: LocalInstance, path: str, **parameters: str) -> httpx.Response:
    """Sends a GET to an instance; retries on 503."""
    return retried(lambda: httpx.get(f"{instance.url}/leaderboard{path}", params=parameters, timeout=30))


def row(instance: LocalInstance, table: str, key: int) -> httpx.Response:
    """Asks an instance for the row of a joined table; retries on 503."""
    return retried(lambda: httpx.get(f"{instance.url}/api/tables/{table}/keys/{key}", timeout=30))


def check_rows(instance: LocalInstance) -> None:
    """Checks that an instance answers for all rows: of the table of players through the owners of their partitions."""
    for player, name in NAMES.items():
        found = row(instance, "players", player)
        assert found.json() == {"key": str(player), "value": {"id": player, "name": name}}
        partition = partition_of(str(player).encode(), 2)
        assert found.headers["Balance-Position"].startswith(f"{partition}:")
        owners = [one["task"] for one in status(instance)["tasks"] if one["role"] == "active"]
        is_here = found.headers["Balance-Application-Server"] == status(instance)["applicationServer"]
        assert is_here == (f"leaderboard-by-product_id_{partition}" in owners)
    for game, title in GAMES.items():
        assert row(instance, "products", game).json()["value"]["name"] == title
    assert row(instance, "players", 1 << 41).status_code == 404
    assert row(instance, "racers", 1).status_code == 404


def wait_for(instance: LocalInstance, expected: dict[str, Any]) -> None:
    def is_there() -> bool:
        answer = get(instance, f"/{SMASH}/{KART}")
        return answer.status_code == 200 and answer.json() == expected

    eventually(is_there, lambda: f"{get(instance, f'/{SMASH}/{KART}').text} {status(instance)['tables']}", _SECONDS)


def test_every_instance_answers_for_every_game_before_and_after_a_kill(
    stack: LocalStack, instances: Sequence[LocalInstance]
) -> None:
    first, second = instances
    with Games(stack) as games:
        for player, name in NAMES.items():
            games.player(player, name)
        for game, title in GAMES.items():
            games.products.put(str(game), {"id": game, "name": title})
        games.products.flush()
        games.score(SMASH, ELYSE, 1000.0)
        games.score(SMASH, ISABELLE, 4000.0)
        games.score(SMASH, MITCH, 2000.0)
        games.score(SMASH, NOOR, 500.0)
        for game, player, score in [(KART, ISABELLE, 9000.0), (KART, NOOR, 3000.0), (KART, MITCH, 2500.0)]:
            games.score(game, player, score)

        for instance in instances:
            wait_for(instance, {str(SMASH): SMASHED, str(KART): DRIVEN})
            assert get(instance, f"/{SMASH}").json() == SMASHED
            assert get(instance, f"/{KART + 1}").status_code == 404
            assert get(instance, "/racing").status_code == 400
            everything = get(instance, "", limit="1000").json()
            assert (everything[str(SMASH)], everything[str(KART)]) == (SMASHED, DRIVEN)
            assert list(everything) == sorted(everything, key=int)
            assert get(instance, "/count").json() == {"count": len(everything)}
            page = get(instance, f"/{SMASH}/{KART}", limit="1")
            assert page.json() == {str(SMASH): SMASHED}
            following = httpx.get(f"{instance.url}{page.links['next']['url']}", timeout=30)
            assert following.json() == {str(KART): DRIVEN}
            check_rows(instance)
        tables = [table for instance in instances for table in status(instance)["tables"]]
        assert {(table["table"], table["partition"]) for table in tables} == {
            (name, partition) for name in ("players", "products") for partition in (0, 1)
        }
        assert all(table["whole"] and not table["reason"] for table in tables)
        described = {name: told for name, told in documented().items() if name.startswith(JOIN_METRICS_PREFIX)}
        # A counter of skipped records has no sample until the first one.
        sampled = {
            name: told for name, told in exported(instances).items() if name in described and told[1] is not None
        }
        assert sampled == {name: told for name, told in described.items() if "skipped" not in name}
        counts = [get(instance, "/count/local").json()["count"] for instance in instances]
        assert sum(counts) == get(first, "/count").json()["count"]

        first.kill()
        games.player(NOOR, "Noor II")
        games.score(SMASH, NOOR, 5000.0)

        crowned = {**entry(SMASH, NOOR, 5000.0), "playerName": "Noor II"}
        wait_for(second, {str(SMASH): [crowned, *SMASHED[:2]], str(KART): DRIVEN})


_ids = itertools.count(random.randrange(1 << 40))


@pytest.fixture
def instance(stack: LocalStack) -> Iterator[LocalInstance]:
    settings = application(BALANCE_MODELS="leaderboard", BALANCE_RETRY_EVERY="1")
    with running(new_instance(stack, settings)) as (instance,):
        yield instance


def test_a_score_before_its_player_is_ranked_once_the_player_arrives(
    stack: LocalStack, instance: LocalInstance
) -> None:
    early, known = next(_ids), next(_ids)
    with Games(stack) as games:
        game = games.game("Racing")
        games.player(known, "Known")
        games.score(game, early, 9.0)
        games.score(game, known, 1.0)
        eventually(lambda: leaders(instance, game) == [("Known", 1.0)], lambda: str(leaders(instance, game)))
        eventually(lambda: bool(letters(instance, early)), "the score is a dead letter")
        (letter,) = letters(instance, early)
        assert (letter["cause"], letter["status"], letter["model"]) == ("join-missing", "scheduled", "leaderboard")

        games.player(early, "Early")

        expected = [("Early", 9.0), ("Known", 1.0)]
        eventually(lambda: leaders(instance, game) == expected, lambda: str(leaders(instance, game)))
        (healed,) = letters(instance, early)
        assert healed["status"] == "applied"
        games.score(game, early, 2.0)
        expected.insert(1, ("Early", 2.0))
        eventually(lambda: leaders(instance, game) == expected, lambda: str(leaders(instance, game)))


def letters(instance: LocalInstance, player: int) -> list[dict[str, Any]]:
    """Returns the dead letters of a player's scores."""
    listed = itertools.chain(*pages(instance, model="leaderboard"))
    return [letter for letter in listed if letter["key"] == str(player)]


def leaders(instance: LocalInstance, game: int) -> list[tuple[str, float]]:
    """Returns players and scores of a game; empty if there is no such game."""
    answer = httpx.get(f"{instance.url}/leaderboard/{game}", timeout=30)
    assert answer.status_code in (200, 404, 503), answer.text
    return [(entry["playerName"], entry["score"]) for entry in answer.json()] if answer.is_success else []
