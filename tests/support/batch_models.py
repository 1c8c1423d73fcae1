"""Models for batch jobs, whose Python workers import this module, and nothing else of the tests."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from balance_service.errors import PoisonRecordError
from balance_service.model.read_model import ReadModel
from balance_service.model.stream import Stream

_REFUSED = Decimal("13.00")


@dataclass
class Amounts:
    customerId: str  # noqa: N815  (the column's name)
    amounts: list[str]


class InOrder(ReadModel):
    """Keeps all amounts of a customer in order, and refuses 13.00."""

    name = "test-batch-in-order"
    source = Stream("balance", "FundsAdded")
    key = "customerId"
    state = Amounts

    def fold(self, state: Amounts | None, told: Any) -> Amounts:
        if told["amount"] == _REFUSED:
            raise PoisonRecordError("unlucky", "it is refused")
        return Amounts(told["customerId"], [*(state.amounts if state else []), str(told["amount"])])
