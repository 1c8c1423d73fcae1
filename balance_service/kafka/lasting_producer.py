"""An idempotent producer that is replaced once it has failed for ever."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import structlog
from confluent_kafka import KafkaError, KafkaException, Producer

if TYPE_CHECKING:
    from balance_service.kafka.clients import ClientConfig

log = structlog.get_logger(__name__)

_REPORT_SECONDS = 1.0
_POLL_SECONDS = 0.1


class LastingProducer:
    """Produces as `Producer` does; any thread may call it.

    An idempotent producer that met a fatal error takes no record any more: the broker has lost its sequence, or a
    record was left out of it. What it held is reported as failed then, and a new one begins a sequence of its own.
    Source: librdkafka, "Idempotent Producer", "Fatal errors".
    """

    def __init__(self, config: ClientConfig) -> None:
        """Raises KafkaException for a wrong property."""
        self._config = config
        self._lock = threading.Lock()
        self._producer = Producer(config)

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
            # Whichever call polls first raises a fatal error, callback or not.
            self._replace(producer, error)

    def flush(self, timeout_seconds: float) -> None:
        """Wait, within a bound, for what is queued."""
        _report(self._producer, timeout_seconds)

    def _replace(self, failed: Producer, error: KafkaException) -> None:
        with self._lock:
            if self._producer is failed:
                log.warning("a producer has failed for ever; another takes its place", error=str(error))
                self._producer = Producer(self._config)
                failed.purge()
                _report(failed, _REPORT_SECONDS)


def _report(producer: Producer, timeout_seconds: float) -> None:
    """Report what becomes of all that is queued, within a bound.

    Not by `flush`, which goes on with reports once a fatal error is raised: out comes a SystemError.
    """
    deadline = time.monotonic() + timeout_seconds
    while len(producer) and time.monotonic() < deadline:
        with suppress(KafkaException):
            producer.poll(_POLL_SECONDS)
