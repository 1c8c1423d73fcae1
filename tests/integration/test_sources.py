"""Two topics that one read model folds, on a real broker, and a third one in its next version.

Every event counts once, also when engines are replaced.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import pytest

from balance_service.avro.codec import AvroCodec
from balance_service.avro.registry import SchemaRegistry
from balance_service.avro.schemas import subject_of
from balance_service.hosting.offline_rebuild import rebuild
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


@dataclass
class Refunded:
    orderId: str  # noqa: N815
    customerId: str  # noqa: N815
    amount: int


@dataclass
class Balanced(Account):
    refunded: int


class Shop:
    """Writes events of three topics, and knows what each customer should have.

    Orders and refunds are keyed by the order's id, payments by the customer.
    """

    def __init__(self, stack: LocalStack, settings: Settings) -> None:
        self._stack, self._settings = stack, settings
        names = {OrderPlaced: "orders", PaymentTaken: "payments", Refunded: "refunds"}
        self.topics = {owner: f"{settings.application_id}.{name}" for owner, name in names.items()}
        self._number = 0
        self.expected: defaultdict[str, Counter[str]] = defaultdict(Counter)
        orders, payments, refunds = (Stream(topic, owner) for owner, topic in self.topics.items())

        class Accounts(ReadModel):
            name = settings.models[0]
            sources = (orders, payments)
            key = "customerId"
            state = Account
            ordered = RunningSum("OrderPlaced.amount")
            paid = RunningSum("PaymentTaken.amount")

        class Next(ReadModel):
            name = settings.models[0]
            version = 2
            sources = (orders, payments, refunds)
            key = "customerId"
            state = Balanced
            ordered = RunningSum("OrderPlaced.amount")
            paid = RunningSum("PaymentTaken.amount")
            refunded = RunningSum("Refunded.amount")

        self.former, self.next = Accounts(), Next()

    def sell(self, count: int, *owners: type) -> None:
        with closing(SchemaRegistry.from_settings(self._settings)) as registry:
            for owner in owners or (OrderPlaced, PaymentTaken):
                topic = self.topics[owner]
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
        order = f"o-{number}"
        if owner is PaymentTaken:
            return customer, PaymentTaken(customer, 1 + number), "paid"
        return order, owner(order, customer, 10 + number), "ordered" if owner is OrderPlaced else "refunded"


def folded(engine: Engine, model: str) -> dict[str, dict[str, int]]:
    """Returns the states in the stores of the engine, without their key."""
    tasks = engine.stages_of(model)[-1]
    states = [state for task in tasks.all() if task.view for state in task.view.scan(b"", b"\xff", 1_000)]
    found = {key.decode(): dict(tasks.hosted.state(frame)) for key, frame in states}
    return {key: {name: state[name] for name in state if name != "customerId"} for key, state in found.items()}


def wait_for(engine: Engine, model: str, shop: Shop) -> None:
    expected = {customer: dict(sums) for customer, sums in shop.expected.items()}
    eventually(
        lambda: folded(engine, model) == expected,
        lambda: f"all is folded: {folded(engine, model)}, not {expected}; {engine.problems}",
        _CATCH_UP_SECONDS,
    )


@pytest.mark.shows("outputs-once")
def test_events_of_several_topics_count_once_although_the_engine_and_the_version_change(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    model = f"accounts-{names['application_id']}"
    settings = settings_for(stack, names, tmp_path / "first", models=(model,))
    shop = Shop(stack, settings)
    KNOWN[model] = shop.former
    Topics(settings).create(shop.topics[PaymentTaken], 3, topic_specs.FOREVER)
    with running_engine(settings) as engine:
        shop.sell(60)
        wait_for(engine, model, shop)
        shop.sell(60)
        # It stops in the middle of its work.
    shop.sell(60)

    # Another one, without the stores of the first.
    settings = settings_for(stack, names, tmp_path / "second", models=(model,))
    with running_engine(settings) as engine:
        wait_for(engine, model, shop)
        shop.sell(20)
        wait_for(engine, model, shop)
        rekeyed = engine.stages[model].hosted.source
        assert rekeyed.name == f"{settings.application_id}-{model}-by-customerId"
        assert rekeyed.partitions == max(3, settings.partitions)
        assert Counter(topics_of(stack, rekeyed.name)) == dict.fromkeys([*shop.topics.values()][:2], 200)

    # What it passed on before is not passed on again; the new source is read from its beginning.
    KNOWN[model] = shop.next
    Topics(settings).create(shop.topics[Refunded], 4, topic_specs.FOREVER)
    shop.sell(10, Refunded)
    rebuild(settings, shop.next, lambda _at, _of: None)
    with running_engine(settings) as engine:
        shop.sell(10, OrderPlaced, Refunded)
        wait_for(engine, model, shop)
        passed_on = dict(zip(shop.topics.values(), (210, 200, 20), strict=True))
        assert Counter(topics_of(stack, rekeyed.name)) == passed_on


def topics_of(stack: LocalStack, rekeyed: str) -> list[str]:
    """Returns the source of each record of a re-keyed topic, no two of one event."""
    origins = [origin_of(message) for message in read_topic(stack, rekeyed)]
    assert len(origins) == len({*origins})
    return [origin.partition(":")[0] for origin in origins]
