"""The listed securities, each with its newest record."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from balance_service.model.read_model import ReadModel
from balance_service.model.stream import Stream

if TYPE_CHECKING:
    from balance_service.model.events import Event, State

_TICKER = re.compile(r"[A-Z]{1,5}(\.[A-Z])?")


class Symbols(ReadModel):
    """Symbol → Symbol: upserts and tombstones; keeps the listed securities."""

    name = "symbols"
    source = Stream("symbols", "Symbol", tombstones=True)
    key = "symbol"
    state = "Symbol"

    def fold(self, state: State | None, symbol: Event) -> State | None:  # noqa: ARG002
        """Replaces the state. Deletes a security that is no longer listed: one without a name or a plain ticker."""
        return symbol if symbol["name"] and _TICKER.fullmatch(symbol["symbol"]) else None
