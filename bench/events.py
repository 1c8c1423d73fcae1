"""Encodes `FundsAdded` events in bulk, many times faster than the serializer, with the same result."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from balance_service.avro.registry import SchemaRegistry
from balance_service.avro.schemas import load_schema, subject_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]

MAX_CENTS = 100_000
_ID_CHARACTERS = 36


def register(registry_url: str, topic: str) -> bytes:
    """Register the schema for a topic; returns the header of the frames."""
    registry = SchemaRegistry(registry_url)
    schema = load_schema("FundsAdded")
    schema_id = registry.register(subject_of(topic, schema), schema)
    registry.close()
    return b"\x00" + schema_id.to_bytes(4, "big")


def customer_id(number: int) -> str:
    """The id of a customer; numbers start at 0."""
    return f"customer-{number}"


def encoded(header: bytes, customers: Integers, cents: Integers) -> Iterator[tuple[bytes, bytes]]:
    """Key and frame of one event for each customer number and amount; ids are random, as UUIDs are.

    The amounts are from 1 to `MAX_CENTS` - 1, and a customer's number has at most 50 digits, so that the lengths
    below take one byte.
    """
    # Source: Avro 1.12 specification, "Binary Encoding": field after field, strings and bytes after their length.
    occurred_on = _long(int(time.time() * 1000))
    before_id = header + _long(_ID_CHARACTERS)
    for customer, amount, event_id in zip(customers.tolist(), cents.tolist(), _event_ids(len(customers)), strict=True):
        key = b"customer-%d" % customer
        yield key, b"%b%b%b%c%b%b" % (before_id, event_id, occurred_on, 2 * len(key), key, _AMOUNTS[amount])


def documents(customers: Integers, cents: Integers) -> Iterator[tuple[bytes, bytes]]:
    """As `encoded`, as JSON documents."""
    occurred_on = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z").encode()
    for customer, amount, event_id in zip(customers.tolist(), cents.tolist(), _event_ids(len(customers)), strict=True):
        key = b"customer-%d" % customer
        yield (
            key,
            b'{"id":"%b","occurredOn":"%b","customerId":"%b","amount":%d.%02d}'
            % (event_id, occurred_on, key, *divmod(amount, 100)),
        )


def _event_ids(count: int) -> Iterator[bytes]:
    ids = os.urandom(16 * count).hex().encode()
    for at in range(0, 32 * count, 32):
        yield b"%b-%b-4%b-a%b-%b" % (
            ids[at : at + 8],
            ids[at + 8 : at + 12],
            ids[at + 13 : at + 16],
            ids[at + 17 : at + 20],
            ids[at + 20 : at + 32],
        )


def _long(value: int) -> bytes:
    """Avro's zig-zag, variable-length form of a number that is not negative."""
    rest, encoding = value << 1, bytearray()
    while rest > 0x7F:
        encoding.append(rest & 0x7F | 0x80)
        rest >>= 7
    encoding.append(rest)
    return bytes(encoding)


def _amount(cents: int) -> bytes:
    unscaled = cents.to_bytes(cents.bit_length() // 8 + 1, "big", signed=True)
    return _long(len(unscaled)) + unscaled


_AMOUNTS = [_amount(cents) for cents in range(MAX_CENTS)]
