"""One read model on one source partition: its store, its role, its state machine.

A supervising thread opens, tails, promotes, feeds and closes the task; any thread may halt or close it, or take a view.
The lock is held while the task is opened, tails, processes or is freed; views and snapshots need none.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING

import structlog

from balance_service.engine.commit import Committed, commit, decide, write_position
from balance_service.engine.opening import (
    check_same_log,
    check_still_there,
    open_writer,
    starting_letters,
    starting_position,
)
from balance_service.engine.records import Role, StoreSizes, TaskSnapshot
from balance_service.engine.replica import Replica
from balance_service.errors import FatalError, TaskHaltedError, TaskMigratedError
from balance_service.process.failpoints import reach

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from balance_service.engine.changelog_reader import Part
    from balance_service.engine.changelog_writer import ChangelogWriter
    from balance_service.engine.dead_letter import DueLetters
    from balance_service.engine.decisions import Verdict
    from balance_service.engine.hosted_stage import HostedStage
    from balance_service.engine.records import Position, TaskBatch, TaskId
    from balance_service.engine.store import StateStore, StoreView
    from balance_service.kafka.topics import Topic


log = structlog.get_logger(__name__)


class Task:
    """Work on one partition, from opening to closing; never opened twice.

    A standby applies what the owner commits, and may be promoted once; then it is the owner.
    """

    def __init__(
        self,
        task_id: TaskId,
        hosted: HostedStage,
        role: Role = Role.ACTIVE,
        reason: str = "",
        least_epoch: int = 1,
    ) -> None:
        """Args:
        reason: why the one before had to be closed; shown until this one runs.
        least_epoch: to take as an owner.
        """
        self._least_epoch = least_epoch
        self.task_id = task_id
        self._hosted = hosted
        self._lock = threading.RLock()
        self._state = TaskState.CREATED
        self._role = role
        self._reason = reason
        self._closing = threading.Event()
        self._writer: ChangelogWriter | None = None
        self._epoch = 0
        self._shown: StoreView | None = None
        self._log = log.bind(task=str(task_id), partition=task_id.partition)
        self._replica = Replica(task_id, hosted, self._log)

    @property
    def state(self) -> TaskState:
        """Where the task is in its life."""
        return self._state

    @property
    def role(self) -> Role:
        """Whether it owns its partition. Ask before `view`: a view taken later is at least as new as the role."""
        return self._role

    @property
    def next_epoch(self) -> int:
        """One higher than the task has had, or was told to take."""
        return max(self._least_epoch, self._epoch + 1)

    @property
    def position(self) -> int:
        """Next source offset to apply; -1 while there is no store to ask."""
        stands_at = self._stands_at
        return -1 if stands_at is None else stands_at.offset

    @property
    def view(self) -> StoreView | None:
        """States and position as of the last commit applied; None unless the task answers."""
        return None if self._closing.is_set() else self._shown

    def snapshot(self) -> TaskSnapshot:
        """What the task says of itself."""
        store, state, restoration = self._replica.store, self._state, self._replica.restoration
        stands_at = self._stands_at
        return TaskSnapshot(
            self.task_id,
            self._role,
            state.value,
            self._epoch,
            -1 if stands_at is None else stands_at.offset,
            self._reason,
            restoration.restored,
            restoration.to_restore,
            restoration.seconds_left if state is TaskState.RESTORING else None,
            store.sizes if store is not None and state in ANSWERING else StoreSizes(),
            self.view is not None,
            {} if stands_at is None else stands_at.letters,
        )

    def open(self) -> None:
        """Bring the store up to the changelog's end; as the owner, become the one writer and take a new epoch.

        Raises:
            RetriableError: something outside does not answer; close this task and open another.
            TaskMigratedError: closed, or fenced, meanwhile.
            TaskHaltedError: source or changelog are not what they were.
            StoreFullError: the disk has no room.
        """
        with self._held():
            self._open()

    def tail(self) -> None:
        """As a standby, apply what the owner has committed since, or wait briefly for it. Raises as `open`."""
        with self._held():
            self._apply(self._replica.tail())
            self._answer_if_complete()

    def promote(self) -> None:
        """As a standby, become the owner, from where it is. Raises as `open`."""
        with self._held():
            if self._state is TaskState.HALTED:
                # Whoever asked has not seen it yet.
                return
            self._replica.check_same_logs()
            self._own()

    def process(self, batch: TaskBatch) -> Committed:
        """Commit a micro-batch.

        Raises:
            TaskMigratedError: the part is not ours to take, or the task was fenced or closed.
            RetriableError: nobody knows the outcome; close this task and open another.
            StoreFullError: the disk has no room.
            StoreCorruptedError: wipe the store, open another.
        """
        with self._held():
            store, writer = self._running()
            done = commit(batch, self.task_id.partition, self._hosted.processor, store, writer)
            self._shown = store.view
            return done

    def due(self) -> DueLetters:
        """The dead letters whose time has come. Raises TaskMigratedError: closed."""
        with self._held():
            store, _ = self._running()
            return self._hosted.processor.letters.due(store)

    def left_out(self) -> list[int]:
        """Offsets from the position on that are not applied as they come. Raises TaskMigratedError: closed."""
        with self._held():
            store, _ = self._running()
            return self._hosted.processor.letters.left_out_from(store, self.position)

    def decide(self, offsets: Iterable[int], verdict: Verdict) -> dict[int, str]:
        """Carry out an operator's decision about dead letters.

        Returns:
            Why it was not, by offset, for those about which it makes no sense.

        Raises:
            BalanceServiceError: as `process`; what was decided may have been written.
        """
        letters, decisions = self._hosted.processor.letters, self._hosted.decisions
        with self._held():
            store, writer = self._running(or_waiting=True)
            known = letters.at(store, offsets)
            refused = {at: why for at in offsets if (why := verdict.refusal(known.get(at))) is not None}
            decided = [letter for at, letter in known.items() if at not in refused]
            if decided:
                now_ms, partition = letters.now_ms(), self.task_id.partition
                audit = [decisions.output(partition, letter, verdict, now_ms) for letter in decided]
                decide(decided, verdict.decision.status, audit, self._hosted.processor, store, writer)
                self._shown = store.view
            return refused

    def check_log(self, topic: Topic | None, start: int, position: int, end: int) -> None:
        """Halt if the source is no longer the log this task was folding.

        Args:
            topic: the source as it is now; None if it is gone.
            start: the first offset that is still there; -1 if the task needs none of them.
            position: of this task, read after `start` and before `end` were asked for: else a commit meanwhile would
                seem to be beyond the end.
            end: its high watermark.
        """
        try:
            check_same_log(self._hosted.source, topic)
            check_still_there(self._hosted.source.name, self.task_id.partition, position, start, end)
        except TaskHaltedError as problem:
            self.halt(str(problem))

    def wait(self, reason: str) -> None:
        """Apply nothing until `resume`, or until another is opened; queries go on. RESTORING stays, but says why."""
        with self._lock:
            if self._state in (TaskState.WAITING, TaskState.RESTORING):
                self._reason = reason
                return
            waits = self._state in (TaskState.RUNNING, TaskState.TAILING)
            waits = waits and self._move(self._state, TaskState.WAITING, reason)
        if waits:
            self._log.warning("task waiting", reason=reason)

    def resume(self) -> None:
        """Fold again."""
        self._move(TaskState.WAITING, TaskState.RUNNING, "")

    def halt(self, reason: str) -> None:
        """Stop folding and answering, for a person to look. Idempotent: the first reason stays."""
        with self._lock:
            is_news = self._state is not TaskState.HALTED and self._move(self._state, TaskState.HALTED, reason)
        if is_news:
            self._log.error("task halted", reason=reason)

    def give_up(self) -> None:
        """Answer nobody from now on, and end what is being restored; to be closed then. Returns at once."""
        self._closing.set()

    def close(self, timeout_seconds: float) -> None:
        """Answer nobody from now on, let a running commit end within a bound, free store and writer.

        Idempotent. Whoever still holds the task when the bound is over frees it when done; a successor's
        fencing sees to it that nothing is committed then.
        """
        self.give_up()
        if self._lock.acquire(timeout=timeout_seconds):
            try:
                self._free()
            finally:
                self._lock.release()

    @property
    def _stands_at(self) -> Position | None:
        store = self._replica.store
        return None if store is None else store.position

    @contextmanager
    def _held(self) -> Iterator[None]:
        with self._lock:
            if self._closing.is_set():
                raise TaskMigratedError("the task is closed")
            try:
                yield
            finally:
                if self._closing.is_set():
                    self._free()

    def _move(self, origin: TaskState, state: TaskState, reason: str) -> bool:
        with self._lock:
            if self._closing.is_set() or self._state is not origin:
                return False
            self._to(state)
            self._reason = reason
            return True

    def _free(self) -> None:
        if self._state is TaskState.CLOSED:
            return
        self._to(TaskState.CLOSED)
        if self._writer is not None:
            self._writer.close()
        self._replica.close()

    def _open(self) -> None:
        self._to(TaskState.RESTORING)
        # (a) What is in the store is a copy of the changelog.
        self._replica.open(is_owned=self._role is Role.ACTIVE)
        if self._role is Role.ACTIVE:
            self._own()
        else:
            self._catch_up(is_fenced=False)
            self._answer_if_complete()

    def _answer_if_complete(self) -> None:
        if self._state is TaskState.RESTORING and self._replica.is_complete:
            self._to(TaskState.TAILING)
            self._reason = ""
            self._log.info("task tailing", position=self.position, restored=self._replica.restoration.restored)

    def _own(self) -> None:
        hosted, task_id = self._hosted, self.task_id
        store = self._store()
        # (b) From here on no predecessor can commit.
        self._writer = open_writer(task_id, hosted.settings, hosted.stage, hosted.topics, hosted.source)
        self._writer.fence(self._closing.is_set)
        reach("fenced")
        # (c) So the changelog's end, taken now, is the end.
        self._catch_up(is_fenced=True)
        reach("restored")
        # (d) One higher than any holder before.
        changelog_topic_id = self._replica.changelog_topic_id
        position = starting_position(store.position, hosted, task_id.partition, changelog_topic_id, self._least_epoch)
        letters = starting_letters(store, hosted, task_id.partition)
        if self._closing.is_set():
            raise TaskMigratedError("the task was closed while it was opened")
        write_position(position, hosted.processor.position_codec, store, self._writer, letters)
        reach("position-written")
        self._replica.stop_reading()
        self._epoch = position.epoch
        self._to(TaskState.RUNNING)
        # Not before what is shown has the new epoch.
        self._role = Role.ACTIVE
        self._reason = ""
        self._log.info(
            "task running", epoch=position.epoch, position=position.offset, restored=self._replica.restoration.restored
        )

    def _catch_up(self, *, is_fenced: bool) -> None:
        answers = self._state is TaskState.TAILING
        self._apply(self._replica.catch_up(self._closing.is_set, is_fenced=is_fenced, answers=answers))

    def _apply(self, parts: Iterable[Part]) -> None:
        for part in parts:
            will_be_complete = self._replica.passed(part)
            if self._state is TaskState.TAILING and not will_be_complete:
                self._to(TaskState.RESTORING)
            self._replica.apply(part)
            if self._state is TaskState.TAILING:
                self._shown = self._store().view

    def _store(self) -> StateStore:
        if self._replica.store is None:
            raise FatalError(f"task {self.task_id} is {self._state.value} without a store")
        return self._replica.store

    def _running(self, *, or_waiting: bool = False) -> tuple[StateStore, ChangelogWriter]:
        """What an owner writes to. Raises TaskMigratedError: the task is none now."""
        is_running = self._state is TaskState.RUNNING or (or_waiting and self._state is TaskState.WAITING)
        if not is_running or self._writer is None:
            raise TaskMigratedError(f"the task is {self._state.value}, not RUNNING")
        return self._store(), self._writer

    def _to(self, state: TaskState) -> None:
        if state not in TRANSITIONS[self._state]:
            raise FatalError(f"task {self.task_id} cannot go from {self._state.value} to {state.value}")
        self._state = state
        # One reference, so that nobody who asks meanwhile sees what may not be shown.
        store = self._replica.store
        self._shown = store.view if store is not None and state in ANSWERING else None


class TaskState(Enum):
    """Where a task is in its life.

    ```
     CREATED ──► RESTORING ◄──► TAILING ──┐
        │            │  │        │   │    │
        │            │  └──► RUNNING │ ◄──┘
        │            │        ▲  │   ▼
        │            │        └──┼► WAITING
        │            ├───────────┼──► HALTED  (from TAILING and WAITING too)
        ▼            ▼           ▼      ▼
     CLOSED ◄────────────────────────────     (from every state)
    ```
    RESTORING replays the changelog and answers nobody. RUNNING folds and answers. TAILING, a standby's state, applies
    what the owner commits and answers those who accept that. WAITING answers as before, but applies nothing until
    something outside is back. HALTED does neither, until a person has looked. CLOSED is final: a partition that comes
    back gets a new task.
    """

    CREATED = "CREATED"
    RESTORING = "RESTORING"
    RUNNING = "RUNNING"
    TAILING = "TAILING"
    WAITING = "WAITING"
    HALTED = "HALTED"
    CLOSED = "CLOSED"


_ENDS = {TaskState.HALTED, TaskState.CLOSED}
TRANSITIONS = {
    TaskState.CREATED: {TaskState.RESTORING, TaskState.CLOSED},
    TaskState.RESTORING: {TaskState.RUNNING, TaskState.TAILING, *_ENDS},
    TaskState.RUNNING: {TaskState.WAITING, *_ENDS},
    TaskState.TAILING: {TaskState.RESTORING, TaskState.RUNNING, TaskState.WAITING, *_ENDS},
    TaskState.WAITING: {TaskState.RUNNING, *_ENDS},
    TaskState.HALTED: {TaskState.CLOSED},
    TaskState.CLOSED: set(),
}
ANSWERING = frozenset({TaskState.RUNNING, TaskState.TAILING, TaskState.WAITING})
