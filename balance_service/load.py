"""Load: many `FundsAdded` events, quickly."""

from __future__ import annotations

import random
import time
from decimal import Decimal
from typing import TYPE_CHECKING

from confluent_kafka import KafkaException, Producer

from balance_service.commands.publisher import FundsAddedSerializer
from balance_service.errors import RetriableError
from balance_service.kafka.clients import by_remedy, not_authorized

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from confluent_kafka import KafkaError, Message

    from balance_service.avro.registry import SchemaRegistry
    from balance_service.kafka.clients import ClientConfig

_SLICE_SECONDS = 0.05
_FLUSH_SECONDS = 60.0
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
        RetriableError: not all events were acknowledged.
    """
    failures: list[KafkaError] = []

    def on_delivery(error: KafkaError | None, _message: Message) -> None:
        if error is not None:
            failures.append(error)

    producer = Producer({**config, "linger.ms": 20, "compression.type": "lz4"})
    serialize = FundsAddedSerializer(registry, topic)
    total, produced = Decimal(0), 0
    random_source = random.Random(events)  # noqa: S311  (load, not secrets)
    try:
        for size in _slices(events, rate):
            for _ in range(size):
                customer = f"customer-{random_source.randrange(customers)}"
                amount = Decimal(random_source.randrange(1, _MAX_CENTS)).scaleb(-2)
                _produce(producer, topic, customer.encode(), serialize(customer, amount), on_delivery)
                total += amount
            produced += size
            producer.poll(0)
            progress(size)
        unsent = producer.flush(_FLUSH_SECONDS)
    except KafkaException as error:
        raise by_remedy(error, "producing load") from error
    grant = f"Write on topic '{topic}'"
    if failures and (forbidden := not_authorized(failures[0], f"writing to topic '{topic}'", grant)):
        raise forbidden
    if failures or unsent:
        reason = f": {failures[0].str()}" if failures else ""
        raise RetriableError(f"{len(failures) + unsent} of {produced} events were not acknowledged{reason}")
    return total


def _produce(
    producer: Producer,
    topic: str,
    key: bytes,
    value: bytes,
    on_delivery: Callable[[KafkaError | None, Message], None],
) -> None:
    while True:
        try:
            producer.produce(topic, value, key, on_delivery=on_delivery)
        except BufferError:
            producer.poll(_SLICE_SECONDS)
        else:
            return


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
