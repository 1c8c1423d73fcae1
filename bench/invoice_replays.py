"""Replays of invoices into output topics.

A replay is complete when a read-committed consumer, in another process, has all records. That process uses the same CPU
for each side. A run with more records is invalid.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient

from balance_service.errors import BalanceServiceError
from bench.background import Background
from bench.figures import NAMES, Figures
from bench.invoices import TOPIC
from bench.load import create_topic, end_offsets
from bench.sides import delete_internal_topics, new_application_id
from bench.sweep import best, told, try_all
from bench.usage import Meter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from multiprocessing.synchronize import Event

    from balance_service.devtools.local.stack import LocalStack
    from bench.background import Count
    from bench.sides import Instance, Side

_LOOK_EVERY_SECONDS = 0.03
_STANDSTILL_SECONDS = 180.0
_SURPLUS_SECONDS = 2.0
_ANSWER_SECONDS = 10.0
_MILLION = 1e6
_BATCH = 10_000


def created(stack: LocalStack, topic: str) -> None:
    """Create a topic unless it exists."""
    admin = AdminClient({"bootstrap.servers": stack.bootstrap_servers, "log_level": 0})
    if topic not in admin.list_topics(timeout=_ANSWER_SECONDS).topics:
        create_topic(admin, topic)


def measure_both(
    measure: str,
    case: str,
    repetitions: int,
    figures: Figures,
    ours: Side,
    variants: Sequence[Side],
    replay: Callable[[Side], Mapping[str, float | None]],
) -> None:
    """Measure both sides in turn; the first repetition tries all settings of the peer, and the fastest counts.

    Raises as `replayed`.
    """

    def once(side: Side, to: Figures) -> None:
        to.add(side.name, measure, case, **replay(side))

    once(ours, figures)
    counts = best(try_all(variants, figures, once), "rate_with_start", case)
    figures.take(counts.figures, NAMES)
    figures.notes.append(told(f"{measure}, {case}", "all figures", counts))
    for repetition in range(2, repetitions + 1):
        for side in (ours, counts.side) if repetition % 2 else (counts.side, ours):
            once(side, figures)


def replayed(
    stack: LocalStack,
    side: Side,
    topics: Sequence[str],
    invoices: int,
    records: int,
    check: Callable[[Instance], None],
) -> dict[str, float | None]:
    """Replay the invoices with a new instance; returns name → figure.

    Args:
        records: how many the topics get together.
        check: raises BalanceServiceError if an answer or a record is wrong.

    Raises:
        BalanceServiceError: the instance makes no progress, or its output is wrong.
    """
    application_id = new_application_id("invoices")
    with ExitStack() as cleanup:
        cleanup.callback(delete_internal_topics, stack, application_id)
        admin = AdminClient({"bootstrap.servers": stack.bootstrap_servers, "log_level": 0})
        starts = [(topic, *found) for topic in topics for found in end_offsets(admin, topic).items()]
        sent = cleanup.enter_context(Background(_count_committed, stack.bootstrap_servers, starts))
        instance = side.instance(1, TOPIC, application_id)
        cleanup.callback(instance.wipe)
        cleanup.callback(instance.stop)
        started = time.monotonic()
        instance.launch()
        meter = cleanup.enter_context(Meter(instance.process))
        done = _wait(side, sent, records)
        cpu_seconds = meter.cpu_seconds()
        time.sleep(_SURPLUS_SECONDS)
        if sent.count != records:
            raise BalanceServiceError(f"{side.name} is wrong: {sent.count} records, not {records}")
        check(instance)
    return {
        "rate_with_start": invoices / (done - started),
        "cpu_with_start": cpu_seconds / (invoices / _MILLION),
        "memory": meter.peak_bytes / _MILLION,
    }


def _wait(side: Side, sent: Background, records: int) -> float:
    """The monotonic time when all records have arrived."""
    most, moved = 0, time.monotonic()
    while True:
        count, now = sent.count, time.monotonic()
        if count >= records:
            return now
        if count > most:
            most, moved = count, now
        if now - moved > _STANDSTILL_SECONDS:
            raise BalanceServiceError(f"{side.name} stands still at {most} of {records} records")
        time.sleep(_LOOK_EVERY_SECONDS)


def _count_committed(bootstrap_servers: str, starts: Sequence[tuple[str, int, int]], stop: Event, count: Count) -> None:
    """Args:
    starts: topic, partition and offset.
    """
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": "bench-count",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "log_level": 0,
        }
    )
    consumer.assign([TopicPartition(*start) for start in starts])
    while not stop.is_set():
        count.value += sum(message.error() is None for message in consumer.consume(_BATCH, timeout=0.05))
    consumer.close()
