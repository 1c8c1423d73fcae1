"""The tasks of one instance: one supervising thread per assigned partition.

The membership thread calls `assign` and `dismiss`, the directory's `stand_by`. Each supervising thread opens its task,
then tails, promotes or feeds it, and opens another when one is closed while the partition is still to be worked on.
"""

from __future__ import annotations

import sys
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Protocol

import structlog

from balance_service.engine.records import Role, TaskId
from balance_service.engine.store.database import Database, has_room
from balance_service.engine.task import Task
from balance_service.engine.task_state import ANSWERING, TaskState
from balance_service.errors import (
    BalanceServiceError,
    ConfigurationError,
    FatalError,
    NotAuthorizedError,
    RetriableError,
    StoreCorruptedError,
    StoreFullError,
    TaskHaltedError,
    TaskMigratedError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from balance_service.engine.opening import TaskContext
    from balance_service.engine.records import TaskSnapshot

log = structlog.get_logger(__name__)

_BACK_OFF_SECONDS = (0.2, 0.5, 1.0, 2.0, 5.0)
# One that was fenced may have slept through the loss of its partition; by then the group has told it.
_FENCED_BACK_OFF_SECONDS = 2.0
_WAITING_SECONDS = 2.0
# While a task waits for its turn to open, it looks so often whether it is still wanted.
_TURN_SECONDS = 0.2


class Feed(Protocol):
    """Where running tasks get their events from."""

    def run(self, task: Task, interrupted: threading.Event) -> None:
        """Have a task fold until interrupted, or until it has to wait or is halted.

        Raises:
            BalanceServiceError: the task is to be closed, by the error's remedy.
        """


class Tasks:
    """Tasks by partition. Invariant: at most one task per partition is open at a time."""

    def __init__(
        self,
        stage: str,
        context: TaskContext,
        feed: Feed,
        on_change: Callable[[], None],
        openings: threading.Semaphore | None = None,
    ) -> None:
        """Args:
        openings: how many tasks of the process may open or be promoted at once; any number if it is None.
        """
        self._openings = openings or threading.Semaphore(sys.maxsize)
        self._stage = stage
        self._context = context
        self._feed = feed
        self._on_change = on_change
        self._lock = threading.Lock()
        self._supervisors: dict[int, _Supervisor] = {}
        self._leaving: list[_Supervisor] = []
        self._stopped = False

    def assign(self, partitions: Iterable[int]) -> None:
        """Begin to own each partition, from its standby where there is one; returns at once."""
        with self._lock:
            for partition in () if self._stopped else partitions:
                if partition in self._supervisors:
                    self._supervisors[partition].promote()
                else:
                    self._supervise(partition, Role.ACTIVE)

    def stand_by(self, partitions: Iterable[int]) -> None:
        """Keep standbys of exactly these partitions, but of none that is owned here; returns at once."""
        wanted = frozenset(partitions)
        with self._lock:
            if self._stopped:
                return
            for partition in wanted - self._supervisors.keys():
                self._supervise(partition, Role.STANDBY)
            standbys = {p for p, supervisor in self._supervisors.items() if supervisor.role is Role.STANDBY}
            self._dismiss(standbys - wanted)

    def dismiss(self, partitions: Iterable[int]) -> list[Task]:
        """Open no other tasks of these partitions; returns at once those there were, which are to be closed."""
        with self._lock:
            return [supervisor.task for supervisor in self._dismiss(partitions)]

    def stop(self, timeout_seconds: float) -> bool:
        """Close all tasks and end their threads, for good; returns whether all have ended within the bound."""
        deadline = time.monotonic() + timeout_seconds
        with self._lock:
            self._stopped = True
        for task in self.dismiss(list(self._supervisors)):
            task.close(max(0.0, deadline - time.monotonic()))
        for supervisor in self._leaving:
            supervisor.ended(max(0.0, deadline - time.monotonic()))
        return all(supervisor.ended(0) for supervisor in self._leaving)

    def task(self, partition: int) -> Task | None:
        """The task of a partition, in whichever role; None if there is none here."""
        supervisor = self._supervisors.get(partition)
        return None if supervisor is None else supervisor.task

    def all(self) -> list[Task]:
        """All tasks, in whichever role, by partition."""
        return [supervisor.task for _, supervisor in sorted(self._supervisors.copy().items())]

    def answering(self) -> dict[int, Task]:
        """The tasks that are asked, in whichever role, by partition."""
        return {t.task_id.partition: t for t in self.all() if t.state in ANSWERING}

    def snapshots(self) -> list[TaskSnapshot]:
        """What each task says of itself, by partition."""
        return [task.snapshot() for task in self.all()]

    def failed(self, task: Task, error: BalanceServiceError) -> None:
        """A task was found to be damaged while it was read: close it, so that its supervisor opens another."""
        supervisor = self._supervisors.get(task.task_id.partition)
        if supervisor is not None and supervisor.task is task:
            supervisor.failed(task, error)

    def _supervise(self, partition: int, role: Role) -> None:
        task_id = TaskId(self._stage, partition)
        self._supervisors[partition] = _Supervisor(
            task_id, self._context, self._feed, role, self._on_change, self._openings
        )

    def _dismiss(self, partitions: Iterable[int]) -> list[_Supervisor]:
        leaving = [s for p in partitions if (s := self._supervisors.pop(p, None))]
        for supervisor in leaving:
            supervisor.stop()
        self._leaving = [s for s in self._leaving if not s.ended(0)] + leaving
        return leaving


class _Supervisor:
    """Keeps one partition's task at work in the role that is wanted, from a thread of its own."""

    def __init__(
        self,
        task_id: TaskId,
        context: TaskContext,
        feed: Feed,
        role: Role,
        on_change: Callable[[], None],
        openings: threading.Semaphore,
    ) -> None:
        self.role = role
        """What the task is to be; what it is, it says itself."""
        self._task_id = task_id
        self._context = context
        self._feed = feed
        self._on_change = on_change
        self._openings = openings
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._failed: tuple[Task, BalanceServiceError] | None = None
        self._failures = 0
        self._log = log.bind(task=str(task_id), partition=task_id.partition)
        self.task = Task(task_id, context, role)
        self._thread = threading.Thread(target=self._supervise, name=f"task-{task_id}", daemon=True)
        self._thread.start()

    def promote(self) -> None:
        """The task is to own its partition; returns at once."""
        self.role = Role.ACTIVE
        self._wake.set()

    def failed(self, task: Task, error: BalanceServiceError) -> None:
        """The task must be closed and opened anew; returns at once."""
        self._failed = task, _alone(error)
        # Nobody is to be answered from it while its thread finds the time.
        task.give_up()
        self._wake.set()

    def stop(self) -> None:
        """Open no other task; this one answers nobody, and what is being restored is given up. Returns at once."""
        self._stopping.set()
        self._wake.set()
        self.task.give_up()

    def ended(self, timeout_seconds: float) -> bool:
        """Whether the thread has ended, within the bound."""
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _supervise(self) -> None:
        joined, partition = self._context.joined, self._task_id.partition
        if joined is not None:
            joined.hold(partition)
        try:
            while not self._stopping.is_set():
                error = self._attempt(partial(self._in_turn, self.task.open)) or self._watch()
                if error is None or self._stopping.is_set():
                    return
                self._recover(error)
        finally:
            self.task.close(max(_BACK_OFF_SECONDS))
            if joined is not None:
                joined.let_go(partition)

    def _in_turn(self, step: Callable[[], None]) -> None:
        """Open or promote the task in its turn: meanwhile it has more files open than later."""
        while not self._openings.acquire(timeout=_TURN_SECONDS):
            if self._stopping.is_set():
                return
        try:
            step()
        finally:
            self._openings.release()

    def _attempt(self, step: Callable[[], None]) -> BalanceServiceError | None:
        """One step of the task's life, and what went wrong with it."""
        before = self.task.state, self.task.role
        try:
            step()
        except NotAuthorizedError as error:
            return _alone(error)
        except (TaskHaltedError, ConfigurationError) as error:
            if isinstance(error, TaskHaltedError) and error.__cause__ is not None:
                self._log.error("the read model's code failed", exc_info=error.__cause__)
            self.task.halt(str(error))
        except BalanceServiceError as error:
            return _alone(error)
        except Exception as error:
            self._log.exception("a step of the task failed")
            # No more of it: probes are told this without a token, and it may quote an event.
            return RetriableError(f"a step of the task failed with {type(error).__name__}")
        if (self.task.state, self.task.role) != before:
            self._on_change()
        return None

    def _watch(self) -> BalanceServiceError | None:
        """Do what the role asks for until something is wrong; None once the task is not wanted any more."""
        opened = time.monotonic()
        while not self._stopping.is_set():
            state, error = self.task.state, None
            if self.task.role is Role.STANDBY and state in (TaskState.TAILING, TaskState.RESTORING):
                error = self._attempt(
                    self.task.tail if self.role is Role.STANDBY else partial(self._in_turn, self.task.promote)
                )
            elif state is TaskState.HALTED and self.task.role is Role.STANDBY and self.role is Role.ACTIVE:
                # The partition has moved here. Opened as its owner, the task halts again if it must.
                error = RetriableError("the task halted as a standby, and is to own its partition now")
            elif state is TaskState.RUNNING:
                error = self._attempt(partial(self._feed.run, self.task, self._wake))
            elif not self._wake.wait(_WAITING_SECONDS if state is TaskState.WAITING else None):
                self._resume()
                self._on_change()
            self._wake.clear()
            error = self._reported() or error
            if isinstance(error, StoreFullError):
                error = self._wait_for_room(error)
            if error is not None:
                self._failures = 0 if time.monotonic() - opened > max(_BACK_OFF_SECONDS) else self._failures
                return error
        return None

    def _resume(self) -> None:
        """Have a task that waits fold again, but not before the tables that it joins with are read."""
        try:
            if self._context.joined is not None:
                self._context.joined.catch_up(self._task_id.partition, self._wake.is_set)
        except (NotAuthorizedError, RetriableError) as error:
            self.task.wait(str(error))
        else:
            self.task.resume()

    def _reported(self) -> BalanceServiceError | None:
        """What this task, and none before it, was said to have failed with."""
        failed, self._failed = self._failed, None
        return failed[1] if failed is not None and failed[0] is self.task else None

    def _wait_for_room(self, full: StoreFullError) -> BalanceServiceError | None:
        """Let the task answer from what it has; what it is closed for, in the end."""
        self.task.wait(str(full))
        self._on_change()
        while not self._stopping.wait(_WAITING_SECONDS):
            if (error := self._reported()) is not None:
                return error
            if has_room(self._context.state_directory.path):
                return RetriableError("there is room on the disk again")
        return None

    def _recover(self, error: BalanceServiceError) -> None:
        if isinstance(error, FatalError):
            raise error
        is_fenced = isinstance(error, TaskMigratedError)
        self._log.warning("task closed, to be opened anew", error=str(error), fenced=is_fenced)
        self.task.close(max(_BACK_OFF_SECONDS))
        self._on_change()
        if isinstance(error, StoreCorruptedError):
            Database.wipe(self._context.state_directory.store_path(self._task_id))
        back_off = _BACK_OFF_SECONDS[min(self._failures, len(_BACK_OFF_SECONDS) - 1)]
        self._failures += 1
        if not self._stopping.wait(max(back_off, _FENCED_BACK_OFF_SECONDS) if is_fenced else back_off):
            self.task = Task(self._task_id, self._context, self.role, str(error), self.task.next_epoch)


def _alone(error: BalanceServiceError) -> BalanceServiceError:
    """The error without the frames it came through: those would hold store and producer open while it is kept."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
