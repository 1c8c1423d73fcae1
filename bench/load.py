"""Topics that are filled before measurements, and events that arrive during measurements."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import TYPE_CHECKING

import numpy as np
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec

from balance_service.errors import BalanceServiceError
from balance_service.kafka.partitioner import partition_of
from balance_service.kafka.topic_specs import FOREVER
from bench.background import Background, at_rate
from bench.events import MAX_CENTS, customer_id, documents, encoded, register

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.synchronize import Event

    from balance_service.devtools.local.stack import LocalStack
    from bench.background import Count
    from bench.events import Integers

PARTITIONS = 2
_WORKERS = 2
_SLICE_EVENTS = 250_000
_CHUNK_EVENTS = 10_000
_TIMEOUT_SECONDS = 120.0
_CREATE_SECONDS = 20.0

PRODUCER: dict[str, str | int | bool] = {
    "partitioner": "murmur2_random",
    "enable.idempotence": True,
    "acks": "all",
    "compression.type": "lz4",
    "linger.ms": 20,
    "queue.buffering.max.messages": 500_000,
}
"""The configuration of the producer, for the report."""


@dataclass(frozen=True)
class Load:
    """A topic with events, with known sums per customer."""

    topic: str
    header: bytes
    """Of the frames; empty if the events are documents."""
    events: int
    ends: dict[int, int]
    cents: Integers = field(repr=False)
    """Customer number → sum in cents."""

    @property
    def customers(self) -> int:
        """The number of possible customers; a few of them can have no event."""
        return len(self.cents)

    @property
    def partitions(self) -> frozenset[int]:
        """Of the topic."""
        return frozenset(self.ends)

    def customers_of(self, partition: int, at_most: int) -> list[str]:
        """Ids of customers of one partition that have a balance."""
        return [customer_id(number) for number in self.numbers_of(partition, at_most)]

    def numbers_of(self, partition: int, at_most: int) -> list[int]:
        """Numbers of customers of one partition that have a balance."""
        partitions = len(self.ends)
        having = (n for n in np.flatnonzero(self.cents).tolist() if _home(n, partitions) == partition)
        return list(islice(having, at_most))


def generate(
    stack: LocalStack,
    topic: str,
    events: int,
    customers: int,
    advance: Callable[[int], None],
    *,
    each_once: bool = False,
    partitions: int = PARTITIONS,
    is_json: bool = False,
) -> Load:
    """Create a topic and fill it.

    Args:
        advance: called with the number of newly acknowledged events.
        each_once: one event for each customer instead of `events` at random.
        is_json: the same events as documents.

    Raises:
        BalanceServiceError: not all events were acknowledged.
    """
    admin = AdminClient({"bootstrap.servers": stack.bootstrap_servers, "log_level": 0})
    create_topic(admin, topic, partitions)
    header = b"" if is_json else register(stack.schema_registry_url, topic)
    events = customers if each_once else events
    starts = range(0, events, _SLICE_EVENTS)
    sums = np.zeros(customers, np.int64)
    with ProcessPoolExecutor(_WORKERS, multiprocessing.get_context("spawn")) as workers:
        slices = [
            workers.submit(
                _produce_slice,
                stack.bootstrap_servers,
                topic,
                header,
                start,
                min(_SLICE_EVENTS, events - start),
                None if each_once else customers,
            )
            for start in starts
        ]
        for done in as_completed(slices):
            first, cents, produced = done.result()
            sums[first : first + len(cents)] += cents
            advance(produced)
    ends = end_offsets(admin, topic)
    if sum(ends.values()) != events:
        raise BalanceServiceError(f"the load is not whole: {sum(ends.values())} of {events} events were written")
    return Load(topic, header, events, ends, sums)


def create_topic(admin: AdminClient, topic: str, partitions: int = PARTITIONS, policy: str = "delete") -> None:
    """Create a topic with unlimited retention, or a compacted one."""
    wanted = NewTopic(topic, partitions, 1, config={**FOREVER, "cleanup.policy": policy})
    admin.create_topics([wanted])[topic].result(_CREATE_SECONDS)


def end_offsets(admin: AdminClient, topic: str) -> dict[int, int]:
    """Partition → end offset."""
    partitions = admin.list_topics(topic, timeout=_CREATE_SECONDS).topics[topic].partitions
    wanted = {TopicPartition(topic, p): OffsetSpec.latest() for p in partitions}
    return {p.partition: found.result(20).offset for p, found in admin.list_offsets(wanted).items()}


def _produce_slice(
    bootstrap_servers: str, topic: str, header: bytes, start: int, count: int, customers: int | None
) -> tuple[int, Integers, int]:
    """Produce events; returns the first customer number, the sums in cents from that number on, and the event count.

    Without `customers`, one event for each customer number from `start` on.
    """
    source = np.random.default_rng(start)
    numbers = np.arange(start, start + count) if customers is None else source.integers(0, customers, count)
    cents = source.integers(1, MAX_CENTS, count)
    producer = Producer({"bootstrap.servers": bootstrap_servers, "log_level": 0, **PRODUCER})
    for at in range(0, count, _CHUNK_EVENTS):
        some = numbers[at : at + _CHUNK_EVENTS], cents[at : at + _CHUNK_EVENTS]
        for key, frame in encoded(header, *some) if header else documents(*some):
            produce(producer, topic, key, frame)
    if producer.flush(_TIMEOUT_SECONDS):
        raise BalanceServiceError("not all events of the load were acknowledged: is the broker still up?")
    first = start if customers is None else 0
    sums = np.zeros(count if customers is None else customers, np.int64)
    np.add.at(sums, numbers - first, cents)
    return first, sums, count


def produce(producer: Producer, topic: str, key: bytes | None, frame: bytes) -> None:
    """Queue a record; waits while the queue is full."""
    while True:
        try:
            producer.produce(topic, frame, key)
        except BufferError:
            producer.poll(0.01)
        else:
            return


def _home(number: int, partitions: int) -> int:
    return partition_of(customer_id(number).encode(), partitions)


def arriving(stack: LocalStack, load: Load, rate: int, numbers: Sequence[int] = ()) -> Background:
    """Events that arrive at a rate, from the start of the context on.

    Args:
        numbers: the customers who get them in turn; by default, they are drawn from all.
    """
    return Background(
        _events_at_rate,
        stack.bootstrap_servers,
        load.topic,
        load.header,
        load.customers,
        rate,
        numbers,
        from_count=rate,
    )


def _events_at_rate(
    bootstrap_servers: str,
    topic: str,
    header: bytes,
    customers: int,
    rate: int,
    numbers: Sequence[int],
    stop: Event,
    count: Count,
) -> None:
    source, turns = np.random.default_rng(rate), cycle(numbers)
    producer = Producer({"bootstrap.servers": bootstrap_servers, "log_level": 0, **PRODUCER, "linger.ms": 5})

    def send(due: int) -> None:
        chosen = np.array(list(islice(turns, due))) if numbers else source.integers(0, customers, due)
        for key, frame in encoded(header, chosen, source.integers(1, MAX_CENTS, due)):
            produce(producer, topic, key, frame)

    at_rate(rate, _CHUNK_EVENTS, send, stop, count)
    producer.flush(_TIMEOUT_SECONDS)
