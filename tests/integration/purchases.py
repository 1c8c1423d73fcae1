"""Invoices on a topic, renamed purchase models, and an independent recount of their outputs."""

from __future__ import annotations

import io
import json
from collections import defaultdict
from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any, NamedTuple

import fastavro

from balance_service.avro.schemas import full_name, load_schema
from balance_service.model.conditions import col
from balance_service.model.stream import Stream
from balance_service.read_models.purchases import Purchases
from balance_service.read_models.rewards import Rewards
from tests.support.kafka import Writer, read_topic
from tests.support.shipped import KNOWN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from confluent_kafka import Message

    from balance_service.devtools.local.stack import LocalStack
    from balance_service.model.read_model import ReadModel


class Named(NamedTuple):
    """The shipped purchase models on topics of their own."""

    pos: str
    notifications: str
    shipments: str
    hadoop: str
    rewards: type[ReadModel]
    purchases: type[ReadModel]


def named(application_id: str) -> Named:
    """Returns the models of an application and makes them known to settings."""
    pos, notifications, shipments, hadoop = (
        f"{application_id}.{topic}" for topic in ("pos", "notifications", "shipments", "hadoop")
    )
    rewards = type(
        "NamedRewards",
        (Rewards,),
        {
            "__module__": __name__,
            "__qualname__": f"{application_id}-rewards",
            "name": f"rewards-{application_id}",
            "source": Stream(pos, "PosInvoice")
            .where(col("customerType") == "PRIME")
            .by("customerCardNo", unchanged=True),
            "emits": replace(Rewards.emits, topic=notifications),
            # Only one model may serve a path.
            "queries": None,
        },
    )
    purchases = type(
        "NamedPurchases",
        (Purchases,),
        {
            "__module__": __name__,
            "__qualname__": f"{application_id}-purchases",
            "name": f"purchases-{application_id}",
            "source": Stream(pos, "PosInvoice"),
            "emits": tuple(
                replace(emit, topic=topic) for emit, topic in zip(Purchases.emits, (shipments, hadoop), strict=True)
            ),
        },
    )
    made = Named(pos, notifications, shipments, hadoop, rewards, purchases)
    KNOWN.update({model.name: model() for model in (made.rewards, made.purchases)})
    return made


def invoice(number: int, card: str, amount: str, *, kind: str = "PRIME", delivery: str = "TAKEAWAY") -> dict[str, Any]:
    """Returns an invoice with two lines."""
    line = {"description": "thing", "quantity": 1, "unitPrice": Decimal(amount) / 2, "amount": Decimal(amount) / 2}
    return {
        "invoiceNumber": f"i{number}",
        "storeId": f"store-{number % 5}",
        "customerCardNo": card,
        "customerType": kind,
        "deliveryType": delivery,
        "totalAmount": Decimal(amount),
        "customerName": "Ann",
        "address": None,
        "lines": [{**line, "itemCode": "a"}, {**line, "itemCode": "b"}],
    }


class Till(Writer):
    """Produces invoices."""

    def __init__(self, stack: LocalStack, topic: str, **config: Any) -> None:
        super().__init__(stack, topic, **config)
        schema = load_schema("PosInvoice")
        self._schema = fastavro.parse_schema(schema)
        self._id = self.register(f"{topic}-{full_name(schema)}", schema)

    def sell(self, *invoices: dict[str, Any], **where: Any) -> None:
        """Appends invoices with their store as key, and flushes."""
        for sold in invoices:
            self.send(sold["storeId"], self.frame_of(sold), **where)
        assert self.producer.flush(20) == 0

    def frame_of(self, sold: dict[str, Any]) -> bytes:
        """Returns the framed value of an invoice."""
        body = io.BytesIO()
        body.write(b"\0" + self._id.to_bytes(4, "big"))
        fastavro.schemaless_writer(body, self._schema, sold)
        return body.getvalue()


