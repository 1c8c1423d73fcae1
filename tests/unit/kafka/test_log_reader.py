"""The log reader over a scripted consumer: ends, positions, errors of the broker."""

from __future__ import annotations

import time
import weakref
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import KafkaError

from balance_service.errors import NotAuthorizedError, RetriableError
from balance_service.kafka import log_reader
from balance_service.kafka.log_reader import LogReader, OffsetOutOfRangeError
from tests.support.collector import no_collector

if TYPE_CHECKING:
    from collections.abc import Sequence

    from confluent_kafka import TopicPartition

CONFIG: dict[str, object] = {"group.id": "app"}


class Message:
    """A record, or the report of an error, at an offset."""

    def __init__(self, offset: int, partition: int = 0, code: int | None = None) -> None:
        self._offset, self._partition, self._code = offset, partition, code

    def error(self) -> KafkaError | None:
        return None if self._code is None else KafkaError(self._code)

    def partition(self) -> int:
        return self._partition

    def offset(self) -> int:
        return self._offset


class ScriptedConsumer:
    """Returns one batch of messages per call; then nothing."""

    def __init__(self, batches: Sequence[Sequence[Message]]) -> None:
        self._batches = list(batches)
        self._position = -1
        self.assigned: dict[int, int] = {}
        self.paused: set[int] = set()

    def assign(self, partitions: list[TopicPartition]) -> None:
        self.assigned = {p.partition: p.offset for p in partitions}

    def consume(self, _most: int, _seconds: float) -> list[Message]:
        messages = list(self._batches.pop(0)) if self._batches else []
        self._position = max([self._position, *(m.offset() + 1 for m in messages if m.error() is None)])
        return messages

    def position(self, partitions: list[TopicPartition]) -> list[TopicPartition]:
        partitions[0].offset = self._position
        return partitions

    def pause(self, partitions: list[TopicPartition]) -> None:
        self.paused |= {p.partition for p in partitions}

    def close(self) -> None: ...


def end_at(offset: int, partition: int = 0) -> Message:
    return Message(offset, partition, KafkaError._PARTITION_EOF)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes readers over these batches; the consumer is in `consumer`."""

    def reader(
        batches: Sequence[Sequence[Message]], starts: dict[int, int], ends: dict[int, int] | None, **more: Any
    ) -> Any:
        consumer = ScriptedConsumer(batches)
        monkeypatch.setattr(log_reader, "Consumer", lambda _config: consumer)
        return LogReader(CONFIG, "t", starts, ends, **more), consumer

    return reader


def offsets(messages: Sequence[Any]) -> list[tuple[int, int]]:
    return [(m.partition(), m.offset()) for m in messages]


def test_a_bounded_reader_returns_the_records_below_the_ends_and_pauses_finished_partitions(scripted: Any) -> None:
    batch = [Message(0), Message(5, 1), Message(1), Message(2), Message(6, 1)]
    reader, consumer = scripted([batch], {0: 0, 1: 5}, {0: 2, 1: 7})

    assert offsets(list(reader)) == [(0, 0), (1, 5), (0, 1), (1, 6)]
    assert (reader.unfinished, consumer.paused) == (set(), {0, 1})
    assert (reader.offsets_read, reader.offsets_in_all) == (4, 4)


def test_a_bounded_reader_does_not_assign_a_partition_that_is_at_its_end(scripted: Any) -> None:
    reader, consumer = scripted([], {0: 3, 1: 4}, {0: 3, 1: 5})

    assert consumer.assigned == {1: 4}
    assert reader.unfinished == {1}


def test_a_bounded_reader_ends_where_the_last_offsets_hold_no_records(scripted: Any) -> None:
    reader, _ = scripted([[Message(0), end_at(3)]], {0: 0}, {0: 3})

    assert offsets(list(reader)) == [(0, 0)]
    assert reader.position(0) == 3


def test_a_bounded_reader_returns_no_record_twice(scripted: Any) -> None:
    reader, _ = scripted([[Message(0), Message(1)], [Message(1), Message(2)]], {0: 0}, {0: 3})

    assert offsets(list(reader)) == [(0, 0), (0, 1), (0, 2)]


def test_a_silent_broker_is_a_retriable_error_for_a_bounded_reader(
    scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_reader, "_SILENCE_SECONDS", 0.0)
    reader, _ = scripted([], {0: 0}, {0: 3})

    with pytest.raises(RetriableError, match="t-0 was not read to its end: the broker sends nothing"):
        list(reader)


def test_a_reader_that_waits_for_transactions_waits_as_long_as_one_may_be_open(
    scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_reader, "_SILENCE_SECONDS", 0.0)
    reader, _ = scripted([], {0: 0}, {0: 3}, transaction_seconds=0.2)
    began = time.monotonic()

    with pytest.raises(RetriableError, match="a transaction hangs there"):
        list(reader)

    assert time.monotonic() - began > 0.2


def test_a_following_reader_reports_the_end_once_and_stands_there(scripted: Any) -> None:
    reader, _ = scripted([[Message(4), end_at(6)], []], {0: 4}, None)

    read = offsets(reader.read())

    assert (read, reader.met_end, reader.position(0)) == ([(0, 4)], True, 6)
    assert (reader.read(), reader.met_end, reader.position(0)) == ([], False, 6)


def test_records_are_returned_before_the_error_that_came_with_them(scripted: Any) -> None:
    reader, _ = scripted([[Message(0), Message(1, code=KafkaError._AUTO_OFFSET_RESET)]], {0: 0}, None)

    assert offsets(reader.read()) == [(0, 0)]
    with pytest.raises(OffsetOutOfRangeError, match="t-0 no longer has the next offset"):
        reader.read()


class Held:
    """As a view of a store."""


def test_an_error_of_the_broker_keeps_nothing_of_the_callers(scripted: Any) -> None:
    """Otherwise a store would stay locked until a collection, for minutes."""
    reader, _ = scripted([[Message(0, code=KafkaError.OFFSET_OUT_OF_RANGE)]], {0: 0}, None)

    def attempt() -> weakref.ref[Held]:
        held = Held()
        try:
            reader.read()
        except OffsetOutOfRangeError:
            return weakref.ref(held)
        raise AssertionError("it was read")

    with no_collector():
        assert attempt()() is None


@pytest.mark.parametrize(
    ("code", "error", "sentence"),
    [
        (KafkaError.OFFSET_OUT_OF_RANGE, OffsetOutOfRangeError, "no longer has the next offset"),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, NotAuthorizedError, "grant this user Read on topic 't' and on group"),
        (KafkaError._ALL_BROKERS_DOWN, RetriableError, "Kafka failed while reading t-0"),
    ],
)
def test_an_error_of_the_broker_is_raised_by_remedy(
    scripted: Any, code: int, error: type[Exception], sentence: str
) -> None:
    reader, _ = scripted([[Message(0, code=code)]], {0: 0}, None)

    with pytest.raises(error, match=sentence):
        reader.read()


def test_a_reader_that_is_assigned_again_starts_over(scripted: Any) -> None:
    reader, consumer = scripted([[Message(4), end_at(5)]], {0: 4}, None)
    reader.read()

    reader.assign({0: 0})

    assert consumer.assigned == {0: 0}
