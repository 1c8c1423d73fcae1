"""Appending many records to a topic, and knowing that all of them are there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from confluent_kafka import KafkaException, Producer

from balance_service.errors import RetriableError
from balance_service.kafka.clients import by_remedy, new_client, not_authorized
from balance_service.kafka.connection import Connection
from balance_service.kafka.deliveries import undelivered

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Message

    from balance_service.errors import BalanceServiceError
    from balance_service.kafka.clients import ClientConfig

_ROOM_SECONDS = 0.1
_FINISH_SECONDS = 60.0
_OF_THE_KEY = -1


class BulkProducer:
    """Appends records to one topic, in order per partition. For one thread."""

    def __init__(self, config: ClientConfig, topic: str) -> None:
        """Raises ConfigurationError if the client refuses a property."""
        self._topic = topic
        self._sent = 0
        self._failed = 0
        self._first_failure: KafkaError | None = None
        self._connection = Connection()
        watched = self._connection.watched(config)
        self._producer = new_client(Producer, {**watched, "linger.ms": 20, "compression.type": "lz4"})

    def send(self, key: bytes | None, value: bytes | None, partition: int = _OF_THE_KEY) -> None:
        """Hand one record over; waits while the queue is full.

        Raises:
            BalanceServiceError: this one or one before it was refused.
        """
        if self._first_failure is not None:
            raise self._failure()
        try:
            while not self._is_taken(key, value, partition):
                self._producer.poll(_ROOM_SECONDS)
            self._producer.poll(0)
        except KafkaException as error:
            raise by_remedy(error, f"writing to topic '{self._topic}'", self._grant) from error
        self._sent += 1

    def finish(self) -> int:
        """Wait as long as records are acknowledged, until all that were handed over are; returns how many there are.

        Raises:
            BalanceServiceError: not all of them are.
        """
        try:
            unsent = len(self._producer)
            while unsent and (left := undelivered(self._producer, _FINISH_SECONDS)) < unsent:
                unsent = left
        except KafkaException as error:
            raise by_remedy(error, f"writing to topic '{self._topic}'", self._grant) from error
        if self._first_failure is not None or unsent:
            raise self._failure(unsent)
        return self._sent

    def _is_taken(self, key: bytes | None, value: bytes | None, partition: int) -> bool:
        try:
            self._producer.produce(self._topic, value, key, partition, on_delivery=self._on_delivery)
        except BufferError:
            return False
        return True

    def _on_delivery(self, error: KafkaError | None, _message: Message) -> None:
        if error is not None:
            self._failed += 1
            self._first_failure = self._first_failure or error

    def _failure(self, unsent: int = 0) -> BalanceServiceError:
        first = self._first_failure
        if first is not None and (forbidden := not_authorized(first, f"writing to topic '{self._topic}'", self._grant)):
            return forbidden
        reasons = filter(None, (first.str() if first else "the brokers do not answer", self._connection.refusal))
        missing = f"{self._failed + unsent} of {self._sent} records"
        return RetriableError(f"{missing} were not acknowledged by topic '{self._topic}': {'; '.join(reasons)}")

    @property
    def _grant(self) -> str:
        return f"Write on topic '{self._topic}'"
