"""Producers after a fatal error, which librdkafka's own test hook causes, and reports about their queued records."""

from __future__ import annotations

import asyncio
import time
from contextlib import nullcontext
from decimal import Decimal
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import KafkaError

from balance_service.errors import RetriableError
from balance_service.kafka import producers
from balance_service.kafka.producers import BulkProducer, RecoveringProducer
from balance_service.read_models.add_funds import FundsAddedPublisher
from tests.support.fakes import FakeRegistry
from tests.support.kafka import fail_fatally

if TYPE_CHECKING:
    from confluent_kafka import Message

UNREACHABLE = {"bootstrap.servers": "127.0.0.1:1", "enable.idempotence": True, "log_level": 0}


def test_a_bulk_producer_reports_the_reason_of_a_fatal_error() -> None:
    producer = BulkProducer({**UNREACHABLE}, "topic")
    for number in range(3):
        producer.send(b"key", b"value", number)
    fail_fatally(producer._producer)

    with pytest.raises(RetriableError, match=r"writing to topic 'topic'.*planted"):
        producer.finish()


class Draining:
    """A producer that acknowledges one record with each poll."""

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
def test_a_bulk_producer_waits_as_long_as_records_are_acknowledged(
    monkeypatch: pytest.MonkeyPatch, acknowledged: int
) -> None:
    monkeypatch.setattr(producers, "_FINISH_SECONDS", 0.1)
    monkeypatch.setattr(producers, "Producer", lambda _config: Draining(5, acknowledged))
    producer = BulkProducer({**UNREACHABLE}, "topic")

    with nullcontext() if acknowledged == 5 else pytest.raises(RetriableError, match="3 of 0 records"):
        producer.finish()


def test_queued_records_are_reported_as_failed_although_no_other_record_follows() -> None:
    reported: list[bool] = []
    recovering = RecoveringProducer({**UNREACHABLE})
    failed = recovering._producer

    def report(error: KafkaError | None, _message: Message) -> None:
        reported.append(error is None)

    for number in range(3):
        recovering.produce("topic", b"value", b"key", partition=number, on_delivery=report)
    fail_fatally(failed)

    recovering.flush(10.0)

    assert reported == [False] * 3
    assert recovering._producer is not failed


def test_a_record_does_not_wait_for_the_reports_of_those_that_failed_before_it() -> None:
    reported: list[bool] = []
    recovering = RecoveringProducer({**UNREACHABLE})
    failed = recovering._producer
    recovering.produce("topic", b"value", b"key", on_delivery=lambda error, _message: reported.append(error is None))
    fail_fatally(failed)

    recovering.produce("topic", b"value", b"key")

    assert recovering._producer is not failed
    assert reported == []
    recovering.poll(0)
    assert reported == [False]


def test_an_event_that_a_failed_producer_dropped_may_have_been_written() -> None:
    # Records that wait for a retry are dropped with the same error as records that were never sent.
    publisher = FundsAddedPublisher({**UNREACHABLE}, FakeRegistry(), "topic", 10.0)

    failure = publisher.failure_of(KafkaError(KafkaError._PURGE_QUEUE))
    publisher.close()

    assert str(failure).startswith("the event may have been written: ")


def test_a_timeout_below_a_millisecond_is_not_infinite() -> None:
    publisher = FundsAddedPublisher({**UNREACHABLE}, FakeRegistry(), "topic", 0.0005)

    with pytest.raises(RetriableError, match="the event may have been written: "):
        asyncio.run(asyncio.wait_for(publisher.publish("c1", Decimal("1.00")), 10.0))

    publisher.close()
