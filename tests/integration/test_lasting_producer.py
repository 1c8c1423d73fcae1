"""A producer that fails for ever, as librdkafka's own test hook makes it, and what goes on without it."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import KafkaError, Producer

from balance_service.avro.registry import SchemaRegistry
from balance_service.kafka.clients import producer_config
from balance_service.kafka.topics import Topics
from balance_service.read_models.funds_publisher import FundsAddedPublisher
from tests.integration.engines import prepare, settings_for
from tests.integration.test_directory import following, heard_of
from tests.support.kafka import fail_fatally
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalStack
    from balance_service.settings import Settings


@pytest.fixture
def settings(stack: LocalStack, names: dict[str, str], tmp_path: Path) -> Settings:
    """Of an application whose topics are there."""
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


def test_events_are_added_again_and_what_was_under_way_is_reported(
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


def test_an_instance_is_heard_of_again(settings: Settings) -> None:
    with following(settings, "a:1") as one, following(settings, "b:1") as other:
        eventually(lambda: heard_of(one) == heard_of(other) == {"a:1", "b:1"}, "both know both")
        failed = one._producer._producer
        fail_fatally(failed)
        one.publish_soon()
        eventually(lambda: one._producer._producer is not failed, "another producer took its place")
        one.stop(10)
        eventually(lambda: heard_of(other) == {"b:1"}, "its farewell came by that")


def test_an_event_is_called_certainly_not_written_only_where_no_attempt_can_have_been(
    publisher: FundsAddedPublisher,
) -> None:
    told = {
        code: str(publisher._failure(KafkaError(code)))
        for code in (KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.NOT_ENOUGH_REPLICAS, KafkaError._MSG_TIMED_OUT)
    }
    assert "certainly not written" in told[KafkaError.MSG_SIZE_TOO_LARGE]
    assert "may have been written" in told[KafkaError.NOT_ENOUGH_REPLICAS]
    assert "may have been written" in told[KafkaError._MSG_TIMED_OUT]
