"""Tasks of one instance: a partition that is given to it is opened, whatever became of its standby."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from balance_service.engine import tasks as module
from balance_service.engine.records import Role
from balance_service.engine.task import Task, TaskState
from balance_service.engine.tasks import Tasks
from balance_service.errors import StoreCorruptedError, StoreFullError, TaskHaltedError
from balance_service.hosting.engine import Engine
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from balance_service.engine.hosted_stage import HostedStage

HALTED_STANDBY = (Role.STANDBY, TaskState.HALTED)
TAILING_STANDBY = (Role.STANDBY, TaskState.TAILING)
RESTORING_STANDBY = (Role.STANDBY, TaskState.RESTORING)
HALTED_OWNER = (Role.ACTIVE, TaskState.HALTED)
RUNNING_OWNER = (Role.ACTIVE, TaskState.RUNNING)


class Opening:
    """What becomes of tasks when they are opened, as the test says; none needs a broker."""

    def __init__(self) -> None:
        self.halts: set[Role] = set()
        self.has_room = True
        self.opened: list[Role] = []

    def task(self, *args: Any) -> Task:
        return _Task(self, *args)

    @property
    def problem(self) -> str:
        return ""

    def run(self, _task: Task, interrupted: threading.Event) -> None:
        interrupted.wait()


class _Task(Task):
    def __init__(self, opening: Opening, *args: Any) -> None:
        super().__init__(*args)
        self._opening = opening

    def open(self) -> None:
        self._opening.opened.append(self.role)
        self._to(TaskState.RESTORING)
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
    return cast("HostedStage", SimpleNamespace(name=name, joined=None, **parts))


@pytest.fixture
def opening(monkeypatch: pytest.MonkeyPatch) -> Opening:
    played = Opening()
    monkeypatch.setattr(module, "Task", played.task)
    monkeypatch.setattr(module, "has_room", lambda _path: played.has_room)
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


def test_no_more_tasks_open_at_once_than_there_are_open_files_for_and_all_have_their_turn(
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


def test_a_task_that_waits_for_its_turn_to_open_ends_once_it_is_not_wanted(opening: Opening) -> None:
    tasks = Tasks(hosted(), opening, lambda: None, threading.Semaphore(0))
    tasks.assign([0])

    assert tasks.stop(2)
    assert opening.opened == []


def test_a_standby_that_has_halted_is_opened_anew_once_it_is_to_own_its_partition(
    tasks: Tasks, opening: Opening
) -> None:
    opening.halts = {Role.STANDBY}
    tasks.stand_by([0])
    becomes(tasks, *HALTED_STANDBY)

    tasks.assign([0])

    becomes(tasks, *RUNNING_OWNER)
    assert opening.opened == [Role.STANDBY, Role.ACTIVE]


def test_a_standby_that_halts_while_it_is_promoted_is_opened_as_owner_and_then_stays_halted(
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


def test_a_standby_that_has_halted_stays_so_while_it_is_one(tasks: Tasks, opening: Opening) -> None:
    opening.halts = {Role.STANDBY}
    tasks.stand_by([0])
    becomes(tasks, *HALTED_STANDBY)

    tasks.stand_by([0])
    time.sleep(0.5)

    becomes(tasks, *HALTED_STANDBY)
    assert opening.opened == [Role.STANDBY]


def test_where_an_engine_stops_no_stage_waits_for_another_to_be_told(
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
        membership=other, _workers=(), stages=stages, tables=other, spark=other, registry=other, state_directory=other
    )

    Engine.stop(engine)

    assert told == [True]


@pytest.mark.parametrize("is_promoted", [False, True])
def test_a_standby_for_which_there_is_no_room_while_it_is_restored_says_so_and_goes_on_once_there_is(
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


def test_damage_in_a_task_that_was_closed_since_leaves_its_successor_and_that_ones_store_alone(
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
