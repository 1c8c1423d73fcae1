"""Versions: a corrected read model is built next to the serving one, by rolling upgrade, and without its old class."""

from __future__ import annotations

import json
from collections import Counter
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from balance_service.avro.codec import AvroCodec
from balance_service.avro.registry import SchemaRegistry
from balance_service.avro.schemas import load_schema, subject_of
from balance_service.client import Client
from balance_service.devtools.local.stack import LocalStack
from tests.integration.purchases import Till, invoice
from tests.support.commands import run
from tests.support.kafka import read_topic
from tests.support.service import application, new_instance, on, running, status
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalInstance

# Each test starts two instances several times.
pytestmark = pytest.mark.timeout(600)

_CARDS = 20
_SOLD = Decimal("10.00")
_SHARE, _CORRECTED_SHARE = Decimal("0.02"), Decimal("0.03")
_CORRECTED = '''
from decimal import Decimal

from balance_service.read_models import rewards


class CorrectedRewards(rewards.Rewards):
    """Three points of a hundred, as promised to the customers."""

    version = 2

    def transform(self, invoices):
        points = invoices["totalAmount"] * Decimal("0.03")
        return invoices.select("invoiceNumber", "customerCardNo", "totalAmount", points.alias("points"))
'''


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[LocalStack]:
    """A stack of its own, because the shipped models have fixed topic names. It has the corrected model."""
    with LocalStack(tmp_path / "stack") as stack:
        (stack.data_dir / "corrected.py").write_text(_CORRECTED)
        yield stack


class Shop:
    """Sells at one price to some cards, and knows what the read model should say."""

    def __init__(self, stack: LocalStack, till: Till) -> None:
        self.sold = 0
        self._stack = stack
        self._till = till

    def sell(self, count: int) -> None:
        for number in range(self.sold, self.sold + count):
            self._till.sell(invoice(number, f"card-{number % _CARDS}", str(_SOLD)))
        self.sold += count

    def points(self, share: Decimal, sold: int | None = None) -> Mapping[str, Decimal]:
        """Returns the points of each card after a number of sales, by default all."""
        numbers = range(self.sold if sold is None else sold)
        cards = Counter(f"card-{number % _CARDS}" for number in numbers)
        return {card: count * _SOLD * share for card, count in cards.items()}

    def sent(self) -> dict[str, list[Decimal]]:
        """Returns the points of the notifications for each invoice."""
        schema, registry = load_schema("Notification"), SchemaRegistry(self._stack.schema_registry_url)
        codec = AvroCodec(registry, subject_of("notifications", schema), schema)
        found: dict[str, list[Decimal]] = {}
        for message in read_topic(self._stack, "notifications"):
            value = codec.decode(message.value() or b"")
            found.setdefault(value["invoiceNumber"], []).append(value["earnedLoyaltyPoints"])
        registry.close()
        return found

    def all_sent_once(self) -> bool:
        sent = self.sent()
        assert [number for number, points in sent.items() if len(points) > 1] == []
        return len(sent) == self.sold


def points(instance: LocalInstance, **parameters: Any) -> dict[str, Decimal]:
    """Returns the points of each card."""
    url = f"{instance.url}/api/models/rewards/entries"
    answer = httpx.get(url, params={"limit": 1000, **parameters}, timeout=30)
    assert answer.status_code == 200, answer.text
    entries = json.loads(answer.text, parse_float=Decimal)["entries"]
    return {entry["key"]: Decimal(entry["value"]["points"]) for entry in entries}


def wait_for(instances: Sequence[LocalInstance], expected: Mapping[str, Decimal], **parameters: Any) -> None:
    """Waits until every instance answers so."""
    for instance in instances:
        eventually(
            partial(_answers, instance, expected, parameters),
            lambda: f"{points(instances[0], **parameters)}, not {expected}",
            60,
        )


