"""Kafka clients of the tests: writers, readers, operators, and calls that only librdkafka has."""

from __future__ import annotations

import ctypes
import json
import re
import struct
import threading
from contextlib import contextmanager
from datetime import UTC, datetime
from decimal import Decimal
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import confluent_kafka
import fastavro
import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    OffsetSpec,
    ResourceType,
)
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from confluent_kafka.schema_registry import topic_record_subject_name_strategy as by_record_name
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

from balance_service.avro.schemas import load_schema
from tests.support.recount import recount, schema_of
from tests.support.service import PARTITIONS
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from confluent_kafka import Message

    from balance_service.devtools.local.stack import LocalStack
    from balance_service.kafka.clients import ClientConfig

_JOINED_WITHIN_SECONDS = 30.0
_CLOSED_WITHIN_SECONDS = 30.0


class Writer:
    """Produces events to a topic under any schema, as an application would."""

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
        """Returns a framed FundsAdded event; `schema` defaults to the shipped one."""
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
        """Registers a schema and returns its id."""
        return int(self.registry.register_schema(subject, Schema(json.dumps(schema), "AVRO")))

    def send(self, key: bytes | str | None, value: bytes | None, **where: Any) -> None:
        self.producer.produce(self.topic, value, key, **where)
        self.producer.poll(0)

    def add(self, customer: str, *amounts: str) -> None:
        """Produces FundsAdded events of a customer and flushes."""
        for amount in amounts:
            self.send(customer, self.frame(customer, amount))
        self.producer.flush(10)


def read_topic(stack: LocalStack, topic: str) -> list[Any]:
    """Returns all committed records of a topic, sorted by partition and offset."""
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


_RESERVED_KEY_PREFIX = b"\xff"


@cache
def _admin(bootstrap_servers: str) -> AdminClient:
    return AdminClient({"bootstrap.servers": bootstrap_servers, "log_level": 0})


def admin(stack: LocalStack) -> AdminClient:
    return _admin(stack.bootstrap_servers)


def delete_before(bootstrap_servers: str, topic: str, offsets: Mapping[int, int]) -> None:
    """Deletes the records of partitions below an offset each."""
    wanted = [TopicPartition(topic, partition, offset) for partition, offset in offsets.items()]
    for future in _admin(bootstrap_servers).delete_records(wanted).values():
        future.result(10)


def create_topic(stack: LocalStack, name: str, config: Mapping[str, str], partitions: int = PARTITIONS) -> None:
    """Creates a topic with a configuration that the service would not choose."""
    topic = NewTopic(name, num_partitions=partitions, replication_factor=1, config=dict(config))
    admin(stack).create_topics([topic])[name].result(10)


def ends_of(stack: LocalStack, topic: str) -> dict[int, int]:
    """Returns the high watermark of each partition. Raises KafkaException if the topic does not exist."""
    wanted = {TopicPartition(topic, p): OffsetSpec.latest() for p in range(PARTITIONS)}
    # Otherwise the client knows for minutes only the leaders from before a broker's restart.
    admin(stack).list_topics(topic, timeout=10)
    futures = admin(stack).list_offsets(wanted, request_timeout=10)
    return {tp.partition: int(future.result(10).offset) for tp, future in futures.items()}


def recounted(stack: LocalStack, settings: Mapping[str, str]) -> dict[str, Decimal]:
    """Returns the balances that an independent recount of the topic finds."""
    return recount(stack.bootstrap_servers, stack.schema_registry_url, settings["BALANCE_TOPIC"])


def changelogs_of(stack: LocalStack, settings: Mapping[str, str]) -> list[str]:
    """Returns the names of the changelogs of model `balance`, by generation."""
    form = re.compile(re.escape(settings["BALANCE_APPLICATION_ID"]) + r"-balance(?:\.g([0-9]+))?-changelog")
    found = filter(None, map(form.fullmatch, admin(stack).list_topics(timeout=10).topics))
    return [match[0] for match in sorted(found, key=lambda match: int(match[1] or 1))]


def in_changelog(stack: LocalStack, settings: Mapping[str, str]) -> dict[str, Decimal]:
    """Returns the balances in the changelog of the last generation, decoded with the schemas of the registry."""
    schemas: dict[int, Any] = {}
    balances = {}
    for record in read_topic(stack, changelogs_of(stack, settings)[-1]):
        if record.key().startswith(_RESERVED_KEY_PREFIX):
            continue
        (schema_id,) = struct.unpack(">I", record.value()[1:5])
        if schema_id not in schemas:
            schemas[schema_id] = fastavro.parse_schema(schema_of(stack.schema_registry_url, schema_id))
        state: Any = fastavro.schemaless_reader(BytesIO(record.value()[5:]), schemas[schema_id], None)
        assert state["customerId"].encode() == record.key()
        balances[state["customerId"]] = state["amount"]
    return balances


# The log cleaner compacts closed segments only, and the broker rolls a segment only when a record is appended.
_EAGER = {
    "min.compaction.lag.ms": "0",
    "min.cleanable.dirty.ratio": "0",
    "segment.ms": "100",
    "delete.retention.ms": "100",
    "file.delete.delay.ms": "100",
}


