"""A task that stops at an offset: the rows that it gets until then, and those that wait."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pyarrow as pa
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from balance_service.engine.records import TaskId
from balance_service.engine.task import StopAt, Task
from balance_service.spark.task_runner import _BoundedRows

if TYPE_CHECKING:
    from balance_service.engine.hosted_stage import HostedStage


class Standing(Task):
    """A task that is at a position without a store."""

    def __init__(self) -> None:
        super().__init__(TaskId("balance", 0), cast("HostedStage", None))
        self.at = 0
        self.until: int | None = None

    @property
    def limit(self) -> int | None:
        return self.until

    @property
    def position(self) -> int:
        return self.at


class Query:
    """A query that delivers rows as a test says."""

    def __init__(self) -> None:
        self.coming: list[list[int]] = []

    def pull(self, _timeout_seconds: float) -> pa.RecordBatch | None:
        return pa.record_batch({"offset": pa.array(self.coming.pop(0), pa.int64())}) if self.coming else None


class Partition:
    """A task with its query. `gather` pulls once, `commit` applies all that was gathered."""

    def __init__(self, *coming: list[int]) -> None:
        self.task, self.query = Standing(), Query()
        self.query.coming = [*coming]
        self.rows = _BoundedRows(self.query.pull, self.task)
        self.gathered: list[int] = []
        self.applied: list[int] = []

    def gather(self) -> list[int]:
        batch = self.rows.pull(0.0)
        found = [] if batch is None else batch["offset"].to_pylist()
        assert batch is None or found
        self.gathered += found
        return found

    def commit(self) -> None:
        self.applied += self.gathered
        if self.gathered:
            self.task.at = self.gathered[-1] + 1
        self.gathered = []


def test_a_task_without_a_bound_gets_all_rows() -> None:
    partition = Partition([0, 1, 2], [3])

    assert [partition.gather() for _ in range(3)] == [[0, 1, 2], [3], []]


@pytest.mark.parametrize("offset", [3, 4])
def test_rows_at_and_beyond_the_bound_wait_until_it_is_released(offset: int) -> None:
    # There is no record at offset 3, as after a transaction.
    partition = Partition([0, 1, 2, 4, 5], [6])
    stop = partition.task.stop_at(offset)

    before = [partition.gather() for _ in range(3)]
    partition.commit()
    at_bound = [partition.gather() for _ in range(3)]
    partition.task.go_on()

    assert (before, at_bound) == ([[0, 1, 2], [], []], [[], [], []])
    assert stop.reached.is_set()
    assert [partition.gather() for _ in range(3)] == [[4, 5], [6], []]


def test_a_bound_is_reached_only_after_every_row_below_it_was_committed() -> None:
    partition = Partition([0, 1], [2, 3], [4])
    stop = partition.task.stop_at(4)

    # One commit has the rows of several pulls.
    for expected in ([0, 1], [2, 3], []):
        assert partition.gather() == expected
        assert not stop.reached.is_set()
    partition.commit()

    assert partition.gather() == []
    assert stop.reached.is_set()


def test_a_bound_without_a_row_beyond_it_is_reached_by_the_position() -> None:
    partition = Partition([0, 1])
    stop = partition.task.stop_at(3)
    partition.gather()
    partition.commit()

    partition.gather()
    is_reached_before = stop.reached.is_set()
    # The task has read offset 2, which is a control record.
    partition.task.at = 3
    partition.gather()

    assert (is_reached_before, stop.reached.is_set()) == (False, True)


def test_a_task_at_its_bound_gets_no_row_from_the_start() -> None:
    partition = Partition([0, 1])

    stop = partition.task.stop_at(0)

    assert [partition.gather() for _ in range(3)] == [[], [], []]
    assert stop.reached.is_set()


def test_a_task_beyond_its_bound_stops_at_once() -> None:
    partition = Partition([0, 1], [2])
    partition.gather()
    partition.commit()

    stop = partition.task.stop_at(1)

    assert [partition.gather() for _ in range(2)] == [[], []]
    assert stop.reached.is_set()


def test_another_query_delivers_the_rows_that_waited_again() -> None:
    partition = Partition([0, 1, 2, 3])
    partition.task.stop_at(2)
    partition.gather()
    partition.commit()
    partition.gather()

    # As the task runner does when a query replaces another.
    partition.rows.rest = None
    partition.query.coming = [[2, 3, 4]]
    partition.task.go_on()

    assert [partition.gather() for _ in range(2)] == [[2, 3, 4], []]


def test_a_row_that_was_gathered_before_the_bound_keeps_it_from_being_reached() -> None:
    partition = Partition([0, 1], [2])
    partition.gather()
    stop = partition.task.stop_at(2)

    partition.gather()
    is_reached_before = stop.reached.is_set()
    partition.commit()
    partition.gather()

    assert (is_reached_before, stop.reached.is_set()) == (False, True)


def test_rows_at_and_beyond_the_limit_wait_until_it_rises() -> None:
    partition = Partition([0, 1, 2, 4], [5])
    partition.task.until = 2

    at_limit = [partition.gather() for _ in range(3)]
    partition.commit()
    partition.task.until = 5

    assert at_limit == [[0, 1], [], []]
    assert [partition.gather() for _ in range(3)] == [[2, 4], [], []]
    partition.task.until = None
    assert partition.gather() == [5]


def test_a_bound_beyond_the_limit_is_reached_once_the_limit_is_there() -> None:
    partition = Partition([0, 1, 2, 3, 4])
    partition.task.until = 2
    stop = partition.task.stop_at(4)

    for until in (2, 3, 4):
        partition.task.until = until
        assert not stop.reached.is_set()
        partition.gather()
        partition.commit()
    partition.gather()

    assert partition.applied == [0, 1, 2, 3]
    assert stop.reached.is_set()


class AnyOrder(RuleBasedStateMachine):
    """Rows, commits, bounds, limits and other queries in any order; bounds between commits only."""

    def __init__(self) -> None:
        super().__init__()
        self.partition = Partition()
        self.log: list[int] = []
        self.read = 0
        self.stop: StopAt | None = None

    @rule(gaps=st.lists(st.integers(1, 3), min_size=1, max_size=6))
    def rows_arrive(self, gaps: list[int]) -> None:
        for gap in gaps:
            self.log.append((self.log[-1] if self.log else -1) + gap)

    @precondition(lambda self: self.read < len(self.log))
    @rule(share=st.floats(0, 1))
    def the_query_delivers(self, share: float) -> None:
        some = max(1, round(share * (len(self.log) - self.read)))
        self.partition.query.coming.append(self.log[self.read : self.read + some])
        self.read += some

    @rule()
    def a_pull(self) -> None:
        found, limit = self.partition.gather(), self.partition.task.until
        assert self.stop is None or all(offset < self.stop.offset for offset in found)
        assert limit is None or all(offset < limit for offset in found)

    @rule()
    def a_commit(self) -> None:
        self.partition.commit()

    @precondition(lambda self: self.stop is None and not self.partition.gathered)
    @rule(ahead=st.integers(0, 8))
    def a_bound(self, ahead: int) -> None:
        self.stop = self.partition.task.stop_at(self.partition.task.position + ahead)

    @precondition(lambda self: self.stop is not None and not self.partition.gathered)
    @rule()
    def a_release(self) -> None:
        self.partition.task.go_on()
        self.stop = None

    @rule(ahead=st.none() | st.integers(0, 8))
    def a_limit(self, ahead: int | None) -> None:
        self.partition.task.until = None if ahead is None else self.partition.task.position + ahead

    @precondition(lambda self: not self.partition.gathered)
    @rule()
    def another_query(self) -> None:
        self.partition.rows.rest = None
        self.partition.query.coming = []
        self.read = len(self.partition.applied)

    @invariant()
    def nothing_is_lost_or_applied_twice(self) -> None:
        taken = self.partition.applied + self.partition.gathered
        assert taken == self.log[: len(taken)]

    @invariant()
    def a_reached_bound_has_every_row_below_it_committed(self) -> None:
        if self.stop is not None and self.stop.reached.is_set():
            applied, stop = self.partition.applied, self.stop.offset
            assert self.partition.task.position <= stop
            assert applied == [offset for offset in self.log[: self.read] if offset < stop][: len(applied)]
            below = [offset for offset in self.log if offset < stop]
            assert applied == below or not any(offset >= stop for offset in self.log[: self.read])

    def teardown(self) -> None:
        self.partition.commit()
        self.partition.task.go_on()
        self.partition.task.until = self.stop = None
        self.partition.query.coming.append(self.log[self.read :] or [])
        self.partition.query.coming = [some for some in self.partition.query.coming if some]
        while self.partition.gather():
            self.partition.commit()
        assert self.partition.applied == self.log


TestAnyOrder = AnyOrder.TestCase
