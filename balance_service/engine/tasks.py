"""The tasks of a stage in this instance: one supervising thread for each partition.

The thread of a membership calls `assign` and `dismiss`, the directory's thread `stand_by`. Each supervising thread
opens its task, then tails, promotes or runs it. It opens a new task when one was closed and the partition is still
wanted here.
"""

from __future__ import annotations

import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import structlog

from balance_service.engine.database import Database, has_room
from balance_service.engine.processor import failed_at
from balance_service.engine.progress import Seen
from balance_service.engine.records import Role, TaskId
from balance_service.engine.task import ANSWERING, Task, TaskState
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
    UnreadableRecordError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from balance_service.engine.decisions import Verdict
    from balance_service.engine.hosted_stage import HostedStage
    from balance_service.engine.records import TaskSnapshot
    from balance_service.engine.store import StoreView
    from balance_service.engine.task import Watcher

log = structlog.get_logger(__name__)

_BACK_OFF_SECONDS = (0.2, 0.5, 1.0, 2.0, 5.0)
# A fenced task may have slept through the loss of its partition. The group has informed it by then.
_FENCED_BACK_OFF_SECONDS = 2.0
_WAITING_SECONDS = 2.0
# How often a task that waits for its turn to open checks whether it is still wanted.
_TURN_SECONDS = 0.2
# A task that decodes or folds a part stops after it.
_FORMER_SECONDS = 20.0


class Runner(Protocol):
    """Runs the tasks of a stage. `spark.task_runner` implements it, which this package does not import."""

    def run(self, task: Task, interrupted: threading.Event) -> None:
        """Folds and commits a task's events until interrupted, or until it waits or halts.

        Raises:
            BalanceServiceError: the task must be closed, and the error's class says what to do next.
        """

    def check_resumption(self, partition: int, interrupted: threading.Event) -> None:
        """Waits for what a waiting task needs to fold again.

        Raises:
            NotAuthorizedError, RetriableError: it must go on waiting.
        """

    def has_begun(self, partition: int) -> bool:
        """Whether events of the partition are read, or cannot be. False from a task's first run until then."""

    def stop(self, timeout_seconds: float) -> bool:
        """Frees what the tasks shared, once none runs any more. Returns whether that ended in time."""


