"""The securities that are listed, each as last told."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from balance_service.model.flow import Stream
from balance_service.model.read_model import ReadModel

if TYPE_CHECKING:
    from balance_service.model.event import Event, State

_TICKER = re.compile(r"[A-Z]{1,5}(\.[A-Z])?")


class Symbols(ReadModel):
    """Symbol → Symbol: upserts and tombstones, of which a filter keeps those that are listed."""

    name = "symbols"
    source = Stream("symbols", "Symbol", tombstones=True)
    key = "symbol"
    state = "Symbol"

    def fold(self, state: State | None, symbol: Event) -> State | None:  # noqa: ARG002
        """The symbol as it is told now; one that is not listed any more, having no name or no plain ticker, goes."""
        return symbol if symbol["name"] and _TICKER.fullmatch(symbol["symbol"]) else None
