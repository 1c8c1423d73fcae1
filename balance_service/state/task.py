"""One read model on one source partition: its store, its writer, its state machine.

A supervising thread opens and closes the task, a commit thread processes batches, any thread may take a view.
The lock is held while the task is opened, processes or is freed; views and snapshots need none.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import structlog

from balance_service.errors import (
    FatalError,
    StoreCorruptedError,
    TaskHaltedError,
    TaskMigratedError,
)
from balance_service.failpoints import reach
from balance_service.kafka.clients import reader_config, transactional_config
from balance_service.state.changelog import ChangelogWriter, replay
from balance_service.state.commit import Committed, commit, write_position
from balance_service.state.opening import check_same_log, check_still_there, open_store, starting_position
from balance_service.state.records import TaskSnapshot
from balance_service.state.task_state import ANSWERING, TRANSITIONS, TaskState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from balance_service.kafka.topics import Topic
    from balance_service.state.changelog import Record
    from balance_service.state.opening import TaskContext
    from balance_service.state.records import TaskBatch, TaskId
    from balance_service.state.store import StateStore, StoreView

log = structlog.get_logger(__name__)

_PROGRESS_EVERY_SECONDS = 2.0


class Task:
    """Active work on one partition, from opening to closing; never opened twice."""

    def __init__(self, task_id: TaskId, context: TaskContext) -> None:
        self.task_id = task_id
        self._context = context
        self._lock = threading.RLock()
        self._state = TaskState.CREATED
        self._reason = ""
        self._closing = threading.Event()
        self._store: StateStore | None = None
        self._writer: ChangelogWriter | None = None
        self._epoch = 0
        self.restored = 0
        self._to_restore = 0
        self._log = log.bind(task=str(task_id), partition=task_id.partition)

    @property
    def state(self) -> TaskState:
        """Where the task is in its life."""
        return self._state

    @property
    def epoch(self) -> int:
        """The fencing number under which it was opened; 0 before."""
        return self._epoch

    @property
    def position(self) -> int:
        """Next source offset to apply; -1 while there is no store to ask."""
        stands_at = None if self._store is None else self._store.position
        return -1 if stands_at is None else stands_at.offset

    @property
    def view(self) -> StoreView | None:
        """States and position as of the last commit; None unless the task answers."""
        answers = self._state in ANSWERING and not self._closing.is_set()
        return self._store.view if self._store is not None and answers else None

    def snapshot(self) -> TaskSnapshot:
        """What the task says of itself."""
        store, state = self._store, self._state
        size = store.size_bytes if store is not None and state in ANSWERING else 0
        return TaskSnapshot(
            self.task_id,
            "ACTIVE",
            state.value,
            self._epoch,
            self.position,
            self._reason,
            self.restored,
            self._to_restore,
            size,
        )

    def open(self) -> None:
        """Become the one writer, bring the store up to the changelog's end, take a new epoch.

        Raises:
            RetriableError: something outside does not answer; close this task and open another.
            TaskMigratedError: closed, or fenced, meanwhile.
            TaskHaltedError: source or changelog are not what they were.
        """
        with self._held():
            self._open()

    def process(self, batch: TaskBatch) -> Committed:
        """Commit this task's part of a micro-batch.

        Raises:
            TaskMigratedError: the part is not ours to take, or the task was fenced or closed.
            RetriableError: nobody knows the outcome; close this task and open another.
            StoreCorruptedError: wipe the store, open another.
        """
        with self._held():
            if self._state is not TaskState.RUNNING:
                raise TaskMigratedError(f"the task is {self._state.value}, not RUNNING")
            store, writer = self._opened()
            return commit(batch, self.task_id.partition, self._context.folding, store, writer)

    def check_log(self, topic: Topic | None, start: int, end: int) -> None:
        """Halt if the source is no longer the log this task was folding.

        Args:
            topic: the source as it is now; None if it is gone.
            start: its first offset that is still there.
            end: its high watermark.
        """
        try:
            check_same_log(self._context.source, topic)
            check_still_there(self._context.source.name, self.task_id.partition, self.position, start, end)
        except TaskHaltedError as problem:
            self.halt(str(problem))

    def wait(self, reason: str) -> None:
        """Stop folding until `resume`; queries go on."""
        if self._move(TaskState.RUNNING, TaskState.WAITING, reason):
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

    def close(self, timeout_seconds: float) -> None:
        """Answer nobody from now on, let a running commit end within a bound, free store and writer.

        Idempotent. Whoever still holds the task when the bound is over frees it when done; a successor's
        fencing sees to it that nothing is committed then.
        """
        self._closing.set()
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
        if self._writer is not None:
            self._writer.close()
        if self._store is not None:
            self._store.close()

    def _open(self) -> None:
        self._to(TaskState.RESTORING)
        context, partition = self._context, self.task_id.partition
        settings, topics, source = context.settings, context.topics, context.source
        changelog = topics.prepare_changelog(source)
        check_same_log(source, topics.find(source.name), changelog)
        # (a) A store that is no copy of this changelog is worth nothing.
        self._store = open_store(self.task_id, context, changelog)
        # (b) From here on no predecessor can commit.
        self._writer = ChangelogWriter(
            transactional_config(settings, f"{settings.application_id}-{self.task_id.read_model}-{partition}"),
            self.task_id,
            changelog.name,
            settings.dead_letters_topic,
            source.name,
            settings.application_id,
        )
        self._writer.fence()
        reach("fenced")
        # (c) So its end, taken now, is the end.
        end = topics.offsets(changelog.name, [partition])[partition]
        start = self._store.changelog_offset
        if start > end:
            raise StoreCorruptedError(f"the store stands at {start}, beyond the changelog's end {end}")
        self._to_restore = end - start
        replay(
            reader_config(settings), changelog.name, partition, start, end, self._restoring(end), self._closing.is_set
        )
        reach("restored")
        # (d) One higher than any holder before.
        position = starting_position(self._store.position, context, partition)
        write_position(position, context.folding.position_codec, self._store, self._writer)
        reach("position-written")
        self._epoch = position.epoch
        self._to(TaskState.RUNNING)
        self._log.info("task running", epoch=position.epoch, position=position.offset, restored=self.restored)

    def _restoring(self, end: int) -> Callable[[list[Record], int], None]:
        """Writes what is replayed to the store, and says now and then how far it is."""
        store, _ = self._opened()
        start = store.changelog_offset
        began = reported = time.monotonic()

        def apply(records: list[Record], changelog_offset: int) -> None:
            nonlocal reported
            store.write(records, changelog_offset)
            self.restored += len(records)
            now = time.monotonic()
            if now - reported >= _PROGRESS_EVERY_SECONDS:
                reported = now
                left = (now - began) * (end - changelog_offset) / max(changelog_offset - start, 1)
                self._log.info("restoring", restored=self.restored, seconds_left=round(left, 1))

        return apply

    def _opened(self) -> tuple[StateStore, ChangelogWriter]:
        if self._store is None or self._writer is None:
            raise FatalError(f"task {self.task_id} is {self._state.value} without a store")
        return self._store, self._writer

    def _to(self, state: TaskState) -> None:
        if state not in TRANSITIONS[self._state]:
            raise FatalError(f"task {self.task_id} cannot go from {self._state.value} to {state.value}")
        self._state = state