class Tasks:
    """The tasks of a hosted stage, by partition. Invariant: at most one task per partition is open at a time."""

    def __init__(
        self,
        hosted: HostedStage,
        runner: Runner,
        on_change: Callable[[], None],
        openings: threading.Semaphore | None = None,
    ) -> None:
        """Args:
        on_change: called on any thread when a task's state has changed.
        openings: limits how many tasks of the process open or are promoted at once; None sets no limit.
        """
        self.hosted = hosted
        self.source_problem = ""
        """Why the source cannot be read as before; empty if it can. Set by the source check."""
        self.losses: Sequence[str] = ()
        """Why topics of the stage may lose what it needs. Set by the loss check."""
        self._runner = runner
        self._on_change = on_change
        self._openings = openings or threading.Semaphore(sys.maxsize)
        self._lock = threading.Lock()
        self._supervisors: dict[int, _Supervisor] = {}
        self._leaving: list[_Supervisor] = []
        self._left: dict[int, Task] = {}
        self._stopped = False

    @property
    def name(self) -> str:
        return self.hosted.name

    @property
    def have_begun(self) -> bool:
        """Whether every task that runs reads its events, or cannot."""
        return all(
            self._runner.has_begun(task.task_id.partition) for task in self.all() if task.state is TaskState.RUNNING
        )

    @property
    def problems(self) -> Sequence[str]:
        """Why some partition is not folded now; empty if all are."""
        told = [
            task.stand.told(task.task_id, task.stand.error)
            for task in self.snapshots()
            if task.stand is not None and (task.stand.is_still or task.stand.error)
        ]
        return [*told, *filter(None, [self.source_problem])]

    def assign(self, partitions: Iterable[int]) -> None:
        """Starts to own each partition, from its standby if there is one. Returns at once."""
        with self._lock:
            for partition in () if self._stopped else partitions:
                if partition in self._supervisors:
                    self._supervisors[partition].promote()
                else:
                    self._supervise(partition, Role.ACTIVE)

    def stand_by(self, partitions: Iterable[int]) -> None:
        """Keeps standbys of exactly these partitions, except those that are owned here. Returns at once."""
        wanted = frozenset(partitions)
        with self._lock:
            if self._stopped:
                return
            for partition in wanted - self._supervisors.keys():
                self._supervise(partition, Role.STANDBY)
            standbys = {p for p, supervisor in self._supervisors.items() if supervisor.role is Role.STANDBY}
            self._dismiss(standbys - wanted)

    def dismiss(self, partitions: Iterable[int], *, leaves_views: bool = False) -> list[Task]:
        """Opens no more tasks of these partitions. Returns their present tasks at once, for the caller to close.

        Args:
            leaves_views: keeps what `left` returns, until `forget_left` or the next task runs. Another instance may own
                the partitions, so only queries that take an old state may read it.
        """
        with self._lock:
            leaving = [supervisor.task for supervisor in self._dismiss(partitions, leaves_views=leaves_views)]
            if leaves_views:
                self._left |= {task.task_id.partition: task for task in leaving}
            return leaving

    def stop(self, timeout_seconds: float) -> bool:
        """Closes all tasks for good. Returns whether all their threads, and the runner's, ended within the timeout."""
        deadline = time.monotonic() + timeout_seconds
        with self._lock:
            self._stopped = True
        self.forget_left(lambda _partition: True)
        for task in self.dismiss(list(self._supervisors)):
            task.close(max(0.0, deadline - time.monotonic()))
        ended = [supervisor.ended(max(0.0, deadline - time.monotonic())) for supervisor in self._leaving]
        return all(ended) and self._runner.stop(max(0.0, deadline - time.monotonic()))

    def task(self, partition: int) -> Task | None:
        """Returns the task of a partition in either role, or None."""
        supervisor = self._supervisors.get(partition)
        return None if supervisor is None else supervisor.task

    def left(self, partition: int) -> LeftCopy | None:
        """Returns what a closed task of a partition left, until the next task runs."""
        task = self.task(partition) or self._left.get(partition)
        view = None if task is None else task.left_view
        return None if task is None or view is None else LeftCopy(task, view)

    def forget_left(self, is_answered: Callable[[int], bool]) -> None:
        """Gives up what the tasks of partitions have left that are not here any more.

        Args:
            is_answered: whether another instance answers for a partition.
        """
        with self._lock:
            for partition in [*filter(is_answered, self._left)]:
                self._left.pop(partition).take_left()

    def all(self) -> list[Task]:
        """Returns all tasks in either role, ordered by partition."""
        return [supervisor.task for _, supervisor in sorted(self._supervisors.copy().items())]

    def answering(self) -> dict[int, Task]:
        """Returns the tasks that answer queries, in either role, by partition."""
        return {t.task_id.partition: t for t in self.all() if t.state in ANSWERING}

    def snapshots(self) -> list[TaskSnapshot]:
        """Returns the states of all tasks. A task that stands still has the reason."""
        return [self._snapshot(task) for task in self.all()]

    def with_states(self) -> dict[int, Task]:
        """Returns the tasks that answer queries, if only with old states, by partition."""
        return {t.task_id.partition: t for t in self.all() if (t.view or t.frozen_view) is not None}

    def positions(self) -> dict[int, int]:
        """Returns the position of each task that has states to answer with, by partition."""
        return {p: task.position for p, task in self.with_states().items() if task.position >= 0}

    def look(self) -> None:
        """Notes how far the owned tasks are. To be called every second."""
        owned = [task for task in self.all() if task.role is Role.ACTIVE]
        self.hosted.progress.look({task.task_id.partition: self._seen(task) for task in owned})

    def _seen(self, task: Task) -> Seen:
        position, stop = task.position, task.stop
        # A task does not go beyond these.
        ends = [self.hosted.watermarks.end(task.task_id.partition), task.goal, None if stop is None else stop.offset]
        end = min((end for end in ends if end is not None), default=None)
        restores = task.state in (TaskState.CREATED, TaskState.RESTORING)
        return Seen(position, None if end is None else max(0, end - position), restores)

    def _snapshot(self, task: Task) -> TaskSnapshot:
        snapshot = task.snapshot()
        if snapshot.role is not Role.ACTIVE:
            return snapshot
        stand = self.hosted.progress.stand(task.task_id.partition, snapshot.position)
        waited = snapshot.waited
        if snapshot.state == TaskState.RUNNING.value and waited is not None and stand is not None and not stand.error:
            # It tries, and may have to wait again.
            snapshot = replace(snapshot, state=TaskState.WAITING.value, reason=waited.reason, since_ms=waited.since_ms)
        if stand is None or not stand.is_still:
            return replace(snapshot, stand=stand)
        stand = replace(stand, error=stand.error or snapshot.reason)
        reason = snapshot.reason or stand.told(task.task_id, stand.error)
        return replace(snapshot, stand=stand, reason=reason, since_ms=stand.since_ms)

    def decide(self, partition: int, offsets: Sequence[int], verdict: Verdict) -> Mapping[int, str]:
        """Carries out an operator's decision about dead letters of a partition that is owned here.

        Takes as long as a commit.

        Returns:
            For each offset that the decision does not apply to, the reason.

        Raises:
            BalanceServiceError: the decision was not carried out, or its outcome is unknown.
        """
        task = self.task(partition)
        if task is None:
            raise TaskMigratedError(f"partition {partition} is not here")
        try:
            refused = task.decide(offsets, verdict)
            # The decision is carried out. The tasks of other generations find it, too, when this partition is opened.
            with suppress(TaskMigratedError):
                letters = task.letters_at(set(offsets) - refused.keys())
                self.hosted.generations.follow(self.hosted.stage, partition, letters)
            return refused
        except (NotAuthorizedError, RetriableError, StoreCorruptedError) as error:
            self.failed(task, error)
            raise
        except TaskMigratedError as error:
            # Its thread would not notice the fencing before it commits events.
            if task.state is TaskState.RUNNING:
                self.failed(task, error)
            raise

    def damaged(self, partition: int, read: object, error: StoreCorruptedError) -> None:
        """Has a store restored that turned out to be damaged while a query read `read`, the task or its view.

        Does nothing if another task has replaced `read`: that one has another store.
        """
        if isinstance(read, LeftCopy):
            # The next task finds the damage when it opens the store.
            read.forget()
        task = self.task(partition)
        if task is not None and task is read:
            self.failed(task, error)

    def failed(self, task: Task, error: BalanceServiceError) -> None:
        """Has its supervisor close a task and open a new one."""
        supervisor = self._supervisors.get(task.task_id.partition)
        if supervisor is not None and supervisor.task is task:
            supervisor.failed(task, error)

    def _supervise(self, partition: int, role: Role) -> None:
        before = self._left.pop(partition, None)
        task = Task(
            TaskId(self.name, partition), self.hosted, role, left=None if before is None else before.take_left()
        )
        former = [one for one in self._leaving if one.task.task_id.partition == partition]
        self._supervisors[partition] = _Supervisor(
            task, self.hosted, self._runner, self._on_change, self._openings, former
        )

    def _dismiss(self, partitions: Iterable[int], *, leaves_views: bool = False) -> list[_Supervisor]:
        leaving = [s for p in partitions if (s := self._supervisors.pop(p, None))]
        for supervisor in leaving:
            supervisor.stop(leaves_view=leaves_views)
            if not leaves_views:
                # One that an outage has closed may have left it: the folder would stay locked.
                supervisor.task.take_left()
        self._leaving = [s for s in self._leaving if not s.ended(0)] + leaving
        return leaving


