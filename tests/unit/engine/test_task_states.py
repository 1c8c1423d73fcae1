"""The state machine of a task: every legal transition is allowed, every other refused."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from balance_service.engine.batch import PartitionUpdates, TaskBatch
from balance_service.engine.commit import Committed
from balance_service.engine.records import FailedAt, TaskId
from balance_service.engine.task import ANSWERING, TRANSITIONS, Task, TaskState
from balance_service.errors import FatalError, TaskMigratedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from balance_service.engine.changelog_writer import ChangelogWriter
    from balance_service.engine.hosted_stage import HostedStage
    from balance_service.engine.store import StateStore, StoreView

LEGAL = {
    ("CREATED", "RESTORING"),
    ("CREATED", "CLOSED"),
    ("RESTORING", "RUNNING"),
    ("RESTORING", "TAILING"),
    ("RESTORING", "HALTED"),
    ("RESTORING", "CLOSED"),
    ("RUNNING", "WAITING"),
    ("RUNNING", "HALTED"),
    ("RUNNING", "CLOSED"),
    ("TAILING", "RESTORING"),
    ("TAILING", "RUNNING"),
    ("TAILING", "WAITING"),
    ("TAILING", "HALTED"),
    ("TAILING", "CLOSED"),
    ("WAITING", "RUNNING"),
    ("WAITING", "HALTED"),
    ("WAITING", "CLOSED"),
    ("HALTED", "CLOSED"),
}
# The shortest way to each state.
WAYS = {
    TaskState.CREATED: [],
    TaskState.RESTORING: [TaskState.RESTORING],
    TaskState.RUNNING: [TaskState.RESTORING, TaskState.RUNNING],
    TaskState.TAILING: [TaskState.RESTORING, TaskState.TAILING],
    TaskState.WAITING: [TaskState.RESTORING, TaskState.RUNNING, TaskState.WAITING],
    TaskState.HALTED: [TaskState.RESTORING, TaskState.HALTED],
    TaskState.CLOSED: [TaskState.CLOSED],
}
ALL = list(product(TaskState, TaskState))
EMPTY_BATCH = TaskBatch(0, PartitionUpdates(0))


_FAILED_AT = FailedAt(b"a", "x.py:1", "KeyError")


VIEW = cast("StoreView", object())


def task_in(state: TaskState, hosted: object = None, *, has_store: bool = False) -> Task:
    """Returns a task, if it has a store, with VIEW. The machine alone needs no `hosted`: that is used by opening."""
    task = Task(TaskId("balance", 0), cast("HostedStage", hosted))
    if has_store:
        task.replica.store = cast("StateStore", SimpleNamespace(view=VIEW, position=None, close=lambda: None))
    for step in WAYS[state]:
        task._to(step)
    assert task.state is state
    return task


def is_legal(origin: TaskState, state: TaskState) -> bool:
    return (origin.value, state.value) in LEGAL


@pytest.mark.parametrize(("origin", "state"), [pair for pair in ALL if is_legal(*pair)])
def test_a_legal_transition_is_allowed(origin: TaskState, state: TaskState) -> None:
    task = task_in(origin)

    task._to(state)

    assert task.state is state


@pytest.mark.parametrize(("origin", "state"), [pair for pair in ALL if not is_legal(*pair)])
def test_an_illegal_transition_is_rejected_and_changes_nothing(origin: TaskState, state: TaskState) -> None:
    task = task_in(origin)

    with pytest.raises(FatalError, match=f"cannot go from {origin.value} to {state.value}"):
        task._to(state)

    assert task.state is origin


def test_every_state_except_closed_can_be_closed() -> None:
    assert {state for state, after in TRANSITIONS.items() if TaskState.CLOSED in after} == set(TaskState) - {
        TaskState.CLOSED
    }


def test_every_state_can_be_reached() -> None:
    assert set().union(*TRANSITIONS.values()) == set(TaskState) - {TaskState.CREATED}


def test_a_restoring_or_halted_task_does_not_answer() -> None:
    assert {TaskState.RUNNING, TaskState.TAILING, TaskState.WAITING} == ANSWERING


@pytest.mark.parametrize("state", list(TaskState))
def test_a_task_can_be_closed_in_any_state_and_twice(state: TaskState) -> None:
    task = task_in(state)

    task.close(1.0)
    task.close(1.0)

    assert task.state is TaskState.CLOSED


def test_a_task_that_is_given_up_has_no_view_and_cancels_its_work() -> None:
    task = task_in(TaskState.TAILING, has_store=True)
    before = task.view

    task.give_up()

    assert (before is None, task.view) == (False, None)
    with pytest.raises(TaskMigratedError, match="closed"):
        task.tail()


@pytest.mark.parametrize("state", [TaskState.RUNNING, TaskState.WAITING])
def test_a_task_that_its_models_code_halts_leaves_its_last_view_until_it_is_closed(state: TaskState) -> None:
    task = task_in(state, has_store=True)

    task.halt("the code fails", _FAILED_AT)

    assert (task.view, task.frozen_view) == (None, VIEW)
    task.give_up()
    assert task.frozen_view is None


def test_a_task_that_is_given_up_leaves_its_last_view_if_it_is_told_to() -> None:
    left = []
    for leaves_view in (True, False):
        task = task_in(TaskState.RUNNING, has_store=True)
        task.give_up(leaves_view=leaves_view)
        # The first one counts.
        task.close(1.0, leaves_view=not leaves_view)
        left.append(task.left_view is VIEW)
        assert (task.view, task.frozen_view) == (None, None)

    assert left == [True, False]


def test_a_task_keeps_what_the_previous_one_left_and_passes_it_on() -> None:
    view = cast("StoreView", object())
    task = Task(TaskId("balance", 0), cast("HostedStage", None), left=view)
    assert (task.view, task.left_view) == (None, view)

    task.close(1.0, leaves_view=True)

    assert (task.take_left(), task.left_view) == (view, None)


def test_a_task_whose_log_has_changed_leaves_no_view() -> None:
    task = task_in(TaskState.RUNNING, has_store=True)

    task.halt("the topic was recreated")

    assert task.frozen_view is None


def test_a_halted_task_whose_log_changes_later_leaves_no_view_any_more() -> None:
    task = task_in(TaskState.RUNNING, has_store=True)
    task.halt("the code fails", _FAILED_AT)
    assert task.frozen_view is not None

    task.halt("the topic was recreated")

    assert task.frozen_view is None


def test_a_task_that_is_given_up_before_it_halts_leaves_no_view() -> None:
    task = task_in(TaskState.RUNNING, has_store=True)
    task.give_up()

    task.halt("the code fails", _FAILED_AT)

    assert (task.frozen_view, task.left_view) == (None, None)


def test_a_task_that_halts_before_it_runs_leaves_no_view() -> None:
    task = task_in(TaskState.RESTORING)

    task.halt("the code fails", _FAILED_AT)

    assert task.frozen_view is None


def test_a_waiting_task_shows_its_latest_reason() -> None:
    task = task_in(TaskState.WAITING)

    task.wait("the table is at 1 of 9")
    task.wait("the table is at 5 of 9")

    assert (task.state, task.snapshot().reason) == (TaskState.WAITING, "the table is at 5 of 9")


def test_a_task_that_waits_during_restoration_shows_the_reason_and_does_not_answer() -> None:
    task = task_in(TaskState.RESTORING)

    task.wait("the disk is full")

    assert (task.state, task.snapshot().reason) == (TaskState.RESTORING, "the disk is full")


_APPLIES_OR_WAITS = (TaskState.RESTORING, TaskState.RUNNING, TaskState.TAILING, TaskState.WAITING)


@pytest.mark.parametrize("state", [s for s in TaskState if s not in _APPLIES_OR_WAITS])
def test_only_a_task_that_applies_records_can_wait(state: TaskState) -> None:
    task = task_in(state)

    task.wait("registry down")

    assert task.state is state
    assert task.snapshot().reason == ""


@pytest.mark.parametrize("state", [s for s in TaskState if s is not TaskState.WAITING])
def test_only_a_waiting_task_can_be_resumed(state: TaskState) -> None:
    task = task_in(state)

    task.resume()

    assert task.state is state


def test_a_waiting_task_shows_its_reason_until_it_is_resumed() -> None:
    task = task_in(TaskState.RUNNING)

    task.wait("registry down")
    assert (task.state, task.snapshot().reason) == (TaskState.WAITING, "registry down")
    task.resume()
    assert (task.snapshot().state, task.snapshot().reason) == ("RUNNING", "")


@pytest.mark.parametrize("state", [TaskState.RESTORING, TaskState.RUNNING, TaskState.TAILING, TaskState.WAITING])
def test_an_open_task_can_be_halted_and_shows_the_reason(state: TaskState) -> None:
    task = task_in(state)

    task.halt("the topic was deleted")

    assert (task.state, task.snapshot().reason) == (TaskState.HALTED, "the topic was deleted")


def test_a_task_halted_twice_keeps_the_first_reason() -> None:
    task = task_in(TaskState.RUNNING)

    task.halt("the topic was deleted")
    task.halt("something that followed from it")

    assert task.snapshot().reason == "the topic was deleted"


def test_a_closed_task_makes_no_transition() -> None:
    task = task_in(TaskState.RUNNING)
    task.close(1.0)

    task.wait("w")
    task.resume()
    task.halt("h")

    assert task.state is TaskState.CLOSED


def test_a_closed_task_is_never_opened_again() -> None:
    task = task_in(TaskState.CREATED)
    task.close(1.0)

    with pytest.raises(TaskMigratedError):
        task.open()


@pytest.mark.parametrize("state", [s for s in TaskState if s is not TaskState.RUNNING])
def test_only_a_running_task_processes(state: TaskState) -> None:
    task = task_in(state)

    with pytest.raises(TaskMigratedError):
        task.process(EMPTY_BATCH)


@pytest.mark.parametrize("state", list(TaskState))
def test_a_task_without_a_store_has_neither_view_nor_position(state: TaskState) -> None:
    task = task_in(state)

    assert task.view is None
    assert task.snapshot().position == -1


def test_a_standby_that_halts_just_before_its_promotion_is_not_promoted() -> None:
    task = task_in(TaskState.TAILING)
    task.halt("the source is gone")

    # What it would need, it has not.
    task.promote()

    assert task.state is TaskState.HALTED


def test_a_watcher_that_begins_during_a_commit_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    generations = SimpleNamespace(serves=lambda _stage: True)
    hosted = SimpleNamespace(
        processor=None, stage=SimpleNamespace(outputs=(), compacted=False), generations=generations
    )
    task = task_in(TaskState.RUNNING, hosted, has_store=True)
    task._writer = cast("ChangelogWriter", SimpleNamespace(close=lambda: None))
    task._sends = True
    told: list[tuple[int, int, Sequence[bytes] | None, bool]] = []

    class Watching:
        def committed(self, start: int, end: int, keys: Sequence[bytes] | None) -> None:
            told.append((start, end, keys, task.view is VIEW))

    def commit(*_: object) -> Committed:
        task.watch(Watching())
        return Committed(1, 0, 0, 0, changed_keys=lambda _most: [b"c1"])

    monkeypatch.setattr("balance_service.engine.task.commit", commit)
    task.process(TaskBatch(0, PartitionUpdates(3)))

    assert told == [(0, 3, [b"c1"], True)]


def test_a_task_that_is_given_up_ends_the_fold_of_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    hosted = SimpleNamespace(
        processor=None,
        stage=SimpleNamespace(outputs=(), compacted=False),
        generations=SimpleNamespace(serves=lambda _stage: True),
    )
    task = task_in(TaskState.RUNNING, hosted, has_store=True)
    task._writer = cast("ChangelogWriter", SimpleNamespace(close=lambda: None))
    task._sends = True

    def commit(batch: TaskBatch, *_: object) -> Committed:
        batch.require_wanted()
        task.give_up()
        batch.require_wanted()
        raise AssertionError("the batch is still wanted")

    monkeypatch.setattr("balance_service.engine.task.commit", commit)

    with pytest.raises(TaskMigratedError, match="closed while it folded"):
        task.process(TaskBatch(0, PartitionUpdates(3)))
    assert task.state is TaskState.CLOSED


def test_a_task_tells_since_when_it_is_in_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000]
    monkeypatch.setattr("balance_service.engine.task.now_ms", lambda: now[0])
    task = Task(TaskId("balance", 0), cast("HostedStage", None))

    told = [(task.state.value, task.snapshot().since_ms)]
    for state in (TaskState.RESTORING, TaskState.RUNNING, TaskState.WAITING, TaskState.HALTED):
        now[0] += 100
        task._to(state)
        told.append((state.value, task.snapshot().since_ms))

    # A restore begins when the task is made, which may wait for its turn.
    assert told == [("CREATED", 1000), ("RESTORING", 1000), ("RUNNING", 1200), ("WAITING", 1300), ("HALTED", 1400)]


def test_a_task_that_is_opened_again_counts_from_the_first_failure_until_it_runs() -> None:
    task = Task(TaskId("balance", 0), cast("HostedStage", None), since_ms=7)

    task._to(TaskState.RESTORING)
    assert task.snapshot().since_ms == 7
    task._to(TaskState.RUNNING)
    assert task.snapshot().since_ms > 7


def test_a_task_that_fails_to_open_counts_from_the_first_failure_also_while_it_is_closed() -> None:
    task = Task(TaskId("balance", 0), cast("HostedStage", None), since_ms=7)
    task._to(TaskState.RESTORING)

    task.close(1.0, "the brokers do not allow it")

    assert (task.state, task.snapshot().since_ms) == (TaskState.CLOSED, 7)


@pytest.mark.parametrize(("passed", "since_ms"), [(59, 1000), (60, 1300)])
def test_a_task_that_has_to_wait_again_before_it_commits_has_waited_all_the_time(
    monkeypatch: pytest.MonkeyPatch, passed: float, since_ms: int
) -> None:
    now, clock = [1000], [0.0]
    monkeypatch.setattr("balance_service.engine.task.now_ms", lambda: now[0])
    monkeypatch.setattr("balance_service.engine.task.elapsed", lambda: clock[0])
    task = task_in(TaskState.RUNNING)

    for _ in range(3):
        task.wait("the registry does not answer")
        now[0] += 50
        task.resume()
        now[0] += 50
    clock[0] += passed
    task.wait("the registry does not answer")

    assert task.snapshot().since_ms == since_ms


def test_a_task_that_has_committed_waits_from_the_next_wait_on(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000]
    monkeypatch.setattr("balance_service.engine.task.now_ms", lambda: now[0])
    generations = SimpleNamespace(serves=lambda _stage: True)
    task = task_in(
        TaskState.RUNNING,
        SimpleNamespace(processor=None, stage=SimpleNamespace(compacted=False), generations=generations),
    )
    task.replica.store = cast("StateStore", SimpleNamespace(view=None, close=lambda: None, position=None))
    task._writer = cast("ChangelogWriter", SimpleNamespace(close=lambda: None))
    committed = Committed(1, 0, 0, 0, changed_keys=lambda _most: None)
    monkeypatch.setattr("balance_service.engine.task.commit", lambda *_: committed)
    task.wait("the registry does not answer")
    task.resume()
    task._sends = True

    task.process(TaskBatch(0, PartitionUpdates(3)))
    now[0] += 500
    task.wait("the disk is full")

    assert task.since_ms == 1500


def test_a_halted_task_tells_where_its_models_code_failed_first() -> None:
    task = task_in(TaskState.RUNNING)
    first, second = _FAILED_AT, FailedAt(b"b", "x.py:2", "KeyError")

    task.halt("its fold failed", first)
    task.halt("it failed again", second)

    assert task.snapshot().failed_at == first
