"""Valid and invalid records as other applications produce them. Shares no code with the service.

A frame is 0x00, the schema id in four bytes, big-endian, and the Avro body.
"""

from __future__ import annotations

import io
import json
import struct
import urllib.request
from datetime import UTC, datetime
from decimal import Context, Decimal
from pathlib import Path
from typing import Any, NamedTuple

import fastavro

_SHIPPED = Path(__file__).parents[2] / "schemas" / "FundsAdded.avsc"
_UNKNOWN_SCHEMA_ID = 999_999
_CENT = Decimal("0.01")
_EXACT = Context(prec=60)

HEALING = b"healing-"
"""Key prefix of events that may be dead letters for a while."""
POISON = (
    "key-null",
    "value-null",
    "frame-missing",
    "magic-byte-unknown",
    "schema-id-unknown",
    "schema-incompatible",
    "body-undecodable",
    "field-null",
    "decimal-loses-digits",
    "key-is-not-customer-id",
    "customer-id-malformed",
    "key-not-of-this-partition",
)


class Source(NamedTuple):
    """A record to append; without a partition, the key decides."""

    key: bytes | None
    value: bytes | None
    partition: int | None = None
    idempotency_key: str | None = None


class Frames:
    """Registers schemas once for a topic and frames records with them. Thread-safe."""

    def __init__(self, registry_url: str, topic: str) -> None:
        shipped: dict[str, Any] = json.loads(_SHIPPED.read_text(encoding="utf-8"))
        funds_added = f"{shipped['namespace']}.{shipped['name']}"
        seen = {
            "type": "record",
            "name": "FundsSeen",
            "namespace": shipped["namespace"],
            "fields": [{"name": "who", "type": "string"}],
        }
        schemas = {
            "shipped": shipped,
            "wide": _with_amount(shipped, ["null", _decimal(38, 3)]),
            "inexact": _with_amount(shipped, "double"),
            "seen": seen,
        }
        self._schemas = {name: fastavro.parse_schema(schema) for name, schema in schemas.items()}
        self._registry_url = registry_url
        self._subject, self._shipped = f"{topic}-{funds_added}", shipped
        self._late = 0
        self._late_header = b""
        subjects = dict.fromkeys(schemas, f"{topic}-{funds_added}") | {"seen": f"{topic}-{seen['namespace']}.FundsSeen"}
        self._headers = {
            name: struct.pack(">bI", 0, _register(registry_url, subjects[name], schema))
            for name, schema in schemas.items()
        }

    def funds_added(self, customer: str, cents: int, schema: str = "shipped") -> bytes:
        """Returns a valid event; the schema `wide` holds more digits than the shipped one."""
        return self._frame(schema, customer, _EXACT.multiply(Decimal(cents), _CENT))

    def expect_late(self) -> None:
        """Makes `late` use a schema that is not registered yet."""
        self._late += 1
        # The registry assigns ids in sequence, and no other client registers schemas now.
        probe = _register(self._registry_url, f"{self._subject}-probe", self._of_late("probe"))
        self._late_header = struct.pack(">bI", 0, probe + 1)

    def register_late(self) -> None:
        """Registers the schema that `late` uses."""
        given = _register(self._registry_url, self._subject, self._of_late("late"))
        assert struct.pack(">bI", 0, given) == self._late_header, f"the late schema has id {given}"

    def late(self, customer: str, cents: int) -> bytes:
        """Returns an event whose schema is registered only later."""
        # The last field is null, the first branch of its union.
        return self._late_header + self.funds_added(customer, cents)[5:] + b"\0"

    def _of_late(self, name: str) -> dict[str, Any]:
        another = {"name": f"{name}{self._late}", "type": ["null", "string"], "default": None}
        return {**self._shipped, "fields": [*self._shipped["fields"], another]}

    def seen(self, customer: str) -> bytes:
        """Returns a record of another type, which no model folds."""
        return self._encode("seen", {"who": customer})

    def poison(self, cause: str, customer: str, elsewhere: int, cents: int) -> Source:
        """Returns a record that can never be applied.

        Args:
            cause: one of POISON.
            customer: the customer that the record names.
            elsewhere: a partition other than the customer's.
            cents: the amount.
        """
        key, good = customer.encode(), self.funds_added(customer, cents)
        match cause:
            case "key-null":
                return Source(None, good, elsewhere)
            case "value-null":
                return Source(key, None)
            case "frame-missing":
                return Source(key, good[:3])
            case "magic-byte-unknown":
                return Source(key, b"\x01" + good[1:])
            case "schema-id-unknown":
                return Source(key, struct.pack(">bI", 0, _UNKNOWN_SCHEMA_ID) + good[5:])
            case "schema-incompatible":
                return Source(key, self._frame("inexact", customer, cents / 100))
            case "body-undecodable":
                return Source(key, good[:9])
            case "field-null":
                return Source(key, self._frame("wide", customer, None))
            case "decimal-loses-digits":
                return Source(key, self._frame("wide", customer, Decimal("0.013")))
            case "key-is-not-customer-id":
                return Source(b"not-" + key, good)
            case "customer-id-malformed":
                return Source(key + b"\x07", self.funds_added(customer + "\x07", cents))
            case "key-not-of-this-partition":
                return Source(key, good, elsewhere)
        raise ValueError(cause)

    def _frame(self, schema: str, customer: str, amount: Decimal | float | None) -> bytes:
        event = {"id": "chaos", "occurredOn": datetime.now(UTC), "customerId": customer, "amount": amount}
        return self._encode(schema, event)

    def _encode(self, schema: str, record: dict[str, Any]) -> bytes:
        body = io.BytesIO()
        fastavro.schemaless_writer(body, self._schemas[schema], record)
        return self._headers[schema] + body.getvalue()


def _decimal(precision: int, scale: int) -> dict[str, Any]:
    return {"type": "bytes", "logicalType": "decimal", "precision": precision, "scale": scale}


def _with_amount(schema: dict[str, Any], amount: Any) -> dict[str, Any]:
    return {**schema, "fields": [*schema["fields"][:3], {"name": "amount", "type": amount}]}


def _register(registry_url: str, subject: str, schema: dict[str, Any]) -> int:
    request = urllib.request.Request(
        f"{registry_url}/subjects/{subject}/versions",
        json.dumps({"schema": json.dumps(schema), "schemaType": "AVRO"}).encode(),
        {"Content-Type": "application/vnd.schemaregistry.v1+json"},
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        return int(json.load(answer)["id"])
