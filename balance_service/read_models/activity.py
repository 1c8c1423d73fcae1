"""The additions of each customer: their number, the first and the last, and the greatest amount."""

from __future__ import annotations

from balance_service.model.folds import Count, Greatest, Least
from balance_service.model.read_model import ReadModel
from balance_service.model.stream import Stream


class Activity(ReadModel):
    """FundsAdded → Activity."""

    name = "activity"
    source = Stream("balance", "FundsAdded")
    key = "customerId"
    state = "Activity"

    additions = Count("FundsAdded")
    # By the event's own time, independent of the order in the topic.
    first = Least("FundsAdded.occurredOn")
    latest = Greatest("FundsAdded.occurredOn")
    greatest = Greatest("FundsAdded.amount")
