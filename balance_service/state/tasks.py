"""The tasks of one instance: one supervising thread per assigned partition.

The membership thread calls `assign` and `revoke`; each supervising thread opens its task, and opens
another when one is closed while the partition is still ours; the stream reads `running` and is told of
changes.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import structlog

from balance_service.errors import (
    BalanceServiceError,
    ConfigurationError,
    FatalError,
    RetriableError,
    StoreCorruptedError,
    TaskHaltedError,
    TaskMigratedError,
)
from balance_service.state.records import TaskId
from balance_service.state.store import StateStore
from balance_service.state.task import Task
from balance_service.state.task_state import TaskState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from balance_service.state.opening import TaskContext
    from balance_service.state.records import TaskSnapshot

log = structlog.get_logger(__name__)

_BACK_OFF_SECONDS = (0.2, 0.5, 1.0, 2.0, 5.0)
_WAITING_SECONDS = 2.0


class Tasks:
    """Active tasks by partition. Invariant: at most one task per partition is open at a time."""

    def __init__(self, read_model: str, context: TaskContext, on_change: Callable[[], None]) -> None:
        self._read_model = read_model
        self._context = context
        self._on_change = on_change
        self._lock = threading.Lock()
        self._supervisors: dict[int, _Supervisor] = {}

    def assign(self, partitions: Iterable[int]) -> None:
        """Begin to open a task for each partition; returns at once."""
        with self._lock:
            for partition in partitions:
                if partition not in self._supervisors:
                    task_id = TaskId(self._read_model, partition)
                    self._supervisors[partition] = _Supervisor(task_id, self._context, self._on_change)

    def revoke(self, partitions: Iterable[int], timeout_seconds: float) -> None:
        """Close these tasks; running commits may end first, within the bound."""
        with self._lock:
            leaving = [s for p in partitions if (s := self._supervisors.pop(p, None))]
        for supervisor in leaving:
            supervisor.stop()
        deadline = time.monotonic() + timeout_seconds
        for supervisor in leaving:
            supervisor.close(max(0.0, deadline - time.monotonic()))
        if leaving:
            self._on_change()

    def task(self, partition: int) -> Task | None:
        """The task of a partition; None if the partition is not ours."""
        supervisor = self._supervisors.get(partition)
        return None if supervisor is None else supervisor.task

    def all(self) -> list[Task]:
        """The tasks of all partitions that are ours, by partition."""
        return [supervisor.task for _, supervisor in sorted(self._supervisors.copy().items())]

    def running(self) -> dict[int, Task]:
        """The tasks that fold, by partition."""
        return {t.task_id.partition: t for t in self.all() if t.state is TaskState.RUNNING}

    def snapshots(self) -> list[TaskSnapshot]:
        """What each task says of itself, by partition."""
        return [task.snapshot() for task in self.all()]

    def wait(self, task: Task, reason: str) -> None:
        """A task cannot go on for now: it leaves the stream and is tried again every two seconds."""
        supervisor = self._supervisors.get(task.task_id.partition)
        if supervisor is not None and supervisor.task is task:
            supervisor.wait(reason)

    def failed(self, task: Task, error: BalanceServiceError) -> None:
        """A task failed while it processed: close it, so that its supervisor opens another."""
        supervisor = self._supervisors.get(task.task_id.partition)
        if supervisor is not None and supervisor.task is task:
            supervisor.failed(error)


class _Supervisor:
    """Keeps one assigned partition's task open, from a thread of its own."""

    def __init__(self, task_id: TaskId, context: TaskContext, on_change: Callable[[], None]) -> None:
        self._task_id = task_id
        self._context = context
        self._on_change = on_change
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._error: BalanceServiceError | None = None
        self._failures = 0
        self._log = log.bind(task=str(task_id), partition=task_id.partition)
        self.task = Task(task_id, context)
        self._thread = threading.Thread(target=self._supervise, name=f"task-{task_id}", daemon=True)
        self._thread.start()

    def failed(self, error: BalanceServiceError) -> None:
        """The task must be closed and opened anew; returns at once."""
        self._error = error
        self._wake.set()

    def wait(self, reason: str) -> None:
        """The task cannot go on for now."""
        self.task.wait(reason)
        self._wake.set()

    def stop(self) -> None:
        """Open no other task; what is being restored is given up."""
        self._stopping.set()
        self._wake.set()

    def close(self, timeout_seconds: float) -> None:
        """Close the task, whatever the thread is doing."""
        deadline = time.monotonic() + timeout_seconds
        self.task.close(timeout_seconds)
        self._thread.join(max(0.0, deadline - time.monotonic()))

    def _supervise(self) -> None:
        while not self._stopping.is_set():
            error = self._open() or self._watch()
            if error is None:
                return
            self._recover(error)

    def _open(self) -> BalanceServiceError | None:
        try:
            self.task.open()
        except (TaskHaltedError, ConfigurationError) as error:
            self.task.halt(str(error))
        except BalanceServiceError as error:
            return error
        except Exception as error:
            self._log.exception("opening the task failed")
            return RetriableError(f"opening the task failed: {error}")
        self._on_change()
        return None

    def _watch(self) -> BalanceServiceError | None:
        opened = time.monotonic()
        while not self._stopping.is_set():
            waiting = self.task.state is TaskState.WAITING
            if self._wake.wait(_WAITING_SECONDS if waiting else None):
                self._wake.clear()
                if self._error is not None:
                    error, self._error = self._error, None
                    self._failures = 0 if time.monotonic() - opened > max(_BACK_OFF_SECONDS) else self._failures
                    return error
            elif waiting and self.task.state is TaskState.WAITING:
                self.task.resume()
                self._on_change()
        return None

    def _recover(self, error: BalanceServiceError) -> None:
        if isinstance(error, FatalError):
            raise error
        migrated = isinstance(error, TaskMigratedError)
        self._log.warning("task closed, to be opened anew", error=str(error), fenced=migrated)
        self.task.close(max(_BACK_OFF_SECONDS))
        self._on_change()
        if isinstance(error, StoreCorruptedError):
            StateStore.wipe(self._context.state_directory.store_path(self._task_id))
        back_off = _BACK_OFF_SECONDS[min(self._failures, len(_BACK_OFF_SECONDS) - 1)]
        self._failures += 1
        if not self._stopping.wait(back_off):
            self.task = Task(self._task_id, self._context)
