"""`balance` over documents: the same model as the one that ships, which reads Avro."""

from __future__ import annotations

from balance_service import ReadModel, Routes, RunningSum, Stream, api


class JsonBalance(ReadModel):
    """FundsAdded → BalanceState."""

    name = "balance"
    source = Stream("balance", "FundsAdded", format="json")
    key = "customerId"
    state = "BalanceState"
    queries = Routes(api.GET_BALANCE, key="customerId", noun="customer")

    amount = RunningSum("FundsAdded.amount")
