"""Rewards: invoices replayed through a re-key to points and notifications.

Done is when a reader of what is committed, in a process of its own, has a notification for each invoice of a member. It
takes processor time from either side alike. One notification more than that, or a wrong total of points, and the run
does not count.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from decimal import Decimal
from typing import TYPE_CHECKING

import httpx
import numpy as np
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from balance_service.errors import BalanceServiceError
from bench.background import Background
from bench.invoices import TOPIC, card_number, registered
from bench.load import PARTITIONS, end_offsets
from bench.sides import OurSide, TheirSide, delete_internal_topics, new_application_id
from bench.usage import Meter

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.synchronize import Event

    from balance_service.tools.local.stack import LocalStack
    from bench.background import Count
    from bench.figures import Figures
    from bench.invoices import Invoices
    from bench.sides import Instance, Side

NOTIFICATIONS = "notifications"
_PATH = "/api/customers.getRewards"
_POINTS_OF_A_CENT = Decimal("0.0002")
_CHECKED_CARDS = 300
_LOOK_EVERY_SECONDS = 0.03
_STANDSTILL_SECONDS = 180.0
_SURPLUS_SECONDS = 2.0
_ANSWER_SECONDS = 10.0
_CACHE_BYTES = 128 << 20
_COMMIT_INTERVALS_MS = (100, 1_000)
_MILLION = 1e6
_BATCH = 10_000


def sides_of(stack: LocalStack) -> tuple[Side, Sequence[Side]]:
    """Ours, and the variants of Kafka Streams that are tried."""
    admin = AdminClient({"bootstrap.servers": stack.bootstrap_servers, "log_level": 0})
    if NOTIFICATIONS not in admin.list_topics(timeout=_ANSWER_SECONDS).topics:
        config = {"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1"}
        wanted = NewTopic(NOTIFICATIONS, num_partitions=PARTITIONS, replication_factor=1, config=config)
        admin.create_topics([wanted])[NOTIFICATIONS].result(20)
    more = {
        "output-topic": NOTIFICATIONS,
        "notification-schema-id": str(registered(stack, NOTIFICATIONS, "Notification")),
    }
    variants = [
        TheirSide(stack, cache_bytes=cache, commit_interval_ms=interval, program="RewardsStreams", more=more)
        for cache in (_CACHE_BYTES, 0)
        for interval in _COMMIT_INTERVALS_MS
    ]
    return OurSide(stack, model="rewards"), variants


def replay_rewards(stack: LocalStack, side: Side, load: Invoices) -> dict[str, float | None]:
    """Replay the invoices with a fresh instance; returns figures by name.

    Raises:
        BalanceServiceError: it does not get on, or what it sent or keeps is wrong.
    """
    application_id = new_application_id("rewards")
    with ExitStack() as cleanup:
        cleanup.callback(delete_internal_topics, stack, application_id)
        admin = AdminClient({"bootstrap.servers": stack.bootstrap_servers, "log_level": 0})
        starts = end_offsets(admin, NOTIFICATIONS)
        sent = cleanup.enter_context(Background(_count_committed, stack.bootstrap_servers, NOTIFICATIONS, starts))
        instance = side.instance(1, TOPIC, application_id)
        cleanup.callback(instance.wipe)
        cleanup.callback(instance.stop)
        started = time.monotonic()
        instance.launch()
        meter = cleanup.enter_context(Meter(instance.process))
        first, done = _wait(side, sent, load)
        cpu_seconds = meter.cpu_seconds()
        _check(side, instance, sent, load)
    rate_after_commit = load.invoices * (1 - first[1] / load.members) / (done - first[0]) if done > first[0] else None
    return {
        "rate_with_start": load.invoices / (done - started),
        "rate_after_commit": rate_after_commit,
        "cpu_with_start": cpu_seconds / (load.invoices / _MILLION),
        "memory": meter.peak_bytes / _MILLION,
    }


def measure_rewards(stack: LocalStack, load: Invoices, repetitions: int, figures: Figures) -> None:
    """Both sides in turn; of Kafka Streams, the variant that is fastest at first."""
    ours, variants = sides_of(stack)
    case = f"{len(load.cents):,} cards"
    figures.add(ours.name, "rewards", case, **replay_rewards(stack, ours, load))
    tried = [(replay_rewards(stack, variant, load), variant) for variant in variants]
    best, theirs = max(tried, key=lambda t: t[0]["rate_with_start"] or 0.0)
    figures.add(theirs.name, "rewards", case, **best)
    rates = ", ".join(f"{run['rate_with_start']:,.0f} with {variant.variant}" for run, variant in tried)
    figures.notes.append(f"rewards, {case}: {theirs.name} does, in invoices/s, {rates}; the best counts")
    for repetition in range(2, repetitions + 1):
        for side in (ours, theirs) if repetition % 2 else (theirs, ours):
            figures.add(side.name, "rewards", case, **replay_rewards(stack, side, load))


def _wait(side: Side, sent: Background, load: Invoices) -> tuple[tuple[float, int], float]:
    """When there were notifications for the first time, and how many; and when there were all."""
    first: tuple[float, int] | None = None
    most, moved = 0, time.monotonic()
    while True:
        count, now = sent.count, time.monotonic()
        if count > most:
            most, moved = count, now
            first = first or (now, count)
        if first is not None and count >= load.members:
            return first, now
        if now - moved > _STANDSTILL_SECONDS:
            raise BalanceServiceError(f"{side.name} stands still at {most} of {load.members} notifications")
        time.sleep(_LOOK_EVERY_SECONDS)


def _check(side: Side, instance: Instance, sent: Background, load: Invoices) -> None:
    time.sleep(_SURPLUS_SECONDS)
    if sent.count != load.members:
        raise BalanceServiceError(f"{side.name} is wrong: {sent.count} notifications for {load.members} invoices")
    known = np.flatnonzero(load.cents)
    chosen = np.random.default_rng(1).choice(known, min(_CHECKED_CARDS, len(known)), replace=False)
    with httpx.Client(timeout=_ANSWER_SECONDS, trust_env=False) as client:
        for number in chosen.tolist():
            wanted = int(load.cents[number]) * _POINTS_OF_A_CENT
            answer = client.get(instance.url + _PATH, params={"customerCardNo": card_number(number)})
            if answer.is_error or Decimal(str(answer.json(parse_float=Decimal)["points"])) != wanted:
                raise BalanceServiceError(
                    f"{side.name} is wrong: {card_number(number)} has {wanted}, the answer was {answer.text}"
                )


def _count_committed(bootstrap_servers: str, topic: str, starts: dict[int, int], stop: Event, count: Count) -> None:
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": "bench-count",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "log_level": 0,
        }
    )
    consumer.assign([TopicPartition(topic, partition, start) for partition, start in starts.items()])
    while not stop.is_set():
        count.value += sum(message.error() is None for message in consumer.consume(_BATCH, timeout=0.05))
    consumer.close()
