"""Two topics that one read model folds, on a real broker: every event counts once, also when engines are replaced."""

from __future__ import annotations

from collections import Counter, defaultdict
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import pytest

from balance_service.avro.codec import AvroCodec
from balance_service.avro.registry import SchemaRegistry
from balance_service.avro.schemas import subject_of
from balance_service.kafka import topic_specs
from balance_service.kafka.topics import Topics
from balance_service.model.converters import record_converter
from balance_service.model.folds import RunningSum
from balance_service.model.read_model import ReadModel
from balance_service.model.stream import Stream
from tests.integration.engines import running_engine, settings_for
from tests.integration.purchases import origin_of
from tests.support.kafka import Writer, read_topic
from tests.support.shipped import KNOWN
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalStack
    from balance_service.hosting.engine import Engine
    from balance_service.settings import Settings

pytestmark = pytest.mark.timeout(600)
_CATCH_UP_SECONDS = 200.0
_CUSTOMERS = 7


@dataclass
class OrderPlaced:
    orderId: str  # noqa: N815
    customerId: str  # noqa: N815
    amount: int


@dataclass
class PaymentTaken:
    customerId: str  # noqa: N815
    amount: int


@dataclass
class Account:
    customerId: str  # noqa: N815
    ordered: int
    paid: int


def declared(orders: str, payments: str) -> type[ReadModel]:
    """Returns a model of two topics, known to settings: orders are keyed by their id, payments by the customer."""

    class Accounts(ReadModel):
        name = f"accounts-{orders.partition('.')[0]}"
        sources = (Stream(orders, OrderPlaced), Stream(payments, PaymentTaken))
        key = "customerId"
        state = Account
        ordered = RunningSum("OrderPlaced.amount")
        paid = RunningSum("PaymentTaken.amount")

    KNOWN[Accounts.name] = Accounts()
    return Accounts


class Shop:
    """Writes orders and payments by turns, and knows what each customer should have."""

    def __init__(self, stack: LocalStack, settings: Settings, orders: str, payments: str) -> None:
        self._stack, self._settings = stack, settings
        self._topics = {OrderPlaced: orders, PaymentTaken: payments}
        self._number = 0
        self.expected: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def sell(self, count: int) -> None:
        with closing(SchemaRegistry.from_settings(self._settings)) as registry:
            for owner, topic in self._topics.items():
                schema = record_converter(owner).schema
                codec = AvroCodec(registry, subject_of(topic, schema), schema)
                with Writer(self._stack, topic) as writer:
                    for number in range(self._number, self._number + count):
                        key, record, field = self._made(owner, number)
                        writer.send(key, codec.encode(asdict(record)))
                        self.expected[record.customerId][field] += record.amount
        self._number += count

    def _made(self, owner: type, number: int) -> tuple[str, Any, str]:
        customer = f"customer-{number % _CUSTOMERS}"
        if owner is OrderPlaced:
            return f"o-{number}", OrderPlaced(f"o-{number}", customer, 10 + number), "ordered"
        return customer, PaymentTaken(customer, 1 + number), "paid"


def folded(engine: Engine, model: str) -> dict[str, dict[str, int]]:
    """Returns the states in the stores of the engine, without their key."""
    tasks = engine.stages[model]
    states = [state for task in tasks.all() if task.view for state in task.view.scan(b"", b"\xff", 1_000)]
    found = {key.decode(): dict(tasks.hosted.state(frame)) for key, frame in states}
    return {key: {name: state[name] for name in ("ordered", "paid")} for key, state in found.items()}


def wait_for(engine: Engine, model: str, shop: Shop) -> None:
    expected = {customer: dict(sums) for customer, sums in shop.expected.items()}
    eventually(
        lambda: folded(engine, model) == expected,
        lambda: f"all is folded: {folded(engine, model)}, not {expected}; {engine.problems}",
        _CATCH_UP_SECONDS,
    )


@pytest.mark.shows("outputs-once")
def test_events_of_two_topics_count_once_although_the_engine_is_replaced(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    orders, payments = f"{names['application_id']}.orders", f"{names['application_id']}.payments"
    model = declared(orders, payments).name
    settings = settings_for(stack, names, tmp_path / "first", models=(model,))
    Topics(settings).create(payments, 3, topic_specs.FOREVER)
    shop = Shop(stack, settings, orders, payments)
    with running_engine(settings) as engine:
        shop.sell(60)
        wait_for(engine, model, shop)
        shop.sell(60)
        # It stops in the middle of its work.
        eventually(lambda: len(folded(engine, model)) == _CUSTOMERS, "it has begun", _CATCH_UP_SECONDS)
    shop.sell(60)

    # Another one, without the stores of the first.
    with running_engine(settings_for(stack, names, tmp_path / "second", models=(model,))) as engine:
        wait_for(engine, model, shop)
        shop.sell(20)
        wait_for(engine, model, shop)

        rekeyed = engine.stages[model].hosted.source
        assert rekeyed.name == f"{settings.application_id}-{model}-by-customerId"
        assert rekeyed.partitions == max(3, engine.settings.partitions)
        passed_on = Counter(origin_of(message) for message in read_topic(stack, rekeyed.name))
        assert len(passed_on) == passed_on.total() == 2 * 200
        assert {origin.partition(":")[0] for origin in passed_on} == {orders, payments}