class LeftCopy:
    """The last view of a closed task, as queries read a task."""

    role, view = Role.STANDBY, None

    def __init__(self, task: Task, view: StoreView) -> None:
        self._task = task
        self.frozen_view: StoreView | None = view

    def watch(self, watcher: Watcher | None) -> None:
        """Nothing is committed any more."""

    def forget(self) -> None:
        """Takes the view away from later queries."""
        self._task.take_left()


class _Supervisor:
    """Keeps the task of one partition in the role that is wanted, on a thread of its own."""

    def __init__(
        self,
        task: Task,
        hosted: HostedStage,
        runner: Runner,
        on_change: Callable[[], None],
        openings: threading.Semaphore,
        former: Sequence[_Supervisor],
    ) -> None:
        """Args:
        former: dismissed supervisors of the partition, whose tasks may still have its store open.
        """
        self.role = task.role
        """The role that is wanted; `task.role` is the present one."""
        self._task_id = task_id = task.task_id
        self._hosted = hosted
        self._runner = runner
        self._on_change = on_change
        self._openings = openings
        self._former = former
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._failed: tuple[Task, BalanceServiceError] | None = None
        self._failures = 0
        self._log = log.bind(task=str(task_id), partition=task_id.partition)
        self.task = task
        self._thread = threading.Thread(target=self._supervise, name=f"task-{task_id}", daemon=True)
        self._thread.start()

    def promote(self) -> None:
        """Requests that the task owns its partition. Returns at once."""
        self.role = Role.ACTIVE
        self._wake.set()

    def failed(self, task: Task, error: BalanceServiceError) -> None:
        """Requests that the task is closed and a new one opened. Returns at once."""
        self._failed = task, _alone(error)
        if not isinstance(error, UnreadableRecordError):
            # The task must not answer until its thread gets to close it.
            task.give_up(leaves_view=not isinstance(error, StoreCorruptedError))
        self._wake.set()

    def stop(self, *, leaves_view: bool = False) -> None:
        """Opens no more tasks; the present one stops to answer and to restore, as `Task.give_up`. Returns at once."""
        self._stopping.set()
        self._wake.set()
        self.task.give_up(leaves_view=leaves_view)

    def ended(self, timeout_seconds: float) -> bool:
        """Waits for the thread to end; returns whether it has."""
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _supervise(self) -> None:
        joined, partition = self._hosted.joined, self._task_id.partition
        if joined is not None:
            joined.acquire(partition)
        try:
            self._wait_for_former()
            while not self._stopping.is_set():
                error = self._attempt(partial(self._in_turn, self.task.open)) or self._watch()
                if error is None or self._stopping.is_set():
                    return
                self._recover(error)
        finally:
            self.task.close(max(_BACK_OFF_SECONDS))
            if joined is not None:
                joined.release(partition)

    def _wait_for_former(self) -> None:
        """Waits until the partition's former tasks are closed: RocksDB does not open a store that is open.

        If one is not closed in time, the new task fails to open the store, and says so, until it can.
        """
        until = time.monotonic() + _FORMER_SECONDS
        while self._former and not self._stopping.is_set() and time.monotonic() < until:
            self._former = [one for one in self._former if not one.ended(_TURN_SECONDS)]

    def _in_turn(self, step: Callable[[], None]) -> None:
        """Opens or promotes the task when it is its turn. During that step a task has more files open than later."""
        while not self._openings.acquire(timeout=_TURN_SECONDS):
            if self._stopping.is_set():
                return
        try:
            step()
        finally:
            self._openings.release()

    def _attempt(self, step: Callable[[], None]) -> BalanceServiceError | None:
        """Takes one step of the task's life; returns the error that requires a new task, if any."""
        before = self.task.state, self.task.role
        try:
            step()
        except NotAuthorizedError as error:
            return _alone(error)
        except (TaskHaltedError, ConfigurationError, UnreadableRecordError) as error:
            at = failed_at(error) if isinstance(error, TaskHaltedError) else None
            if at is not None:
                self._log.error("the read model's code failed", exc_info=error.__cause__)
            self.task.halt(str(error), at)
        except BalanceServiceError as error:
            return _alone(error)
        except Exception as error:
            self._log.exception("a step of the task failed")
            # Without its text, which may quote an event: probes get this reason without a token.
            return RetriableError(f"a step of the task failed with {type(error).__name__}")
        if (self.task.state, self.task.role) != before:
            self._on_change()
        return None

    def _watch(self) -> BalanceServiceError | None:
        """Does what the role requires until an error requires a new task; None when the task is no longer wanted."""
        opened = time.monotonic()
        while not self._stopping.is_set():
            state, error = self.task.state, None
            if self.task.is_loading:
                # Not in turn: it may take hours, and another task may have to open.
                error = self._attempt(self.task.load)
            elif self.task.role is Role.STANDBY and state in (TaskState.TAILING, TaskState.RESTORING):
                error = self._attempt(
                    self.task.tail if self.role is Role.STANDBY else partial(self._in_turn, self.task.promote)
                )
            elif state is TaskState.HALTED and self.task.role is Role.STANDBY and self.role is Role.ACTIVE:
                # The partition moved here. Opened as its owner, the task halts again if it has to.
                error = RetriableError("the task halted as a standby, and must own its partition now")
            elif state is TaskState.RUNNING:
                error = self._attempt(partial(self._runner.run, self.task, self._wake))
            elif not self._wake.wait(_WAITING_SECONDS if state is TaskState.WAITING else None):
                self._resume()
                error = self._attempt(self.task.carry_out)
                self._on_change()
            self._wake.clear()
            error = self._reported() or error
            if isinstance(error, UnreadableRecordError):
                # Met by a query, or by a comparison. Restored, the store would have the same records.
                self.task.halt(str(error))
                self._on_change()
                error = None
            if isinstance(error, StoreFullError):
                error = self._wait_for_room(error)
            if error is not None:
                self._failures = 0 if time.monotonic() - opened > max(_BACK_OFF_SECONDS) else self._failures
                return error
        return None

    def _resume(self) -> None:
        """Lets a waiting task fold again, once what it needs is there."""
        try:
            self._runner.check_resumption(self._task_id.partition, self._wake)
        except (NotAuthorizedError, RetriableError) as error:
            self.task.wait(str(error))
        else:
            self.task.resume()

    def _reported(self) -> BalanceServiceError | None:
        """Returns the error that `failed` was called with for the present task."""
        failed, self._failed = self._failed, None
        return failed[1] if failed is not None and failed[0] is self.task else None

    def _wait_for_room(self, full: StoreFullError) -> BalanceServiceError | None:
        """Keeps the task answering until the disk has room; returns the reason to open a new task then."""
        self.task.wait(str(full))
        self._on_change()
        while not self._stopping.wait(_WAITING_SECONDS):
            if (error := self._reported()) is not None:
                return error
            # A generation may have begun to serve.
            serves = self._hosted.generations.serves(self._hosted.stage)
            if has_room(self._hosted.state_directory.path, serves=serves):
                return RetriableError("there is room on the disk again")
        return None

    def _recover(self, error: BalanceServiceError) -> None:
        if isinstance(error, FatalError):
            raise error
        is_fenced = isinstance(error, TaskMigratedError)
        has_run = self.task.state not in (TaskState.CREATED, TaskState.RESTORING)
        since_ms = None if has_run else self.task.since_ms
        self._log.warning("task closed; a new one is opened", error=str(error), fenced=is_fenced)
        is_damaged = isinstance(error, StoreCorruptedError)
        self.task.close(max(_BACK_OFF_SECONDS), str(error), leaves_view=not is_damaged)
        self._on_change()
        if is_damaged:
            # It may have been left before the damage was found.
            self.task.take_left()
            Database.wipe(self._hosted.state_directory.store_path(self._task_id))
        back_off = _BACK_OFF_SECONDS[min(self._failures, len(_BACK_OFF_SECONDS) - 1)]
        self._failures += 1
        if not self._stopping.wait(max(back_off, _FENCED_BACK_OFF_SECONDS) if is_fenced else back_off):
            before = self.task
            self.task = Task(
                self._task_id, self._hosted, self.role, str(error), before.next_epoch, before.take_left(), since_ms
            )


def _alone(error: BalanceServiceError) -> BalanceServiceError:
    """Returns the error without its frames, which would keep store and producer open while it is referenced."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
