"""Records read again by their offsets, near to each other and far apart, between others that were aborted."""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer

from balance_service.kafka.bounded_reader import _WAIT_SECONDS, records_at
from balance_service.kafka.topics import Topics
from tests.integration.engines import prepare, settings_for

if TYPE_CHECKING:
    from pathlib import Path

    from balance_service.settings import Settings
    from balance_service.tools.local.stack import LocalStack

_RECORDS = 20_000
# Far below the time after which a silent broker is given up: what is there has to be read, not waited for.
_SECONDS = 20.0


@pytest.fixture
def settings(stack: LocalStack, names: dict[str, str], tmp_path: Path) -> Settings:
    return settings_for(stack, names, tmp_path)


def topic_of(settings: Settings, records: int) -> str:
    """A topic whose first partition has so many records, each with its offset as the value."""
    topic = prepare(Topics(settings), settings).name
    producer = Producer({"bootstrap.servers": settings.bootstrap_servers})
    for number in range(records):
        producer.produce(topic, str(number).encode(), partition=0)
    assert producer.flush(20) == 0
    return topic


def test_records_far_apart_are_read_each_at_its_offset(stack: LocalStack, settings: Settings) -> None:
    topic = topic_of(settings, _RECORDS)
    aborting = Producer({"bootstrap.servers": stack.bootstrap_servers, "transactional.id": f"{topic}-aborting"})
    aborting.init_transactions()
    aborting.begin_transaction()
    aborting.produce(topic, b"aborted", partition=0)
    aborting.flush(20)
    aborting.abort_transaction()
    wanted = [0, 1, 7, 3_000, 3_001, 14_000, _RECORDS - 1, _RECORDS]
    began = time.monotonic()

    looked_for, records = records_at(settings, topic, 0, wanted)

    assert looked_for == wanted
    assert {offset: message.value() for offset, message in records.items()} == {
        offset: str(offset).encode() for offset in wanted[:-1]
    }
    assert time.monotonic() - began < _SECONDS


def test_what_is_there_is_not_waited_for_though_a_partition_ends_after_it(settings: Settings) -> None:
    topic = topic_of(settings, 1)

    def seconds() -> float:
        began = time.monotonic()
        records_at(settings, topic, 0, [0])
        return time.monotonic() - began

    assert median(seconds() for _ in range(9)) < _WAIT_SECONDS


def test_reading_ends_in_time_and_says_how_far_it_came(settings: Settings) -> None:
    topic = topic_of(settings, 3 * _RECORDS)

    looked_for, records = records_at(settings, topic, 0, [0, _RECORDS, 2 * _RECORDS], 0.0)

    assert (looked_for, [*records]) == ([0], [0])
