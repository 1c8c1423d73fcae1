"""Load: many `FundsAdded` events, quickly."""

from __future__ import annotations

import random
import time
from decimal import Decimal
from typing import TYPE_CHECKING

from balance_service.kafka.producers import BulkProducer
from balance_service.read_models.funds_publisher import FundsAddedSerializer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from balance_service.avro.registry import SchemaRegistry
    from balance_service.kafka.clients import ClientConfig

_SLICE_SECONDS = 0.05
_MAX_CENTS = 100_000


def produce_load(
    config: ClientConfig,
    registry: SchemaRegistry,
    topic: str,
    events: int,
    customers: int,
    rate: float | None,
    progress: Callable[[int], None],
) -> Decimal:
    """Append random events for `customer-0` to `customer-<customers - 1>`.

    Args:
        rate: events per second; None for as fast as possible.
        progress: told of every few thousand events, how many more were handed to the producer.

    Returns:
        The sum of all amounts.

    Raises:
        BalanceServiceError: not all events were acknowledged.
    """
    producer = BulkProducer(config, topic)
    serialize = FundsAddedSerializer(registry, topic)
    total = Decimal(0)
    random_source = random.Random(events)  # noqa: S311  (load, not secrets)
    for size in _slices(events, rate):
        for _ in range(size):
            customer = f"customer-{random_source.randrange(customers)}"
            amount = Decimal(random_source.randrange(1, _MAX_CENTS)).scaleb(-2)
            producer.send(customer.encode(), serialize(customer, amount))
            total += amount
        progress(size)
    producer.finish()
    return total


def _slices(events: int, rate: float | None) -> Iterator[int]:
    """How many events to produce next, at the pace of the rate."""
    began, done = time.monotonic(), 0
    while done < events:
        if rate is None:
            size = 5_000
        else:
            due = int((time.monotonic() - began + _SLICE_SECONDS) * rate) - done
            if due <= 0:
                time.sleep(_SLICE_SECONDS / 2)
                continue
            size = due
        size = min(size, events - done)
        yield size
        done += size