def _answers(instance: LocalInstance, expected: Mapping[str, Decimal], parameters: Mapping[str, Any]) -> bool:
    return points(instance, **parameters) == expected


def _is_missed(instance: LocalInstance, what: str) -> bool:
    return what in str(told(instance)["problem"])


def told(instance: LocalInstance) -> dict[str, Any]:
    with Client(instance.url) as client:
        return client.generations("rewards")


def differences(*instances: LocalInstance) -> list[dict[str, Any]]:
    found = []
    for instance in instances:
        with Client(instance.url) as client:
            found += client.differences("rewards")
    return found


def states(instance: LocalInstance) -> dict[int, tuple[int, str]]:
    return {one["generation"]: (one["version"], one["status"]) for one in told(instance)["generations"]}


@pytest.mark.shows("versions")
def test_a_rolling_upgrade_builds_a_new_version_next_to_the_serving_one(stack: LocalStack) -> None:
    settings = application(BALANCE_MODELS="rewards")
    instances = [new_instance(stack, settings) for _ in range(2)]
    environment = on(stack, settings) | {"BALANCE_APPLICATION_SERVER": instances[0].url.removeprefix("http://")}
    with running(*instances), Till(stack, "pos") as till:
        shop = Shop(stack, till)
        shop.sell(200)
        eventually(lambda: points(instances[0]) == shop.points(_SHARE), "all invoices are folded", 60)

        instances[0].stop()
        instances[0].environment["BALANCE_MODELS"] = "rewards,corrected:CorrectedRewards"
        instances[0].launch()
        instances[0].wait_ready()
        eventually(lambda: states(instances[0]) == {1: (1, "serving"), 2: (2, "building")}, "version 2 is built", 60)
        address = instances[1].url.removeprefix("http://")
        for instance in instances:
            eventually(partial(_is_missed, instance, f"{address} without version 2"), "it waits", 30)
        wait_for(instances, shop.points(_SHARE))
        shop.sell(100)

        instances[1].stop()
        instances[1].environment["BALANCE_MODELS"] = "rewards,corrected:CorrectedRewards"
        instances[1].launch()
        instances[1].wait_ready()
        eventually(lambda: states(instances[1])[2] == (2, "ready"), "version 2 has caught up", 90)
        # It does not serve by itself.
        shop.sell(50)
        eventually(shop.all_sent_once, "all notifications are sent", 60)
        assert {tuple(sent) for sent in shop.sent().values()} == {(_SOLD * _SHARE,)}
        wait_for(instances, shop.points(_SHARE))
        wait_for(instances, shop.points(_CORRECTED_SHARE), generation=2)
        assert told(instances[0])["comparison"]["different"] == _CARDS
        # Those that know them are the owners, after a move once they have compared again.
        eventually(lambda: len(differences(*instances)) == _CARDS, lambda: str(differences(*instances)), 60)
        assert all(3 * one["serving"]["points"] == 2 * one["building"]["points"] for one in differences(*instances))

        switched = run(environment, "switch", "rewards", "--reason", "the promise is three percent")
        assert switched.code == 0, switched
        # The outputs switch a moment after the answers.
        eventually(lambda: told(instances[0])["action"] == "settle", "version 2 sends the outputs", 60)
        before = shop.sold
        shop.sell(50)
        wait_for(instances, shop.points(_CORRECTED_SHARE))
        eventually(shop.all_sent_once, "all notifications are sent", 60)
        since = {sent for number, (sent,) in shop.sent().items() if int(number[1:]) >= before}
        assert since == {_SOLD * _CORRECTED_SHARE}

        assert run(environment, "switch", "rewards", "--reason", "back").code == 0
        wait_for(instances, shop.points(_SHARE))


