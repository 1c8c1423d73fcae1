"""Read models with folds of their own, which Python runs for each event, and the results of the models that ship."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any

from balance_service import api, scale
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


@dataclass(frozen=True)
class Total:
    """A customer's balance."""

    amount: Annotated[Decimal, scale(2)]


class Balance(ReadModel):
    """FundsAdded → Total."""

    name = "balance"
    source = Stream("balance", "FundsAdded")
    key = "customerId"
    state = Total
    queries = Routes(api.GET_BALANCE, key="customerId", noun="customer")

    def fold(self, total: Total | None, funds: Event) -> Total:
        """Adds the funds."""
        return Total(total.amount + funds["amount"] if total else funds["amount"])


class Rewards(ReadModel):
    """PosInvoice → Rewards, and a Notification for each invoice: as d5926fb had it, whose recorded data tests read."""

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
