"""Committed changelog records, and stores that should equal them, by content and digest."""

from __future__ import annotations

import hashlib
import io
import struct
import time
from dataclasses import dataclass
from decimal import Context, Decimal
from typing import TYPE_CHECKING, Any

import fastavro
from confluent_kafka import Consumer, KafkaError, TopicPartition
from rocksdict import AccessType, Options, Rdict

from tests.support.recount import schema_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

RESERVED = b"\xff"
POSITION_KEY = RESERVED + b"position"
_CHANGELOG_OFFSET_KEY = RESERVED + b"changelog-offset"
_LOCAL_KEYS = (RESERVED + b"identity", RESERVED + b"reaches", _CHANGELOG_OFFSET_KEY)
_MARKER_BY_NAME = RESERVED + b"once-by-name"
_MARKER_BY_TIME = RESERVED + b"once-by-time"
_READ_SECONDS = 60.0
_EXACT = Context(prec=80)

Content = dict[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Logged:
    """A committed record."""

    offset: int
    key: bytes | None
    value: bytes | None
    headers: Mapping[str, bytes]


def read_committed(bootstrap_servers: str, topic: str, partitions: int) -> list[list[Logged]]:
    """Returns all committed records of a topic up to its present end, by partition and offset."""
    consumer = _consumer(bootstrap_servers)
    records: list[list[Logged]] = [[] for _ in range(partitions)]
    try:
        ends = _ends(consumer, topic, partitions)
        consumer.assign([TopicPartition(topic, p, 0) for p in range(partitions)])
        stands_at = dict.fromkeys(range(partitions), 0)
        deadline = time.monotonic() + _READ_SECONDS
        while any(stands_at[p] < end for p, end in enumerate(ends)):
            assert time.monotonic() < deadline, f"{topic} was not read to {ends}: a transaction is open"
            for message in consumer.consume(10_000, timeout=0.1):
                error, partition, offset = message.error(), message.partition(), message.offset()
                assert partition is not None
                assert offset is not None
                if error is None:
                    headers: Any = dict(message.headers() or ())
                    records[partition].append(Logged(offset, message.key(), message.value(), headers))
                    stands_at[partition] = offset + 1
                elif error.code() == KafkaError._PARTITION_EOF:
                    stands_at[partition] = max(stands_at[partition], offset)
    finally:
        consumer.close()
    return records


def is_of_letter(key: bytes | None) -> bool:
    """Whether a changelog key belongs to a dead letter."""
    return key is not None and key.startswith(RESERVED + b"letter-")


def stable_ends(bootstrap_servers: str, topic: str, partitions: int) -> list[int]:
    """Returns the last stable offset of each partition."""
    consumer = _consumer(bootstrap_servers)
    try:
        return _ends(consumer, topic, partitions)
    finally:
        consumer.close()


def _consumer(bootstrap_servers: str) -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": "chaos-reader",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "log_level": 0,
        }
    )


def _ends(consumer: Consumer, topic: str, partitions: int) -> list[int]:
    return [consumer.get_watermark_offsets(TopicPartition(topic, p), timeout=10)[1] for p in range(partitions)]


def compacted(records: Iterable[Logged], below: int | None = None) -> Content:
    """Returns the last value of each key below an offset, without keys whose last record is a tombstone."""
    content: Content = {}
    for record in records:
        if below is not None and record.offset >= below:
            break
        assert record.key is not None
        if record.value is None:
            content.pop(record.key, None)
        else:
            content[record.key] = record.value
    return content


def is_marker(key: bytes) -> bool:
    """Whether a changelog key is the marker of an idempotency key; each has one."""
    return key.startswith(_MARKER_BY_NAME)


def states(content: Content) -> Content:
    """Returns the states of customers, without internal records."""
    return {key: value for key, value in content.items() if not key.startswith(RESERVED)}


def digest(content: Content) -> str:
    """Returns the start of a SHA-256 over keys and values in key order."""
    sha = hashlib.sha256()
    for key, value in sorted(content.items()):
        sha.update(struct.pack(">II", len(key), len(value)) + key + value)
    return sha.hexdigest()[:16]


def read_store(path: Path) -> tuple[int, Content]:
    """Returns a store's changelog offset and its changelog contents. The instance must be stopped."""
    db = Rdict(str(path), options=Options(raw_mode=True), access_type=AccessType.read_only())
    try:
        raw: Any = db.items()
        content: Content = dict(raw)
    finally:
        db.close()
    offset = int.from_bytes(content.get(_CHANGELOG_OFFSET_KEY, b""), "big")
    return offset, {key: value for key, value in content.items() if key not in _LOCAL_KEYS}


class Decoder:
    """Decodes frames with the schemas of the registry."""

    def __init__(self, registry_url: str) -> None:
        self._registry_url = registry_url
        self._schemas: dict[int, Any] = {}

    def decode(self, frame: bytes) -> dict[str, Any]:
        (schema_id,) = struct.unpack(">I", frame[1:5])
        if schema_id not in self._schemas:
            self._schemas[schema_id] = fastavro.parse_schema(schema_of(self._registry_url, schema_id))
        record: Any = fastavro.schemaless_reader(io.BytesIO(frame[5:]), self._schemas[schema_id], None)
        assert isinstance(record, dict)
        return record

    def living(self, content: Content, window_ms: int) -> Content:
        """Drops expired idempotency keys: the time of their removal depends on commits."""
        now = self.decode(content[POSITION_KEY])["streamTime"]

        def has_expired(key: bytes, value: bytes) -> bool:
            if is_marker(key):
                at_ms = self.decode(value)["timestamp"]
            elif key.startswith(_MARKER_BY_TIME):
                at_ms = int.from_bytes(key[len(_MARKER_BY_TIME) :][:8], "big")
            else:
                return False
            return bool(at_ms + window_ms <= now)

        return {key: value for key, value in content.items() if not has_expired(key, value)}

    def cents(self, frame: bytes) -> tuple[str, int]:
        """Returns customer and balance of a state."""
        state = self.decode(frame)
        return state["customerId"], int(_EXACT.multiply(state["amount"], Decimal(100)))
