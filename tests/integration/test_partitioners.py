"""Producers with their defaults: their functions, the sentence about a wrong declaration, and the rebuild after it."""

from __future__ import annotations

from contextlib import closing
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer

from balance_service.avro.registry import SchemaRegistry
from balance_service.devtools.produce import produce_load
from balance_service.engine.dead_letter import Status
from balance_service.engine.decisions import Decision, Verdict
from balance_service.engine.records import MISPLACED
from balance_service.hosting.offline_rebuild import rebuild
from balance_service.kafka.clients import producer_config
from balance_service.kafka.log_reader import reader_to_end
from balance_service.kafka.partitioner import Partitioning
from balance_service.kafka.topic_specs import FOREVER
from balance_service.kafka.topics import Topics
from balance_service.read_models.add_funds import FundsAddedPublisher, FundsAddedSerializer
from balance_service.read_models.balance import Balance
from balance_service.settings import load_settings
from balance_service.spark.session import start_spark
from tests.integration.engines import catch_up, hosted, running_engine, settings_for, tasks_of
from tests.support.shipped import jvm_scratch
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

    from balance_service.devtools.local.stack import LocalStack
    from balance_service.engine.dead_letter import Letter
    from balance_service.hosting.engine import Engine
    from balance_service.model.stream import Partitioner
    from balance_service.settings import Settings

CUSTOMERS = [f"c{n}" for n in range(60)]
PARTITIONS = range(2)
BY_MURMUR2, BY_CRC32 = Partitioning(2, "murmur2"), Partitioning(2, "crc32")
MISPLACED_CUSTOMERS = [c for c in CUSTOMERS if BY_MURMUR2.of(c.encode()) != BY_CRC32.of(c.encode())]
SECONDS = 60.0


def send_by_default(settings: Settings, amount: str) -> None:
    """Adds an amount to each customer, by a producer of confluent-kafka with its default partitioner."""
    producer = Producer({"bootstrap.servers": settings.bootstrap_servers})
    with closing(SchemaRegistry.from_settings(settings)) as registry:
        serialize = FundsAddedSerializer(registry, settings.topic)
        for customer in CUSTOMERS:
            producer.produce(settings.topic, serialize(customer, Decimal(amount)), customer.encode())
    assert producer.flush(20) == 0


def letters_of(engine: Engine) -> dict[tuple[int, int], Letter]:
    """Returns the dead letters by partition and offset."""
    views = {p: task.view for p in PARTITIONS if (task := tasks_of(engine).task(p)) is not None}
    return {
        (partition, letter.offset): letter
        for partition, view in views.items()
        if view is not None
        for letter in hosted(engine).processor.letters.page(view, 0, 1_000)
    }


def balances(engine: Engine) -> dict[str, Decimal]:
    """Returns the balance of each customer in the partition where queries look for it."""
    found: dict[str, Decimal] = {}
    for customer in CUSTOMERS:
        task = tasks_of(engine).task(hosted(engine).partitioning.of(customer.encode()))
        assert task is not None
        view = task.view
        assert view is not None
        frame = view.get(customer.encode())
        if frame is not None:
            found[customer] = hosted(engine).state(frame)["amount"]
    return found


def are_halted(engine: Engine) -> bool:
    return {task.state for task in tasks_of(engine).snapshots()} == {"HALTED"}


