"""The three highest scores of each game."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

from balance_service.errors import PoisonRecordError
from balance_service.model.flow import Stream
from balance_service.model.joins import Global, Table, days
from balance_service.model.outputs import LAST, Emit
from balance_service.model.read_model import ReadModel
from balance_service.model.routes import Collection

if TYPE_CHECKING:
    from collections.abc import Mapping

    from balance_service.model.event import Event, State

_PLACES = 3


class Leaderboard(ReadModel):
    """ScoreEvent, with its player and its game → HighScores."""

    name = "leaderboard"
    source = (
        Stream("score-events", "ScoreEvent")
        .by("player_id")
        .join(Table("players", "Player", history=days(7)), on="player_id", take={"name": "playerName"})
        .join(Global("products", "Product"), on="product_id", take={"name": "gameName"})
        .by("product_id", "ScoredGame")
    )
    state = "HighScores"
    emits = Emit("high-scores", each=LAST)
    queries = Collection("/leaderboard", key="productId", noun="game")
    fields: ClassVar[Mapping[str, str]] = {}

    def fold(self, state: State | None, scored: Event) -> State:
        """The highest scores with another one; whatever the order in which they come."""
        if math.isnan(scored["score"]):
            raise PoisonRecordError("score-not-a-number", "the score has no place among others")
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
        """The list, highest first."""
        return [{name: value for name, value in entry.items() if name != "scoredAt"} for entry in state["entries"]]


def _place(entry: Mapping[str, Any]) -> tuple[float, int, int]:
    """Of equal scores, the earlier is the higher; of those at one time, that of the player with the lower number."""
    return -entry["score"], entry["scoredAt"], entry["playerId"]
