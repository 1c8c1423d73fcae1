"""The three highest scores of each game."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

from balance_service.errors import PoisonRecordError
from balance_service.model.events import LAST, Emit
from balance_service.model.read_model import Collection, ReadModel
from balance_service.model.stream import Global, Stream, Table, days

if TYPE_CHECKING:
    from collections.abc import Mapping

    from balance_service.model.events import Event, State

_PLACES = 3


class Leaderboard(ReadModel):
    """ScoreEvent, joined with its player and its game → HighScores."""

    name = "leaderboard"
    source = (
        Stream("score-events", "ScoreEvent")
        .by("player_id")
        .join(Table("players", "Player", history=days(7)), on="player_id", take={"name": "playerName"})
        .join(Global("products", "Product"), on="product_id", take={"name": "gameName"})
        .by("product_id", record="ScoredGame")
    )
    state = "HighScores"
    emits = Emit("high-scores", each=LAST)
    queries = Collection("/leaderboard", key="productId", noun="game")
    fields: ClassVar[Mapping[str, str]] = {}

    def fold(self, state: State | None, scored: Event) -> State:
        """Adds a score to the list. The result does not depend on the order of the events."""
        if math.isnan(scored["score"]):
            raise PoisonRecordError("score-not-a-number", "the score is NaN, which has no rank")
        entry = {
            "playerId": scored["player_id"],
            "productId": scored["product_id"],
            "playerName": scored["playerName"],
            "gameName": scored["gameName"],
            "score": scored["score"],
            "scoredAt": scored.timestamp_ms,
        }
        entries = [*(state["entries"] if state else []), entry]
        return {"entries": sorted(entries, key=_place)[:_PLACES]}

    def view(self, state: State) -> list[dict[str, Any]]:
        """Returns the list, highest score first."""
        return [{name: value for name, value in entry.items() if name != "scoredAt"} for entry in state["entries"]]


def _place(entry: Mapping[str, Any]) -> tuple[float, int, int]:
    """Ranks equal scores by time, the earlier first, then by player id."""
    return -entry["score"], entry["scoredAt"], entry["playerId"]
