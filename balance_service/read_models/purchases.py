"""What becomes of each purchase: shipments of what is to be delivered, and lines for analysis that tell of nobody."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from balance_service.model.conditions import col
from balance_service.model.flow import Stream
from balance_service.model.outputs import Emit
from balance_service.model.read_model import ReadModel

if TYPE_CHECKING:
    from balance_service.model.event import Event

_SHOWN_DIGITS = 4


def masked_lines(invoice: Event) -> list[dict[str, Any]]:
    """A HadoopRecord for each line of an invoice, without name and address and with the end of the card's number."""
    common = {name: invoice[name] for name in ("invoiceNumber", "storeId", "customerType", "deliveryType")}
    common["customerCardDigits"] = invoice["customerCardNo"][-_SHOWN_DIGITS:]
    return [{**common, **line} for line in invoice["lines"]]


class Purchases(ReadModel):
    """PosInvoice → PosInvoice for those who deliver, HadoopRecord for those who analyse."""

    name = "purchases"
    source = Stream("pos", "PosInvoice")
    emits = (
        Emit("shipments", where=col("deliveryType").lower() == "home-delivery"),
        Emit("hadoop", "HadoopRecord", make=masked_lines),
    )
