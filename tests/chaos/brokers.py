"""Finds the broker that leads a partition, or coordinates a group or the transactions of a task."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tests.support.kafka import admin

if TYPE_CHECKING:
    from balance_service.devtools.local.broker import Broker
    from balance_service.devtools.local.stack import LocalStack

GROUPS, TRANSACTIONS = "__consumer_offsets", "__transaction_state"
_ANSWER_SECONDS = 10.0
_LED_WITHIN_SECONDS = 60.0
_LOOK_SECONDS = 0.2


def leader_of(stack: LocalStack, topic: str, partition: int) -> Broker:
    """Waits until the partition has a leader that runs, and returns it."""
    deadline = time.monotonic() + _LED_WITHIN_SECONDS
    by_number = {broker.number: broker for broker in stack.brokers}
    while True:
        partitions = admin(stack).list_topics(topic, timeout=_ANSWER_SECONDS).topics[topic].partitions
        leader = by_number.get(partitions[partition].leader) if partition in partitions else None
        if leader is not None and leader.running:
            return leader
        assert time.monotonic() < deadline, f"{topic}-{partition} has no leader"
        time.sleep(_LOOK_SECONDS)


def coordinator_of(stack: LocalStack, topic: str, name: str) -> Broker:
    """Returns the coordinator of a group (`GROUPS`) or a transactional id (`TRANSACTIONS`).

    It leads the partition of the topic that Kafka chooses by the hash of Java's `String`.
    """
    hashed = 0
    for character in name:
        hashed = (31 * hashed + ord(character)) & 0xFFFFFFFF
    count = len(admin(stack).list_topics(topic, timeout=_ANSWER_SECONDS).topics[topic].partitions)
    return leader_of(stack, topic, (hashed & 0x7FFFFFFF) % count)


def in_sync(stack: LocalStack, topic: str) -> list[int]:
    """Returns the number of in-sync replicas of each partition."""
    partitions = admin(stack).list_topics(topic, timeout=_ANSWER_SECONDS).topics[topic].partitions
    return [len(one.isrs) for _, one in sorted(partitions.items())]
