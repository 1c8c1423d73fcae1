"""Members of a consumer group, for what they do by themselves."""

from __future__ import annotations

from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING

from confluent_kafka import Consumer

from balance_service.cluster.membership import Membership, consumer_config
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from balance_service.cluster.membership import AssignmentListener, Partitions
    from balance_service.kafka.clients import ClientConfig

SESSION_MS = 10_000
_JOINED_WITHIN_SECONDS = 30.0


class Unheeding:
    """Takes no notice of what is assigned."""

    def assigned(self, partitions: Partitions) -> None: ...

    def revoked(self, partitions: Partitions) -> None: ...

    def lost(self, partitions: Partitions) -> None: ...


def lone_member(
    listener: AssignmentListener | None = None, positions: Mapping[tuple[str, int], int] = MappingProxyType({})
) -> Membership:
    """A member of a group of which no broker can be reached. Its consumer is to be closed."""
    return Membership(
        config=consumer_config({"bootstrap.servers": "127.0.0.1:1", "log_level": 0}, "group", SESSION_MS),
        topics=["topic"],
        session_timeout_ms=SESSION_MS,
        listener=listener or Unheeding(),
        positions=lambda: positions,
    )


@contextmanager
def joined(config: ClientConfig, topic: str) -> Iterator[Consumer]:
    """A consumer that its group has given partitions of a topic; closed at the end."""
    consumer = Consumer(config)
    consumer.subscribe([topic])
    try:
        eventually(
            lambda: consumer.poll(0.1) is None and len(consumer.assignment()) > 0,
            "the other has joined",
            _JOINED_WITHIN_SECONDS,
        )
        yield consumer
    finally:
        consumer.close()