def clean_eagerly(bootstrap_servers: str, topic: str) -> None:
    """Configures the log cleaner to compact a topic continuously and to drop tombstones after 100 ms."""
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    wanted = [(ResourceType.BROKER, "1", {"log.cleaner.backoff.ms": "100"}), (ResourceType.TOPIC, topic, _EAGER)]
    for kind, name, values in wanted:
        entries = [
            ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET) for key, value in values.items()
        ]
        resource = ConfigResource(kind, name, incremental_configs=entries)
        admin.incremental_alter_configs([resource])[resource].result(10)


# Constants of rdkafka.h.
_PRODUCER = 0
_END, _TOPIC, _PARTITION, _VALUE, _KEY, _FLAGS, _HEADERS = 0, 1, 3, 4, 5, 7, 10
_COPY = 2
_FLUSH_MS = 20_000
# The librdkafka handle is the first field of the C struct behind a `confluent_kafka` client.
_HANDLE_AT = object.__basicsize__


def librdkafka() -> ctypes.CDLL:
    """Returns the library inside the confluent-kafka wheel; skips the test if there is none."""
    libraries = Path(confluent_kafka.__file__).parent.parent / "confluent_kafka.libs"
    found = next(iter(libraries.glob("librdkafka*.so*")), None)
    if found is None:
        pytest.skip("this confluent-kafka is not a wheel with its own librdkafka")
    return ctypes.CDLL(str(found))


def fail_fatally(producer: Producer) -> None:
    """Injects a fatal error into a producer and checks that it takes effect."""
    handle = ctypes.c_void_p.from_address(id(producer) + _HANDLE_AT)
    assert librdkafka().rd_kafka_test_fatal_error(handle, KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER, b"planted") == 0
    with pytest.raises(KafkaException) as refused:
        producer.produce("any", b"value", b"key")
    assert refused.value.args[0].code() == KafkaError._FATAL


def append_with_header(
    bootstrap_servers: str, topic: str, partition: int, key: bytes, value: bytes, header_name: bytes
) -> None:
    """Appends a record whose header name is not valid UTF-8; the Python client cannot send one."""
    library = librdkafka()
    for call in ("rd_kafka_conf_new", "rd_kafka_new", "rd_kafka_headers_new"):
        getattr(library, call).restype = ctypes.c_void_p
    text, size = ctypes.create_string_buffer(512), ctypes.c_size_t
    config = ctypes.c_void_p(library.rd_kafka_conf_new())
    library.rd_kafka_conf_set(config, b"bootstrap.servers", bootstrap_servers.encode(), text, size(512))
    producer = ctypes.c_void_p(library.rd_kafka_new(_PRODUCER, config, text, size(512)))
    headers = ctypes.c_void_p(library.rd_kafka_headers_new(size(1)))
    library.rd_kafka_header_add(headers, header_name, ctypes.c_ssize_t(len(header_name)), b"v", ctypes.c_ssize_t(1))
    failed = library.rd_kafka_producev(
        producer,
        *(_TOPIC, ctypes.c_char_p(topic.encode())),
        *(_PARTITION, ctypes.c_int32(partition)),
        *(_KEY, ctypes.c_char_p(key), size(len(key))),
        *(_VALUE, ctypes.c_char_p(value), size(len(value))),
        *(_FLAGS, _COPY),
        *(_HEADERS, headers),
        _END,
    )
    assert failed == 0, f"librdkafka rejected the record with error {failed}"
    assert library.rd_kafka_flush(producer, _FLUSH_MS) == 0, "the record was not delivered"
    library.rd_kafka_destroy(producer)


@contextmanager
def joined(config: ClientConfig, topic: str) -> Iterator[Consumer]:
    """A consumer to which its group has assigned partitions of a topic."""
    consumer = Consumer(config)
    consumer.subscribe([topic])
    try:
        eventually(
            lambda: consumer.poll(0.1) is None and len(consumer.assignment()) > 0,
            "the consumer has joined its group",
            _JOINED_WITHIN_SECONDS,
        )
        yield consumer
    finally:
        # Without a poll, librdkafka may wait for ever for a rebalance that began meanwhile.
        closing = threading.Thread(target=consumer.close, daemon=True)
        closing.start()
        closing.join(_CLOSED_WITHIN_SECONDS)


_FLUSH_SECONDS = 60.0


class Rows:
    """Produces records of one shipped schema to a topic; the end of the context waits for acknowledgements."""

    def __init__(self, stack: LocalStack, topic: str, schema: str, **config: Any) -> None:
        self._topic = topic
        self._refused: list[KafkaError] = []
        self._registry = SchemaRegistryClient({"url": stack.schema_registry_url})
        self._schema = load_schema(schema)
        self._serializer = self._serializer_of(self._schema)
        self._producer = Producer(
            {"bootstrap.servers": stack.bootstrap_servers, "partitioner": "murmur2_random", **config}
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()
        self._registry.__exit__()

    def _serializer_of(self, schema: Mapping[str, Any]) -> AvroSerializer:
        conf = {"subject.name.strategy": by_record_name}
        made: AvroSerializer = AvroSerializer(self._registry, json.dumps(schema), conf=conf)
        return made

    def add_field(self, name: str) -> None:
        """Makes a schema of the shipped one and a further field, which is null, and uses that from now on."""
        fields = [*self._schema["fields"], {"name": name, "type": ["null", "string"], "default": None}]
        self._serializer = self._serializer_of({**self._schema, "fields": fields})

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
