"""A recount of the source by a plain consumer that shares no code with the service.

Counts money in cents, as Python's unbounded integers.
"""

from __future__ import annotations

import io
import re
import struct
import time
from array import array
from bisect import bisect_left
from dataclasses import dataclass, field
from decimal import Context, Decimal
from typing import TYPE_CHECKING, Any, NamedTuple

import fastavro
from confluent_kafka import Consumer, KafkaError, TopicPartition

from tests.chaos.workload import HEALING
from tests.support.recount import schema_of

if TYPE_CHECKING:
    from collections.abc import Mapping

_FUNDS_ADDED = "parts.code.balance.events.FundsAdded"
_LIMIT_CENTS = 10**38
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")
_EXACT = Context(prec=80)
_READ_SECONDS = 60.0


class History:
    """A customer's balance after each event that counts."""

    __slots__ = ("offsets", "sums")

    def __init__(self) -> None:
        self.offsets = array("q")
        self.sums: list[int] = []

    def add(self, offset: int, cents: int) -> None:
        self.offsets.append(offset)
        self.sums.append(self.total + cents)

    @property
    def total(self) -> int:
        """The balance after all events read."""
        return self.sums[-1] if self.sums else 0

    def below(self, position: int) -> int | None:
        """Returns the balance after the events below a position; None without events."""
        count = bisect_left(self.offsets, position)
        return self.sums[count - 1] if count else None


class Poison(NamedTuple):
    """A record that should be a dead letter."""

    cause: str
    key: bytes | None
    value: bytes | None


class Marker(NamedTuple):
    """An event with an idempotency key that counts: the stream time at its offset, and its cents."""

    since_ms: int
    cents: int


@dataclass
class PartitionCount:
    """The counts of one partition."""

    end: int = 0
    applied: int = 0
    ignored: int = 0
    duplicates: int = 0
    poison: dict[int, Poison] = field(default_factory=dict)
    """By offset."""
    markers: dict[tuple[bytes, bytes], Marker] = field(default_factory=dict)
    """By customer and idempotency key, expired or not."""
    stream_time_ms: int = -1
    """The greatest timestamp of the events with an idempotency key so far."""
    healed: set[int] = field(default_factory=set)
    """Offsets of valid events that may have been dead letters until their schema was registered."""

    def living(self, window_ms: int) -> set[tuple[bytes, bytes]]:
        """Returns the markers that have not expired."""
        return {name for name, marker in self.markers.items() if marker.since_ms + window_ms > self.stream_time_ms}

    @property
    def records(self) -> int:
        """The number of committed records of any kind."""
        return self.applied + self.ignored + self.duplicates + len(self.poison)


