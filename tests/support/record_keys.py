"""Read models whose key is the record's own, which their events do not repeat; and one that joins a table of longs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from balance_service.model.events import EVENT, Emit
from balance_service.model.folds import Count, RunningSum
from balance_service.model.read_model import ReadModel
from balance_service.model.record_keys import RECORD_KEY
from balance_service.model.stream import Stream, Table
from tests.support.composite import Purchase

if TYPE_CHECKING:
    from balance_service.model.record_keys import KeyFormat


@dataclass
class Order:
    amount: int


@dataclass
class Orders:
    total: int
    orders: int


@dataclass
class KeyedOrders:
    """An answer with its key, as a client reads it."""

    key: str
    total: int
    orders: int


def totals_of(form: KeyFormat | None, name: str = "own-totals") -> ReadModel:
    """A model with standard folds."""
    members = {
        "name": name,
        "source": Stream("own-orders", Order, key_format=form),
        "key": RECORD_KEY,
        "state": Orders,
        "total": RunningSum("Order.amount"),
        "orders": Count("Order"),
    }
    made: ReadModel = type("OwnTotals", (ReadModel,), members)()
    return made


class OrdersById(ReadModel):
    """A fold of its own, with tombstones, which sends each state on under the key that it came with."""

    name = "own-orders-by-id"
    source = Stream("own-orders", Order, tombstones=True, key_format="long")
    key = RECORD_KEY
    state = Orders
    emits = Emit("own-totals", each=EVENT)

    def fold(self, state: Orders | None, event: Order | None) -> Orders | None:
        if event is None:
            return None
        before = state or Orders(0, 0)
        return Orders(before.total + event.amount, before.orders + 1)


@dataclass
class Joined:
    card: str | None
    amount: int
    day: int
    label: str


@dataclass
class Label:
    label: str


@dataclass
class PerLabel:
    label: str
    purchases: int


class Labels(ReadModel):
    name = "labels"
    source = (
        Stream("purchases", Purchase)
        .by("day")
        .join(Table("day-labels", Label, key_format="long"), on="day", take={"label": "label"})
        .by("label", record=Joined)
    )
    state = PerLabel
    purchases = Count("Joined")
