"""Shipments of the purchases that must be delivered, and anonymous invoice lines for analysis."""

from __future__ import annotations

from typing import TYPE_CHECKING

from balance_service.model.conditions import col
from balance_service.model.events import Emit
from balance_service.model.read_model import ReadModel
from balance_service.model.stream import Stream

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_SHOWN_DIGITS = 4
_OF_LINE = ("itemCode", "description", "quantity", "unitPrice", "amount")


class Purchases(ReadModel):
    """PosInvoice → PosInvoice for delivery, HadoopRecord for analysis."""

    name = "purchases"
    source = Stream("pos", "PosInvoice")
    emits = (
        Emit("shipments", where=col("deliveryType").lower() == "home-delivery"),
        Emit("hadoop", "HadoopRecord", of="maskedLines"),
    )

    def transform(self, invoices: DataFrame) -> DataFrame:
        """Makes a record of each line: without name and address, and with the card number's last digits only."""
        from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)

        digits = F.right("customerCardNo", F.lit(_SHOWN_DIGITS)).alias("customerCardDigits")
        common = ("invoiceNumber", "storeId", "customerType", "deliveryType", digits)
        lines = F.transform("lines", lambda line: F.struct(*common, *(line[name].alias(name) for name in _OF_LINE)))
        return invoices.select("deliveryType", lines.alias("maskedLines"))
