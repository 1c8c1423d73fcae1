"""Single events of some keys, each with its record, which is read from the source once more.

Where a combined update cannot be applied, only the events that it was made of tell which of them is to blame.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from balance_service.engine.records import DeadLetter
from balance_service.kafka.log_reader import records_at
from balance_service.kafka.messages import offset_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from confluent_kafka import Message

    from balance_service.engine.records import KeyedUpdate
    from balance_service.settings import Settings
    from balance_service.spark.combine import PartitionRows


def read_singles(
    settings: Settings, topic: str, partition: int, rows: PartitionRows, keys: Sequence[bytes]
) -> Sequence[KeyedUpdate]:
    """The updates of some keys in a batch of a partition of a topic, in offset order, each with its record.

    Raises:
        RetriableError: the broker does not answer.
    """
    found = rows.updates_of(keys)
    offsets = found["offset"].to_pylist()
    if not offsets:
        return []
    _, records = records_at(settings, topic, partition, sorted(offsets))
    return rows.singly(found, {at: letter_of(message) for at, message in records.items()})


def letter_of(message: Message) -> DeadLetter:
    """A record that was read again, without a cause."""
    return DeadLetter(offset_of(message), message.timestamp()[1], message.key(), message.value(), "")
