"""The loyalty points of each customer: a share of every purchase of those who are in the programme."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Any

from balance_service.errors import PoisonRecordError
from balance_service.model.conditions import col
from balance_service.model.flow import Stream
from balance_service.model.folds import add, product
from balance_service.model.outputs import EVENT, Emit
from balance_service.model.read_model import ReadModel
from balance_service.model.routes import Routes

if TYPE_CHECKING:
    from balance_service.model.event import Event, State

# Points per unit of money. Of amounts with two digits after the point, points have four.
_SHARE = Decimal("0.02")
_NO_POINTS = Decimal("0.0000")
_LIMIT = Decimal(10) ** 34


class Rewards(ReadModel):
    """PosInvoice → Rewards, and a Notification for each."""

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
        """The points with those of an invoice."""
        points = add(state["points"] if state else _NO_POINTS, _earned(invoice))
        if points.copy_abs() >= _LIMIT:
            raise PoisonRecordError("rewards-overflow", "the points would not fit into their type")
        return {"customerCardNo": invoice["customerCardNo"], "points": points}

    def emit(self, state: State, invoice: Event) -> dict[str, Any]:
        """What the customer is told of an invoice."""
        return {
            "invoiceNumber": invoice["invoiceNumber"],
            "customerCardNo": invoice["customerCardNo"],
            "totalAmount": invoice["totalAmount"],
            "earnedLoyaltyPoints": _earned(invoice),
            "totalLoyaltyPoints": state["points"],
        }


def _earned(invoice: Event) -> Decimal:
    return product(invoice["totalAmount"], _SHARE)
