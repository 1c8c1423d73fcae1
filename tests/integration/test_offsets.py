"""Offsets of a topic: end offsets during a broker kill, and reads of single records by offset."""

from __future__ import annotations

import threading
import time
from decimal import Decimal
from statistics import median
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Consumer, Producer

from balance_service.avro.codec import SCHEMA_ID_UNKNOWN
from balance_service.avro.frames import frame_header, schema_id_of
from balance_service.engine.dead_letter import Letter
from balance_service.engine.dead_letters import DueLetters
from balance_service.errors import RetriableError
from balance_service.kafka.log_reader import _WAIT_SECONDS, reader_to_end, records_at, records_left_at
from balance_service.kafka.topics import Topics
from balance_service.spark.redrive import Redrive
from tests.integration.engines import prepare, settings_for
from tests.support.kafka import delete_before
from tests.support.waiting import eventually
from tests.unit.spark.decoded import table
from tests.unit.spark.spark_side import lone_session

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import pyarrow as pa

    from balance_service.devtools.local.stack import LocalStack
    from balance_service.settings import Settings

_FEW_RECORDS = 5
_RESTARTS = 3
_TOPICS = 20
_KNOWN_WITHIN_SECONDS = 15


def test_offsets_are_correct_or_an_error_during_a_broker_kill_and_known_afterwards(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path)
    topics = Topics(settings)
    topic = prepare(topics, settings).name
    producer = Producer({"bootstrap.servers": stack.bootstrap_servers})
    for _ in range(_FEW_RECORDS):
        producer.produce(topic, b"", partition=0)
    assert producer.flush(20) == 0
    answers: list[int] = []
    over = threading.Event()

    def ask() -> None:
        while not over.wait(0.002):
            try:
                answers.append(topics.offsets(topic, [0])[0])
            except RetriableError:
                time.sleep(0.1)

    def wait_for_one_more() -> None:
        before = len(answers)
        eventually(lambda: len(answers) > before, "the end offset is known", _KNOWN_WITHIN_SECONDS)

    asking = [threading.Thread(target=ask) for _ in range(4)]
    for thread in asking:
        thread.start()
    try:
        for _ in range(_RESTARTS):
            wait_for_one_more()
            stack.broker.kill()
            stack.broker.start()
        time.sleep(1)
        wait_for_one_more()
    finally:
        over.set()
        for thread in asking:
            thread.join()

    assert set(answers) == {_FEW_RECORDS}


def test_offsets_of_new_topics_are_returned_before_a_leader_is_elected(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path)
    topics = Topics(settings)
    for number in range(_TOPICS):
        topic = topics.create(f"{settings.topic}-{number}", 12, {})
        assert topics.offsets(topic.name, range(12)) == dict.fromkeys(range(12), 0)


_RECORDS = 20_000
# Far below the timeout for a silent broker: existing records must be read without waiting.
_SECONDS = 20.0


@pytest.fixture
def settings(stack: LocalStack, names: dict[str, str], tmp_path: Path) -> Settings:
    return settings_for(stack, names, tmp_path)


def topic_of(settings: Settings, records: int, value_of: Callable[[int], bytes] = lambda at: str(at).encode()) -> str:
    """Creates a topic with `records` records in its first partition; the default value is the offset."""
    topic = prepare(Topics(settings), settings).name
    producer = Producer({"bootstrap.servers": settings.bootstrap_servers})
    for number in range(records):
        producer.produce(topic, value_of(number), partition=0)
    assert producer.flush(20) == 0
    return topic


def test_records_far_apart_are_read_by_offset(stack: LocalStack, settings: Settings) -> None:
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


def test_existing_records_are_read_without_waiting_at_the_end_of_a_partition(settings: Settings) -> None:
    topic = topic_of(settings, 1)

    def seconds() -> float:
        began = time.monotonic()
        records_at(settings, topic, 0, [0])
        return time.monotonic() - began

    assert median(seconds() for _ in range(9)) < _WAIT_SECONDS


def test_a_topic_that_ends_in_a_marker_is_read_to_its_end_without_waiting(settings: Settings) -> None:
    """The end of a transaction takes an offset, so only the broker's report shows that nothing follows."""
    topics = Topics(settings)
    topic = prepare(topics, settings)
    producer = Producer({"bootstrap.servers": settings.bootstrap_servers, "transactional.id": f"{topic.name}-writer"})
    producer.init_transactions()
    producer.begin_transaction()
    producer.produce(topic.name, b"committed", partition=0)
    producer.commit_transaction()
    # The broker writes the marker after it has answered.
    eventually(lambda: topics.offsets(topic.name, [0])[0] == 2, "the marker is there")

    def seconds() -> float:
        began = time.monotonic()
        with reader_to_end(settings, topics, topic, [0], waits_for_open=True) as reader:
            assert [message.value() for message in reader] == [b"committed"]
        return time.monotonic() - began

    assert min(seconds() for _ in range(9)) < _WAIT_SECONDS


