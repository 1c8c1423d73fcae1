"""The loyalty points of each customer in the programme: a share of every purchase."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING

from balance_service.model.conditions import col
from balance_service.model.events import Emit, OfState
from balance_service.model.folds import RunningSum
from balance_service.model.read_model import ReadModel, Routes
from balance_service.model.stream import Stream

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# Points per unit of money. Amounts with two digits after the point give points with four.
_SHARE = Decimal("0.02")
_OF_INVOICE = ("invoiceNumber", "customerCardNo", "totalAmount")


class Rewards(ReadModel):
    """PosInvoice → Rewards, and a Notification for each invoice."""

    name = "rewards"
    source = Stream("pos", "PosInvoice").where(col("customerType") == "PRIME").by("customerCardNo", unchanged=True)
    state = "Rewards"
    emits = Emit(
        "notifications",
        "Notification",
        fields={
            **{name: name for name in _OF_INVOICE},
            "earnedLoyaltyPoints": "points",
            "totalLoyaltyPoints": OfState("points"),
        },
    )
    queries = Routes("/api/customers.getRewards", key="customerCardNo", noun="customer")

    points = RunningSum("points")

    def transform(self, invoices: DataFrame) -> DataFrame:
        """Computes the points of each invoice, exactly."""
        return invoices.select(*_OF_INVOICE, (invoices["totalAmount"] * _SHARE).alias("points"))
