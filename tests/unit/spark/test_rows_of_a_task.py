"""The rows of a task: those that wait where it must stop while its query is replaced, and those of one commit."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from balance_service.engine.batch import PartitionUpdates
from balance_service.engine.records import TaskId
from balance_service.engine.task import Task, TaskState
from balance_service.errors import BalanceServiceError
from balance_service.model.generations import Switch
from balance_service.spark.task_runner import TaskRunner
from tests.support.fakes import DECLARED, alone
from tests.unit.spark.test_task_runner import FIRST, runner


class Running(Task):
    """A running task without a store, with the offsets that it has applied."""

    def __init__(self) -> None:
        super().__init__(TaskId("balance", 0), alone())
        self._state = TaskState.RUNNING
        self._sends = True
        self.applied: list[int] = []

    @property
    def position(self) -> int:
        return self.applied[-1] + 1 if self.applied else 0

    def left_out(self) -> list[int]:
        return []


def note_commits(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Returns the offsets of each commit from now on; a commit applies them to the task."""
    commits: list[list[int]] = []

    def part(_runner: TaskRunner, _partition: int, _left_out: pa.Array, table: pa.Table) -> PartitionUpdates:
        return PartitionUpdates(table["offset"].to_pylist()[-1] + 1, table)

    def commit(
        _runner: TaskRunner, updates: PartitionUpdates, start: int, _left_out: object, of: Running, _: object
    ) -> int:
        assert start == of.position
        assert updates.combined is not None
        commits.append(updates.combined["offset"].to_pylist())
        of.applied += commits[-1]
        return len(commits[-1])

    monkeypatch.setattr(TaskRunner, "_part", part)
    monkeypatch.setattr(TaskRunner, "_commit", commit)
    return commits


def run(of: TaskRunner, rows: object, task: Running, interrupted: threading.Event) -> None:
    """Runs a task with the rows of one query, until it is interrupted."""
    runs: Any = of
    runs._queries = SimpleNamespace(rows=lambda *_: nullcontext(rows))
    runs._metrics = SimpleNamespace(query_started=lambda *_: None)
    of._run_query(task, "assigned", interrupted)


class Replaced:
    """The rows of a query, which another one replaces once the task has waited where it must stop."""

    position = 0

    def __init__(self, task: Running, interrupted: threading.Event) -> None:
        self._task = task
        self._interrupted = interrupted
        self._from = 0
        self._looks = 0

    def change_over(self, start: int) -> bool:
        self._looks += 1
        if self._looks == 3:
            self._from = start
            self._task.go_on()
        return self._looks == 3

    def pull(self, _timeout_seconds: float) -> pa.RecordBatch | None:
        if self._looks > 5:
            self._interrupted.set()
        if self._from >= 6:
            return None
        rows = pa.record_batch({"offset": pa.array(range(self._from, 6), pa.int64())})
        self._from = 6
        return rows


def test_a_row_that_waited_is_applied_once_after_its_query_was_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    note_commits(monkeypatch)
    task, interrupted = Running(), threading.Event()
    task.stop_at(4)

    run(runner(), Replaced(task, interrupted), task, interrupted)

    assert task.applied == [0, 1, 2, 3, 4, 5]


class Arriving:
    """Rows of a query, two a pull by default; the task is interrupted once there are no more."""

    position = 0

    def __init__(self, end: int, interrupted: threading.Event, rows: int = 2) -> None:
        self._end = end
        self._interrupted = interrupted
        self._rows = rows
        self._next = 0

    def change_over(self, _start: int) -> bool:
        return False

    def pull(self, _timeout_seconds: float) -> pa.RecordBatch | None:
        if self._next == self._end:
            self._interrupted.set()
            return None
        self._next += self._rows
        return pa.record_batch({"offset": pa.array(range(self._next - self._rows, self._next), pa.int64())})


@pytest.mark.parametrize(
    ("max_rate", "commits"), [(None, [[0, 1, 2, 3, 4, 5]]), (10_000, [[0, 1], [2, 3], [4, 5]])], ids=["full", "bounded"]
)
def test_at_a_bounded_rate_events_are_not_gathered_at_full_speed(
    monkeypatch: pytest.MonkeyPatch, max_rate: int | None, commits: list[list[int]]
) -> None:
    found, task, interrupted = note_commits(monkeypatch), Running(), threading.Event()
    built = FIRST.begun(DECLARED).rebuilt(DECLARED, Switch.NEVER, 60, max_rate, "", "")

    run(runner(now=built, end=6), Arriving(6, interrupted), task, interrupted)

    assert found == commits


def test_at_a_bounded_rate_no_commit_has_more_than_a_quarter_of_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    found, task, interrupted = note_commits(monkeypatch), Running(), threading.Event()
    built = FIRST.begun(DECLARED).rebuilt(DECLARED, Switch.NEVER, 60, 40, "", "")

    run(runner(now=built, end=30), Arriving(30, interrupted, rows=30), task, interrupted)

    assert found == [[*range(10)], [*range(10, 20)], [*range(20, 30)]]


class SetAside(Arriving):
    """An operator sets the first record aside while the task waits for rows."""

    def __init__(self, task: Running, interrupted: threading.Event) -> None:
        super().__init__(6, interrupted)
        self._task = task

    def pull(self, timeout_seconds: float) -> pa.RecordBatch | None:
        self._task.applied.append(0)
        return super().pull(timeout_seconds)


def test_another_query_reads_on_when_an_operator_has_set_a_record_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    found, task, interrupted = note_commits(monkeypatch), Running(), threading.Event()

    with pytest.raises(BalanceServiceError, match=r"^set aside$"):
        run(runner(), SetAside(task, interrupted), task, interrupted)

    # The rows of the former query may begin with the record.
    assert found == []
