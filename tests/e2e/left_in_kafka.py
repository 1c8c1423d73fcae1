"""What an application has left in Kafka, and what an operator makes there."""

from __future__ import annotations

import struct
from functools import cache
from io import BytesIO
from typing import TYPE_CHECKING, Any

import fastavro
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec

from tests.support.recount import recount
from tests.support.schemas import schema_of
from tests.support.service import PARTITIONS
from tests.support.topics import read_topic

if TYPE_CHECKING:
    from collections.abc import Mapping
    from decimal import Decimal

    from balance_service.devtools.local.stack import LocalStack

_RESERVED = b"\xff"


@cache
def _admin(bootstrap_servers: str) -> AdminClient:
    return AdminClient({"bootstrap.servers": bootstrap_servers, "log_level": 0})


def admin(stack: LocalStack) -> AdminClient:
    """For what only an operator does."""
    return _admin(stack.bootstrap_servers)


def create_topic(stack: LocalStack, name: str, config: Mapping[str, str], partitions: int = PARTITIONS) -> None:
    """A topic as somebody else might have made it."""
    topic = NewTopic(name, num_partitions=partitions, replication_factor=1, config=dict(config))
    admin(stack).create_topics([topic])[name].result(10)


def ends_of(stack: LocalStack, topic: str) -> dict[int, int]:
    """The high watermark of each partition; none while there is no such topic."""
    wanted = {TopicPartition(topic, p): OffsetSpec.latest() for p in range(PARTITIONS)}
    futures = admin(stack).list_offsets(wanted, request_timeout=10)
    return {tp.partition: int(future.result(10).offset) for tp, future in futures.items()}


def recounted(stack: LocalStack, settings: Mapping[str, str]) -> dict[str, Decimal]:
    """Every balance as an independent recount of the topic has it."""
    return recount(stack.bootstrap_servers, stack.schema_registry_url, settings["BALANCE_TOPIC"])


def in_changelog(stack: LocalStack, settings: Mapping[str, str]) -> dict[str, Decimal]:
    """Every balance that the changelog holds, by the schemas of the registry."""
    schemas: dict[int, Any] = {}
    balances = {}
    for record in read_topic(stack, f"{settings['BALANCE_APPLICATION_ID']}-balance-changelog"):
        if record.key().startswith(_RESERVED):
            continue
        (schema_id,) = struct.unpack(">I", record.value()[1:5])
        if schema_id not in schemas:
            schemas[schema_id] = fastavro.parse_schema(schema_of(stack.schema_registry_url, schema_id))
        state: Any = fastavro.schemaless_reader(BytesIO(record.value()[5:]), schemas[schema_id], None)
        assert state["customerId"].encode() == record.key()
        balances[state["customerId"]] = state["amount"]
    return balances