class Recount:
    """Reads the topic incrementally. Used by one thread."""

    def __init__(
        self,
        bootstrap_servers: str,
        registry_url: str,
        topic: str,
        partitions: int,
        homes: Mapping[bytes, int],
        window_ms: int,
    ) -> None:
        """Args:
        homes: key → partition, as the producer's partitioner chose it.
        window_ms: the idempotency window, in stream time.
        """
        self.window_ms = window_ms
        self._registry_url = registry_url
        self._topic = topic
        self._homes = homes
        self._schemas: dict[int, Any] = {}
        self._config = {
            "bootstrap.servers": bootstrap_servers,
            "group.id": "chaos-recount",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "log_level": 0,
        }
        self.partitions = [PartitionCount() for _ in range(partitions)]
        self.histories: dict[bytes, History] = {}
        self.events: dict[tuple[int, int], tuple[bytes, int, bytes | None]] = {}
        """(partition, offset) → customer, cents and idempotency key of every valid event, duplicates included."""

    def home(self, key: bytes) -> int:
        return self._homes[key]

    def totals(self) -> dict[str, int]:
        """Returns the number of committed records by outcome, over all partitions."""
        of_all = self.partitions
        return {
            "committed records": sum(count.records for count in of_all),
            "  applied": sum(count.applied for count in of_all),
            "  of other types": sum(count.ignored for count in of_all),
            "  duplicates": sum(count.duplicates for count in of_all),
            "  poison": sum(len(count.poison) for count in of_all),
            "idempotency keys": sum(len(count.markers) for count in of_all),
            "  expired": sum(len(count.markers) - len(count.living(self.window_ms)) for count in of_all),
        }

    def read_on(self) -> None:
        """Counts the records committed since the last call, up to the present end."""
        consumer = Consumer(self._config)
        try:
            ends = {
                p: consumer.get_watermark_offsets(TopicPartition(self._topic, p), timeout=10)[1]
                for p in range(len(self.partitions))
            }
            consumer.assign([TopicPartition(self._topic, p, count.end) for p, count in enumerate(self.partitions)])
            deadline = time.monotonic() + _READ_SECONDS
            while any(count.end < ends[p] for p, count in enumerate(self.partitions)):
                assert time.monotonic() < deadline, f"the source was not read to {ends}: a transaction is open"
                for message in consumer.consume(10_000, timeout=0.1):
                    error, partition, offset = message.error(), message.partition(), message.offset()
                    assert partition is not None
                    assert offset is not None
                    count = self.partitions[partition]
                    if error is None:
                        self.count(partition, count, offset, message)
                        count.end = offset + 1
                    elif error.code() == KafkaError._PARTITION_EOF:
                        count.end = max(count.end, offset)
        finally:
            consumer.close()

    def count(self, partition: int, count: PartitionCount, offset: int, message: Any) -> None:
        """Counts one committed record."""
        key, value = message.key(), message.value()
        kind, cents = self.judge(partition, key, value)
        if kind == "ignored":
            count.ignored += 1
            return
        if kind:
            count.poison[offset] = Poison(kind, key, value)
            return
        token = dict(message.headers() or ()).get("idempotency-key")
        self.events[partition, offset] = key, cents, token
        history = self.histories.setdefault(key, History())
        timestamp_ms, first = message.timestamp()[1], None
        if token is not None:
            count.stream_time_ms = max(count.stream_time_ms, timestamp_ms)
            first = count.markers.get((key, token))
        if first is not None and first.since_ms + self.window_ms > count.stream_time_ms:
            if first.cents == cents:
                count.duplicates += 1
            else:
                count.poison[offset] = Poison("idempotency-key-reused", key, value)
        elif abs(history.total + cents) >= _LIMIT_CENTS:
            count.poison[offset] = Poison("balance-overflow", key, value)
        else:
            history.add(offset, cents)
            count.applied += 1
            if key.startswith(HEALING):
                count.healed.add(offset)
            if token is not None:
                count.markers[key, token] = Marker(count.stream_time_ms, cents)

    def judge(self, partition: int, key: bytes | None, value: bytes | None) -> tuple[str, int]:
        """Returns the cause why a record is poison, or "", and its cents."""
        if key is None:
            return "key-null", 0
        if value is None:
            return "value-null", 0
        if len(value) < 5:
            return "frame-missing", 0
        if value[0] != 0:
            return "magic-byte-unknown", 0
        (schema_id,) = struct.unpack(">I", value[1:5])
        if schema_id not in self._schemas:
            self._schemas[schema_id] = self._schema(schema_id)
        schema = self._schemas[schema_id]
        if schema is None:
            return "schema-id-unknown", 0
        if schema["name"] != _FUNDS_ADDED:
            return "ignored", 0
        if any(f["name"] == "amount" and f["type"] == "double" for f in schema["fields"]):
            return "schema-incompatible", 0
        if any(f["name"] == "hostile" for f in schema["fields"]):
            return "values-too-many", 0
        try:
            event: Any = fastavro.schemaless_reader(io.BytesIO(value[5:]), schema, None)
        except Exception:  # fastavro raises various exceptions for invalid bytes
            return "body-undecodable", 0
        return self._judge_event(partition, key, event["customerId"], event["amount"])

    def _judge_event(self, partition: int, key: bytes, customer: str, amount: Decimal | None) -> tuple[str, int]:
        if amount is None:
            return "field-null", 0
        cents = _EXACT.multiply(amount, Decimal(100))
        if cents != int(cents):
            return "decimal-loses-digits", 0
        if customer.encode() != key:
            return "key-is-not-customer-id", 0
        if not 1 <= len(key) <= 256 or _CONTROL.search(customer):
            return "customer-id-malformed", 0
        if self._homes[key] != partition:
            return "key-not-of-this-partition", 0
        return "", int(cents)

    def _schema(self, schema_id: int) -> Any:
        schema = schema_of(self._registry_url, schema_id)
        if isinstance(schema, dict) and "fields" in schema:
            # It takes no bytes, and fastavro would read each of its 2^60 values.
            schema["fields"] = [field for field in schema["fields"] if field["name"] != "nothing"]
        return None if schema is None else fastavro.parse_schema(schema)
