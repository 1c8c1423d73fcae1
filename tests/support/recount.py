"""An independent recount of a topic: a plain consumer that shares no code with the service.

It decodes Avro itself, strictly, as the specification says: libraries differ in how they treat malformed bytes.
"""

from __future__ import annotations

import json
import struct
import time
import unicodedata
from collections import defaultdict
from decimal import Decimal, localcontext
from functools import cache
from typing import Any

import httpx
from confluent_kafka import Consumer, KafkaError, TopicPartition


def recount(bootstrap_servers: str, registry_url: str, topic: str) -> dict[str, Decimal]:
    """Returns customer → sum of the committed, valid `FundsAdded` events, up to the current end of the topic.

    Never expires an idempotency key, so events with keys must lie within one window.
    """
    _schema.cache_clear()
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
    seen: set[tuple[str, bytes | None]] = set()
    open_ends = set(partitions)
    with localcontext() as context:
        context.prec = 100
        while open_ends:
            for message in consumer.consume(10_000, timeout=0.1):
                error = message.error()
                if error is not None:
                    assert error.code() == KafkaError._PARTITION_EOF, error
                    open_ends.discard(message.partition())
                    continue
                event = _event(registry_url, message.value())
                if event is None or event[0].encode() != message.key():
                    continue
                name = _idempotency_key(message.headers())
                if name is None or (event[0], name) not in seen:
                    balances[event[0]] += event[1]
                    seen.add((event[0], name))
    consumer.close()
    return dict(balances)


def _idempotency_key(headers: Any) -> bytes | None:
    """Returns the key of an event. The first event with a key counts; later ones are duplicates even if they differ."""
    first = next((value for name, value in headers or () if name == "idempotency-key"), None)
    return bytes(first) if first else None


def _event(registry_url: str, value: bytes | None) -> tuple[str, Decimal] | None:
    """Returns customer and amount of a valid FundsAdded event; None for any other record."""
    if value is None or len(value) < 5 or value[0] != 0:
        return None
    (schema_id,) = struct.unpack(">I", value[1:5])
    schema = _schema(registry_url, schema_id)
    if schema is None or schema["type"] != "record" or schema["name"].rpartition(".")[2] != "FundsAdded":
        return None
    try:
        fields = dict(_Reader(value[5:]).record(schema))
        amount = _exact(fields["amount"], next(f["type"] for f in schema["fields"] if f["name"] == "amount"))
        customer = fields["customerId"].decode()
    except (ValueError, KeyError):
        return None
    is_id = 1 <= len(customer.encode()) <= 256 and not any(unicodedata.category(c) == "Cc" for c in customer)
    return (customer, amount) if is_id and fields["id"] is not None and fields["occurredOn"] is not None else None


def _exact(unscaled: Any, kind: Any) -> Decimal:
    """Returns an amount with two decimals. Raises ValueError if a digit would be lost."""
    if isinstance(kind, list):
        kind = next(k for k in kind if k != "null")
    if not isinstance(kind, dict) or kind.get("logicalType") != "decimal" or not unscaled:
        raise ValueError("no amount")
    number = int.from_bytes(unscaled, "big", signed=True)
    if len(str(abs(number))) > kind["precision"]:
        raise ValueError("more digits than the schema allows")
    amount = Decimal(number).scaleb(-kind.get("scale", 0))
    if amount != round(amount, 2):
        raise ValueError("more than two decimals")
    return round(amount, 2)


class _Reader:
    """Reads Avro's binary encoding by the writer's schema. Raises ValueError for invalid bytes.

    Returns strings as bytes, because the service does not check UTF-8 in fields that it does not fold.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def record(self, schema: Any) -> list[tuple[str, Any]]:
        return [(field["name"], self._value(field["type"])) for field in schema["fields"]]

    def _value(self, schema: Any) -> Any:
        if isinstance(schema, list):
            return self._value(schema[self._below(self._long(), len(schema))])
        kind = schema if isinstance(schema, str) else schema["type"]
        if kind in ("array", "map"):
            return self._blocks(schema["items"] if kind == "array" else schema["values"], with_names=kind == "map")
        if kind == "record":
            return self.record(schema)
        if kind == "enum":
            return schema["symbols"][self._below(self._int(), len(schema["symbols"]))]
        sizes = {"null": 0, "boolean": 1, "float": 4, "double": 8}
        if kind in sizes or kind == "fixed":
            return self._bytes(schema["size"] if kind == "fixed" else sizes[kind]) or None
        if kind in ("bytes", "string"):
            return self._bytes(self._long())
        return self._long()

    def _blocks(self, items: Any, *, with_names: bool) -> list[Any]:
        values: list[Any] = []
        while count := self._long():
            if count < 0:
                count, _ = -count, self._long()
            if count > len(self._data):
                raise ValueError("more items than bytes")
            for _ in range(count):
                name = self._value("string") if with_names else None
                values.append((name, self._value(items)))
        return values

    def _int(self) -> int:
        number = self._long()
        if not -(2**31) <= number < 2**31:
            raise ValueError("an int of more than 32 bits")
        return number

    def _long(self) -> int:
        """Reads a varint. Drops excess bits of the tenth byte, like Avro's own decoder."""
        number = 0
        for shift in range(0, 64, 7):
            (byte,) = self._bytes(1)
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                number &= (1 << 64) - 1
                return (number >> 1) ^ -(number & 1)
        raise ValueError("a varint of more than ten bytes")

    def _bytes(self, count: int) -> bytes:
        end = self._at + count
        if count < 0 or end > len(self._data):
            raise ValueError("a length beyond the end")
        data, self._at = self._data[self._at : end], end
        return data

    @staticmethod
    def _below(number: int, limit: int) -> int:
        if not 0 <= number < limit:
            raise ValueError("an index out of range")
        return number


@cache
def _schema(registry_url: str, schema_id: int) -> Any:
    return schema_of(registry_url, schema_id)


_ATTEMPTS = 4


def schema_of(registry_url: str, schema_id: int) -> Any:
    """Returns the schema with an id, as JSON; None if there is none. Does not use the service's own registry client.

    Retries when the connection breaks.
    """
    for attempt in range(_ATTEMPTS):
        try:
            answer = httpx.get(f"{registry_url}/schemas/ids/{schema_id}", timeout=10, trust_env=False)
        except httpx.TransportError:
            if attempt + 1 == _ATTEMPTS:
                raise
            time.sleep(0.5)
        else:
            break
    if answer.status_code == httpx.codes.NOT_FOUND:
        return None
    return json.loads(answer.raise_for_status().json()["schema"])
