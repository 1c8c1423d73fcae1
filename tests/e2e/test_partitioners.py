"""Two instances on a topic of a librdkafka producer with its defaults; and one that expects another function."""

from __future__ import annotations

from contextlib import closing
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from confluent_kafka import Producer

from balance_service.avro.registry import SchemaRegistry
from balance_service.kafka.partitioner import partition_of
from balance_service.read_models.add_funds import FundsAddedSerializer
from balance_service.settings import load_settings
from tests.support.api import ADD_FUNDS, GET_BALANCE
from tests.support.service import PARTITIONS, application, new_instance, running
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from balance_service.devtools.local.stack import LocalInstance, LocalStack

CUSTOMERS = [f"c{n}" for n in range(40)]
SECONDS = 60.0
SAID = "keys lie where librdkafka's default puts them: configure their producers to use murmur2;"


@pytest.fixture(scope="module")
def settings() -> dict[str, str]:
    return application(BALANCE_PARTITIONER="crc32")


def send_by_default(stack: LocalStack, topic: str) -> None:
    """Adds 1.00 to each customer, by a producer of confluent-kafka with its default partitioner."""
    producer = Producer({"bootstrap.servers": stack.bootstrap_servers})
    registry = SchemaRegistry.from_settings(load_settings(schema_registry_url=stack.schema_registry_url))
    with closing(registry):
        serialize = FundsAddedSerializer(registry, topic)
        for customer in CUSTOMERS:
            producer.produce(topic, serialize(customer, Decimal("1.00")), customer.encode())
    assert producer.flush(20) == 0


def got(instance: LocalInstance, path: str, **parameters: str) -> httpx.Response:
    return httpx.get(f"{instance.url}{path}", params=parameters, timeout=20)


@pytest.mark.shows("partitioner")
def test_each_instance_answers_for_every_customer_of_a_librdkafka_producer(
    stack: LocalStack, settings: dict[str, str], pair: tuple[LocalInstance, LocalInstance]
) -> None:
    send_by_default(stack, settings["BALANCE_TOPIC"])

    def answers() -> list[str]:
        return [got(instance, GET_BALANCE, customerId=c).text for instance in pair for c in CUSTOMERS]

    eventually(lambda: answers() == ['{"amount":1.00}'] * 2 * len(CUSTOMERS), lambda: str(answers()), SECONDS)
    for instance in pair:
        assert got(instance, "/api/deadLetters").json()["deadLetters"] == []
        assert got(instance, "/health/ready").json()["problems"] == []


def test_a_command_writes_a_customer_where_the_producer_does(pair: tuple[LocalInstance, LocalInstance]) -> None:
    for number, (asked, other) in enumerate((pair, pair[::-1])):
        customer = f"new-{number}"
        body = {"customerId": customer, "amount": "2.00"}
        position = httpx.post(f"{asked.url}{ADD_FUNDS}", json=body, timeout=20).headers["Balance-Position"]

        assert int(position.split(":")[0]) == partition_of(customer.encode(), PARTITIONS, "crc32")
        answer = got(other, GET_BALANCE, customerId=customer, minPosition=position)
        assert answer.text == '{"amount":2.00}'


@pytest.mark.shows("partitioner")
def test_an_instance_that_expects_murmur2_names_the_function_of_the_producer_and_is_ready(stack: LocalStack) -> None:
    settings = application()
    with running(new_instance(stack, settings)) as (instance,):
        send_by_default(stack, settings["BALANCE_TOPIC"])

        def letters() -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = got(instance, "/api/deadLetters").json()["deadLetters"]
            return found

        strangers = [c for c in CUSTOMERS if partition_of(c.encode(), 2) != partition_of(c.encode(), 2, "crc32")]
        eventually(lambda: len(letters()) == len(strangers), lambda: str(letters()), SECONDS)
        assert {letter["cause"] for letter in letters()} == {"key-not-of-this-partition"}
        assert all(letter["detail"].startswith("by murmur2, the key belongs to partition ") for letter in letters())
        ready = got(instance, "/health/ready")
        assert ready.status_code == httpx.codes.OK
        assert [SAID in problem for problem in ready.json()["problems"]] == [True]
        assert any(SAID in problem for problem in got(instance, "/api/status").json()["problems"])
