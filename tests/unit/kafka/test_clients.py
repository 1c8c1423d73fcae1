"""Configuration and creation of Kafka clients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer

from balance_service.errors import RetriableError
from balance_service.kafka.clients import (
    common_config,
    new_client,
    producer_config,
    reader_config,
    transactional_config,
)
from balance_service.settings import load_settings

if TYPE_CHECKING:
    from balance_service.model.stream import Partitioner

pytestmark = pytest.mark.usefixtures("no_environment")


def test_every_client_gets_the_user_properties() -> None:
    settings = load_settings(kafka_config={"security.protocol": "SSL"})

    for config in (
        common_config(settings),
        producer_config(settings),
        reader_config(settings),
        transactional_config(settings, "t"),
    ):
        assert config["security.protocol"] == "SSL"
        assert config["bootstrap.servers"] == "localhost:9092"


@pytest.mark.shows("accepted")
def test_user_properties_cannot_weaken_the_guarantees() -> None:
    weak: dict[str, Any] = {
        "acks": "1",
        "enable.idempotence": "false",
        "partitioner": "random",
        "isolation.level": "read_uncommitted",
        "auto.offset.reset": "latest",
        "enable.auto.commit": "true",
    }
    settings = load_settings(kafka_config=weak)

    produced, read = transactional_config(settings, "task"), reader_config(settings)
    assert (produced["acks"], produced["enable.idempotence"], produced["partitioner"]) == (
        "all",
        True,
        "murmur2_random",
    )
    assert (read["isolation.level"], read["auto.offset.reset"], read["enable.auto.commit"]) == (
        "read_committed",
        "error",
        False,
    )


@pytest.mark.parametrize(
    ("partitioner", "of_librdkafka"),
    [("murmur2", "murmur2_random"), ("crc32", "consistent_random"), ("fnv1a", "fnv1a_random")],
)
def test_commands_write_by_the_partitioner_of_their_topic_and_tasks_by_murmur2(
    partitioner: Partitioner, of_librdkafka: str
) -> None:
    settings = load_settings(partitioner=partitioner)

    assert producer_config(settings, settings.partitioner)["partitioner"] == of_librdkafka
    assert transactional_config(settings, "task")["partitioner"] == "murmur2_random"


def test_a_lack_of_threads_is_a_retriable_error() -> None:
    def short_of_threads(_config: object) -> None:
        raise KafkaException(KafkaError(KafkaError._CRIT_SYS_RESOURCE, "Failed to create thread"))

    with pytest.raises(RetriableError, match="Failed to create thread"):
        new_client(short_of_threads, {})


@pytest.mark.parametrize("session_timeout_ms", [6_000, 30_000, 120_000])
@pytest.mark.parametrize("transaction_timeout_ms", [None, 15_000])
def test_a_producer_can_be_made_whatever_the_timeouts_are(
    session_timeout_ms: int, transaction_timeout_ms: int | None
) -> None:
    settings = load_settings(session_timeout_ms=session_timeout_ms)

    new_client(Producer, transactional_config(settings, "t", transaction_timeout_ms))
