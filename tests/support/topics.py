"""What a test writes to a topic, as an application would, and reads from one."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Self

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from confluent_kafka.schema_registry import topic_record_subject_name_strategy as by_record_name
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

from balance_service.avro.schemas import load_schema

if TYPE_CHECKING:
    from balance_service.devtools.local.stack import LocalStack


class Writer:
    """Writes events as an application would, with whatever schema it likes."""

    def __init__(self, stack: LocalStack, topic: str, **config: Any) -> None:
        self.topic = topic
        self.registry = SchemaRegistryClient({"url": stack.schema_registry_url})
        self.producer = Producer(
            {
                "bootstrap.servers": stack.bootstrap_servers,
                "partitioner": "murmur2_random",
                "linger.ms": 5,
                **config,
            }
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.producer.flush(10)
        self.registry.__exit__()

    def frame(self, customer: str, amount: str, schema: dict[str, Any] | None = None, **fields: Any) -> bytes:
        """A FundsAdded event under a schema; by default the shipped one."""
        serializer = AvroSerializer(
            self.registry,
            json.dumps(schema or load_schema("FundsAdded")),
            conf={"subject.name.strategy": by_record_name},
        )
        event = {
            "id": "e1",
            "occurredOn": datetime.now(UTC),
            "customerId": customer,
            "amount": Decimal(amount),
            **fields,
        }
        frame: bytes = serializer(event, SerializationContext(self.topic, MessageField.VALUE))
        return frame

    def register(self, subject: str, schema: dict[str, Any]) -> int:
        """The id of a schema."""
        return int(self.registry.register_schema(subject, Schema(json.dumps(schema), "AVRO")))

    def send(self, key: bytes | str | None, value: bytes | None, **where: Any) -> None:
        """Append one record."""
        self.producer.produce(self.topic, value, key, **where)
        self.producer.poll(0)

    def add(self, customer: str, *amounts: str) -> None:
        """Append FundsAdded events of a customer."""
        for amount in amounts:
            self.send(customer, self.frame(customer, amount))
        self.producer.flush(10)


def read_topic(stack: LocalStack, topic: str) -> list[Any]:
    """All committed records of a topic, by partition and offset."""
    consumer = Consumer(
        {
            "bootstrap.servers": stack.bootstrap_servers,
            "group.id": "test-reader",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "enable.auto.commit": False,
        }
    )
    partitions = set(consumer.list_topics(topic, timeout=10).topics[topic].partitions)
    consumer.assign([TopicPartition(topic, p, 0) for p in partitions])
    records = []
    while partitions:
        message = consumer.poll(5)
        assert message is not None
        if message.error():
            partitions.discard(message.partition())
        else:
            records.append(message)
    consumer.close()
    return sorted(records, key=lambda m: (m.partition(), m.offset()))
