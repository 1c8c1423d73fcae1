"""A read model whose key has several columns: what each card has spent on each day."""

from __future__ import annotations

from dataclasses import dataclass

from balance_service.model.folds import Count, RunningSum
from balance_service.model.read_model import ReadModel
from balance_service.model.stream import Stream


@dataclass
class Purchase:
    card: str | None
    day: int
    amount: int


@dataclass
class Spent:
    card: str
    day: int
    total: int
    purchases: int


class SpentPerDay(ReadModel):
    name = "spent-per-day"
    source = Stream("purchases", Purchase).by("card", "day")
    key = ("card", "day")
    state = Spent
    total = RunningSum("Purchase.amount")
    purchases = Count("Purchase")
