"""One read model on one source partition: its store, its role, its state machine.

A supervising thread opens, tails, promotes, feeds and closes the task; any thread may halt or close it, or take a view.
The lock is held while the task is opened, tails, processes or is freed; views and snapshots need none.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import structlog

from balance_service.errors import FatalError, StoreCorruptedError, TaskHaltedError, TaskMigratedError
from balance_service.kafka.clients import reader_config
from balance_service.kafka.topic_setup import prepare_changelog
from balance_service.process.failpoints import reach
from balance_service.state.changelog.completeness import Wholeness
from balance_service.state.changelog.reader import ChangelogReader
from balance_service.state.changelog.restoration import Restoration
from balance_service.state.commit import Committed, commit, write_position
from balance_service.state.opening import (
    check_same_changelog,
    check_same_log,
    check_still_there,
    open_store,
    open_writer,
    starting_position,
)
from balance_service.state.records import Role, StoreSizes, TaskSnapshot
from balance_service.state.task_state import ANSWERING, TRANSITIONS, TaskState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from balance_service.kafka.topics import Topic
    from balance_service.state.changelog.writer import ChangelogWriter
    from balance_service.state.opening import TaskContext
    from balance_service.state.records import TaskBatch, TaskId
    from balance_service.state.store.batch import StoreBatch
    from balance_service.state.store.store import StateStore, StoreView

log = structlog.get_logger(__name__)

_END_WITHIN_MS = 10


class Task:
    """Work on one partition, from opening to closing; never opened twice.

    A standby applies what the owner commits, and may be promoted once; then it is the owner.
    """

    def __init__(
        self,
        task_id: TaskId,
        context: TaskContext,
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
        self._context = context
        self._lock = threading.RLock()
        self._state = TaskState.CREATED
        self._role = role
        self._reason = reason
        self._closing = threading.Event()
        self._store: StateStore | None = None
        self._writer: ChangelogWriter | None = None
        self._reader: ChangelogReader | None = None
        self._changelog_topic_id = ""
        self._epoch = 0
        self._wholeness = Wholeness(self._changelog_end)
        self._shown: StoreView | None = None
        self._log = log.bind(task=str(task_id), partition=task_id.partition)
        self.restoration = Restoration(self._log)

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
        stands_at = None if self._store is None else self._store.position
        return -1 if stands_at is None else stands_at.offset

    @property
    def view(self) -> StoreView | None:
        """States and position as of the last commit applied; None unless the task answers."""
        return None if self._closing.is_set() else self._shown

    def snapshot(self) -> TaskSnapshot:
        """What the task says of itself."""
        store, state, restoration = self._store, self._state, self.restoration
        return TaskSnapshot(
            self.task_id,
            self._role,
            state.value,
            self._epoch,
            self.position,
            self._reason,
            restoration.restored,
            restoration.to_restore,
            restoration.seconds_left if state is TaskState.RESTORING else None,
            store.sizes if store is not None and state in ANSWERING else StoreSizes(),
            self.view is not None,
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
            _, reader = self._opened()
            if reader.tail():
                self._wholeness.met_end()
            # The end is met once; an idle changelog is stood at for long.
            self._wholeness.passed(reader.whole_up_to)
            self._wholeness.look()
            if self._state is TaskState.RESTORING and reader.is_whole and self._wholeness.holds:
                self._to(TaskState.TAILING)

    def promote(self) -> None:
        """As a standby, become the owner, from where it is. Raises as `open`."""
        with self._held():
            topics, source = self._context.topics, self._context.source
            check_same_log(source, topics.find_patiently(source.name))
            changelog = topics.find_patiently(self._context.stage.changelog)
            check_same_changelog(self._changelog_topic_id, None if changelog is None else changelog.topic_id)
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
            if self._state is not TaskState.RUNNING or self._store is None or self._writer is None:
                raise TaskMigratedError(f"the task is {self._state.value}, not RUNNING")
            done = commit(batch, self.task_id.partition, self._context.work, self._store, self._writer)
            self._shown = self._store.view
            return done

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
            check_same_log(self._context.source, topic)
            check_still_there(self._context.source.name, self.task_id.partition, position, start, end)
        except TaskHaltedError as problem:
            self.halt(str(problem))

    def wait(self, reason: str) -> None:
        """Apply nothing until `resume`, or until another is opened; queries go on."""
        with self._lock:
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
        for owned in (self._writer, self._reader, self._store):
            if owned is not None:
                owned.close()

    def _open(self) -> None:
        self._to(TaskState.RESTORING)
        context, partition = self._context, self.task_id.partition
        topics, source = context.topics, context.source
        changelog = prepare_changelog(topics, context.stage, source)
        check_same_log(source, topics.find_patiently(source.name), changelog)
        self._changelog_topic_id = changelog.topic_id
        # (a) A store that is no copy of this changelog is worth nothing.
        self._store = open_store(self.task_id, context, changelog)
        config = reader_config(context.settings)
        if self._role is Role.ACTIVE:
            # The broker holds back for so long that it has no more, which nobody can answer without.
            config |= {"fetch.wait.max.ms": _END_WITHIN_MS}
        # Asked for here: a consumer that shall begin at the beginning finds out where that is half a second later.
        start = self._store.changelog_offset or topics.offsets(changelog.name, [partition], earliest=True)[partition]
        self._reader = ChangelogReader(config, changelog.name, partition, start, self._apply)
        if self._role is Role.ACTIVE:
            self._own()
        else:
            self._wholeness.look()
            self._catch_up(fenced=False)
            self._wholeness.passed(self._reader.whole_up_to)
            self._to(TaskState.TAILING)
            self._reason = ""
            self._log.info("task tailing", position=self.position, restored=self.restoration.restored)

    def _own(self) -> None:
        context, task_id = self._context, self.task_id
        store, reader = self._opened()
        # (b) From here on no predecessor can commit.
        self._writer = open_writer(task_id, context.settings, context.stage, context.topics, context.source)
        self._writer.fence(self._closing.is_set)
        reach("fenced")
        # (c) So the changelog's end, taken now, is the end.
        self._catch_up(fenced=True)
        reach("restored")
        # (d) One higher than any holder before.
        position = starting_position(
            store.position, context, task_id.partition, self._changelog_topic_id, self._least_epoch
        )
        if self._closing.is_set():
            raise TaskMigratedError("the task was closed while it was opened")
        write_position(position, context.work.position_codec, store, self._writer)
        reach("position-written")
        reader.close()
        self._reader = None
        self._epoch = position.epoch
        self._to(TaskState.RUNNING)
        # Not before what is shown has the new epoch.
        self._role = Role.ACTIVE
        self._reason = ""
        self._log.info(
            "task running", epoch=position.epoch, position=position.offset, restored=self.restoration.restored
        )

    def _catch_up(self, *, fenced: bool) -> None:
        """Replay the changelog up to its present end; not fenced, up to the transaction that a writer may have open.

        A writer that was cut off leaves one open until its successor fences it, which may be who waits here.
        """
        store, reader = self._opened()
        start, end = store.changelog_offset, self._changelog_end(committed=not fenced)
        if store.reaches > end:
            raise StoreCorruptedError(f"the store reaches to {store.reaches}, beyond the changelog's end {end}")
        self.restoration.begin(start, end)
        reader.replay(end, self._closing.is_set, answers=self._state is TaskState.TAILING, fenced=fenced)

    def _apply(self, batch: StoreBatch, changelog_offset: int, is_whole: bool) -> None:
        store, _ = self._opened()
        if is_whole:
            self._wholeness.passed(changelog_offset)
        if self._state is TaskState.TAILING and not (is_whole and self._wholeness.holds):
            self._to(TaskState.RESTORING)
        store.require_room()
        records = len(batch)
        store.apply(batch, changelog_offset)
        if is_whole and store.position is not None:
            check_same_changelog(self._changelog_topic_id, store.position.changelog_topic_id)
        if self._state is TaskState.TAILING:
            self._shown = store.view
        self.restoration.advance(records, changelog_offset)

    def _changelog_end(self, *, committed: bool = True) -> int:
        changelog, partition = self._context.stage.changelog, self.task_id.partition
        return self._context.topics.offsets(changelog, [partition], committed=committed)[partition]

    def _opened(self) -> tuple[StateStore, ChangelogReader]:
        if self._store is None or self._reader is None:
            raise FatalError(f"task {self.task_id} is {self._state.value} without store or reader")
        return self._store, self._reader

    def _to(self, state: TaskState) -> None:
        if state not in TRANSITIONS[self._state]:
            raise FatalError(f"task {self.task_id} cannot go from {self._state.value} to {state.value}")
        self._state = state
        # One reference, so that nobody who asks meanwhile sees what may not be shown.
        self._shown = self._store.view if self._store is not None and state in ANSWERING else None
