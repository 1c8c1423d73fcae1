"""A producer with a fatal error, injected through librdkafka's test hook, and its replacement."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import KafkaError, Producer

from balance_service.avro.registry import SchemaRegistry
from balance_service.kafka.clients import producer_config
from balance_service.kafka.topics import Topics
from balance_service.read_models.add_funds import FundsAddedPublisher
from tests.integration.engines import prepare, settings_for
from tests.integration.test_directory import following, known_servers
from tests.support.kafka import fail_fatally
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalStack
    from balance_service.settings import Settings


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
        code: str(publisher._failure(KafkaError(code)))
        for code in (KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.NOT_ENOUGH_REPLICAS, KafkaError._MSG_TIMED_OUT)
    }
    assert "certainly not written" in told[KafkaError.MSG_SIZE_TOO_LARGE]
    assert "may have been written" in told[KafkaError.NOT_ENOUGH_REPLICAS]
    assert "may have been written" in told[KafkaError._MSG_TIMED_OUT]
