"""The instance directory on a topic, and a fatal producer error of those who publish."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from decimal import Decimal
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import KafkaError, Producer

from balance_service.avro.codec import AvroCodec
from balance_service.avro.registry import SchemaRegistry
from balance_service.avro.schemas import load_schema
from balance_service.cluster.directory import (
    SUSPECT_AFTER_SECONDS,
    Directory,
    PublishedModel,
    ServerTable,
)
from balance_service.cluster.signatures import RecordSignatures
from balance_service.engine.records import Role, TaskSnapshot
from balance_service.kafka.clients import producer_config, reader_config
from balance_service.kafka.topics import Topics
from balance_service.model.generations import Comparison
from balance_service.process.runtime import elapsed
from balance_service.read_models.add_funds import FundsAddedPublisher
from tests.integration.engines import prepare, settings_for
from tests.support.kafka import fail_fatally
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalStack
    from balance_service.settings import Settings

# Makes the old topic longer than the new one.
_MORE = 100


MODEL = PublishedModel("balance", 2, "murmur2", True, (1, 2), "no room")
TASK = TaskSnapshot("balance", 0, Role.ACTIVE, "RUNNING", 1, 7, comparison=Comparison(5, 1), sends_as_of=3)


@contextmanager
def following(settings: Settings, address: str) -> Iterator[Directory]:
    registry = SchemaRegistry.from_settings(settings)
    topic, schema = settings.application_servers_topic, load_schema("ApplicationServer")
    codec = AvroCodec(registry, f"{topic}-parts.code.balance.cluster.ApplicationServer", schema)
    directory = Directory(
        consumer_config=reader_config(settings),
        producer_config=producer_config(settings),
        topic=topic,
        address=address,
        incarnation="i",
        codec=codec,
        signatures=RecordSignatures(None, topic),
        models=lambda: [MODEL],
        tasks=lambda: [TASK],
        table=ServerTable(),
    )
    directory.start()
    yield directory
    directory.stop(10)
    registry.close()


def known_servers(directory: Directory) -> set[str]:
    """Returns the instances to which the directory would route."""
    return {server.address for server in directory.table.servers() if not server.is_suspect(elapsed())}


def test_an_instance_reads_what_another_one_published(stack: LocalStack, names: dict[str, str], tmp_path: Path) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    prepare(Topics(settings), settings)
    with following(settings, "a:1"), following(settings, "b:1") as other:
        eventually(lambda: known_servers(other) == {"a:1", "b:1"}, "it knows both")
        server = other.table.servers()[0]
        assert (server.address, server.models, server.tasks) == ("a:1", (MODEL,), (TASK,))
        assert other.table.problem("balance") == "no room (at a:1, b:1)"


def test_a_directory_follows_its_topic_after_the_topic_was_recreated(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    topics = Topics(settings)
    prepare(topics, settings)
    with following(settings, "a:1") as one, following(settings, "b:1") as other:
        eventually(lambda: known_servers(one) == known_servers(other) == {"a:1", "b:1"}, "both know both")
        for _ in range(_MORE):
            one.publish_soon()
            time.sleep(0.05)

        topics.delete(settings.application_servers_topic)
        prepare(topics, settings)

        # Waits until both have forgotten the earlier records.
        time.sleep(2 * SUSPECT_AFTER_SECONDS)
        eventually(lambda: known_servers(one) == known_servers(other) == {"a:1", "b:1"}, "both know both again")


def test_an_instance_learns_of_others_that_publish_continuously(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    prepare(Topics(settings), settings)
    with following(settings, "a:1") as busy:
        over = threading.Event()

        def publish() -> None:
            # The next record always arrives before the consumer's poll times out.
            while not over.wait(0.1):
                busy.publish_soon()

        publishing = threading.Thread(target=publish)
        publishing.start()
        try:
            eventually(lambda: known_servers(busy) == {"a:1"}, "the instance knows itself")
            with following(settings, "b:1") as new:
                eventually(lambda: new.is_read and "a:1" in known_servers(new), "the new instance knows the other", 5)
        finally:
            over.set()
            publishing.join()


@pytest.fixture
def settings(stack: LocalStack, names: dict[str, str], tmp_path: Path) -> Settings:
    """Settings of an application whose topics exist."""
    made = settings_for(stack, names, tmp_path / "state")
    prepare(Topics(made), made)
    return made


@pytest.fixture
def publisher(settings: Settings) -> Iterator[FundsAddedPublisher]:
    registry = SchemaRegistry.from_settings(settings)
    made = FundsAddedPublisher(producer_config(settings), registry, settings.topic, 20.0)
    yield made
    made.close()
    registry.close()


def test_events_are_published_after_a_fatal_error_and_pending_ones_are_reported(
    settings: Settings, publisher: FundsAddedPublisher
) -> None:
    first = publisher.publish_and_wait("c1", Decimal(1))
    reported: list[object] = []
    held: Producer = publisher._producer._producer
    held.produce(settings.topic, b"under way", b"key", on_delivery=lambda error, _: reported.append(error))
    fail_fatally(held)

    partition, offset = publisher.publish_and_wait("c1", Decimal(2))

    assert partition == first[0]
    assert offset > first[1]
    assert len(reported) == 1
    assert publisher._producer._producer is not held


def test_an_instance_publishes_again_after_a_fatal_error(settings: Settings) -> None:
    with following(settings, "a:1") as one, following(settings, "b:1") as other:
        eventually(
            lambda: known_servers(one) == known_servers(other) == {"a:1", "b:1"}, "both instances know each other"
        )
        failed = one._producer._producer
        fail_fatally(failed)
        one.publish_soon()
        eventually(lambda: one._producer._producer is not failed, "a new producer has replaced the failed one")
        one.stop(10)
        eventually(lambda: known_servers(other) == {"b:1"}, "the new producer has published the tombstone")


def test_an_event_counts_as_certainly_not_written_only_if_no_attempt_can_have_written_it(
    publisher: FundsAddedPublisher,
) -> None:
    told = {
        code: str(publisher.failure_of(KafkaError(code)))
        for code in (KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.NOT_ENOUGH_REPLICAS, KafkaError._MSG_TIMED_OUT)
    }
    assert "certainly not written" in told[KafkaError.MSG_SIZE_TOO_LARGE]
    assert "may have been written" in told[KafkaError.NOT_ENOUGH_REPLICAS]
    assert "may have been written" in told[KafkaError._MSG_TIMED_OUT]
