"""Producers that have failed for ever, as librdkafka's own test hook makes them: what is said of what they held."""

from __future__ import annotations

import asyncio
import time
from contextlib import nullcontext
from decimal import Decimal
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import KafkaError

from balance_service.errors import RetriableError
from balance_service.kafka import bulk_producer
from balance_service.kafka.bulk_producer import BulkProducer
from balance_service.kafka.lasting_producer import LastingProducer
from balance_service.read_models.funds_publisher import FundsAddedPublisher
from tests.support.fakes import FakeRegistry
from tests.support.kafka import fail_fatally

if TYPE_CHECKING:
    from confluent_kafka import Message

NOBODY = {"bootstrap.servers": "127.0.0.1:1", "enable.idempotence": True, "log_level": 0}


def test_many_records_that_cannot_be_appended_any_more_are_told_with_the_reason() -> None:
    producer = BulkProducer({**NOBODY}, "topic")
    for number in range(3):
        producer.send(b"key", b"value", number)
    fail_fatally(producer._producer)

    with pytest.raises(RetriableError, match=r"writing to topic 'topic'.*planted"):
        producer.finish()


class Draining:
    """A producer of which a record is acknowledged with each poll, as many as there are."""

    def __init__(self, left: int, acknowledged: int) -> None:
        self._left = left
        self._acknowledged = acknowledged

    def __len__(self) -> int:
        return self._left

    def poll(self, _seconds: float) -> None:
        time.sleep(0.03)
        if self._acknowledged:
            self._left, self._acknowledged = self._left - 1, self._acknowledged - 1


@pytest.mark.parametrize("acknowledged", [5, 2])
def test_many_records_are_waited_for_as_long_as_some_are_acknowledged(
    monkeypatch: pytest.MonkeyPatch, acknowledged: int
) -> None:
    monkeypatch.setattr(bulk_producer, "_FINISH_SECONDS", 0.1)
    producer = BulkProducer({**NOBODY}, "topic")
    monkeypatch.setattr(producer, "_producer", Draining(5, acknowledged))

    with nullcontext() if acknowledged == 5 else pytest.raises(RetriableError, match="3 of 0 records"):
        producer.finish()


def test_what_was_under_way_is_reported_where_nothing_more_is_produced() -> None:
    reported: list[bool] = []
    lasting = LastingProducer({**NOBODY})
    failed = lasting._producer

    def report(error: KafkaError | None, _message: Message) -> None:
        reported.append(error is None)

    for number in range(3):
        lasting.produce("topic", b"value", b"key", partition=number, on_delivery=report)
    fail_fatally(failed)

    lasting.flush(10.0)

    assert reported == [False] * 3
    assert lasting._producer is not failed


def test_an_event_that_a_failed_producer_let_go_may_have_been_written() -> None:
    # Those that wait to be sent once more are let go with those that were never sent, by the same error.
    publisher = FundsAddedPublisher({**NOBODY}, FakeRegistry(), "topic", 10.0)

    failure = publisher._failure(KafkaError(KafkaError._PURGE_QUEUE))
    publisher.close()

    assert str(failure).startswith("the event may have been written: ")


def test_an_event_with_less_than_a_millisecond_is_not_waited_for_for_ever() -> None:
    publisher = FundsAddedPublisher({**NOBODY}, FakeRegistry(), "topic", 0.0005)

    with pytest.raises(RetriableError, match="the event may have been written: "):
        asyncio.run(asyncio.wait_for(publisher.publish("c1", Decimal("1.00")), 10.0))

    publisher.close()
