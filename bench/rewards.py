"""Rewards: invoices replayed through a re-key to points and notifications.

A replay is complete when a read-committed consumer, in another process, has a notification for each invoice of a
member. That process uses the same CPU for each side. A run with more notifications, or a wrong total of points, is
invalid.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from decimal import Decimal
from typing import TYPE_CHECKING

import httpx
import numpy as np
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient

from balance_service.errors import BalanceServiceError
from bench.background import Background
from bench.figures import NAMES
from bench.invoices import TOPIC, card_number, registered
from bench.load import create_topic, end_offsets
from bench.sides import OurSide, delete_internal_topics, new_application_id
from bench.sweep import best, settings_of, told, try_all
from bench.usage import Meter

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.synchronize import Event

    from balance_service.devtools.local.stack import LocalStack
    from bench.background import Count
    from bench.figures import Figures
    from bench.invoices import Invoices
    from bench.plan import Plan
    from bench.sides import Instance, Side

NOTIFICATIONS = "notifications"
_PATH = "/api/customers.getRewards"
_POINTS_OF_A_CENT = Decimal("0.0002")
_CHECKED_CARDS = 300
_LOOK_EVERY_SECONDS = 0.03
_STANDSTILL_SECONDS = 180.0
_SURPLUS_SECONDS = 2.0
_ANSWER_SECONDS = 10.0
_MILLION = 1e6
_BATCH = 10_000


def measure_rewards(stack: LocalStack, load: Invoices, plan: Plan, figures: Figures) -> None:
    """Measure both sides; the first repetition tries all settings of Kafka Streams, and the fastest counts.

    Raises:
        BalanceServiceError: a side makes no progress, or its output or state is wrong.
    """
    ours, variants = _sides(stack, plan)
    case = f"{len(load.cents):,} cards"

    def measure(side: Side, to: Figures) -> None:
        to.add(side.name, "rewards", case, **_replay(stack, side, load))

    measure(ours, figures)
    counts = best(try_all(variants, figures, measure), "rate_with_start", case)
    figures.take(counts.figures, NAMES)
    figures.notes.append(told(f"rewards, {case}", "all figures", counts))
    for repetition in range(2, plan.rewards + 1):
        for side in (ours, counts.side) if repetition % 2 else (counts.side, ours):
            measure(side, figures)


def _sides(stack: LocalStack, plan: Plan) -> tuple[Side, Sequence[Side]]:
    """Our side, and the settings of Kafka Streams."""
    admin = AdminClient({"bootstrap.servers": stack.bootstrap_servers, "log_level": 0})
    if NOTIFICATIONS not in admin.list_topics(timeout=_ANSWER_SECONDS).topics:
        create_topic(admin, NOTIFICATIONS)
    more = {
        "output-topic": NOTIFICATIONS,
        "notification-schema-id": str(registered(stack, NOTIFICATIONS, "Notification")),
    }
    return OurSide(stack, models=["rewards"]), settings_of(stack, plan, "RewardsStreams", more)


def _replay(stack: LocalStack, side: Side, load: Invoices) -> dict[str, float | None]:
    """Replay the invoices with a new instance; returns name → figure.

    Raises:
        BalanceServiceError: the instance makes no progress, or its output or state is wrong.
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
        done = _wait(side, sent, load)
        cpu_seconds = meter.cpu_seconds()
        _check(side, instance, sent, load)
    return {
        "rate_with_start": load.invoices / (done - started),
        "cpu_with_start": cpu_seconds / (load.invoices / _MILLION),
        "memory": meter.peak_bytes / _MILLION,
    }


def _wait(side: Side, sent: Background, load: Invoices) -> float:
    """The monotonic time when all notifications have arrived."""
    most, moved = 0, time.monotonic()
    while True:
        count, now = sent.count, time.monotonic()
        if count >= load.members:
            return now
        if count > most:
            most, moved = count, now
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
