"""Appends `FundsAdded` to the source, and says where it landed.

One thread serves delivery reports; any event loop or thread may publish.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from confluent_kafka import KafkaError, KafkaException
from opentelemetry.trace import SpanKind

from balance_service.avro.codec import AvroCodec
from balance_service.avro.schemas import load_schema, subject_of
from balance_service.errors import RetriableError
from balance_service.kafka.clients import IDEMPOTENCY_HEADER, ConnectionErrors, not_authorized
from balance_service.kafka.producers import RecoveringProducer
from balance_service.observability.tracing import UNTRACED, W3C, open_span

if TYPE_CHECKING:
    from collections.abc import Callable
    from decimal import Decimal

    from confluent_kafka import Message
    from opentelemetry.trace import Tracer

    from balance_service.avro.registry import SchemaRegistry
    from balance_service.kafka.clients import ClientConfig

_POLL_SECONDS = 0.1
# A record may be sent several times, and an error is that of the last. So these are only what the first would have met.
_CERTAINLY_NOT_WRITTEN = {
    KafkaError.MSG_SIZE_TOO_LARGE,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError._UNKNOWN_TOPIC,
    KafkaError._UNKNOWN_PARTITION,
}

Delivered = tuple[int, int]
"""Partition and offset of a record."""


class FundsAddedSerializer:
    """`FundsAdded` as a frame, its schema registered under the topic and the record's name."""

    def __init__(self, registry: SchemaRegistry, topic: str) -> None:
        """Raises RetriableError while the registry cannot be reached."""
        schema = load_schema("FundsAdded")
        self._codec = AvroCodec(registry, subject_of(topic, schema), schema)

    def __call__(self, customer_id: str, amount: Decimal) -> bytes:
        """The frame of a new event; the amount has at most 16 digits before the point and 2 after."""
        event = {"id": str(uuid.uuid4()), "occurredOn": datetime.now(UTC), "customerId": customer_id, "amount": amount}
        return self._codec.encode(event)


class FundsAddedPublisher:
    """Publishes one event at a time. Owns its producer."""

    def __init__(
        self,
        config: ClientConfig,
        registry: SchemaRegistry,
        topic: str,
        timeout_seconds: float,
        tracer: Tracer = UNTRACED,
    ) -> None:
        """Raises RetriableError while the registry cannot be reached, ConfigurationError for a wrong property."""
        self._topic = topic
        self._tracer = tracer
        self._serialize = FundsAddedSerializer(registry, topic)
        self._connection = ConnectionErrors()
        config = self._connection.watched(config)
        # 0 would be for ever.
        timeout_ms = max(1, int(timeout_seconds * 1000))
        self._producer = RecoveringProducer({**config, "message.timeout.ms": timeout_ms, "linger.ms": 0})
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="publisher", daemon=True)
        self._thread.start()

    async def publish(self, customer_id: str, amount: Decimal, idempotency_key: bytes | None = None) -> Delivered:
        """Append one event and wait until all in-sync replicas have it.

        Args:
            idempotency_key: of several events of a customer with the same one, the first is applied.

        Raises:
            RetriableError: it was not acknowledged; the message says whether it may have been written.
        """
        attributes = {
            "messaging.system": "kafka",
            "messaging.operation.type": "send",
            "messaging.operation.name": "send",
            "messaging.destination.name": self._topic,
        }
        with open_span(self._tracer, f"send {self._topic}", SpanKind.PRODUCER, attributes) as span:
            partition, offset = await self._publish(customer_id, amount, idempotency_key)
            span.set_attribute("messaging.destination.partition.id", str(partition))
            span.set_attribute("messaging.kafka.offset", offset)
            return partition, offset

    async def _publish(self, customer_id: str, amount: Decimal, idempotency_key: bytes | None) -> Delivered:
        loop = asyncio.get_running_loop()
        delivered: asyncio.Future[Delivered | KafkaError] = loop.create_future()

        def settle(outcome: Delivered | KafkaError) -> None:
            if not delivered.done():
                delivered.set_result(outcome)

        headers: dict[str, str | bytes | None] = {}
        W3C.inject(headers)
        if idempotency_key is not None:
            headers[IDEMPOTENCY_HEADER] = idempotency_key
        self._produce(customer_id, amount, headers, lambda outcome: loop.call_soon_threadsafe(settle, outcome))
        outcome = await delivered
        if isinstance(outcome, KafkaError):
            raise self._failure(outcome)
        self._connection.accepted()
        return outcome

    def publish_and_wait(self, customer_id: str, amount: Decimal, idempotency_key: bytes | None = None) -> Delivered:
        """The same, for a caller without an event loop."""
        return asyncio.run(self.publish(customer_id, amount, idempotency_key))

    def close(self) -> None:
        """Wait, within a bound, for what is under way."""
        self._producer.flush(2.0)
        self._stopping.set()
        self._thread.join(1.0)

    def _produce(
        self,
        customer_id: str,
        amount: Decimal,
        headers: dict[str, str | bytes | None],
        report: Callable[[Delivered | KafkaError], object],
    ) -> None:
        def on_delivery(error: KafkaError | None, message: Message) -> None:
            report(error if error is not None else (int(message.partition() or 0), int(message.offset() or 0)))

        try:
            frame = self._serialize(customer_id, amount)
            self._producer.produce(self._topic, frame, customer_id.encode(), on_delivery=on_delivery, headers=headers)
        except BufferError as error:
            raise RetriableError("too many events are under way; this one was certainly not written") from error
        except KafkaException as error:
            raise RetriableError(f"the event was certainly not written: {error.args[0].str()}") from error

    def _serve(self) -> None:
        while not self._stopping.is_set():
            self._producer.poll(_POLL_SECONDS)

    def _failure(self, error: KafkaError) -> RetriableError:
        certainty = "was certainly not written" if error.code() in _CERTAINLY_NOT_WRITTEN else "may have been written"
        forbidden = not_authorized(error, f"writing to topic '{self._topic}'", f"Write on topic '{self._topic}'")
        reasons = filter(None, (str(forbidden or error.str()), self._connection.refusal))
        return RetriableError(f"the event {certainty}: {'; '.join(reasons)}")
