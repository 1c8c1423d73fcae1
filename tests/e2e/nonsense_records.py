"""Records of every kind of nonsense, among right ones."""

from __future__ import annotations

import random
import struct
from typing import TYPE_CHECKING, Any

from balance_service.avro.schemas import load_schema
from balance_service.kafka.clients import IDEMPOTENCY_HEADER
from tests.e2e.nonsense import CUSTOMERS, mutated, noise, text_of

if TYPE_CHECKING:
    from tests.support.kafka import Writer

_MAX_UNKNOWN_IDS = 200


def _schemas() -> dict[str, dict[str, Any]]:
    """Schemas that FundsAdded events may be written with, by what is special about them."""
    shipped = load_schema("FundsAdded")
    amount = {"type": "bytes", "logicalType": "decimal", "precision": 18, "scale": 2}
    first = shipped["fields"][:3]
    more = [
        {"name": "tags", "type": {"type": "array", "items": "string"}},
        {"name": "notes", "type": {"type": "map", "values": "string"}},
        {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["A", "B"]}},
        {"name": "hash", "type": {"type": "fixed", "name": "Hash", "size": 4}},
        {"name": "ratio", "type": "double"},
    ]
    return {
        "shipped": shipped,
        "scale 4": {**shipped, "fields": [*first, {"name": "amount", "type": {**amount, "scale": 4}}]},
        "precision 38": {**shipped, "fields": [*first, {"name": "amount", "type": {**amount, "precision": 38}}]},
        "nullable": {**shipped, "fields": [*first, {"name": "amount", "type": ["null", amount]}]},
        "more fields": {**shipped, "fields": [*more, *shipped["fields"]]},
    }


_LENGTHS = [
    -(2**63),
    -(2**31),
    -1,
    2**20,
    2**28,
    2**29,
    2**30,
    2**31 - 9,
    2**31 - 8,
    2**31 - 1,
    2**31,
    2**40,
    2**63 - 1,
]


def _varint(number: int) -> bytes:
    """Avro's long."""
    zigzag = ((number << 1) ^ (number >> 63)) & (2**64 - 1)
    out = bytearray()
    while zigzag >= 0x80:
        out.append(zigzag & 0x7F | 0x80)
        zigzag >>= 7
    out.append(zigzag)
    return bytes(out)


class Records:
    """Makes records: right, nearly right, and plain nonsense."""

    def __init__(self, seed: int, writer: Writer) -> None:
        self._r = random.Random(seed)
        events: list[dict[str, Any]] = [
            {"tags": ["a", "b"], "notes": {"a": "b"}, "kind": "A", "hash": b"hash", "ratio": 1.5},
            {"tags": [], "notes": {}, "kind": "B", "hash": b"\x00" * 4, "ratio": 0.0},
        ]
        amounts = ["0.01", "1.00", "-12.34", "0.00", "9999999999999999.99"]
        self._frames = [
            (customer, writer.frame(customer, amount, schema, **(extra if name == "more fields" else {})))
            for name, schema in _schemas().items()
            for extra in events
            for customer in CUSTOMERS
            for amount in amounts
        ]
        self._known = sorted({frame[:5] for _, frame in self._frames})
        self._header = next(f[:5] for c, f in self._frames if c == CUSTOMERS[0])
        other = {"type": "record", "name": "SomethingElse", "fields": [{"name": "text", "type": "string"}]}
        in_floats = {
            "type": "record",
            "name": "FundsAdded",
            "namespace": "parts.code.balance.events",
            "fields": [{"name": "customerId", "type": "string"}, {"name": "amount", "type": "double"}],
        }
        self._others = [
            struct.pack(">bI", 0, writer.register(f"{writer.topic}-{name}", schema))
            for name, schema in {"else": other, "floats": in_floats}.items()
        ]
        self._unknown_left = _MAX_UNKNOWN_IDS

    def next(self) -> tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]]]:
        """A record's key, value and headers."""
        r = self._r
        customer, frame = r.choice(self._frames)
        key: bytes | None = customer.encode()
        kind = r.random()
        value: bytes | None = frame
        if kind < 0.2:
            value = noise(r, r.choice([4, 64, 64, 2000]))
        elif kind < 0.35:
            value = r.choice([*self._known, *self._others]) + noise(r, r.choice([4, 64, 64, 2000]))
        elif kind < 0.6:
            value = mutated(r, frame)
        elif kind < 0.7:
            value = self._with_a_length(frame)
        elif kind < 0.75:
            value = frame + noise(r, 20)
        elif kind < 0.8:
            key, value = self._with_a_strange_customer()
        elif kind < 0.81:
            value = None
        other_key = r.random()
        if other_key < 0.02:
            key = None
        elif other_key < 0.05:
            key = noise(r, 20)
        elif other_key < 0.07:
            key = b"\xff" + noise(r, 10)
        elif other_key < 0.1:
            key = r.choice(CUSTOMERS).encode()
        return key, self._with_few_unknown_ids(value), self._headers()

    def _headers(self) -> list[tuple[str, bytes | None]]:
        """Most often none; now and then an idempotency key, good or not, once or more."""
        r = self._r
        names = [IDEMPOTENCY_HEADER, IDEMPOTENCY_HEADER, "other", "", "\u0000"]
        values = [b"a", b"b", b"", None, b"\xff\xfe", b"x" * 10_000, noise(r, 3)]
        return [
            (r.choice(names), r.choice(values)) for _ in range(r.choice([1, 1, 1, 2, 5]) if r.random() < 0.1 else 0)
        ]

    def _with_a_length(self, frame: bytes) -> bytes:
        """A frame with a huge, negative or overlong number somewhere, at best where a length is."""
        r = self._r
        at = r.choice([5, 5, r.randrange(5, len(frame) + 1)])
        number = _varint(r.choice(_LENGTHS)) if r.random() < 0.9 else b"\x80" * r.choice([1, 9, 10, 50]) + b"\x01"
        return frame[:at] + number + frame[at + r.randrange(3) :]

    def _with_a_strange_customer(self) -> tuple[bytes, bytes]:
        """A well-formed event whose customer is bytes of any kind, under that very key."""
        r = self._r
        customer = r.choice(
            [
                b"",
                b"x" * r.choice([256, 257]),
                text_of(r, 10).encode(),
                noise(r, 10),
                b"\xed\xa0\x80",
                b"\xc0\x80",
                b"a\x00b",
                b"\xff" + noise(r, 4),
                b"\xf4\x90\x80\x80",
                "\ufffd".encode(),
            ]
        )
        event_id, when = b"e1", r.choice([0, 1, -1, 2**40, -(2**50), 9223372036854775, 9223372036854776, 2**63 - 1])
        amount = r.choice(
            [b"\x01", b"", b"\x00" * 50 + b"\x01", b"\x7f" * 8, b"\xff" * 9, r.randbytes(r.randrange(1, 20))]
        )
        fields = (event_id, customer, amount)
        body = _varint(len(event_id)) + event_id + _varint(when)
        for field in fields[1:]:
            body += _varint(len(field)) + field
        return customer, self._header + body

    def _with_few_unknown_ids(self, value: bytes | None) -> bytes | None:
        """Each unknown id costs a question to the registry; a few thousand would only take long."""
        if value is None or len(value) < 5 or value[0] != 0 or value[:5] in self._known or value[:5] in self._others:
            return value
        if self._unknown_left:
            self._unknown_left -= 1
            return value
        return b"\x01" + value[1:]
