"""The fold of `Leaderboard`: three places, ties, and NaN; and invalid joins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balance_service.errors import ConfigurationError
from balance_service.model.read_model import ReadModel
from balance_service.model.stream import Global, Stream, Table
from balance_service.read_models.leaderboard import Leaderboard
from balance_service.testing import Driver, event
from tests.support.models import ship

if TYPE_CHECKING:
    from collections.abc import Iterator

PLAYERS = Table("players", "Player")
SCORES = Stream("score-events", "ScoreEvent")
ship("NumberedGame", {"score": "double", "product_id": "long", "player_id": "long", "playerName": "long"})
ship("UnknownGame", {"score": "double", "product_id": "long", "place": "long"})
ship("PerhapsGame", {"product_id": "long", "playerName": ["null", "string"]})


def scored(player: int, score: float, product: int = 1, at: int = 0) -> Any:
    names = {"playerName": f"player {player}", "gameName": "game"}
    return event("ScoredGame", {"score": score, "player_id": player, "product_id": product, **names}, timestamp_ms=at)


@pytest.fixture
def leaderboard() -> Iterator[Driver]:
    with Driver(Leaderboard(), after_joins=True) as driver:
        yield driver


def places(driver: Driver, product: int = 1) -> list[tuple[int, float]]:
    return [(entry["playerId"], entry["score"]) for entry in driver.view(str(product))]


def test_the_three_highest_scores_stay_and_ties_go_to_the_earlier_then_to_the_lower_player(
    leaderboard: Driver,
) -> None:
    leaderboard.given(
        scored(1, 10.0), scored(7, 30.0, at=2), scored(3, 10.0), scored(5, 30.0, at=2), scored(4, 20.0), scored(6, 20.0)
    ).given(scored(2, 30.0, at=1))

    assert places(leaderboard) == [(2, 30.0), (5, 30.0), (7, 30.0)]


def test_changed_lists_are_emitted(leaderboard: Driver) -> None:
    leaderboard.given(scored(1, 10.0), scored(2, 20.0)).given(scored(3, 30.0)).given(scored(4, 5.0))

    sent = [
        [entry["playerId"] for entry in scores["entries"]] for scores in leaderboard.emitted("high-scores") if scores
    ]
    assert sent == [[2, 1], [3, 2, 1]]


def test_the_last_emitted_list_is_the_current_one(leaderboard: Driver) -> None:
    leaderboard.given(scored(1, 10.0), scored(2, 30.0), scored(3, 10.0), scored(4, 20.0), scored(5, 30.0, at=1))

    assert places(leaderboard) == [(2, 30.0), (5, 30.0), (4, 20.0)]
    last = leaderboard.last_emitted("high-scores")
    assert [[entry["playerId"] for entry in scores["entries"]] for scores in last.values() if scores] == [[2, 5, 4]]


def test_games_are_separate_and_a_nan_score_is_a_dead_letter(leaderboard: Driver) -> None:
    leaderboard.given(scored(1, 10.0), scored(1, 5.0, product=-2), scored(1, float("nan")), scored(2, float("inf")))

    assert (places(leaderboard), places(leaderboard, -2)) == ([(2, float("inf")), (1, 10.0)], [(1, 5.0)])
    assert [letter.cause for letter in leaderboard.dead_letters()] == ["score-not-a-number"]


_TOLD = st.tuples(st.integers(0, 3), st.integers(-3, 3), st.integers(0, 1), st.integers(0, 2))


@given(st.lists(_TOLD, max_size=20))
def test_in_any_order_of_events_the_places_are_those_of_all_scores_sorted(
    told: list[tuple[int, int, int, int]],
) -> None:
    with Driver(Leaderboard(), after_joins=True) as driver:
        driver.given(*(scored(player, float(score), product, at) for player, score, product, at in told))

        for product in {product for _, _, product, _ in told}:
            of_it = sorted((-score, at, player) for player, score, of, at in told if of == product)
            assert places(driver, product) == [(player, float(-score)) for score, _, player in of_it][:3]


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (
            SCORES.join(PLAYERS, on="player_id", take={"name": "playerName"}).by("product_id", record="ScoredGame"),
            "put a `.by` that column before the join",
        ),
        (
            SCORES.by("player_id")
            .join(PLAYERS, on="product_id", take={"name": "x"})
            .by("product_id", record="ScoredGame"),
            "joins the table 'players' on 'product_id': put a `.by` that column before the join",
        ),
        (
            SCORES.by("player_id").join(PLAYERS, on="player_id", take={"name": "x"}),
            "needs both a join and a `.by` that names the joined record",
        ),
        (
            SCORES.by("product_id", record="ScoredGame"),
            "continues by 'product_id' as `record='ScoredGame'`: that is a joined record, and nothing is joined",
        ),
        (
            SCORES.join(Global("p", "Player"), on="player_id", take={"rank": "x"}).by(
                "product_id", record="ScoredGame"
            ),
            "takes 'rank' of Player, which has no such column",
        ),
        (
            SCORES.join(Global("p", "Player"), on="player_id", take={"name": "x"}).by(
                "product_id", record="UnknownGame"
            ),
            "makes UnknownGame, but neither ScoreEvent nor a table has its 'place'",
        ),
        (
            SCORES.join(Global("p", "Player"), on="player_id", take={"name": "playerName"}).by(
                "product_id", record="NumberedGame"
            ),
            "whose 'playerName' is of type long, but in Player it is string",
        ),
        (
            SCORES.join(Global("p", "Player"), on="score", take={"name": "x"}).by("product_id", record="ScoredGame"),
            "joins Player, which has string keys, on 'score', which is no string, int or long of ScoreEvent",
        ),
    ],
)
def test_an_invalid_join_is_refused(source: Stream, why: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        define("test-joined", source)

    assert why in str(refused.value)


def test_a_column_that_a_missing_row_leaves_null_must_be_nullable() -> None:
    perhaps = SCORES.join(Global("p", "Player"), on="player_id", take={"name": "playerName"}, missing="null")
    both = perhaps.join(Global("g", "Product"), on="product_id", take={"name": "gameName"})

    define("test-perhaps", perhaps.by("product_id", record="PerhapsGame"))
    with pytest.raises(ConfigurationError, match="whose 'playerName' is of type string, but in Player"):
        define("test-joined", both.by("product_id", record="ScoredGame"))


def define(name: str, source: Stream) -> None:
    attributes = {"__module__": __name__, "name": name, "source": source, "state": "HighScores", "fold": _keep}
    type("Joined", (ReadModel,), attributes)()


def _keep(_model: ReadModel, state: Any, _event: Any) -> Any:
    return state
