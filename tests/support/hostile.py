"""Records whose schemas and bytes are made to stop a decoder, each with a field before the fields of `FundsAdded`."""

from __future__ import annotations

import io
import random
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import fastavro

from balance_service.avro.schemas import load_schema

FUNDS = load_schema("FundsAdded")
ADDED = {"id": "e", "occurredOn": datetime(2026, 1, 2, tzinfo=UTC), "customerId": "c", "amount": Decimal("1.00")}
FIXED_0 = {"type": "fixed", "name": "F0", "size": 0}
_MANY = 1 << 20
_PRIMITIVES = ("null", "boolean", "int", "long", "float", "double", "bytes", "string")


@dataclass(frozen=True)
class Hostile:
    """A record of `FundsAdded`, whose writer's schema has the field `extra`."""

    name: str
    schema: dict[str, Any]
    body: bytes


def number(value: int) -> bytes:
    """Returns an Avro int or long."""
    bits, out = (value << 1) ^ (value >> 63), bytearray()
    while bits > 127:
        out.append(bits & 127 | 128)
        bits >>= 7
    return bytes([*out, bits])


def funds_with(extra: Any) -> dict[str, Any]:
    """Returns a version of `FundsAdded` with another field, before its own."""
    return {**FUNDS, "fields": [{"name": "extra", "type": extra}, *FUNDS["fields"]]}


def added() -> bytes:
    """Returns the body of a `FundsAdded`."""
    body = io.BytesIO()
    fastavro.schemaless_writer(body, FUNDS, ADDED)
    return body.getvalue()


def record(name: str, *kinds: Any) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": [{"name": f"f{i}", "type": kind} for i, kind in enumerate(kinds)]}


