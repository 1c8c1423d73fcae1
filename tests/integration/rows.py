"""Produces records of a shipped schema."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Self

from confluent_kafka import Producer
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry import topic_record_subject_name_strategy as by_record_name
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

from balance_service.avro.schemas import load_schema

if TYPE_CHECKING:
    from collections.abc import Mapping

    from confluent_kafka import KafkaError, Message

    from balance_service.devtools.local.stack import LocalStack

_FLUSH_SECONDS = 60.0


class Rows:
    """Produces records of one shipped schema to a topic; the end of the context waits for acknowledgements."""

    def __init__(self, stack: LocalStack, topic: str, schema: str, **config: Any) -> None:
        self._topic = topic
        self._refused: list[KafkaError] = []
        self._registry = SchemaRegistryClient({"url": stack.schema_registry_url})
        conf = {"subject.name.strategy": by_record_name}
        self._serializer = AvroSerializer(self._registry, json.dumps(load_schema(schema)), conf=conf)
        self._producer = Producer(
            {"bootstrap.servers": stack.bootstrap_servers, "partitioner": "murmur2_random", **config}
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()
        self._registry.__exit__()

    def put(self, key: str | None, fields: Mapping[str, Any] | None, **more: Any) -> None:
        """Sends a record, or a tombstone if `fields` is None. `more` are arguments of the producer."""
        value = None
        if fields is not None:
            value = self._serializer(fields, SerializationContext(self._topic, MessageField.VALUE))
        self.put_raw(key, value, **more)

    def put_raw(self, key: str | bytes | None, value: bytes | None, **more: Any) -> None:
        """Sends a record with any value."""
        key = key.encode() if isinstance(key, str) else key
        self._producer.produce(self._topic, value, key, on_delivery=self._delivered, **more)

    def flush(self, seconds: float = _FLUSH_SECONDS) -> None:
        """Waits until all records are acknowledged."""
        assert self._producer.flush(seconds) == 0
        assert not self._refused, self._refused

    def _delivered(self, error: KafkaError | None, _message: Message) -> None:
        if error is not None:
            self._refused.append(error)
