"""A score that came before its player is on the leaderboard once the player comes."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.e2e.letters import pages
from tests.integration.test_leaderboard import Games
from tests.support.service import application, new_instance, running
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from balance_service.devtools.local.stack import LocalInstance, LocalStack

_ids = itertools.count(random.randrange(1 << 40))


@pytest.fixture
def instance(stack: LocalStack) -> Iterator[LocalInstance]:
    settings = application(BALANCE_MODELS="leaderboard", BALANCE_RETRY_EVERY="1")
    with running(new_instance(stack, settings)) as (instance,):
        yield instance


def test_a_score_before_its_player_is_on_the_leaderboard_once_the_player_comes(
    stack: LocalStack, instance: LocalInstance
) -> None:
    early, known = next(_ids), next(_ids)
    with Games(stack) as games:
        game = games.game("Racing")
        games.player(known, "Known")
        games.score(game, early, 9.0)
        games.score(game, known, 1.0)
        eventually(lambda: leaders(instance, game) == [("Known", 1.0)], lambda: str(leaders(instance, game)))
        eventually(lambda: bool(letters(instance, early)), "it is a dead letter")
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
    """The dead letters of a player's scores."""
    listed = itertools.chain(*pages(instance, model="leaderboard"))
    return [letter for letter in listed if letter["key"] == str(player)]


def leaders(instance: LocalInstance, game: int) -> list[tuple[str, float]]:
    """A game's players and scores; none while there is no game."""
    answer = httpx.get(f"{instance.url}/leaderboard/{game}", timeout=30)
    assert answer.status_code in (200, 404, 503), answer.text
    return [(entry["playerName"], entry["score"]) for entry in answer.json()] if answer.is_success else []