def decoded(till: Till, message: Message) -> dict[str, Any]:
    """Decodes the value of a record with its own schema."""
    value = message.value()
    assert value is not None
    schema = json.loads(str(till.registry.get_schema(int.from_bytes(value[1:5], "big")).schema_str))
    record = fastavro.schemaless_reader(io.BytesIO(value[5:]), fastavro.parse_schema(schema), None)
    assert isinstance(record, dict)
    return record


def origin_of(message: Message) -> str:
    """Returns the origin header of a record."""
    (origin,) = [value for name, value in list(message.headers() or ()) if name == "origin"]
    assert isinstance(origin, bytes)
    return origin.decode()


def points_of(invoices: Sequence[dict[str, Any]]) -> dict[str, Decimal]:
    """Returns the points of each card, recounted from invoices."""
    points: dict[str, Decimal] = defaultdict(Decimal)
    for sold in invoices:
        if sold["customerType"] == "PRIME":
            points[sold["customerCardNo"]] += sold["totalAmount"] * Decimal("0.02")
    return dict(points)


def assert_notified_once(stack: LocalStack, till: Till, models: Named, rekeyed: str) -> int:
    """Recounts the invoices on the source and compares each hop record by record.

    Returns:
        The number of notifications.
    """
    sold = [(m, decoded(till, m)) for m in read_topic(stack, models.pos)]
    prime = {f"{models.pos}:{m.partition()}:{m.offset()}": m for m, record in sold if record["customerType"] == "PRIME"}
    passed = read_topic(stack, rekeyed)
    assert sorted(map(origin_of, passed)) == sorted(prime)
    for message in passed:
        source = prime[origin_of(message)]
        assert (message.value(), message.timestamp()) == (source.value(), source.timestamp())
    totals: dict[str, Decimal] = defaultdict(Decimal)
    expected = {}
    for message in passed:
        record = decoded(till, message)
        card = record["customerCardNo"]
        assert message.key() == card.encode()
        earned = record["totalAmount"] * Decimal("0.02")
        totals[card] += earned
        expected[f"{rekeyed}:{message.partition()}:{message.offset()}"] = {
            "invoiceNumber": record["invoiceNumber"],
            "customerCardNo": card,
            "totalAmount": record["totalAmount"],
            "earnedLoyaltyPoints": earned,
            "totalLoyaltyPoints": totals[card],
        }
    notified = read_topic(stack, models.notifications)
    assert len(notified) == len(expected)
    assert {origin_of(m): decoded(till, m) for m in notified} == expected
    return len(notified)


def assert_shipped_once(stack: LocalStack, till: Till, models: Named) -> int:
    """Recounts the invoices on the source and compares shipments and masked lines record by record.

    Returns:
        The number of shipments.
    """
    sold = {}
    for message in read_topic(stack, models.pos):
        if (message.value() or b"").startswith(b"\0"):
            sold[f"{models.pos}:{message.partition()}:{message.offset()}"] = (message, decoded(till, message))
    delivered = {o: m for o, (m, record) in sold.items() if record["deliveryType"].lower() == "home-delivery"}
    shipped = read_topic(stack, models.shipments)
    assert sorted(map(origin_of, shipped)) == sorted(delivered)
    for message in shipped:
        source = delivered[origin_of(message)]
        assert (message.key(), message.value(), message.timestamp()) == (
            source.key(),
            source.value(),
            source.timestamp(),
        )
    lines = sorted((o, str(line)) for o, (_, record) in sold.items() for line in masked(record))
    assert sorted((origin_of(m), str(decoded(till, m))) for m in read_topic(stack, models.hadoop)) == lines
    return len(shipped)


def masked(sold: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the expected HadoopRecord of each line of an invoice."""
    return [
        {
            "invoiceNumber": sold["invoiceNumber"],
            "storeId": sold["storeId"],
            "customerCardDigits": sold["customerCardNo"][-4:],
            "customerType": sold["customerType"],
            "deliveryType": sold["deliveryType"],
            "itemCode": line["itemCode"],
            "description": line["description"],
            "quantity": line["quantity"],
            "unitPrice": line["unitPrice"],
            "amount": line["amount"],
        }
        for line in sold["lines"]
    ]
