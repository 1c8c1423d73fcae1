"""When queries that fail are Spark's own fault, and when they are not."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from balance_service.engine.records import TaskId
from balance_service.engine.task import TaskState
from balance_service.errors import FatalError
from balance_service.spark import rehearsal as module
from balance_service.spark.feed import Feed
from balance_service.spark.rehearsal import Failures, Rehearsal
from balance_service.spark.row_query import QueryEndedError, QueryInterruptedError
from tests.unit.spark.test_feed import feed, spark

if TYPE_CHECKING:
    from pathlib import Path


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_000.0
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class Rehearsed(Rehearsal):
    """Its queries end in the given ways, the later ones in the last of them."""

    def __init__(self, folder: Path, *ends: Exception | None) -> None:
        scratch: Any = SimpleNamespace(files=folder)
        super().__init__(spark(), scratch)
        self._ends = list(ends)
        self.runs = 0

    def _run(self, is_interrupted: object) -> None:
        self.runs += 1
        end = self._ends.pop(0) if len(self._ends) > 1 else self._ends[0]
        if end is not None:
            raise end


FAILED = QueryEndedError("RejectedExecutionException")


def doubt(rehearsal: Rehearsal, clock: Clock, times: int = 1) -> None:
    for _ in range(times):
        rehearsal.doubt(lambda: False)
        clock.now += 5.0


def test_spark_is_in_doubt_once_three_queries_of_a_task_have_failed_within_ten_seconds_or_more(clock: Clock) -> None:
    failures = Failures()
    doubted = []
    for _ in range(12):
        doubted.append(failures.another())
        clock.now += 1.0

    assert doubted == [False] * 10 + [True] * 2

    slow = Failures()
    doubted = []
    for _ in range(3):
        doubted.append(slow.another())
        clock.now += 60.0

    assert doubted == [False, False, True]


def test_a_query_that_reads_ends_the_doubt(clock: Clock) -> None:
    failures = Failures()
    for _ in range(11):
        failures.another()
        clock.now += 1.0
    failures.over()

    assert not failures.another()


def test_three_rehearsals_that_fail_in_a_row_end_the_process(clock: Clock, tmp_path: Path) -> None:
    rehearsal = Rehearsed(tmp_path, FAILED)
    doubt(rehearsal, clock, 2)

    with pytest.raises(FatalError, match="Spark runs no query any more: RejectedExecutionException"):
        doubt(rehearsal, clock)


def test_a_rehearsal_that_succeeds_is_where_counting_begins_again(clock: Clock, tmp_path: Path) -> None:
    rehearsal = Rehearsed(tmp_path, FAILED, FAILED, None, FAILED, FAILED, None)

    doubt(rehearsal, clock, 8)

    assert rehearsal.runs == 8


def test_a_full_disk_is_not_held_against_spark(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "has_room", lambda _path: False)
    rehearsal = Rehearsed(tmp_path, FAILED)

    doubt(rehearsal, clock, 8)

    assert rehearsal.runs == 8


def test_a_rehearsal_that_the_stop_of_the_instance_interrupts_does_not_count(clock: Clock, tmp_path: Path) -> None:
    rehearsal = Rehearsed(tmp_path, QueryInterruptedError("interrupted"))

    doubt(rehearsal, clock, 8)


def test_however_many_tasks_ask_a_query_is_run_every_five_seconds(clock: Clock, tmp_path: Path) -> None:
    rehearsal = Rehearsed(tmp_path, None)
    for _ in range(100):
        rehearsal.doubt(lambda: False)

    assert rehearsal.runs == 1


def test_a_task_asks_for_a_rehearsal_only_after_its_queries_have_failed_for_a_while(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted = threading.Event()
    asked: list[float] = []
    failed = 0

    def doubted(_is_interrupted: object) -> None:
        asked.append(clock.now)
        if len(asked) == 2:
            interrupted.set()

    def fails(*_: object) -> None:
        nonlocal failed
        failed += 1
        clock.now += 1.0
        raise FAILED

    monkeypatch.setattr("balance_service.spark.feed._BACK_OFF_SECONDS", 0.0)
    monkeypatch.setattr(Feed, "_run_query", fails)
    task: Any = SimpleNamespace(task_id=TaskId("balance", 0), state=TaskState.RUNNING)

    feed(rehearsal=SimpleNamespace(doubt=doubted)).run(task, interrupted)

    assert (failed, asked) == (12, [1_011.0, 1_012.0])
