"""The balance of a customer: the exact sum of all `FundsAdded`."""

from __future__ import annotations

from balance_service import api
from balance_service.model.folds import RunningSum
from balance_service.model.read_model import ReadModel, Routes
from balance_service.model.stream import Stream


class Balance(ReadModel):
    """FundsAdded → BalanceState."""

    name = "balance"
    source = Stream("balance", "FundsAdded")
    key = "customerId"
    state = "BalanceState"
    queries = Routes(api.GET_BALANCE, key="customerId", noun="customer")

    amount = RunningSum("FundsAdded.amount")
