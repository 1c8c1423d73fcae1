"""What a customer has done: how often funds were added, when first and last, and the most at once."""

from __future__ import annotations

from balance_service.model.flow import Stream
from balance_service.model.folds import Count, Greatest, Least
from balance_service.model.read_model import ReadModel


class Activity(ReadModel):
    """FundsAdded → Activity."""

    name = "activity"
    source = Stream("balance", "FundsAdded")
    key = "customerId"
    state = "Activity"

    additions = Count("FundsAdded")
    # By when it happened, whatever the order in which the topic has it.
    first = Least("FundsAdded.occurredOn")
    latest = Greatest("FundsAdded.occurredOn")
    greatest = Greatest("FundsAdded.amount")
