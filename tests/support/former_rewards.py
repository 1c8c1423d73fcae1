"""The read model `rewards` as d5926fb had it, with a fold of its own, whose data `tests/data/d5926fb` has."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Any

from balance_service.errors import PoisonRecordError
from balance_service.model.conditions import col
from balance_service.model.events import EVENT, Emit
from balance_service.model.folds import add, product
from balance_service.model.read_model import ReadModel, Routes
from balance_service.model.stream import Stream

if TYPE_CHECKING:
    from balance_service.model.events import Event, State

# Points per unit of money. Amounts with two digits after the point give points with four.
_SHARE = Decimal("0.02")
_NO_POINTS = Decimal("0.0000")
_LIMIT = Decimal(10) ** 34


class Rewards(ReadModel):
    """PosInvoice → Rewards, and a Notification for each invoice."""

    name = "rewards"
    source = (
        Stream("pos", "PosInvoice")
        .where(col("customerType") == "PRIME")
        .by("customerCardNo")
        .select("invoiceNumber", "totalAmount")
    )
    state = "Rewards"
    emits = Emit("notifications", "Notification", each=EVENT)
    queries = Routes("/api/customers.getRewards", key="customerCardNo", noun="customer")

    def fold(self, state: State | None, invoice: Event) -> State:
        """Adds the points of an invoice."""
        points = add(state["points"] if state else _NO_POINTS, _earned(invoice))
        if points.copy_abs() >= _LIMIT:
            raise PoisonRecordError("rewards-overflow", "the points do not fit into their type")
        return {"customerCardNo": invoice["customerCardNo"], "points": points}

    def emit(self, state: State, invoice: Event) -> dict[str, Any]:
        """Notifies the customer of the points of an invoice."""
        return {
            "invoiceNumber": invoice["invoiceNumber"],
            "customerCardNo": invoice["customerCardNo"],
            "totalAmount": invoice["totalAmount"],
            "earnedLoyaltyPoints": _earned(invoice),
            "totalLoyaltyPoints": state["points"],
        }


def _earned(invoice: Event) -> Decimal:
    return product(invoice["totalAmount"], _SHARE)