def test_a_read_ends_in_time_and_the_next_one_continues(settings: Settings) -> None:
    topic = topic_of(settings, 3 * _RECORDS)
    left = [0, _RECORDS, _RECORDS + 1, 2 * _RECORDS]
    answers: list[tuple[list[int], list[int]]] = []
    while left:
        looked_for, records = records_at(settings, topic, 0, left, 0.0)
        answers.append((looked_for, [*records]))
        left = left[len(looked_for) :]

    assert answers[0] == ([0], [0])
    assert [offset for looked_for, _ in answers for offset in looked_for] == [0, _RECORDS, _RECORDS + 1, 2 * _RECORDS]
    assert all(looked_for == found for looked_for, found in answers)


def test_the_time_limit_starts_with_the_first_record(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, wanted = 0.5, range(100)
    topic = topic_of(settings, len(wanted))

    def slow(config: dict[str, Any]) -> Consumer:
        time.sleep(2 * seconds)
        return Consumer(config)

    monkeypatch.setattr("balance_service.kafka.log_reader.Consumer", slow)

    looked_for, records = records_at(settings, topic, 0, wanted, seconds)

    assert (looked_for, [*records]) == ([*wanted], [*wanted])


def test_a_read_of_no_offsets_reads_nothing(settings: Settings) -> None:
    assert records_left_at(settings, Topics(settings), "there is none", 0, [], 0.0, 0) == ([], {})


@pytest.mark.parametrize(
    ("size_of", "kept_from", "looked_for"),
    [
        (lambda _: 1_000, 0, 8),
        (lambda _: 1, 0, 1_000),
        (lambda _: 9_000, 0, 1),
        (lambda _: 9_000, 3, 4),
        (lambda at: 9_000 if at == 0 else 1, 0, 1),
        (lambda at: 1_000 if at >= 500 else 1, 0, 507),
        (lambda _: 9_000, 1_000, 1_000),
    ],
    ids=["large", "small", "one too large", "gone, then too large", "the first too large", "large ones later", "gone"],
)
def test_a_read_is_bounded_in_bytes_but_returns_at_least_one_record(
    settings: Settings, size_of: Callable[[int], int], kept_from: int, looked_for: int
) -> None:
    topic = topic_of(settings, 1_000, lambda at: bytes(size_of(at)))
    delete_before(settings.bootstrap_servers, topic, {0: kept_from})

    found, records = records_left_at(settings, Topics(settings), topic, 0, range(1_000), _SECONDS, 8_000)

    assert (found, [*records]) == ([*range(looked_for)], [*range(kept_from, looked_for)])


def redrive_of(settings: Settings, topic: str, known: set[int]) -> Redrive:
    """Returns a redrive of a topic whose JVM runs and decodes nothing; its registry knows some ids."""
    registry: Any = SimpleNamespace(
        resolve=known.intersection,
        schema_id=schema_id_of,
        framed=lambda record: record,
        ask_anew=lambda: None,
    )
    return Redrive(
        spark=lone_session(),
        settings=settings,
        topics=Topics(settings),
        source=topic,
        decoder=registry,
        has_states=False,
    )


def _as_rows(records: Sequence[Mapping[str, Any]]) -> pa.Table:
    return table({"offset": record["offset"], "key": b"k", "amount": Decimal(1)} for record in records)


def test_dead_letters_are_retried_in_batches_that_fit_into_memory(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 900_000
    topic = topic_of(settings, 16, lambda _: bytes(size))
    delete_before(settings.bootstrap_servers, topic, {0: 2})
    redrive = redrive_of(settings, topic, set())
    monkeypatch.setattr(redrive, "_decoded", _as_rows)
    monkeypatch.setattr("balance_service.spark.redrive._READ_SECONDS", _SECONDS)

    due = DueLetters([Letter.first(at, "join-missing", None, 0, 1) for at in range(16)])
    batch = redrive.batch(0, 16, due, tmp_path / "suspects")

    assert batch.retried == frozenset(range(2 + (8 << 20) // size))
    assert [letter.offset for letter in batch.updates.dead_letters] == [0, 1]


def test_records_whose_schema_is_still_unknown_cost_no_spark_job(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = topic_of(settings, 4, lambda at: frame_header(at) + b"body")
    redrive = redrive_of(settings, topic, {2})
    decoded: list[int] = []

    def decode(records: Sequence[Mapping[str, Any]]) -> pa.Table:
        decoded.extend(record["offset"] for record in records)
        return _as_rows(records)

    monkeypatch.setattr(redrive, "_decoded", decode)
    causes = [SCHEMA_ID_UNKNOWN, "join-missing", SCHEMA_ID_UNKNOWN, SCHEMA_ID_UNKNOWN]

    due = DueLetters([Letter.first(at, cause, None, 0, 1) for at, cause in enumerate(causes)])
    batch = redrive.batch(0, 4, due, tmp_path / "suspects")

    assert decoded == [1, 2]
    assert [(letter.offset, letter.cause) for letter in batch.updates.dead_letters] == [
        (0, SCHEMA_ID_UNKNOWN),
        (3, SCHEMA_ID_UNKNOWN),
    ]
    assert batch.retried == frozenset(range(4))
