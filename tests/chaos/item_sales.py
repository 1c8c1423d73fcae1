"""A read model whose `transform` filters, derives, unfolds and sometimes fails; `systems` recounts it.

Instances load it by name, so nothing of it is used in the recount.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated

from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)

from balance_service import EVENT, Count, Emit, OfState, ReadModel, RunningSum, Stream, scale

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Money = Annotated[Decimal, scale(2)]


@dataclass
class ItemSold:
    storeId: str  # noqa: N815  (the column's name)
    item: str
    lines: int
    revenue: Money


@dataclass
class ItemPrice:
    invoiceNumber: str  # noqa: N815  (the column's name)
    item: str
    price: Money
    revenue: Money


class ItemSales(ReadModel):
    """Invoices of prime customers → lines and revenue of each item in each store; a line without a quantity fails."""

    name = "item-sales"
    source = Stream("pos", "PosInvoice")
    key = ("storeId", "item")
    state = ItemSold

    lines = Count()
    revenue = RunningSum("amount")
    emits = Emit(
        "item-prices",
        ItemPrice,
        each=EVENT,
        fields={"invoiceNumber": "invoiceNumber", "item": "item", "price": "price", "revenue": OfState("revenue")},
    )

    def transform(self, events: DataFrame) -> DataFrame:
        prime = events.where(F.col("customerType") == "PRIME")
        lines = prime.select("invoiceNumber", "storeId", "customerCardNo", F.explode("lines").alias("line"))
        amount = F.col("line.amount")
        rows = lines.select(
            "invoiceNumber",
            "storeId",
            F.concat("line.itemCode", F.lit("-"), F.right("customerCardNo", F.lit(1))).alias("item"),
            amount.alias("amount"),
            (amount / F.col("line.quantity")).cast("decimal(38,2)").alias("price"),
        )
        return rows.where(F.col("item") != "b-0")
