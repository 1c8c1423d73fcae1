"""`PosInvoice` events in bulk; three in four are invoices of members, one in four is delivered."""

from __future__ import annotations

import io
import multiprocessing
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING

import fastavro
import numpy as np
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from balance_service.avro.frames import frame_header
from balance_service.avro.registry import SchemaRegistry
from balance_service.avro.schemas import load_schema, subject_of
from balance_service.errors import BalanceServiceError
from bench.load import PRODUCER, create_topic, end_offsets, produce

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from balance_service.devtools.local.stack import LocalStack
    from bench.events import Integers

TOPIC = "pos"
_WORKERS = 2
_SLICE_INVOICES = 100_000
_STORES = 100
_MAX_CENTS = 100_000
_MEMBERS_IN_FOUR = 3
_DELIVERED_OF = 4
LINES = 2
"""Of each invoice."""
_FREE = Decimal("0.00")
_TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True)
class Invoices:
    """A topic of invoices, with known totals of members."""

    invoices: int
    members: int
    """The number of invoices of members."""
    cents: Integers = field(repr=False)
    """Card number → total of the members' invoices."""


def card_number(number: int) -> str:
    """The card of a customer; numbers start at 0."""
    return f"{4929_0000_0000_0000 + number}"


def deliveries(invoices: int) -> int:
    """How many of a topic's invoices are delivered."""
    return -(-invoices // _DELIVERED_OF)


def generate_invoices(stack: LocalStack, invoices: int, customers: int, advance: Callable[[int], None]) -> Invoices:
    """Create the topic and fill it.

    Args:
        advance: called with the number of newly acknowledged invoices.

    Raises:
        BalanceServiceError: not all invoices were acknowledged.
    """
    admin = AdminClient({"bootstrap.servers": stack.bootstrap_servers, "log_level": 0})
    create_topic(admin, TOPIC)
    schema_id = registered(stack, TOPIC, "PosInvoice")
    cents, members = np.zeros(customers, np.int64), 0
    with ProcessPoolExecutor(_WORKERS, multiprocessing.get_context("spawn")) as workers:
        slices = [
            workers.submit(
                _produce_slice, stack.bootstrap_servers, schema_id, at, min(_SLICE_INVOICES, invoices - at), customers
            )
            for at in range(0, invoices, _SLICE_INVOICES)
        ]
        for done in as_completed(slices):
            of_cards, of_members, produced = done.result()
            cents += of_cards
            members += of_members
            advance(produced)
    if (written := sum(end_offsets(admin, TOPIC).values())) != invoices:
        raise BalanceServiceError(f"the load is not whole: {written} of {invoices} invoices were written")
    return Invoices(invoices, members, cents)


def registered(stack: LocalStack, topic: str, record: str) -> int:
    """The id of a shipped schema on a topic."""
    registry, schema = SchemaRegistry(stack.schema_registry_url), load_schema(record)
    schema_id = registry.register(subject_of(topic, schema), schema)
    registry.close()
    return schema_id


def _produce_slice(
    bootstrap_servers: str, schema_id: int, start: int, count: int, customers: int
) -> tuple[Integers, int, int]:
    """Produce invoices; returns the members' cents by card, the number of members' invoices, and the number of all."""
    source = np.random.default_rng(start)
    numbers, cents = source.integers(0, customers, count), source.integers(1, _MAX_CENTS, count)
    are_members = source.integers(0, 4, count) < _MEMBERS_IN_FOUR
    producer = Producer({"bootstrap.servers": bootstrap_servers, "log_level": 0, **PRODUCER})
    for key, frame in _encoded(schema_id, start, numbers, cents, are_members):
        produce(producer, TOPIC, key, frame)
    if producer.flush(_TIMEOUT_SECONDS):
        raise BalanceServiceError("not all invoices of the load were acknowledged: is the broker still up?")
    sums = np.zeros(customers, np.int64)
    np.add.at(sums, numbers[are_members], cents[are_members])
    return sums, int(are_members.sum()), count


def _encoded(
    schema_id: int, start: int, numbers: Integers, cents: Integers, are_members: NDArray[np.bool_]
) -> Iterator[tuple[bytes, bytes]]:
    """Key and frame of one invoice for each card, amount and kind of customer."""
    header, schema = frame_header(schema_id), fastavro.parse_schema(load_schema("PosInvoice"))
    body = io.BytesIO()
    rows = zip(numbers.tolist(), cents.tolist(), are_members.tolist(), strict=True)
    for number, (card, amount, is_member) in enumerate(rows, start):
        store, total = f"store-{number % _STORES}", Decimal(amount).scaleb(-2)
        invoice = {
            "invoiceNumber": f"invoice-{number}",
            "storeId": store,
            "customerCardNo": card_number(card),
            "customerType": "PRIME" if is_member else "REGULAR",
            "deliveryType": "TAKEAWAY" if number % _DELIVERED_OF else "HOME-DELIVERY",
            "totalAmount": total,
            "lines": [
                {"itemCode": "i-1", "description": "one", "quantity": 1, "unitPrice": total, "amount": total},
                {"itemCode": "i-2", "description": "two", "quantity": 2, "unitPrice": _FREE, "amount": _FREE},
            ],
        }
        body.seek(0)
        body.truncate()
        fastavro.schemaless_writer(body, schema, invoice)
        yield store.encode(), header + body.getvalue()
