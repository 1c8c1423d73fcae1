"""An idempotent producer that is replaced once it has failed for ever."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import structlog
from confluent_kafka import KafkaError, KafkaException, Producer

from balance_service.kafka.clients import new_client
from balance_service.kafka.deliveries import undelivered

if TYPE_CHECKING:
    from balance_service.kafka.clients import ClientConfig

log = structlog.get_logger(__name__)

_REPORT_SECONDS = 1.0


class LastingProducer:
    """Produces as `Producer` does; any thread may call it.

    An idempotent producer that met a fatal error takes no record any more: the broker has lost its sequence, or a
    record was left out of it. What it held is reported as failed then, and a new one begins a sequence of its own.
    Source: librdkafka, "Idempotent Producer", "Fatal errors".
    """

    def __init__(self, config: ClientConfig) -> None:
        """Raises ConfigurationError for a wrong property."""
        self._config = config
        self._lock = threading.Lock()
        self._producer = new_client(Producer, config)

    def produce(self, topic: str, value: bytes | None, key: str | bytes, **more: Any) -> None:
        """Queue a record. Raises BufferError if there is no room, KafkaException if it cannot be taken."""
        producer = self._producer
        try:
            producer.produce(topic, value, key, **more)
        except KafkaException as error:
            if error.args[0].code() != KafkaError._FATAL:
                raise
            self._replace(producer, error)
            self._producer.produce(topic, value, key, **more)

    def poll(self, timeout_seconds: float) -> None:
        """Report what was delivered, or was not."""
        producer = self._producer
        try:
            producer.poll(timeout_seconds)
        except KafkaException as error:
            self._replace(producer, error)

    def flush(self, timeout_seconds: float) -> None:
        """Wait, within a bound, for what is queued."""
        producer = self._producer
        try:
            undelivered(producer, timeout_seconds)
        except KafkaException as error:
            self._replace(producer, error)

    def _replace(self, failed: Producer, error: KafkaException) -> None:
        with self._lock:
            if self._producer is failed:
                log.warning("a producer has failed for ever; another takes its place", error=str(error))
                self._producer = new_client(Producer, self._config)
                failed.purge()
                # The first may still raise the error.
                for _ in range(2):
                    with suppress(KafkaException):
                        undelivered(failed, _REPORT_SECONDS)
