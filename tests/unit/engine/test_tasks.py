"""An assigned partition is opened after anything that happened to its standby."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from balance_service.engine import tasks as module
from balance_service.engine.decisions import Decision, Verdict
from balance_service.engine.progress import Progress, Seen
from balance_service.engine.records import Role
from balance_service.engine.task import Task, TaskState
from balance_service.engine.tasks import Tasks
from balance_service.errors import (
    BalanceServiceError,
    RetriableError,
    StoreCorruptedError,
    StoreFullError,
    TaskHaltedError,
    TaskMigratedError,
    UnreadableRecordError,
)
from balance_service.hosting.engine import Engine
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from balance_service.engine.hosted_stage import HostedStage
    from balance_service.engine.store import StoreView

HALTED_STANDBY = (Role.STANDBY, TaskState.HALTED)
TAILING_STANDBY = (Role.STANDBY, TaskState.TAILING)
RESTORING_STANDBY = (Role.STANDBY, TaskState.RESTORING)
HALTED_OWNER = (Role.ACTIVE, TaskState.HALTED)
RUNNING_OWNER = (Role.ACTIVE, TaskState.RUNNING)


class Opening:
    """What happens to tasks when they are opened; no broker is needed."""

    def __init__(self) -> None:
        self.halts: set[Role] = set()
        self.has_room = True
        self.has_broker = True
        self.opened: list[Role] = []

    def task(self, *args: Any, **named: Any) -> Task:
        return _Task(self, *args, **named)

    def check_resumption(self, _partition: int, _interrupted: threading.Event) -> None:
        """Lets every waiting task fold again."""

    def has_begun(self, _partition: int) -> bool:
        return True

    def stop(self, _timeout_seconds: float) -> bool:
        return True

    def run(self, _task: Task, interrupted: threading.Event) -> None:
        interrupted.wait()


class _Task(Task):
    def __init__(self, opening: Opening, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._opening = opening

    def open(self) -> None:
        self._opening.opened.append(self.role)
        self._to(TaskState.RESTORING)
        if not self._opening.has_broker:
            raise RetriableError("the broker does not answer")
        self.take_left()
        self._halt_if_told(self.role)
        if self._opening.has_room:
            self._to(TaskState.RUNNING if self.role is Role.ACTIVE else TaskState.TAILING)

    def tail(self) -> None:
        time.sleep(0.01)
        if not self._opening.has_room:
            raise StoreFullError("make room")

    def promote(self) -> None:
        self._halt_if_told(Role.ACTIVE)

    def _halt_if_told(self, role: Role) -> None:
        if role in self._opening.halts:
            raise TaskHaltedError("for a person to look")


def hosted(name: str = "balance", **parts: Any) -> HostedStage:
    generations = SimpleNamespace(serves=lambda _stage: True)
    return cast(
        "HostedStage",
        SimpleNamespace(name=name, joined=None, progress=Progress(), generations=generations, stage=None, **parts),
    )


@pytest.fixture
def opening(monkeypatch: pytest.MonkeyPatch) -> Opening:
    played = Opening()
    monkeypatch.setattr(module, "Task", played.task)
    monkeypatch.setattr(module, "has_room", lambda _path, *, serves: serves and played.has_room)
    monkeypatch.setattr(module, "_WAITING_SECONDS", 0.05)
    return played


@pytest.fixture
def tasks(opening: Opening, tmp_path: Path) -> Iterator[Tasks]:
    directory = SimpleNamespace(path=tmp_path, store_path=lambda _: tmp_path / "store")
    kept = Tasks(hosted(state_directory=directory), opening, lambda: None)
    yield kept
    assert kept.stop(5)


def becomes(tasks: Tasks, role: Role, state: TaskState) -> None:
    eventually(lambda: [(t.role, t.state) for t in tasks.all()] == [(role, state)], f"the task is {role} and {state}")


def test_only_as_many_tasks_open_at_once_as_the_open_files_allow_and_all_get_their_turn(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, at_once = threading.Lock(), [0, 0]

    def open_slowly(task: Task) -> None:
        with lock:
            at_once[:] = at_once[0] + 1, max(at_once[1], at_once[0] + 1)
        time.sleep(0.02)
        with lock:
            at_once[0] -= 1
        task._to(TaskState.RESTORING)
        task._to(TaskState.RUNNING)

    monkeypatch.setattr(_Task, "open", open_slowly)
    tasks = Tasks(hosted(), opening, lambda: None, threading.Semaphore(3))
    tasks.assign(range(20))

    eventually(lambda: all(t.state is TaskState.RUNNING for t in tasks.all()), "all run")
    assert at_once == [0, 3]
    assert tasks.stop(5)


def test_a_task_that_waits_for_its_turn_to_open_ends_when_it_is_dismissed(opening: Opening) -> None:
    tasks = Tasks(hosted(), opening, lambda: None, threading.Semaphore(0))
    tasks.assign([0])

    assert tasks.stop(2)
    assert opening.opened == []


def test_a_partition_that_returns_is_opened_once_its_former_task_is_closed(opening: Opening, tasks: Tasks) -> None:
    finishes = threading.Event()

    def run(_task: Task, interrupted: threading.Event) -> None:
        interrupted.wait()
        assert finishes.wait(10)

    opening.run = run  # type: ignore[method-assign]
    tasks.assign([0])
    becomes(tasks, *RUNNING_OWNER)
    tasks.dismiss([0])
    # One that is dismissed while it waits opens nothing, and the next one waits for the first.
    tasks.stand_by([0])
    tasks.stand_by([])
    tasks.stand_by([0])
    time.sleep(0.5)
    assert opening.opened == [Role.ACTIVE]

    finishes.set()

    becomes(tasks, *TAILING_STANDBY)
    assert opening.opened == [Role.ACTIVE, Role.STANDBY]


def test_a_former_task_that_does_not_end_is_not_waited_for_in_silence(
    opening: Opening, tasks: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FORMER_SECONDS", 0.3)
    finishes = threading.Event()

    def run(_task: Task, interrupted: threading.Event) -> None:
        del interrupted
        finishes.wait(60)

    opening.run = run  # type: ignore[method-assign]
    tasks.assign([0])
    becomes(tasks, *RUNNING_OWNER)
    try:
        tasks.dismiss([0])
        tasks.stand_by([0])

        eventually(lambda: opening.opened == [Role.ACTIVE, Role.STANDBY], "the new task tries to open the store", 20)
    finally:
        finishes.set()


def test_a_halted_standby_is_replaced_by_a_new_task_when_its_partition_is_assigned_here(
    tasks: Tasks, opening: Opening
) -> None:
    opening.halts = {Role.STANDBY}
    tasks.stand_by([0])
    becomes(tasks, *HALTED_STANDBY)

    tasks.assign([0])

    becomes(tasks, *RUNNING_OWNER)
    assert opening.opened == [Role.STANDBY, Role.ACTIVE]


def test_a_standby_that_halts_during_promotion_is_opened_as_owner_and_then_stays_halted(
    tasks: Tasks, opening: Opening
) -> None:
    opening.halts = {Role.ACTIVE}
    tasks.stand_by([0])
    becomes(tasks, *TAILING_STANDBY)

    tasks.assign([0])

    becomes(tasks, *HALTED_OWNER)
    # The group may give it once more. Longer than the first back-off.
    tasks.assign([0])
    time.sleep(0.5)
    becomes(tasks, *HALTED_OWNER)
    assert opening.opened == [Role.STANDBY, Role.ACTIVE]


def test_a_halted_standby_stays_halted_as_long_as_it_is_a_standby(tasks: Tasks, opening: Opening) -> None:
    opening.halts = {Role.STANDBY}
    tasks.stand_by([0])
    becomes(tasks, *HALTED_STANDBY)

    tasks.stand_by([0])
    time.sleep(0.5)

    becomes(tasks, *HALTED_STANDBY)
    assert opening.opened == [Role.STANDBY]


def test_a_stopping_engine_requests_all_stages_to_stop_before_it_awaits_one(
    tasks: Tasks, opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = Tasks(hosted("activity"), opening, lambda: None)
    told = list[bool]()

    def run(_task: Task, interrupted: threading.Event) -> None:
        interrupted.wait()
        eventually(lambda: last.task(0) is None, "the last stage is told", 1.0)
        told.append(True)

    monkeypatch.setattr(opening, "run", run)
    tasks.assign([0])
    becomes(tasks, *RUNNING_OWNER)
    last.stand_by([0])
    becomes(last, *TAILING_STANDBY)
    stages = {"balance": tasks, "activity": last}
    other = SimpleNamespace(stop=lambda *_: None, close=lambda: None)
    engine: Any = SimpleNamespace(
        memberships=other,
        _workers=(),
        _stage_workers={},
        generations=other,
        _warm_up=SimpleNamespace(join=lambda *_: None, is_alive=lambda: False),
        stages=stages,
        tables=other,
        spark=other,
        registry=other,
        state_directory=other,
    )

    Engine.stop(engine)

    assert told == [True]


@pytest.mark.parametrize("is_promoted", [False, True])
def test_a_standby_without_disk_space_during_restoration_reports_it_and_continues_when_there_is_space(
    tasks: Tasks, opening: Opening, *, is_promoted: bool
) -> None:
    opening.has_room = False
    tasks.stand_by([0])
    eventually(lambda: [t.reason for t in tasks.snapshots()] == ["make room"], "the reason is told")
    becomes(tasks, *RESTORING_STANDBY)
    if is_promoted:
        tasks.assign([0])

    opening.has_room = True

    becomes(tasks, *(RUNNING_OWNER if is_promoted else TAILING_STANDBY))


def test_a_generation_that_does_not_serve_waits_for_more_room_until_it_serves(
    tasks: Tasks, opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving: list[bool] = []
    monkeypatch.setattr(tasks.hosted.generations, "serves", lambda _stage: bool(serving))
    opening.has_room = False
    tasks.stand_by([0])
    becomes(tasks, Role.STANDBY, TaskState.RESTORING)
    eventually(lambda: tasks.all()[0].snapshot().reason == "make room", "the task waits for room")
    opening.has_room = True

    # Some turns of waiting.
    time.sleep(0.2)
    assert opening.opened == [Role.STANDBY]

    serving.append(True)
    becomes(tasks, *TAILING_STANDBY)


def test_damage_reported_for_a_closed_task_does_not_affect_its_successor_or_the_successors_store(
    tasks: Tasks, opening: Opening, tmp_path: Path
) -> None:
    tasks.assign([0])
    becomes(tasks, *RUNNING_OWNER)
    first = tasks.task(0)
    assert first is not None
    tasks.damaged(0, first, StoreCorruptedError("met in the first"))
    eventually(lambda: tasks.task(0) is not first, "another task has taken its place")
    becomes(tasks, *RUNNING_OWNER)
    (tmp_path / "store").mkdir()

    tasks.damaged(0, first, StoreCorruptedError("met in the first by a slow scan"))

    # Longer than the first back-off.
    time.sleep(0.5)
    assert (tmp_path / "store").exists()
    assert opening.opened == [Role.ACTIVE, Role.ACTIVE]


def test_states_that_the_class_cannot_read_halt_their_task_and_keep_the_store(
    tasks: Tasks, opening: Opening, tmp_path: Path
) -> None:
    tasks.assign([0])
    becomes(tasks, *RUNNING_OWNER)
    task = tasks.task(0)
    assert task is not None
    (tmp_path / "store").mkdir()

    tasks.damaged(0, task, UnreadableRecordError("'points' is a long there"))

    becomes(tasks, *HALTED_OWNER)
    assert task.snapshot().reason == "'points' is a long there"
    assert ((tmp_path / "store").exists(), opening.opened) == (True, [Role.ACTIVE])


def test_a_task_that_cannot_read_what_it_opens_with_halts(
    tasks: Tasks, opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(_task: Task, _role: Role) -> None:
        raise UnreadableRecordError("of another registry")

    monkeypatch.setattr(_Task, "_halt_if_told", unreadable)

    tasks.assign([0])

    becomes(tasks, *HALTED_OWNER)
    assert opening.opened == [Role.ACTIVE]


def test_a_task_that_waits_carries_out_what_other_generations_decide(
    tasks: Tasks, opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    carried_out = threading.Event()

    def still_waits(_partition: int, _interrupted: threading.Event) -> None:
        raise RetriableError("the table is not read yet")

    def wait_at_once(task: Task, _interrupted: threading.Event) -> None:
        task.wait("for a table")

    monkeypatch.setattr(opening, "check_resumption", still_waits)
    monkeypatch.setattr(opening, "run", wait_at_once)
    monkeypatch.setattr(_Task, "carry_out", lambda _task: carried_out.set())

    tasks.assign([0])

    assert carried_out.wait(5)
    becomes(tasks, Role.ACTIVE, TaskState.WAITING)


def test_a_task_that_is_resumed_counts_as_waiting_while_it_has_records_and_has_applied_none(
    tasks: Tasks, opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited, resumed = threading.Event(), threading.Event()

    def run(task: Task, interrupted: threading.Event) -> None:
        if not waited.is_set():
            waited.set()
            task.wait("the registry does not answer")
        else:
            resumed.set()
            interrupted.wait()

    monkeypatch.setattr(opening, "run", run)
    tasks.assign([0])
    assert resumed.wait(5)
    told = []
    for lag in (3, 0):
        tasks.hosted.progress.look({0: Seen(5, lag, restores=False)})
        told += [(one.state, one.reason) for one in tasks.snapshots()]

    assert told == [("WAITING", "the registry does not answer"), ("RUNNING", "")]


@pytest.mark.parametrize("is_waiting", [False, True])
def test_a_task_that_has_no_room_to_follow_a_decision_answers_until_there_is_room(
    tasks: Tasks, opening: Opening, monkeypatch: pytest.MonkeyPatch, *, is_waiting: bool
) -> None:
    def carry_out(_task: Task) -> None:
        if not opening.has_room:
            raise StoreFullError("make room")

    def run(task: Task, interrupted: threading.Event) -> None:
        if is_waiting:
            task.wait("for a table")
        while not interrupted.wait(0.01) and task.state is TaskState.RUNNING:
            task.carry_out()

    monkeypatch.setattr(_Task, "carry_out", carry_out)
    monkeypatch.setattr(opening, "run", run)
    tasks.assign([0])
    eventually(lambda: opening.opened == [Role.ACTIVE] and tasks.all()[0].state is not TaskState.CREATED, "it opens")
    first = tasks.task(0)
    opening.has_room = False
    eventually(lambda: [t.reason for t in tasks.snapshots()] == ["make room"], "the reason is told")

    # Several looks for room.
    time.sleep(0.3)
    assert tasks.task(0) is first
    becomes(tasks, Role.ACTIVE, TaskState.WAITING)
    opening.has_room = True

    eventually(lambda: tasks.task(0) is not first, "it is opened again")


def test_a_decision_that_was_carried_out_counts_although_its_task_is_closed_then(
    tasks: Tasks, opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    def letters_at(_task: Task, _offsets: object) -> None:
        raise TaskMigratedError("the task is closed")

    monkeypatch.setattr(_Task, "decide", lambda *_: {2: "there is no dead letter"}, raising=False)
    monkeypatch.setattr(_Task, "letters_at", letters_at, raising=False)
    tasks.assign([0])
    eventually(lambda: opening.opened == [Role.ACTIVE], "it opens")

    assert tasks.decide(0, [1, 2], Verdict(Decision.DISCARD, "ann", "")) == {2: "there is no dead letter"}


def test_a_task_that_is_closed_by_an_error_says_why_until_the_next_one_runs(
    tasks: Tasks, opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BACK_OFF_SECONDS", (60.0,))
    tasks.assign([0])
    becomes(tasks, Role.ACTIVE, TaskState.RUNNING)
    (task,) = tasks.all()

    tasks.failed(task, RetriableError("the broker does not answer"))

    becomes(tasks, Role.ACTIVE, TaskState.CLOSED)
    assert [snapshot.reason for snapshot in tasks.snapshots()] == ["the broker does not answer"]


def _left(tasks: Tasks) -> object:
    left = tasks.left(0)
    return None if left is None else left.frozen_view


def _running_with_view(tasks: Tasks) -> object:
    """Returns the view of the task of partition 0."""
    becomes(tasks, *RUNNING_OWNER)
    task = tasks.task(0)
    assert task is not None
    task._shown = view = cast("StoreView", object())
    return view


@pytest.mark.shows("max-age")
@pytest.mark.parametrize(
    ("error", "is_left"), [(RetriableError("away"), True), (StoreCorruptedError("damaged"), False)]
)
def test_a_task_that_is_closed_by_an_outage_leaves_its_view_until_the_next_one_opens_the_store(
    tasks: Tasks, opening: Opening, error: BalanceServiceError, *, is_left: bool
) -> None:
    tasks.assign([0])
    view, before = _running_with_view(tasks), tasks.task(0)
    opening.has_broker = False

    assert before is not None
    tasks.failed(before, error)

    for _ in range(2):
        attempts = len(opening.opened)
        assert _left(tasks) is (view if is_left else None)
        eventually(lambda: len(opening.opened) > attempts, "it is tried again")  # noqa: B023
    opening.has_broker = True
    becomes(tasks, *RUNNING_OWNER)
    assert tasks.left(0) is None


@pytest.mark.shows("max-age")
def test_partitions_whose_group_does_not_answer_leave_their_views_until_another_instance_answers(
    tasks: Tasks, opening: Opening
) -> None:
    tasks.assign([0])
    view = _running_with_view(tasks)

    for task in tasks.dismiss([0], leaves_views=True):
        task.close(1.0)

    assert tasks.task(0) is None
    assert _left(tasks) is view
    opening.has_broker = False
    tasks.assign([0])
    assert _left(tasks) is view
    tasks.dismiss([0], leaves_views=True)
    assert _left(tasks) is view
    tasks.assign([1])
    tasks.forget_left(lambda partition: partition != 0)
    assert _left(tasks) is view
    tasks.forget_left(lambda partition: partition == 0)
    assert tasks.left(0) is None


def test_partitions_that_move_leave_no_views(tasks: Tasks) -> None:
    tasks.assign([0])
    _running_with_view(tasks)

    (task,) = tasks.dismiss([0])

    # As long as anything refers to the view, no other task can open the store.
    assert task.left_view is None


def test_a_partition_that_moves_after_an_outage_has_closed_its_task_leaves_no_view(
    tasks: Tasks, opening: Opening
) -> None:
    tasks.assign([0])
    view, before = _running_with_view(tasks), tasks.task(0)
    assert before is not None
    opening.has_broker = False
    tasks.failed(before, RetriableError("away"))
    assert _left(tasks) is view

    (task,) = tasks.dismiss([0])

    eventually(lambda: before.left_view is None and task.left_view is None, "nothing refers to it")


def test_a_lost_partition_that_another_instance_answers_for_leaves_no_view(tasks: Tasks) -> None:
    tasks.assign([0])
    _running_with_view(tasks)
    (task,) = tasks.dismiss([0], leaves_views=True)
    assert task.left_view is not None

    tasks.forget_left(lambda _partition: True)

    # As long as anything refers to it, a later task cannot open the store.
    assert task.left_view is None


def test_a_left_view_that_turns_out_to_be_damaged_answers_no_more(tasks: Tasks) -> None:
    tasks.assign([0])
    _running_with_view(tasks)
    tasks.dismiss([0], leaves_views=True)

    tasks.damaged(0, tasks.left(0), StoreCorruptedError("damaged"))

    assert tasks.left(0) is None