@pytest.mark.shows("partitioner")
def test_a_topic_of_librdkafkas_default_is_explained_and_a_rebuild_with_its_partitioner_counts_every_event(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    by_murmur2 = settings_for(stack, names, tmp_path / "state")
    by_crc32 = by_murmur2.model_copy(update={"partitioner": "crc32"})
    with running_engine(by_murmur2) as engine:
        send_by_default(by_murmur2, "1.00")
        send_by_default(by_murmur2, "2.00")
        catch_up(engine)
        assert balances(engine) == {c: Decimal("3.00") for c in CUSTOMERS if c not in MISPLACED_CUSTOMERS}
        letters = letters_of(engine)
        assert {letter.cause for letter in letters.values()} == {MISPLACED}
        assert len(letters) == 2 * len(MISPLACED_CUSTOMERS)
        for said in (hosted(engine).misplaced, [*letters.values()][-1].detail):
            assert "keys lie where librdkafka's default puts them: configure their producers to use murmur2;" in said
            assert 'only if all producers use crc32, declare partitioner="crc32"' in said
        (partition, discarded), letter = next(iter(letters.items()))
        assert letter.key is not None
        assert tasks_of(engine).decide(partition, [discarded], Verdict(Decision.DISCARD, "me", "a test")) == {}

    # With the store, and with the changelog alone.
    for settings in (by_crc32, by_crc32.model_copy(update={"state_dir": tmp_path / "empty"})):
        with running_engine(settings) as engine:
            eventually(partial(are_halted, engine), lambda: "every task is halted", SECONDS)
            reasons = {task.reason for task in tasks_of(engine).snapshots()}
            assert len(reasons) == 1
            assert "were folded with partitioner murmur2, and it is crc32 now" in reasons.pop()

    rebuilt = rebuild(by_crc32, Balance(), lambda _done, _all: None)

    assert rebuilt.done.applied == 2 * len(CUSTOMERS) - 1
    with running_engine(by_crc32) as engine:
        catch_up(engine)
        lost = {letter.key.decode(): Decimal("2.00")}
        assert balances(engine) == {c: Decimal("3.00") for c in CUSTOMERS} | lost
        assert hosted(engine).misplaced == ""
        statuses = {at: letter.status for at, letter in letters_of(engine).items()}
        assert statuses == dict.fromkeys(letters, Status.APPLIED) | {(partition, discarded): Status.DISCARDED}


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    session = start_spark(load_settings(), jvm_scratch(), 1)
    yield session
    session.stop()


class Sent:
    """A topic of seven partitions, and the keys of its records by the partition that their producer chose."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.topics = Topics(settings)
        self.topic = self.topics.create(f"{settings.topic}-placed", 7, FOREVER)

    def by_librdkafka(self, **config: str) -> None:
        producer = Producer({"bootstrap.servers": self.settings.bootstrap_servers, **config})
        for key in KEYS:
            producer.produce(self.topic.name, b"v", key)
        assert producer.flush(20) == 0

    def places(self) -> dict[bytes, int]:
        with reader_to_end(self.settings, self.topics, self.topic) as reader:
            return {message.key() or b"": message.partition() or 0 for message in reader}


KEYS = [f"c{n}".encode() for n in range(200)]


@pytest.fixture
def sent(stack: LocalStack, names: dict[str, str], tmp_path: Path) -> Sent:
    return Sent(settings_for(stack, names, tmp_path))


@pytest.mark.parametrize(
    ("config", "partitioner"),
    [
        ({}, "crc32"),
        ({"partitioner": "murmur2_random"}, "murmur2"),
        ({"partitioner": "consistent"}, "crc32"),
        ({"partitioner": "fnv1a_random"}, "fnv1a"),
    ],
)
def test_a_librdkafka_producer_places_keys_as_the_table_of_producers_says(
    sent: Sent, config: dict[str, str], partitioner: Partitioner
) -> None:
    sent.by_librdkafka(**config)

    assert sent.places() == {key: Partitioning(7, partitioner).of(key) for key in KEYS}


def test_javas_producer_places_keys_by_murmur2(sent: Sent, spark: SparkSession) -> None:
    records = spark.range(len(KEYS)).selectExpr(
        "cast(concat('c', id) as binary) as key", "cast('v' as binary) as value"
    )
    brokers = sent.settings.bootstrap_servers

    records.write.format("kafka").option("kafka.bootstrap.servers", brokers).option("topic", sent.topic.name).save()

    assert sent.places() == {key: Partitioning(7, "murmur2").of(key) for key in KEYS}


@pytest.mark.parametrize("partitioner", ["murmur2", "crc32", "fnv1a"])
def test_commands_and_loads_place_keys_by_the_partitioner_of_their_topic(sent: Sent, partitioner: Partitioner) -> None:
    settings = sent.settings.model_copy(update={"partitioner": partitioner})
    config = producer_config(settings, settings.partitioner)
    with closing(SchemaRegistry.from_settings(settings)) as registry:
        produce_load(config, registry, sent.topic.name, 100, 20, None, lambda _done: None)
        with closing(FundsAddedPublisher(config, registry, sent.topic.name, 20.0)) as publisher:
            partition, _ = publisher.publish_and_wait("alice", Decimal("1.00"))

    places = sent.places()
    assert places[b"alice"] == partition
    assert places == {key: Partitioning(7, partitioner).of(key) for key in places}
