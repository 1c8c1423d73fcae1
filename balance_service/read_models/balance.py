"""The balance of a customer: the exact sum of all `FundsAdded`."""

from __future__ import annotations

import re
from decimal import Context, Decimal, DivisionByZero, Inexact, InvalidOperation, Overflow
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)

from balance_service.avro.schemas import full_name, load_schema
from balance_service.errors import PoisonRecordError
from balance_service.read_models.read_model import Combine

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import DataFrame

    from balance_service.avro.schemas import Schema
    from balance_service.read_models.read_model import State, Update

MAX_CUSTOMER_ID_BYTES = 256
_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_LIMIT = Decimal(10) ** 36
# Inexact is trapped: a digit is never dropped without an error.
_EXACT = Context(prec=60, traps=[Inexact, InvalidOperation, Overflow, DivisionByZero])


class Balance:
    """FundsAdded → BalanceState."""

    name = "balance"
    combine: Mapping[str, Combine] | None = {"amount": Combine.SUM}
    adds: str | None = "amount"

    def __init__(self) -> None:
        funds_added = load_schema("FundsAdded")
        self.event_schemas: Mapping[str, Schema] = {full_name(funds_added): funds_added}
        self.state_schema: Schema = load_schema("BalanceState")

    def updates(self, events: DataFrame) -> DataFrame:
        """One row per event: the customer and the amount; `cause` where the customer is not the record's key."""
        customer_id = F.col("FundsAdded.customerId")
        cause = F.when(customer_id.cast("binary") != F.col("key"), "key-is-not-customer-id")
        return events.withColumns({"amount": F.col("FundsAdded.amount"), "cause": cause})

    def fold(self, state: State | None, update: Update) -> State:
        """Add the amount, exactly."""
        amount = update["amount"]
        if state is None:
            customer_id = _customer_id(update["key"])
        else:
            customer_id, amount = state["customerId"], _EXACT.add(state["amount"], amount)
        # `abs` would round to the precision of the calling thread.
        if amount.copy_abs() >= _LIMIT:
            raise PoisonRecordError("balance-overflow", "the balance would not fit into decimal(38,2)")
        return {"customerId": customer_id, "amount": amount}

    def view(self, state: State) -> Mapping[str, Any]:
        """The balance as an exact decimal."""
        return {"amount": state["amount"]}


def _customer_id(key: bytes) -> str:
    """The customer of a key that has no balance yet; those that have one were checked when they came."""
    try:
        customer_id = key.decode()
    except UnicodeDecodeError:
        customer_id = ""
    if not customer_id or len(key) > MAX_CUSTOMER_ID_BYTES or _CONTROL_CHARACTER.search(customer_id):
        raise PoisonRecordError("customer-id-malformed", "the customer id is empty, too long, or not text")
    return customer_id
