"""A changelog that was truncated, or has a second writer, as the next commit detects; an in-memory log is Kafka."""

from __future__ import annotations

import weakref
from decimal import Decimal
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import structlog
from confluent_kafka import KafkaError, KafkaException

from balance_service.engine import changelog_writer as writers
from balance_service.engine.batch import KeyedUpdate, PartitionUpdates, TaskBatch
from balance_service.engine.changelog_writer import ChangelogWriter, SecondWriterError
from balance_service.engine.commit import commit, write_position
from balance_service.engine.records import Output, Position, TaskId
from balance_service.engine.replica import Replica
from balance_service.engine.store import StateStore
from balance_service.engine.tasks import _alone
from balance_service.errors import ChangelogCutError, RetriableError, StoreCorruptedError, TaskMigratedError
from tests.support.collector import no_collector
from tests.unit.engine.test_idempotency import FOLDING, POSITIONS

if TYPE_CHECKING:
    from pathlib import Path

TASK = TaskId("balance", 0)


class Log:
    """A changelog's partition, and a producer to it: an open transaction is aborted when another is fenced."""

    def __init__(self) -> None:
        self.records: list[tuple[bytes | None, bytes | None]] = []
        self.timestamps: list[int] = []
        self._is_open = False

    def __len__(self) -> int:
        return 0

    def init_transactions(self, *_: Any) -> None:
        if self._is_open:
            self.commit_transaction()

    def begin_transaction(self) -> None:
        self._is_open = True

    def produce(
        self,
        topic: str,
        value: bytes,
        key: bytes,
        _partition: int,
        on_delivery: Any = None,
        _callback: Any = None,
        timestamp: int = 0,
        _headers: Any = None,
    ) -> None:
        at = len(self.records)
        self.records.append((key, value))
        self.timestamps.append(timestamp)
        if on_delivery is not None:
            on_delivery(None, SimpleNamespace(offset=lambda: at, partition=lambda: 0, topic=lambda: topic))

    def commit_transaction(self, *_: Any) -> None:
        self.records.append((None, None))
        self._is_open = False

    def poll(self, *_: Any) -> None: ...

    def purge(self) -> None: ...

    def list_topics(self, *_: Any) -> None: ...


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    log = Log()
    monkeypatch.setattr(writers, "new_client", lambda *_: log)
    return log


def fenced() -> ChangelogWriter:
    nothing: Any = None
    writer = ChangelogWriter({"transactional.id": "t"}, TASK, "changelog", "dead", nothing)
    writer.fence()
    return writer


def batch(start: int, *keys: bytes) -> TaskBatch:
    events = [KeyedUpdate(key, {"amount": Decimal("1.00")}, None, None, start + n) for n, key in enumerate(keys)]
    return TaskBatch(start, PartitionUpdates(start + len(keys), None, events, len(keys)))


@pytest.mark.shows("lost-changelog")
def test_a_store_with_records_that_its_changelog_lost_is_never_used_again(log: Log, tmp_path: Path) -> None:
    store, writer = StateStore(tmp_path / "store", POSITIONS), fenced()
    write_position(Position(0, 1, "t", source="s:0"), POSITIONS, store, writer)
    commit(batch(0, b"a"), 0, FOLDING, store, writer)
    kept = len(log.records)
    commit(batch(1, b"b", b"c"), 0, FOLDING, store, writer)
    del log.records[kept:]

    with pytest.raises(ChangelogCutError, match="recreated or truncated"):
        commit(batch(3, *(b"k%d" % n for n in range(20))), 0, FOLDING, store, writer)
    with pytest.raises(RetriableError, match="part of a commit"):
        commit(batch(3, b"d"), 0, FOLDING, store, writer)
    store.close()

    # The refused records are in the changelog, aborted, which so ends beyond the store.
    fenced().close()
    store = StateStore(tmp_path / "store", POSITIONS)
    assert len(log.records) > store.changelog_offset
    topics = SimpleNamespace(offsets=lambda *_, **__: {0: len(log.records)})
    context = SimpleNamespace(topics=topics, stage=SimpleNamespace(changelog="changelog"))
    replica = Replica(TASK, cast("Any", context), structlog.get_logger())
    replica.store, replica._reader = store, cast("Any", object())
    with pytest.raises(StoreCorruptedError, match="beyond the changelog's end"):
        [*replica.catch_up(lambda: False, is_fenced=True, answers=False)]
    store.close()


@pytest.mark.parametrize(("timestamp_ms", "sent"), [(5, 5), (0, 1), (-1, 1), (-(10**12), 1)])
def test_the_output_of_an_event_without_a_timestamp_does_not_get_the_present_time(
    log: Log, timestamp_ms: int, sent: int
) -> None:
    output = Output(0, "topic", -1, b"key", b"value", timestamp_ms, [])

    fenced().commit([], (), b"position", 0, [output])

    # To librdkafka, 0 is now.
    assert log.timestamps[0] == sent


@pytest.mark.shows("outputs-once")
def test_a_commit_that_does_not_follow_on_what_its_task_has_written_is_refused(log: Log) -> None:
    writer = fenced()
    writer.expect(len(log.records))
    for _ in range(2):
        writer.commit([(b"k", b"v")], (), b"position", 0)
    committed = len(log.records)
    # A producer with another transactional id, which no fencing stops.
    log.records += [(b"k", b"theirs"), (None, None)]

    told = rf"another producer has written to changelog-0: a commit began at {committed + 2}, not at {committed}"
    with pytest.raises(SecondWriterError, match=told):
        writer.commit([(b"k", b"v")], (), b"position", 0)

    # Nothing was committed: no marker follows.
    assert log.records[-1] == (b"\xffposition", b"position")


@pytest.mark.shows("outputs-once")
def test_the_first_commit_is_refused_if_another_producer_has_written_since_the_fencing(log: Log) -> None:
    writer = fenced()
    writer.expect(len(log.records))
    log.records += [(b"k", b"theirs"), (None, None)]

    with pytest.raises(SecondWriterError, match="a commit began at 2, not at 0"):
        writer.commit([(b"k", b"v")], (), b"position", 0)


class Held:
    """As a view of a store."""


@pytest.mark.parametrize("fails_at", ["commit_transaction", "produce"])
@pytest.mark.parametrize("is_kept", [True, False])
def test_the_error_of_a_fenced_commit_keeps_nothing_of_its_callers(
    log: Log, monkeypatch: pytest.MonkeyPatch, fails_at: str, *, is_kept: bool
) -> None:
    """Otherwise the store would stay locked until a collection, for minutes."""

    def fail(code: int) -> Any:
        def failing(*_: Any, **__: Any) -> None:
            raise KafkaException(KafkaError(code))

        return failing

    writer = fenced()

    def attempt() -> tuple[weakref.ref[Held], Exception | None]:
        held = Held()
        try:
            writer.commit([(b"k", b"v")], (), b"position", 0)
        except TaskMigratedError as error:
            return weakref.ref(held), _alone(error) if is_kept else None
        raise AssertionError("it was committed")

    begin = log.begin_transaction

    def begin_once() -> None:
        monkeypatch.setattr(log, "begin_transaction", fail(KafkaError._FENCED))
        begin()

    monkeypatch.setattr(log, "begin_transaction", begin_once)
    monkeypatch.setattr(log, fails_at, fail(KafkaError._FATAL))
    with no_collector():
        held, error = attempt()
        assert (isinstance(error, TaskMigratedError), held()) == (is_kept, None)
