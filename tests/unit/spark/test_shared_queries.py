"""Which partitions share a query, and how a query is replaced while tasks read."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

import pyarrow as pa
import pytest

from balance_service.errors import BalanceServiceError, ConfigurationError
from balance_service.spark import shared_queries
from balance_service.spark.row_query import BatchEndedError, QueryEndedError, QueryInterruptedError
from balance_service.spark.shared_queries import SharedQueries, Slots, TaskRows
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


LONG = 10.0
SETTLE_SECONDS = 0.3


class Stream:
    """The rows of a partition, from `position` on, as far as a test lets Spark read them."""

    def __init__(self, query: Query, position: int) -> None:
        self.query = query
        self.next = position
        self.position = position
        self.end = position
        self.is_closed = False

    @property
    def has_rows(self) -> bool:
        return self.end > self.position

    def pull(self, _timeout_seconds: float) -> pa.RecordBatch | None:
        assert not self.is_closed
        if self.query.end is not None:
            raise self.query.end
        if self.next == self.end:
            return None
        rows = pa.record_batch({"offset": pa.array(range(self.next, self.end), pa.int64())})
        self.next = self.end
        return rows

    def close(self) -> None:
        self.is_closed = True


class Query:
    """A query of the test; `failure` is that of its start."""

    def __init__(self, positions: Mapping[int, int], failure: BalanceServiceError | None) -> None:
        self.rows = {partition: Stream(self, position) for partition, position in positions.items()}
        self.failure = failure
        self.end: QueryEndedError | None = None
        self.is_stopped = False
        self.may_start = threading.Event()
        self.may_start.set()

    def __enter__(self) -> Self:
        if self.failure is not None:
            raise self.failure
        return self

    def close(self) -> None:
        self.is_stopped = True

    @property
    def has_ended(self) -> bool:
        return self.end is not None

    @property
    def is_over(self) -> bool:
        return self.end is not None

    def ended(self) -> QueryEndedError:
        assert self.end is not None
        return self.end


class Stage:
    """Shared queries, and tasks that read."""

    def __init__(self) -> None:
        self.started: list[Query] = []
        self.failures: list[BalanceServiceError] = []
        self.slots = Slots(100)
        self.missed = 0
        self.positions: dict[int, int] = {}
        self.errors: list[BaseException] = []
        self._contexts: dict[int, ExitStack] = {}
        self.queries = SharedQueries("balance", self._new, self.slots, self._without_slots)  # type: ignore[arg-type]

    def read(self, *partitions: int) -> dict[int, TaskRows]:
        """Lets tasks ask for rows at the same time, each on a thread of its own, until `leave`."""
        found: dict[int, TaskRows] = {}
        self.errors.clear()

        def ask(partition: int) -> None:
            asked = self.queries.rows(partition, lambda: self.positions.get(partition, 0), lambda: False)
            with ExitStack() as context:
                try:
                    found[partition] = context.enter_context(asked)
                except BalanceServiceError as error:
                    self.errors.append(error)
                else:
                    self._contexts[partition] = context.pop_all()

        threads = [threading.Thread(target=ask, args=(partition,)) for partition in partitions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG)
        return found

    def leave(self, *partitions: int) -> None:
        for partition in partitions:
            self._contexts.pop(partition).close()

    def partitions(self) -> list[list[int]]:
        """Returns the partitions of each query that was started, in order."""
        return [sorted(query.rows) for query in self.started]

    def _new(self, positions: Mapping[int, int], _is_interrupted: Callable[[], bool]) -> Query:
        query = Query(positions, self.failures.pop(0) if self.failures else None)
        self.started.append(query)
        return query

    def _without_slots(self) -> None:
        self.missed += 1


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr(shared_queries, "_SETTLE_SECONDS", SETTLE_SECONDS)
    stage = Stage()
    yield stage
    assert stage.queries.stop(LONG)


def offsets(rows: TaskRows) -> Sequence[int]:
    batch = rows.pull(0.0)
    found: list[int] = [] if batch is None else batch["offset"].to_pylist()
    return found


def stays(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def arrive(query: Query, partition: int, end: int) -> None:
    query.rows[partition].end = end


def test_tasks_that_ask_together_share_a_query_that_starts_at_their_positions(stage: Stage) -> None:
    stage.positions = {0: 5, 1: 7}

    rows = stage.read(0, 1, 2)

    assert stage.partitions() == [[0, 1, 2]]
    assert {p: stream.position for p, stream in stage.started[0].rows.items()} == {0: 5, 1: 7, 2: 0}
    arrive(stage.started[0], 1, 9)
    assert [offsets(rows[p]) for p in (0, 1, 2)] == [[], [7, 8], []]


def test_a_later_task_gets_a_query_of_its_own_until_one_replaces_both(stage: Stage) -> None:
    first = stage.read(0)[0]
    later = stage.read(1)[1]
    assert stage.partitions() == [[0], [1]]

    eventually(lambda: stage.partitions() == [[0], [1], [0, 1]], "one query replaces both")
    old, _, new = stage.started

    # Each task changes over by itself, once the new query reads its partition. Nothing is lost or repeated.
    arrive(old, 0, 3)
    assert offsets(first) == [0, 1, 2]
    assert not first.change_over(3)
    arrive(new, 0, 5)
    eventually(lambda: first.change_over(3), "the task changes over")
    assert offsets(first) == [3, 4]
    assert old.rows[0].is_closed
    eventually(lambda: old.is_stopped, "the replaced query is stopped")
    assert not later.change_over(0)
    assert not stage.started[1].is_stopped


def test_rows_that_are_all_committed_are_left_out(stage: Stage) -> None:
    rows = stage.read(0)[0]
    stage.read(1)
    eventually(lambda: len(stage.started) == 3, "one query replaces both")
    arrive(stage.started[2], 0, 3)

    eventually(lambda: rows.change_over(3), "the task changes over")

    assert rows.pull(0.0) is None
    arrive(stage.started[2], 0, 4)
    assert offsets(rows) == [3]


def test_a_partition_without_events_changes_over_after_a_time(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_queries, "_GRACE_SECONDS", 0.2)
    rows = stage.read(0)[0]
    stage.read(1)

    eventually(lambda: rows.change_over(0), "the task changes over")

    eventually(lambda: stage.started[0].is_stopped, "the replaced query is stopped")


def test_a_partition_with_events_changes_over_only_to_a_query_that_reads_it(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_queries, "_GRACE_SECONDS", 0.0)
    rows = stage.read(0)[0]
    stage.read(1)
    eventually(lambda: len(stage.started) == 3, "one query replaces both")
    arrive(stage.started[0], 0, 3)
    assert offsets(rows) == [0, 1, 2]

    assert stays(lambda: not rows.change_over(3), 0.3)

    arrive(stage.started[2], 0, 1)
    eventually(lambda: rows.change_over(3), "the task changes over")


def test_a_task_that_leaves_disturbs_no_other_and_its_query_is_replaced(stage: Stage) -> None:
    rows = stage.read(0, 1)

    stage.leave(1)

    old = stage.started[0]
    assert (old.rows[0].is_closed, old.rows[1].is_closed, old.is_stopped) == (False, True, False)
    arrive(old, 0, 1)
    assert offsets(rows[0]) == [0]
    eventually(lambda: stage.partitions() == [[0, 1], [0]], "a smaller query replaces it")


def test_a_task_that_asks_again_gets_a_new_stream_from_its_position(stage: Stage) -> None:
    rows = stage.read(0, 1)
    arrive(stage.started[0], 1, 10)
    assert offsets(rows[1]) == list(range(10))

    stage.leave(1)
    stage.positions[1] = 4
    again = stage.read(1)[1]

    arrive(stage.started[0], 1, 20)
    arrive(stage.started[1], 1, 6)
    assert offsets(again) == [4, 5]


def test_the_query_of_the_last_task_is_stopped(stage: Stage) -> None:
    stage.read(0, 1)
    stage.leave(0, 1)

    eventually(lambda: stage.started[0].is_stopped, "the query is stopped")
    assert stays(lambda: len(stage.started) == 1, 2 * SETTLE_SECONDS)
    assert stage.slots.take(100)


def test_a_query_that_fails_is_replaced_by_one_for_each_of_its_partitions(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_queries, "_APART_SECONDS", 4 * SETTLE_SECONDS)
    stage.read(0, 1, 2)
    stage.started[0].end = QueryEndedError("a fault")
    stage.leave(0, 1, 2)
    stage.read(0, 1, 2)

    assert sorted(stage.partitions()[1:]) == [[0], [1], [2]]
    assert stays(lambda: len(stage.started) == 4, 2 * SETTLE_SECONDS)
    eventually(lambda: stage.partitions()[4:] == [[0, 1, 2]], "they share one again")


@pytest.mark.parametrize(
    "end", [QueryEndedError("org.apache.kafka.common.errors.TimeoutException: away"), BatchEndedError("full time")]
)
def test_the_tasks_of_a_query_that_ends_for_a_general_reason_share_the_next_one(
    stage: Stage, end: QueryEndedError
) -> None:
    stage.read(0, 1, 2)
    stage.started[0].end = end
    stage.leave(0, 1, 2)

    stage.read(0, 1, 2)

    assert stage.partitions() == [[0, 1, 2]] * 2


def test_the_end_of_a_query_is_noticed_while_none_of_its_partitions_has_rows(stage: Stage) -> None:
    rows = stage.read(0)[0]
    asked: list[bool] = []
    query = stage.started[0]
    query.ended = lambda: asked.append(True) or QueryEndedError("gone")  # type: ignore[method-assign,func-returns-value]

    query.end = QueryEndedError("gone")

    eventually(lambda: bool(asked), "the end is noticed")
    with pytest.raises(QueryEndedError, match="gone"):
        rows.pull(0.0)


def test_a_query_is_replaced_before_spark_ends_its_batch(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.read(0, 1)
    assert stays(lambda: len(stage.started) == 1, 2 * SETTLE_SECONDS)

    monkeypatch.setattr(shared_queries, "_MOST_AGE_SECONDS", 0.5)

    eventually(lambda: stage.partitions()[:2] == [[0, 1], [0, 1]], "a new query replaces it")


def test_a_replacement_that_fails_leaves_the_tasks_as_they_are(stage: Stage) -> None:
    rows = stage.read(0)[0]
    stage.failures = []
    stage.read(1)
    stage.failures = [QueryEndedError("no luck")]
    eventually(lambda: len(stage.started) == 3, "a replacement is tried")

    arrive(stage.started[2], 0, 1)
    assert not rows.change_over(0)
    arrive(stage.started[0], 0, 1)
    assert offsets(rows) == [0]


def test_a_replacement_that_ends_before_a_task_changes_over_is_ignored(stage: Stage) -> None:
    rows = stage.read(0)[0]
    stage.read(1)
    eventually(lambda: len(stage.started) == 3, "one query replaces both")
    arrive(stage.started[2], 0, 1)
    stage.started[2].end = QueryEndedError("gone")

    assert not rows.change_over(0)
    arrive(stage.started[0], 0, 1)
    assert offsets(rows) == [0]


@pytest.mark.parametrize("failure", [QueryEndedError("no leader"), ConfigurationError("no folder for sockets")])
def test_every_task_of_a_query_that_cannot_start_gets_the_error(stage: Stage, failure: BalanceServiceError) -> None:
    stage.failures = [failure]

    stage.read(0, 1)

    assert [type(error) for error in stage.errors] == [type(failure)] * 2
    assert {str(error) for error in stage.errors} == {str(failure)}
    assert stage.slots.take(100)


def test_a_query_without_slots_is_an_error_and_is_counted(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_queries, "_SLOTS_SECONDS", 0.1)
    assert stage.slots.take(99)

    stage.read(0, 1)

    assert [str(error) for error in stage.errors] == ["Spark has not 2 free slots of 100; report this as a bug"] * 2
    assert stage.missed == 1
    assert stage.read(0)


def test_a_closed_task_gets_no_query(stage: Stage) -> None:
    stage.positions = {0: -1}

    stage.read(0)

    assert [type(error) for error in stage.errors] == [QueryInterruptedError]
    assert all(not query.rows for query in stage.started)
