"""Purchases: invoices replayed to shipments, a branch of them unchanged, and to masked records of their lines.

There is no state and no re-key. A run with more records, or one that shows more of a card than its last digits, is
invalid.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import fastavro
from confluent_kafka import Consumer, TopicPartition

from balance_service.avro.schemas import load_schema
from balance_service.errors import BalanceServiceError
from bench.invoice_replays import created, measure_both, replayed
from bench.invoices import LINES, card_number, deliveries, registered
from bench.sides import OurSide
from bench.sweep import settings_of

if TYPE_CHECKING:
    from balance_service.devtools.local.stack import LocalStack
    from bench.figures import Figures
    from bench.invoices import Invoices
    from bench.plan import Plan
    from bench.sides import Side

_SHIPMENTS, _HADOOP = "shipments", "hadoop"
_CHECKED_RECORDS = 300
_HEADER_BYTES = 5
_SHOWN_DIGITS = 4
_ANSWER_SECONDS = 10.0


def measure_purchases(stack: LocalStack, load: Invoices, plan: Plan, figures: Figures) -> None:
    """Measure both sides, as `measure_rewards`. Raises BalanceServiceError if a side is wrong or makes no progress."""
    for topic in (_SHIPMENTS, _HADOOP):
        created(stack, topic)
    more = {
        "shipments-topic": _SHIPMENTS,
        "lines-topic": _HADOOP,
        "line-schema-id": str(registered(stack, _HADOOP, "HadoopRecord")),
    }
    ours, variants = OurSide(stack, models=["purchases"]), settings_of(stack, plan, "PurchasesStreams", more)
    records = LINES * load.invoices + deliveries(load.invoices)

    def replay(side: Side) -> dict[str, float | None]:
        topics = [_SHIPMENTS, _HADOOP]
        return replayed(stack, side, topics, load.invoices, records, lambda _instance: _check(stack, side, load))

    measure_both("purchases", f"{load.invoices:,} invoices", plan.rewards, figures, ours, variants, replay)


def _check(stack: LocalStack, side: Side, load: Invoices) -> None:
    """Checks the last lines of a partition."""
    consumer = Consumer({"bootstrap.servers": stack.bootstrap_servers, "group.id": "bench-check", "log_level": 0})
    _, end = consumer.get_watermark_offsets(TopicPartition(_HADOOP, 0), timeout=_ANSWER_SECONDS)
    consumer.assign([TopicPartition(_HADOOP, 0, max(0, end - _CHECKED_RECORDS))])
    schema = fastavro.parse_schema(load_schema("HadoopRecord"))
    known = {card_number(number)[-_SHOWN_DIGITS:] for number in range(len(load.cents))}
    found: list[Any] = [
        fastavro.schemaless_reader(io.BytesIO((message.value() or b"")[_HEADER_BYTES:]), schema, None)
        for message in consumer.consume(_CHECKED_RECORDS, timeout=_ANSWER_SECONDS)
        if message.error() is None
    ]
    consumer.close()
    if not found or any(one["customerCardDigits"] not in known or one["quantity"] not in (1, 2) for one in found):
        raise BalanceServiceError(f"{side.name} is wrong: of {len(found)} lines, some are no masked lines of invoices")
