"""Reads on in one partition of a compacted topic, as committed. Used by one thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from balance_service.errors import BalanceServiceError, StoreCorruptedError
from balance_service.kafka.clients import by_remedy, new_client
from balance_service.kafka.messages import offset_of, what_has_come
from balance_service.process.failpoints import part_size

if TYPE_CHECKING:
    from confluent_kafka import Message

    from balance_service.kafka.clients import ClientConfig

# So few that what a read makes of them is still in the processor's cache when it is put away.
_READ = 2_000
_POLL_SECONDS = 0.1
# What is fetched ahead is bounded by these two: whichever is met first.
_QUEUE = {"queued.min.messages": 20_000, "queued.max.messages.kbytes": 16 << 10}


class PartitionReader:
    """A consumer of one partition, which it owns."""

    def __init__(self, config: ClientConfig, what: str, topic: str, partition: int, start: int) -> None:
        """Args:
        config: of a consumer that reads what is committed.
        what: what the topic is, for messages: `changelog`.
        start: the first offset to read.
        """
        self.name = f"{what} {topic}-{partition}"
        """As messages call it."""
        self.met_end = False
        """Whether the last read came upon the end: what is older says nothing about now."""
        self._at = TopicPartition(topic, partition)
        # At the end already, there is nothing to wait for.
        self._reached = start
        self._grants = f"Read on topic '{topic}' and on group '{config['group.id']}'"
        self._consumer = new_client(Consumer, {**config, **_QUEUE})
        self._consumer.assign([TopicPartition(topic, partition, start)])

    @property
    def stands_at(self) -> int:
        """The offset below which everything was read."""
        # Control records take offsets too, so the end is where the reader stands, never a last record.
        return max(self._reached, self._consumer.position([self._at])[0].offset)

    def read(self) -> list[Message]:
        """What has come, in order, or after a brief wait nothing.

        Raises:
            StoreCorruptedError: the topic no longer has what comes next.
            NotAuthorizedError: the brokers do not allow it.
            RetriableError: the topic cannot be read.
        """
        self.met_end = False
        try:
            messages = what_has_come(self._consumer, part_size(_READ), _POLL_SECONDS)
        except KafkaException as error:
            raise self._by_remedy(error) from error
        records = [message for message in messages if message.error() is None]
        if len(records) < len(messages):
            for message in messages:
                if (report := message.error()) is not None:
                    self._note(report, message)
        return records

    def close(self) -> None:
        """Close the consumer."""
        self._consumer.close()

    def _note(self, error: KafkaError, message: Message) -> None:
        if error.code() == KafkaError._PARTITION_EOF:
            self._reached, self.met_end = offset_of(message), True
        elif error.code() in (KafkaError.OFFSET_OUT_OF_RANGE, KafkaError._AUTO_OFFSET_RESET):
            raise StoreCorruptedError(f"the {self.name} no longer has the store's offset: {error.str()}")
        elif not error.retriable():
            raise self._by_remedy(KafkaException(error))

    def _by_remedy(self, error: KafkaException) -> BalanceServiceError:
        return by_remedy(error, f"reading the {self.name}", self._grants)