@pytest.mark.shows("versions")
def test_without_the_old_class_the_answers_stand_still_until_the_new_version_serves(stack: LocalStack) -> None:
    settings = application(BALANCE_MODELS="rewards")
    instances = [new_instance(stack, settings) for _ in range(2)]
    environment = on(stack, settings) | {"BALANCE_APPLICATION_SERVER": instances[0].url.removeprefix("http://")}
    with running(*instances), Till(stack, "pos") as till:
        shop = Shop(stack, till)
        shop.sell(200)
        eventually(lambda: points(instances[0]) == shop.points(_SHARE), "all invoices are folded", 60)
        for instance in instances:
            instance.stop()
            instance.environment["BALANCE_MODELS"] = "corrected:CorrectedRewards"
        for instance in instances:
            instance.launch()
        for instance in instances:
            instance.wait_ready()
        stood_at = shop.sold
        shop.sell(100)
        eventually(lambda: states(instances[0]) == {1: (1, "serving"), 2: (2, "ready")}, "version 2 has caught up", 90)
        assert told(instances[0])["comparison"]["different"] == _CARDS
        for instance in instances:
            assert points(instance) == shop.points(_SHARE, stood_at)
            # It does not go beyond where version 1 stands, whose outputs would be sent by neither.
            assert points(instance, generation=2) == shop.points(_CORRECTED_SHARE, stood_at)
            answer = httpx.get(f"{instance.url}/api/models/rewards/keys/card-1", timeout=30)
            assert int(answer.headers["Balance-Lag"]) > 0
        reasons = {task["reason"] for instance in instances for task in status(instance)["tasks"] if task["reason"]}
        assert ["has version 1, and BALANCE_MODELS has only 2 here" in reason for reason in reasons] == [True]
        assert len(shop.sent()) == stood_at
        back = run(environment, "switch", "rewards", "--to", "1", "--reason", "no")
        assert (back.code, "serves already" in back.stderr) == (1, True)

        for victim in instances:
            victim.kill()
            victim.launch()
            victim.wait_ready()
        switched = run(environment, "switch", "rewards", "--reason", "the promise is three percent")
        assert switched.code == 0, switched
        wait_for(instances, shop.points(_CORRECTED_SHARE))
        eventually(shop.all_sent_once, "all notifications are sent", 60)
        by_number = {int(number[1:]): sent for number, (sent,) in shop.sent().items()}
        assert {by_number[number] for number in range(stood_at)} == {_SOLD * _SHARE}
        assert {by_number[number] for number in range(stood_at, shop.sold)} == {_SOLD * _CORRECTED_SHARE}
        refused = run(environment, "switch", "rewards", "--reason", "back")
        assert (refused.code, "without version 1 of 'rewards'" in refused.stderr) == (1, True)

        # The image is rolled back: the operator switches first, and version 1 folds and sends on.
        for instance in instances:
            instance.stop()
            instance.environment["BALANCE_MODELS"] = "rewards"
        for instance in instances:
            instance.launch()
        for instance in instances:
            instance.wait_ready()
        assert run(environment, "switch", "rewards", "--to", "1", "--reason", "rolled back").code == 0
        shop.sell(50)
        wait_for(instances, shop.points(_SHARE))
        eventually(shop.all_sent_once, "all notifications are sent", 60)


def test_a_new_version_serves_by_itself_where_that_is_set(stack: LocalStack) -> None:
    settings = application(BALANCE_MODELS="rewards", BALANCE_SWITCH="auto")
    instance = new_instance(stack, settings)
    with running(instance), Till(stack, "pos") as till:
        shop = Shop(stack, till)
        shop.sell(100)
        eventually(lambda: points(instance) == shop.points(_SHARE), "all invoices are folded", 60)
        instance.stop()
        instance.environment["BALANCE_MODELS"] = "corrected:CorrectedRewards"
        instance.launch()
        instance.wait_ready()

        eventually(lambda: states(instance).get(2) == (2, "serving"), "version 2 serves", 90)
        eventually(lambda: points(instance) == shop.points(_CORRECTED_SHARE), "version 2 answers", 60)
