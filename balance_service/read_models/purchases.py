"""Shipments of the purchases that must be delivered, and anonymous invoice lines for analysis."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from balance_service.model.conditions import col
from balance_service.model.events import Emit
from balance_service.model.read_model import ReadModel
from balance_service.model.stream import Stream

if TYPE_CHECKING:
    from balance_service.model.events import Event

_SHOWN_DIGITS = 4


def masked_lines(invoice: Event) -> list[dict[str, Any]]:
    """Returns a HadoopRecord for each line: without name and address, and with the card number's last digits only."""
    common = {name: invoice[name] for name in ("invoiceNumber", "storeId", "customerType", "deliveryType")}
    common["customerCardDigits"] = invoice["customerCardNo"][-_SHOWN_DIGITS:]
    return [{**common, **line} for line in invoice["lines"]]


class Purchases(ReadModel):
    """PosInvoice → PosInvoice for delivery, HadoopRecord for analysis."""

    name = "purchases"
    source = Stream("pos", "PosInvoice")
    emits = (
        Emit("shipments", where=col("deliveryType").lower() == "home-delivery"),
        Emit("hadoop", "HadoopRecord", make=masked_lines),
    )
