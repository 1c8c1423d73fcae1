"""What a topic contains, in figures that do not depend on order: two topics that agree hold the same records."""

from __future__ import annotations

import marshal
from dataclasses import dataclass
from decimal import Context, Decimal
from hashlib import blake2b
from typing import TYPE_CHECKING

from balance_service.avro.frames import FrameReader, UndecodableError
from balance_service.avro.schemas import full_name, load_schema
from balance_service.kafka.messages import headers_of

if TYPE_CHECKING:
    from confluent_kafka import Message

    from balance_service.avro.registry import SchemaRegistry

_DIGEST_BYTES = 16
_MODULUS = 1 << 8 * _DIGEST_BYTES
# Wide enough to add exactly whatever decimals of the greatest precision a topic may hold.
_EXACT = Context(prec=200)
_EARLIEST_WRITABLE_MS = 1


@dataclass(frozen=True, slots=True)
class Contents:
    """How many records, a digest of their keys, values, headers and timestamps, and what the funds add up to.

    `others` are records of other types, `undecodable` those that nobody can read; both are in `records` and `digest`.
    """

    records: int
    digest: int
    events: int
    amount: Decimal
    others: int
    undecodable: int

    def __str__(self) -> str:
        return (
            f"{self.records} records, {self.events} FundsAdded events of {self.amount} in all, "
            f"{self.others} records of other types, {self.undecodable} undecodable, digest {self.digest:032x}"
        )


class ContentsCounter:
    """Adds records up to `Contents`."""

    def __init__(self, registry: SchemaRegistry) -> None:
        self._amounts = _FundsAddedAmounts(registry)
        self._records = self._digest = self._events = self._others = self._undecodable = 0
        self._total = Decimal(0)

    def add(self, message: Message) -> None:
        """Count one record.

        Raises:
            RetriableError: the registry does not answer.
        """
        self._records += 1
        self._digest = (self._digest + _hash(message)) % _MODULUS
        try:
            amount = self._amounts.of(message.value())
        except UndecodableError:
            self._undecodable += 1
        else:
            if amount is None:
                self._others += 1
            else:
                self._events += 1
                self._total = _EXACT.add(self._total, amount)

    def contents(self) -> Contents:
        """The figures so far."""
        return Contents(self._records, self._digest, self._events, self._total, self._others, self._undecodable)


def writable_timestamp(message: Message) -> int:
    """A record's timestamp, in milliseconds; the first moment of 1970 as 1, for producers take 0 for "now"."""
    timestamp = int(message.timestamp()[1])
    return timestamp or _EARLIEST_WRITABLE_MS


def _hash(message: Message) -> int:
    content = (message.key(), message.value(), [*headers_of(message)], writable_timestamp(message))
    # Version 2 has no references between equal objects, so that equal contents are equal bytes.
    return int.from_bytes(blake2b(marshal.dumps(content, 2), digest_size=_DIGEST_BYTES).digest(), "big")


class _FundsAddedAmounts:
    """The amounts of events, decoded by their writers' schemas."""

    def __init__(self, registry: SchemaRegistry) -> None:
        self._frames = FrameReader(registry)
        self._name = full_name(load_schema("FundsAdded"))

    def of(self, value: bytes | None) -> Decimal | None:
        """An event's amount; None for a record of another type.

        Raises:
            UndecodableError: it is neither.
            RetriableError: the registry does not answer.
        """
        if value is None:
            raise UndecodableError("a record has no value")
        if self._frames.record(value) != self._name:
            return None
        event = self._frames.value(value)
        amount = event.get("amount") if isinstance(event, dict) else None
        if isinstance(amount, int) and not isinstance(amount, bool):
            return Decimal(amount)
        if not isinstance(amount, Decimal):
            raise UndecodableError("an event has no exact amount")
        return amount
