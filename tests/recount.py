"""An independent recount of a topic: a plain consumer that shares no code with the service."""

from __future__ import annotations

import io
import json
import struct
import urllib.error
import urllib.request
from collections import defaultdict
from decimal import Decimal, localcontext
from typing import Any

import fastavro
from confluent_kafka import Consumer, KafkaError, TopicPartition


def recount(bootstrap_servers: str, registry_url: str, topic: str) -> dict[str, Decimal]:
    """Customer → the sum of the committed, well-formed `FundsAdded` events, read up to the topic's present end."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": "recount",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
        }
    )
    partitions = consumer.list_topics(topic, timeout=10).topics[topic].partitions
    consumer.assign([TopicPartition(topic, p, 0) for p in partitions])
    balances: dict[str, Decimal] = defaultdict(Decimal)
    schemas: dict[int, Any] = {}
    open_ends = set(partitions)
    with localcontext() as context:
        context.prec = 100
        while open_ends:
            for message in consumer.consume(10_000, timeout=1.0):
                error = message.error()
                if error is not None:
                    assert error.code() == KafkaError._PARTITION_EOF, error
                    open_ends.discard(message.partition())
                    continue
                event = _event(registry_url, schemas, message.value())
                if event is not None and event["customerId"].encode() == message.key():
                    balances[event["customerId"]] += event["amount"]
    consumer.close()
    return dict(balances)


def _event(registry_url: str, schemas: dict[int, Any], value: bytes | None) -> dict[str, Any] | None:
    if value is None or len(value) < 5 or value[0] != 0:
        return None
    (schema_id,) = struct.unpack(">I", value[1:5])
    if schema_id not in schemas:
        schemas[schema_id] = _schema(registry_url, schema_id)
    schema = schemas[schema_id]
    if schema is None or schema["name"].rpartition(".")[2] != "FundsAdded":
        return None
    try:
        event = fastavro.schemaless_reader(io.BytesIO(value[5:]), schema, None)
    except Exception:
        return None
    assert isinstance(event, dict)
    return event


def _schema(registry_url: str, schema_id: int) -> Any:
    try:
        with urllib.request.urlopen(f"{registry_url}/schemas/ids/{schema_id}") as answer:
            return fastavro.parse_schema(json.loads(json.load(answer)["schema"]))
    except urllib.error.HTTPError as error:
        if error.code != 404:
            raise
        return None
