"""Messages of a client: what has come, and what each is sure to have, though its type does not say so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from balance_service.errors import FatalError

if TYPE_CHECKING:
    from confluent_kafka import Consumer, Message


def what_has_come(consumer: Consumer, most: int, wait_seconds: float) -> list[Message]:
    """At most so many messages, at once; one, if it comes while there are none. Raises KafkaException."""
    # Asked for many, the consumer would wait for as many; so for one, and then for what came with it.
    return consumer.consume(most, 0) or consumer.consume(1, wait_seconds)


def place_of(message: Message) -> tuple[int, int]:
    """Partition and offset of a record that was delivered."""
    partition, offset = message.partition(), message.offset()
    if partition is None or offset is None:
        raise FatalError("the broker delivered a record without a partition or an offset")
    return partition, offset


def offset_of(message: Message) -> int:
    """The offset of a record that was delivered."""
    return place_of(message)[1]
