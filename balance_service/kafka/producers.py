"""Producers for use outside transactions, and waiting for their delivery reports."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import structlog
from confluent_kafka import KafkaError, KafkaException, Producer

from balance_service.errors import RetriableError
from balance_service.kafka.clients import ConnectionErrors, by_remedy, new_client, not_authorized

if TYPE_CHECKING:
    from confluent_kafka import Message

    from balance_service.errors import BalanceServiceError
    from balance_service.kafka.clients import ClientConfig

log = structlog.get_logger(__name__)

# librdkafka's poll of 0.2 s or more takes its whole time even if reports arrive.
_POLL_SECONDS = 0.1
_REPORT_SECONDS = 1.0
_FINISH_SECONDS = 60.0
_CONNECT_SECONDS = 2.0
_BY_KEY = -1


def connect(producer: Producer, topic: str) -> None:
    """Connects a transactional producer before it looks up its coordinator, as far as the brokers answer in time.

    Otherwise librdkafka repeats the lookup after half a second. The first response makes it replace the bootstrap
    connection by one to a broker; the second arrives over that one.
    """
    with suppress(KafkaException):
        for _ in range(2):
            producer.list_topics(topic, _CONNECT_SECONDS)


def wait_for_deliveries(producer: Producer, seconds: float) -> int:
    """Waits until each record is delivered or refused; returns the number of records that are neither in time.

    `Producer.flush` cannot be used: it goes on with reports after it raised a fatal error, and fails with SystemError.

    Raises:
        KafkaException: the producer failed fatally. Only the first call that polls raises it; the next call serves the
            remaining reports.
    """
    deadline = time.monotonic() + seconds
    while (undelivered := len(producer)) and time.monotonic() < deadline:
        producer.poll(_POLL_SECONDS)
    return undelivered


class RecoveringProducer:
    """An idempotent producer that replaces itself after a fatal error. Any thread may call it; one must poll.

    After a fatal error, such as a lost sequence number, an idempotent producer accepts no more records. This one
    reports the queued records as failed and creates a new producer, which begins a new sequence.
    Source: librdkafka, "Idempotent Producer", "Fatal errors".
    """

    def __init__(self, config: ClientConfig) -> None:
        """Raises ConfigurationError for a wrong property."""
        self._config = config
        self._lock = threading.Lock()
        self._producer = new_client(Producer, config)
        # Any thread appends. Who polls takes, because what is queued is reported as failed only after a while.
        self._failed: deque[Producer] = deque()

    def produce(self, topic: str, value: bytes | None, key: str | bytes, **more: Any) -> None:
        """Queues a record. Raises BufferError if the queue is full, KafkaException if the record is refused."""
        producer = self._producer
        try:
            producer.produce(topic, value, key, **more)
        except KafkaException as error:
            if error.args[0].code() != KafkaError._FATAL:
                raise
            self._replace(producer, error)
            self._producer.produce(topic, value, key, **more)

    def poll(self, timeout_seconds: float) -> None:
        """Serves delivery reports."""
        producer = self._producer
        try:
            producer.poll(timeout_seconds)
        except KafkaException as error:
            self._replace(producer, error)
        self._report_failed()

    def flush(self, timeout_seconds: float) -> None:
        """Waits until each queued record is delivered or refused, or the time is over."""
        producer = self._producer
        try:
            wait_for_deliveries(producer, timeout_seconds)
        except KafkaException as error:
            self._replace(producer, error)
        self._report_failed()

    def _replace(self, failed: Producer, error: KafkaException) -> None:
        with self._lock:
            if self._producer is failed:
                log.warning("the producer failed fatally; creating a new one", error=str(error))
                self._producer = new_client(Producer, self._config)
                self._failed.append(failed)

    def _report_failed(self) -> None:
        while self._failed:
            failed = self._failed.popleft()
            failed.purge()
            # The first call may raise the fatal error once more.
            for _ in range(2):
                with suppress(KafkaException):
                    wait_for_deliveries(failed, _REPORT_SECONDS)


class BulkProducer:
    """Appends many records to one topic and verifies that all were acknowledged. For one thread."""

    def __init__(self, config: ClientConfig, topic: str) -> None:
        """Raises ConfigurationError for a wrong property."""
        self._topic = topic
        self._sent = 0
        self._failed = 0
        self._first_failure: KafkaError | None = None
        self._errors = ConnectionErrors()
        self._doing, self._grant = f"writing to topic '{topic}'", f"Write on topic '{topic}'"
        watched = self._errors.watched(config)
        self._producer = new_client(Producer, {**watched, "linger.ms": 20, "compression.type": "lz4"})

    def send(self, key: bytes | None, value: bytes | None, partition: int = _BY_KEY) -> None:
        """Queues a record; waits while the queue is full.

        Raises:
            BalanceServiceError: this record or an earlier one was refused.
        """
        if self._first_failure is not None:
            raise self._failure()
        try:
            while not self._is_queued(key, value, partition):
                self._producer.poll(_POLL_SECONDS)
            self._producer.poll(0)
        except KafkaException as error:
            raise by_remedy(error, self._doing, self._grant) from error
        self._sent += 1

    def finish(self) -> int:
        """Waits until all records are acknowledged, as long as some are every minute; returns the number of records.

        Raises:
            BalanceServiceError: not all records were acknowledged.
        """
        try:
            unsent = len(self._producer)
            while unsent and (left := wait_for_deliveries(self._producer, _FINISH_SECONDS)) < unsent:
                unsent = left
        except KafkaException as error:
            raise by_remedy(error, self._doing, self._grant) from error
        if self._first_failure is not None or unsent:
            raise self._failure(unsent)
        return self._sent

    def _is_queued(self, key: bytes | None, value: bytes | None, partition: int) -> bool:
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
        if first is not None and (forbidden := not_authorized(first, self._doing, self._grant)):
            return forbidden
        reasons = filter(None, (first.str() if first else "the brokers do not answer", self._errors.refusal))
        missing = f"{self._failed + unsent} of {self._sent} records"
        return RetriableError(f"{missing} were not acknowledged by topic '{self._topic}': {'; '.join(reasons)}")
