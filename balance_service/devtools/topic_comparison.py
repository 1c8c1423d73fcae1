"""Compares a topic with its copy: reads both again, and compares counts, digests and the sum of funds."""

from __future__ import annotations

import marshal
import time
from contextlib import closing
from dataclasses import dataclass
from decimal import Context, Decimal
from hashlib import blake2b
from typing import TYPE_CHECKING

from balance_service.avro.codec import FrameReader, UndecodableError
from balance_service.avro.own_schemas import OwnSchemas
from balance_service.avro.registry import SchemaRegistry
from balance_service.avro.schemas import full_name, load_schema
from balance_service.devtools.topic_copy import writable_timestamp
from balance_service.errors import FatalError, RetriableError
from balance_service.kafka.log_reader import reader_to_end
from balance_service.kafka.messages import headers_of, place_of
from balance_service.kafka.topics import Topics

if TYPE_CHECKING:
    from collections.abc import Callable

    from confluent_kafka import Message

    from balance_service.devtools.topic_copy import Copied
    from balance_service.kafka.messages import Headers
    from balance_service.kafka.topics import Topic
    from balance_service.settings import Settings

_SETTLE_SECONDS = 30.0
_POLL_SECONDS = 0.05
_DIGEST_BYTES = 16
_MODULUS = 1 << 8 * _DIGEST_BYTES
# Adds decimals of Avro's greatest precisions exactly.
_EXACT = Context(prec=200)


@dataclass(frozen=True, slots=True)
class Contents:
    """Figures of a topic, which do not depend on the order of its records."""

    records: int
    digest: int
    """Of keys, values, headers and timestamps of all records."""
    events: int
    """`FundsAdded` events."""
    amount: Decimal
    """The sum of their amounts."""
    others: int
    """Records of other types."""
    undecodable: int

    def __str__(self) -> str:
        return (
            f"{self.records} records, {self.events} FundsAdded events with a total of {self.amount}, "
            f"{self.others} records of other types, {self.undecodable} undecodable, digest {self.digest:032x}"
        )


class ContentsCounter:
    def __init__(self, registry: SchemaRegistry) -> None:
        self._schemas = OwnSchemas(registry)
        self._frames = FrameReader(self._schemas)
        self._event = full_name(load_schema("FundsAdded"))
        self._records = self._digest = self._events = self._others = self._undecodable = 0
        self._total = Decimal(0)

    def add(self, message: Message) -> None:
        """Add one record. Raises RetriableError: the registry does not answer."""
        self._records += 1
        headers = headers_of(message)
        self._schemas.learn(message.key() or b"", message.value())
        self._digest = (self._digest + _hash(message, headers)) % _MODULUS
        try:
            amount = self._amount(message.value(), headers)
        except UndecodableError:
            self._undecodable += 1
        else:
            if amount is None:
                self._others += 1
            else:
                self._events += 1
                self._total = _EXACT.add(self._total, amount)

    def contents(self) -> Contents:
        return Contents(self._records, self._digest, self._events, self._total, self._others, self._undecodable)

    def _amount(self, value: bytes | None, headers: Headers) -> Decimal | None:
        """The amount of a FundsAdded event; None for a record of another type. Raises UndecodableError."""
        if value is None:
            raise UndecodableError("a record has no value")
        frame = self._frames.framed(value, headers)
        if self._frames.record(frame) != self._event:
            return None
        event = self._frames.value(frame)
        amount = event.get("amount") if isinstance(event, dict) else None
        if isinstance(amount, int) and not isinstance(amount, bool):
            return Decimal(amount)
        if not isinstance(amount, Decimal):
            raise UndecodableError("an event has no exact amount")
        return amount


def _hash(message: Message, headers: Headers) -> int:
    content = (message.key(), message.value(), [*headers], writable_timestamp(message))
    # Version 2 has no references between equal objects: equal contents are equal bytes.
    return int.from_bytes(blake2b(marshal.dumps(content, 2), digest_size=_DIGEST_BYTES).digest(), "big")


@dataclass(frozen=True, slots=True)
class TopicComparison:
    source: Contents
    """Up to the ends of the copy."""
    target: Contents
    grown: int
    """Committed records of the source beyond these ends."""
    undecided: int
    """Offsets of the source beyond the start of the first open transaction."""

    def check(self, source: str, target: str) -> None:
        """Check that the target has all records of the source.

        Raises:
            FatalError: the target is not equal to the source.
            RetriableError: the source has more records to copy.
        """
        again = "stop its writers and run this again, which continues the copy"
        if self.source != self.target:
            raise FatalError(
                f"'{target}' is not a copy of '{source}', as the figures show: do not use it; delete it, "
                f"prevent writes to it and deletions of records of '{source}', and run this again"
            )
        if self.grown:
            raise RetriableError(f"'{source}' has grown by {self.grown} records since the copy began; {again}")
        if self.undecided:
            raise RetriableError(
                f"'{source}' has an open transaction, which holds back its last {self.undecided} offsets; {again}"
            )


def compare(settings: Settings, copied: Copied, progress: Callable[[int, int], None]) -> TopicComparison:
    """Read both topics and compare them. Of the result of the copy, only the ends are used.

    Args:
        progress: called with the number of offsets that are read, and of all.

    Raises:
        RetriableError: a broker or the registry does not answer, or a transaction on the target does not end.
    """
    topics = Topics(settings)
    _settle(topics, copied.target)
    with (
        closing(SchemaRegistry.from_settings(settings)) as registry,
        reader_to_end(settings, topics, copied.source) as source,
        reader_to_end(settings, topics, copied.target) as target,
    ):
        total = source.offsets_in_all + target.offsets_in_all
        left, right, grown = ContentsCounter(registry), ContentsCounter(registry), 0
        while source.unfinished:
            for message in source.read():
                partition, offset = place_of(message)
                if offset < copied.ends[partition]:
                    left.add(message)
                else:
                    grown += 1
            progress(source.offsets_read, total)
        while target.unfinished:
            for message in target.read():
                right.add(message)
            progress(source.offsets_read + target.offsets_read, total)
    return TopicComparison(left.contents(), right.contents(), grown, _undecided(topics, copied.source))


def _settle(topics: Topics, topic: Topic) -> None:
    """Wait until no transaction is open: a commit is confirmed before consumers can read its records."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    while _undecided(topics, topic):
        if time.monotonic() > deadline:
            raise RetriableError(f"a transaction on topic '{topic.name}' does not end; end its writer, run this again")
        time.sleep(_POLL_SECONDS)


def _undecided(topics: Topics, topic: Topic) -> int:
    """The number of offsets between the last stable offset and the high watermark."""
    partitions = range(topic.partitions)
    committed = topics.offsets(topic.name, partitions, committed=True)
    ends = topics.offsets(topic.name, partitions)
    return sum(ends[p] - committed[p] for p in partitions)