def array(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


def doubled(times: int, inner: Any) -> dict[str, Any]:
    """Returns a record that holds a power of two of these values."""
    kind = record("D0", inner)
    for level in range(1, times + 1):
        kind = record(f"D{level}", kind, f"D{level - 1}")
    return kind


def wrapped(levels: int, inner: Any) -> dict[str, Any]:
    """Returns records of one field within each other."""
    for level in range(levels):
        inner = record(f"W{level}", inner)
    return inner  # type: ignore[no-any-return]


def corpus() -> list[Hostile]:
    """Returns the records that stopped a partition once, and their kin."""
    block = number(_MANY) + b"\0"
    tree = {"type": "record", "name": "N", "fields": [{"name": "next", "type": ["null", "N"]}]}
    twins = {"type": "record", "name": "T", "fields": [{"name": "l", "type": "T"}, {"name": "r", "type": "T"}]}
    unread = {
        "doubled over a fixed of no bytes": (doubled(60, FIXED_0), b""),
        "doubled over null": (doubled(60, "null"), b""),
        "doubled over an empty record": (doubled(60, record("E")), b""),
        "arrays of fixed of no bytes": (array(array(FIXED_0)), number(400) + block * 400 + b"\0"),
        "arrays of empty records": (array(array(record("E"))), number(400) + block * 400 + b"\0"),
        "arrays of records of nothing": (array(array(record("E", "null", FIXED_0))), number(9) + block * 9 + b"\0"),
        "an array of 2^62 nulls": (array("null"), number(1 << 62) + b"\0"),
        "a million blocks of no items": (array("null"), (number(-1) + number(1)) * 100_000 + b"\0"),
        "an array that announces 2^40 numbers": (array("long"), number(1 << 40)),
        "a map that announces 2^40 entries": ({"type": "map", "values": "null"}, number(1 << 40)),
        "a text of 16 MiB that is not there": ("string", number(1 << 24)),
        "bytes of 2 GiB that are not there": ("bytes", number((1 << 31) - 1)),
        "bytes of less than none": ("bytes", number(-5)),
        "a fixed of 2 GiB that is not there": ({"type": "fixed", "name": "F", "size": (1 << 31) - 1}, b""),
        "a record within itself": (tree, number(1) * 100_000 + b"\0"),
        "records that never end": (twins, b""),
        "an array of records that never end": (array(twins), number(_MANY) + b"\0"),
        "ten thousand nulls with each number": (
            array(record("R", "int", *["null"] * 10_000)),
            number(500_000) + bytes(500_000) + b"\0",
        ),
        "a hundred wrappers of each number": (
            array(wrapped(100, "int")),
            number(500_000) + bytes(500_000) + b"\0",
        ),
    }
    return [Hostile(name, funds_with(kind), body + added()) for name, (kind, body) in unread.items()]


def generated(seed: int, count: int) -> list[Hostile]:
    """Returns records of random schemas with random bytes; lengths and counts are often those of more than follows."""
    return [_generated(random.Random(f"{seed}/{n}"), n) for n in range(count)]


def _generated(chance: random.Random, n: int) -> Hostile:
    kind = _kind(chance, 4, [])
    body = _valid(chance, kind, {}) if chance.random() < 0.5 else _noise(chance)
    cut = chance.randrange(len(body) + 1) if chance.random() < 0.3 else len(body)
    return Hostile(f"generated {n}", funds_with(kind), body[:cut] + added())


def _kind(chance: random.Random, depth: int, names: list[str]) -> Any:
    """Returns a random type; types may take no bytes, and name those that are defined before them."""
    if depth == 0 or chance.random() < 0.3:
        # Types that name each other without end would make values without end.
        return chance.choice([*_PRIMITIVES, *names[:5]])
    match chance.choice(["array", "map", "union", "record", "fixed", "enum"]):
        case "array":
            return array(_kind(chance, depth - 1, names))
        case "map":
            return {"type": "map", "values": _kind(chance, depth - 1, names)}
        case "union":
            return [member for member in _PRIMITIVES if chance.random() < 0.3] or ["null"]
        case "record":
            name = f"G{len(names)}x{chance.randrange(1 << 30)}"
            fields = [_kind(chance, depth - 1, names) for _ in range(chance.randrange(4))]
            names.append(name)
            return record(name, *fields)
        case other:
            name = f"G{len(names)}x{chance.randrange(1 << 30)}"
            names.append(name)
            more = {"size": chance.choice([0, 0, 1, 16])} if other == "fixed" else {"symbols": ["A", "B"]}
            return {"type": other, "name": name, **more}


def _valid(chance: random.Random, kind: Any, named: dict[str, Any]) -> bytes:
    """Returns the bytes of a value of a type; a count may be that of many more items."""
    if isinstance(kind, str) and kind in named:
        return _valid(chance, named[kind], named)
    if isinstance(kind, list):
        member = chance.randrange(len(kind))
        return number(member) + _valid(chance, kind[member], named)
    if isinstance(kind, dict):
        if "name" in kind:
            named[kind["name"]] = kind
        match kind["type"]:
            case "record":
                return b"".join(_valid(chance, field["type"], named) for field in kind["fields"])
            case "fixed":
                return chance.randbytes(kind["size"])
            case "enum":
                return number(chance.randrange(2))
            case "array" | "map" as plain:
                count = chance.randrange(3)
                inner, key = kind.get("items", kind.get("values")), number(1) + b"k" if plain == "map" else b""
                items = b"".join(key + _valid(chance, inner, named) for _ in range(count))
                if chance.random() < 0.2:
                    count = chance.choice([_MANY, 1 << 31, 1 << 62])
                return number(count) + items + b"\0" if count else b"\0"
    sizes = {"null": 0, "boolean": 1, "float": 4, "double": 8}
    if kind in sizes:
        return bytes([1]) if kind == "boolean" else chance.randbytes(sizes[kind])
    if kind in ("int", "long"):
        return number(chance.randrange(-(1 << 31), 1 << 31))
    length = chance.randrange(5)
    return number(chance.choice([length, length, length, 1 << 24])) + b"a" * length


def _noise(chance: random.Random) -> bytes:
    parts = [chance.randbytes(chance.randrange(6)), number(chance.choice([0, 1, _MANY, 1 << 31, 1 << 62, -1, -_MANY]))]
    return b"".join(chance.choice(parts) for _ in range(chance.randrange(1, 12)))
