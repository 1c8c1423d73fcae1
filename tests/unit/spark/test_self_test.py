"""Whether failed queries are Spark's fault: the self-test, and when a task runs it."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from balance_service.engine.records import TaskId
from balance_service.engine.task import TaskState
from balance_service.errors import FatalError
from balance_service.spark import self_test as module
from balance_service.spark.row_query import QueryEndedError, QueryInterruptedError
from balance_service.spark.self_test import FailedQueries, SelfTest
from balance_service.spark.task_runner import TaskRunner
from tests.unit.spark.test_task_runner import runner, spark

if TYPE_CHECKING:
    from pathlib import Path


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_000.0
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class Planned(SelfTest):
    """Its queries end in the given ways; the last one repeats."""

    def __init__(self, folder: Path, *ends: Exception | None) -> None:
        scratch: Any = SimpleNamespace(files=folder)
        super().__init__(spark(), scratch)
        self._ends = list(ends)
        self.runs = 0

    def _query(self, is_interrupted: object) -> None:
        self.runs += 1
        end = self._ends.pop(0) if len(self._ends) > 1 else self._ends[0]
        if end is not None:
            raise end


MOST_FAILURES = 100
FAILED = QueryEndedError("RejectedExecutionException")


def run(self_test: SelfTest, clock: Clock, times: int = 1) -> None:
    for _ in range(times):
        self_test.run(lambda: False)
        clock.now += 5.0


def test_a_self_test_is_due_after_three_failed_queries_over_ten_seconds_or_more(clock: Clock) -> None:
    failures = FailedQueries()
    due = []
    for _ in range(12):
        due.append(failures.add())
        clock.now += 1.0

    assert due == [False] * 10 + [True] * 2

    slow = FailedQueries()
    due = []
    for _ in range(3):
        due.append(slow.add())
        clock.now += 60.0

    assert due == [False, False, True]


def test_a_query_that_reads_resets_the_count(clock: Clock) -> None:
    failures = FailedQueries()
    for _ in range(11):
        failures.add()
        clock.now += 1.0
    failures.reset()

    assert not failures.add()


def test_three_failed_self_tests_in_a_row_end_the_process(clock: Clock, tmp_path: Path) -> None:
    self_test = Planned(tmp_path, FAILED)
    run(self_test, clock, 2)

    with pytest.raises(FatalError, match="Spark runs no query any more: RejectedExecutionException"):
        run(self_test, clock)


def test_a_passed_self_test_resets_the_count(clock: Clock, tmp_path: Path) -> None:
    self_test = Planned(tmp_path, FAILED, FAILED, None, FAILED, FAILED, None)

    run(self_test, clock, 8)

    assert self_test.runs == 8


def test_a_full_disk_is_no_failure_of_spark(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "has_room", lambda _path: False)
    self_test = Planned(tmp_path, FAILED)

    run(self_test, clock, 8)

    assert self_test.runs == 8


def test_an_interrupted_self_test_does_not_count(clock: Clock, tmp_path: Path) -> None:
    self_test = Planned(tmp_path, QueryInterruptedError("interrupted"))

    run(self_test, clock, 8)


def test_the_self_test_runs_every_five_seconds_at_most(clock: Clock, tmp_path: Path) -> None:
    self_test = Planned(tmp_path, None)
    for _ in range(100):
        self_test.run(lambda: False)

    assert self_test.runs == 1


def test_a_task_runs_the_self_test_only_after_its_queries_have_failed_for_some_time(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted = threading.Event()
    tested: list[float] = []
    failed = 0

    def test(_is_interrupted: object) -> None:
        tested.append(clock.now)
        if len(tested) == 2:
            interrupted.set()

    def fails(*_: object) -> None:
        nonlocal failed
        failed += 1
        clock.now += 1.0
        if failed == MOST_FAILURES:
            interrupted.set()
        raise FAILED

    monkeypatch.setattr("balance_service.spark.task_runner._BACK_OFF_SECONDS", 0.0)
    monkeypatch.setattr(TaskRunner, "_run_query", fails)
    task: Any = SimpleNamespace(task_id=TaskId("balance", 0), state=TaskState.RUNNING)

    runner(self_test=SimpleNamespace(run=test)).run(task, interrupted)

    assert (failed, tested) == (12, [1_011.0, 1_012.0])
