"""A stage on one source partition: its store, its role and its state machine.

A supervising thread opens, tails, promotes, runs and closes the task. Any thread may halt or close it, or take a view.
The lock is held while the task opens, tails, processes or is freed. Views and snapshots need no lock.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from itertools import chain
from typing import TYPE_CHECKING, Protocol

import structlog

from balance_service.engine.batch import PartitionUpdates, TaskBatch
from balance_service.engine.commit import Committed, commit, decide, write_position, write_records
from balance_service.engine.dead_letter import Status, open_letters
from balance_service.engine.decisions import TRY_AGAIN, Decision
from balance_service.engine.deletions import Deletions, again_up_to, begun_again, without_states
from balance_service.engine.following import Following
from balance_service.engine.inheritance import check_owner, inherit, last_positions, open_writer
from balance_service.engine.loading import loads, require_loaded
from balance_service.engine.opening import (
    check_same_log,
    check_still_there,
    first_position,
    starting_changes,
    starting_position,
)
from balance_service.engine.records import NEVER, STANDS_AFTER_SECONDS, Role, StoreSizes, TaskSnapshot, Waited
from balance_service.engine.replica import Replica
from balance_service.errors import FatalError, RetriableError, TaskHaltedError, TaskMigratedError
from balance_service.kafka.log_reader import first_record
from balance_service.kafka.messages import offset_of as record_offset
from balance_service.process.failpoints import failpoint
from balance_service.process.runtime import elapsed, now_ms

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from balance_service.engine.changelog_reader import Part
    from balance_service.engine.changelog_writer import ChangelogWriter
    from balance_service.engine.dead_letter import Letter
    from balance_service.engine.dead_letters import DueLetters, LetterChanges
    from balance_service.engine.decisions import Verdict
    from balance_service.engine.hosted_stage import HostedStage
    from balance_service.engine.records import Compared, FailedAt, Output, Position, TaskId
    from balance_service.engine.store import StateStore, StoreView
    from balance_service.kafka.topics import Topic


log = structlog.get_logger(__name__)


class TaskState(Enum):
    """The life of a task.

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
    RESTORING replays the changelog, or loads files, and does not answer. RUNNING folds and answers. TAILING, a
    standby's state, applies the owner's commits and answers queries that accept a standby. WAITING answers, but applies
    nothing until an outage ends. HALTED applies nothing until an operator acts, and answers nothing except from
    `frozen_view`. CLOSED is final: a partition that returns gets a new task.
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
_MOST_CHANGED_KEYS = 10_000
_FIRST_RECORD_SECONDS = 3.0
_LOADED = object()


class StopAt:
    """An offset of the source that a task does not go beyond until `Task.go_on`."""

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.reached = threading.Event()
        """Set once the task has applied every record below the offset, and has no other one in hand."""


class Watcher(Protocol):
    """Receives each commit of an owner, on the task's thread, once queries see it. Must return at once."""

    def committed(self, start: int, end: int, keys: Sequence[bytes] | None) -> None:
        """Args:
        start: the source offset of the first record of the micro-batch; `end` if it retries dead letters.
        end: the position since the commit.
        keys: of the changed states; None if they are more than 10,000.
        """


class Task:
    """The processing of one partition, from opening to closing; opened at most once.

    A standby applies the owner's commits. It may be promoted once, and is the owner then.
    """

    def __init__(
        self,
        task_id: TaskId,
        hosted: HostedStage,
        role: Role = Role.ACTIVE,
        reason: str = "",
        least_epoch: int = 1,
        left: StoreView | None = None,
        since_ms: int | None = None,
    ) -> None:
        """Args:
        reason: why the previous task of the partition was closed; shown until this one runs.
        least_epoch: the lowest epoch to take as the owner.
        left: the last view of the previous task, as of `take_left`.
        since_ms: since when no task of the partition has done its work, in ms since 1970; None: since now.
        """
        self._since_ms = now_ms() if since_ms is None else since_ms
        self._waited: Waited | None = None
        self._resumed_at = float("-inf")
        self._failed_at: FailedAt | None = None
        self._least_epoch = least_epoch
        self.task_id = task_id
        self._hosted = hosted
        self._lock = threading.RLock()
        self._state = TaskState.CREATED
        self._role = role
        self._reason = reason
        self._closing = threading.Event()
        self._giving_up = threading.Lock()
        self._writer: ChangelogWriter | None = None
        self._has_fenced = False
        self._sends = False
        self._left_out_changed = False
        self._epoch = 0
        self._shown: StoreView | None = None
        self._left = left
        self._watcher: Watcher | None = None
        self.compared: Compared | None = None
        """The comparison with the serving generation, once made."""
        self._loads: Iterator[None] | None = None
        """What is left to load before the task runs; None if nothing is."""
        self.stop: StopAt | None = None
        """How far the task folds now; None: as far as there are events."""
        self._log = log.bind(task=str(task_id), partition=task_id.partition)
        self.replica = Replica(task_id, hosted, self._log)
        self._deletions = Deletions(hosted, task_id.partition)
        self._following = Following(hosted, task_id.partition)

    @property
    def state(self) -> TaskState:
        return self._state

    @property
    def is_loading(self) -> bool:
        """Whether `load` is to be called: the task owns its partition, and runs once its store is loaded."""
        return self._loads is not None and self._state is TaskState.RESTORING

    @property
    def role(self) -> Role:
        """The present role. Read it before `view`, which is then at least as recent."""
        return self._role

    @property
    def next_epoch(self) -> int:
        """The least epoch for the next task of the partition."""
        return max(self._least_epoch, self._epoch + 1)

    @property
    def since_ms(self) -> int:
        """Since when the task is in its state: see `TaskSnapshot`."""
        return self._since_ms

    @property
    def sends(self) -> bool:
        """Whether the task sends the outputs of its events, or did until it halted. At most one generation does.

        A task that sends does so until it is fenced.
        """
        return self._sends

    @property
    def sends_since(self) -> int:
        """The number of the state of the generations since which the task sends; -1 if it does not."""
        stands_at = self._stands_at
        return stands_at.inherited if self._sends and stands_at is not None else NEVER

    @property
    def limit(self) -> int | None:
        """The source offset that a silent task must not go beyond; None if the task sends.

        Only what the generation that sends has applied, or made a dead letter of, is known: see `follow_sender`.
        """
        return None if self._sends else self._following.limit

    @property
    def goal(self) -> int | None:
        """The source offset that a silent task is to reach: where the one that sends is. None if it should send."""
        is_silent = not self._sends and not self._hosted.generations.serves(self._hosted.stage)
        return self._following.goal if is_silent else None

    @property
    def position(self) -> int:
        """The next source offset to apply; -1 without an open store."""
        stands_at = self._stands_at
        return -1 if stands_at is None else stands_at.offset

    @property
    def last_view(self) -> StoreView | None:
        """As `view`, but of a halted task too."""
        store = self.replica.store
        return None if store is None or self._closing.is_set() else store.view

    @property
    def view(self) -> StoreView | None:
        """The view after the last applied commit; None unless the task answers."""
        return None if self._closing.is_set() else self._shown

    @property
    def frozen_view(self) -> StoreView | None:
        """The last view of an owner that its read model's own code has halted; otherwise None.

        The state is correct, and becomes older: only a query that says how old its answer may be gets it.
        """
        return self._left if self._state is TaskState.HALTED and not self._closing.is_set() else None

    @property
    def left_view(self) -> StoreView | None:
        """The last view once the task is given up; before it answers, that of the previous one, or of its own store.

        As long as anything refers to it, no other task can open the store.
        """
        return None if self._state is TaskState.HALTED and not self._closing.is_set() else self._left

    def take_left(self) -> StoreView | None:
        """Returns `left_view`, which is None from then on."""
        left, self._left = self.left_view, None
        return left

    def watch(self, watcher: Watcher | None) -> None:
        """Notifies a watcher of the commits from now on, instead of the previous watcher; None: no watcher."""
        self._watcher = watcher

    def stop_at(self, offset: int) -> StopAt:
        """Has the task stop at an offset of the source, until `go_on`.

        It applies what it has in hand, which may be beyond the offset.
        """
        self.stop = stop = StopAt(offset)
        return stop

    def go_on(self) -> None:
        """Lets the task fold on after `stop_at`."""
        self.stop = None

    def snapshot(self) -> TaskSnapshot:
        store, state, restoration = self.replica.store, self._state, self.replica.restoration
        stands_at = self._stands_at
        letters = {} if stands_at is None else stands_at.letters
        return TaskSnapshot(
            stage=self.task_id.stage,
            partition=self.task_id.partition,
            role=self._role,
            state=state.value,
            epoch=self._epoch,
            position=-1 if stands_at is None else stands_at.offset,
            reason=self._reason,
            restored=restoration.restored,
            to_restore=restoration.to_restore,
            seconds_left=restoration.seconds_left if state is TaskState.RESTORING else None,
            dead_letters={f"{cause}/{status}": count for (cause, status), count in open_letters(letters).items()},
            since_ms=self._since_ms,
            sends_as_of=self.sends_since,
            comparison=None if self.compared is None else self.compared.counts,
            sizes=store.sizes if store is not None and state in ANSWERING else StoreSizes(),
            answers=self.view is not None,
            failed_at=self._failed_at,
            waited=self._waited_lately,
            state_since_ms=self._since_ms,
            again_up_to=self._again_up_to(stands_at),
        )

    def open(self) -> None:
        """Brings the store up to the changelog's end. An owner fences its predecessor and takes a new epoch.

        Raises:
            RetriableError: broker or registry do not respond; close this task and open a new one.
            TaskMigratedError: the task was closed or fenced.
            TaskHaltedError: source or changelog were replaced.
            StoreFullError: the disk has no room.
        """
        with self._held():
            self._open()

    def tail(self) -> None:
        """Applies the owner's new commits to a standby; waits briefly if there are none. Raises as `open`."""
        with self._held():
            self._apply(self.replica.tail())
            self._answer_if_complete()

    def promote(self) -> None:
        """Makes a standby the owner, from its present position. Raises as `open`."""
        with self._held():
            if self._state is TaskState.HALTED:
                # The supervisor decided before it saw the halt.
                return
            try:
                self._hosted.generations.serves_since(self._hosted.stage, newest=True)
            except RetriableError as error:
                # It goes on as a standby. Opened as the owner, it would wait for the same.
                self._reason = str(error)
                self._apply(self.replica.tail())
                self._answer_if_complete()
                return
            self.replica.check_same_logs()
            self._own()

    def load(self) -> None:
        """Loads a part of the files that a batch job has made, and runs after the last one.

        Raises: as `open`, or as `engine.loading.loads`.
        """
        with self._held():
            if self._loads is None or self._state is not TaskState.RESTORING:
                # It was halted since.
                return
            rest, self._loads = self._loads, None
            # After an error there is no rest: the task must be opened again.
            if next(rest, _LOADED) is _LOADED:
                self._run()
            else:
                self._loads = rest

    def process(self, batch: TaskBatch) -> Committed:
        """Commits a micro-batch.

        Raises:
            TaskMigratedError: the batch does not start at the position, or the task was fenced or closed.
            RetriableError: the outcome is unknown, or the batch ends beyond `limit`; close this task and open a new
                one.
            StoreFullError: the disk has no room.
            StoreCorruptedError: wipe the store and open a new task.
        """
        with self._held():
            store, writer = self._running()
            if not self._sends and batch.end > self._following.limit:
                raise RetriableError(f"no other generation has applied the records below {batch.end} yet")
            # The records were read before this moment.
            self._deletions.require_all(self._stands_at)
            return self._commit(batch, store, writer)

    def note_seen(self) -> None:
        """Writes when the states had everything in a compacted source, if there are no events. Raises as `process`."""
        with self._held():
            store, writer = self._running()
            if (noted := self._deletions.noted(self._required_position())) is not None:
                write_position(noted, self._hosted.processor.position_codec, store, writer)
                self._shown = store.view

    def due(self) -> DueLetters:
        """Returns the dead letters that are due. Raises TaskMigratedError if the task is closed."""
        with self._held():
            store, _ = self._running()
            if self._sends:
                return self._hosted.processor.letters.due(store)
            return self._following.due(store, self.position)

    def follow_sender(self) -> bool:
        """Takes over the dead letters of the generation that sends, and raises `limit`. Does nothing if the task sends.

        Those that the other one has closed are closed here too, or retried.

        Returns:
            Whether `left_out` has changed.

        Raises:
            BalanceServiceError: as `process`.
        """
        if self._sends:
            has_changed, self._left_out_changed = self._left_out_changed, False
            return has_changed
        if self._following.sender is None:
            return False
        with self._held():
            store, writer = self._running()
            self._follow(self._following.closed_there(store), store, writer)
            return self._follow(self._following.opened_there(store, self.position), store, writer)

    def _follow(self, some: Iterable[LetterChanges], store: StateStore, writer: ChangelogWriter) -> bool:
        """Commits changes of dead letters; returns whether there are any. The caller has the lock."""
        has_changed = False
        for changes in some:
            if changes.records:
                decide(changes, (), self._hosted.processor, store, writer)
                self._shown = store.view
                has_changed = True
        return has_changed

    def left_out(self) -> list[int]:
        """Returns offsets from the position on that must be skipped. Raises TaskMigratedError if the task is closed."""
        with self._held():
            store, _ = self._running()
            return self._hosted.processor.letters.left_out_from(store, self.position)

    def decide(self, offsets: Iterable[int], verdict: Verdict) -> dict[int, str]:
        """Carries out an operator's decision about dead letters.

        Returns:
            For each offset that the decision does not apply to, the reason.

        Raises:
            BalanceServiceError: as `process`; the decision may have been committed.
        """
        if verdict.decision is Decision.SET_ASIDE:
            refusals = ((at, self._set_aside(at, verdict)) for at in sorted(set(offsets)))
            return {at: why for at, why in refusals if why is not None}
        letters, decisions = self._hosted.processor.letters, self._hosted.decisions
        with self._held():
            store, writer = self._running(or_waiting=True)
            if not self._sends:
                # The one that sends until the switch may apply the record at this moment.
                return dict.fromkeys(offsets, f"another generation still sends the outputs{TRY_AGAIN}")
            known = letters.at(store, offsets)
            refused = {at: why for at in offsets if (why := verdict.refusal(known.get(at))) is not None}
            decided = [letter for at, letter in known.items() if at not in refused]
            if decided:
                now_ms, partition = letters.now_ms(), self.task_id.partition
                audit = [decisions.output(partition, letter, verdict, now_ms) for letter in decided]
                changes = letters.on_decision(store, decided, verdict.decision.status)
                decide(changes, audit, self._hosted.processor, store, writer)
                self._shown = store.view
            return refused

    def _set_aside(self, offset: int, verdict: Verdict) -> str | None:
        """Makes a dead letter of the record at the position, and moves the position past it. Raises as `decide`.

        Nothing decodes the record, and no query of Spark is needed.

        Returns:
            Why that is not possible; None if it was done.
        """
        hosted, partition, start = self._hosted, self.task_id.partition, self.position
        known = self.letters_at([offset]).get(offset)
        # A replay applies a record again that was redriven before, and may stop there.
        if known is not None and (known.status is not Status.APPLIED or offset < start):
            return verdict.refusal(known)
        if start < 0:
            raise TaskMigratedError(f"the task is {self._state.value}, and has no position")
        # Without the lock: the broker may take long, and the task may go on.
        source = hosted.source.name
        try:
            first = first_record(hosted.settings, hosted.topics, source, partition, start, _FIRST_RECORD_SECONDS)
        except RetriableError as error:
            # Nothing was written, so the task goes on.
            return f"the record cannot be read: {error}{TRY_AGAIN}"
        if first is None:
            return f"the task's position is {start}, and no committed record is there or behind it"
        if record_offset(first) != offset:
            return f"the task's position is {start}, and its next record has offset {record_offset(first)}"
        with self._held():
            store, writer = self._running(or_waiting=True)
            if self.position != start:
                return f"the task goes on: its position is {self.position}"
            if (limit := self.limit) is not None and offset >= limit:
                return f"the generation that sends the outputs has not passed the record{TRY_AGAIN}"
            letter = verdict.set_aside(first)
            audit = hosted.decisions.output(partition, letter, verdict, hosted.processor.letters.now_ms())
            self._commit(TaskBatch(start, PartitionUpdates(offset + 1, dead_letters=[letter])), store, writer, [audit])
        self._log.warning("a record was set aside", offset=offset, by=verdict.by, reason=verdict.reason)
        return None

    def _commit(
        self, batch: TaskBatch, store: StateStore, writer: ChangelogWriter, audit: Sequence[Output] = ()
    ) -> Committed:
        if not self._hosted.generations.serves(self._hosted.stage):
            store.require_room(serves=False)
        batch = replace(batch, is_silent=not self._sends, given_up=self._closing.is_set)
        seen_to_ms = self._deletions.seen_at(batch.end)
        done = commit(batch, self.task_id.partition, self._hosted.processor, store, writer, audit, seen_to_ms)
        self._waited = None
        self._shown = store.view
        # After the view: who began to watch before may have read the former one.
        if (watcher := self._watcher) is not None:
            watcher.committed(batch.start, batch.end, done.changed_keys(_MOST_CHANGED_KEYS))
        return done

    def follow(self, decided: Mapping[int, Letter]) -> None:
        """Has the task carry out a decision that another generation's task has carried out, before anything else.

        Returns at once: the task may be restoring for long. One that ends before drops the decision: the next one reads
        the topic of decisions when it opens, and what the sending generation has closed.

        Args:
            decided: the dead letters after the decision.
        """
        # A standby that is promoted may have read the topic already.
        if self._state not in _ENDS and (self._role is Role.ACTIVE or self._has_fenced):
            self._following.tell(decided)

    def carry_out(self) -> None:
        """Carries out what `follow` was told, if the task runs or waits. Raises: as `decide`."""
        if self._following.is_told:
            with self._held():
                if self._state in (TaskState.RUNNING, TaskState.WAITING):
                    self._running(or_waiting=True)

    def letters_at(self, offsets: Iterable[int]) -> Mapping[int, Letter]:
        """Returns the dead letters of some offsets. Raises TaskMigratedError if the task is closed."""
        with self._held():
            return self._hosted.processor.letters.at(self._store(), offsets)

    def inherit(self) -> bool:
        """Sends the outputs from now on, in place of the generation that sent them until now.

        The tasks of the other generations must be opened again then: they are fenced. If the write fails, this one
        must be.

        Returns:
            False if this task sends already.

        Raises:
            RetriableError: another generation serves.
            BalanceServiceError: as `process`, or as `engine.inheritance`.
        """
        hosted, partition = self._hosted, self.task_id.partition
        with self._held():
            store, writer = self._running()
            position = self._required_position()
            if (since := hosted.generations.serves_since(hosted.stage)) is None:
                raise RetriableError(f"another generation than that of {self.task_id} serves")
            if self._sends and position.inherited >= since:
                return False
            failpoint("successor-held")
            sent_up_to, changes = inherit(hosted, partition, store, position.offset, {}, self._closing.is_set)
            try:
                moved = replace(position, emitted_up_to=sent_up_to, inherited=since)
                write_position(moved, hosted.processor.position_codec, store, writer, changes)
            except BaseException:
                self.give_up()
                raise
            self._sends = self._left_out_changed = True
            self._shown = store.view
        failpoint("taken-over")
        self._log.info("the task sends the outputs now", first=max(sent_up_to, position.offset))
        return True

    def check_log(self, topic: Topic | None, start: int, position: int, end: int) -> None:
        """Halts the task if the source is no longer the log that it folds.

        Args:
            topic: the source now; None if it was deleted.
            start: the first offset of the source; -1 if the task needs no events from it.
            position: of this task. The caller reads it after `start` and before `end`, since a commit in between could
                otherwise appear to be beyond the end.
            end: the high watermark of the source.
        """
        try:
            check_same_log(self._hosted.source, topic)
            check_still_there(self._hosted.source.name, self.task_id.partition, position, start, end)
        except TaskHaltedError as problem:
            self.halt(str(problem))

    def wait(self, reason: str) -> None:
        """Stops folding until `resume` and continues to answer. A task that is RESTORING only shows the reason."""
        with self._lock:
            if self._state in (TaskState.WAITING, TaskState.RESTORING):
                self._reason = reason
                return
            waits, before = self._state in (TaskState.RUNNING, TaskState.TAILING), self._waited_lately
            waits = waits and self._move(self._state, TaskState.WAITING, reason)
            if waits and before is not None:
                self._since_ms = before.since_ms
        if waits:
            self._log.warning("task waiting", reason=reason)

    def resume(self) -> None:
        """Continues to fold after `wait`."""
        with self._lock:
            waited = Waited(self._since_ms, self._reason)
            if self._move(TaskState.WAITING, TaskState.RUNNING, ""):
                self._waited, self._resumed_at = waited, elapsed()

    def halt(self, reason: str, at: FailedAt | None = None) -> None:
        """Stops folding and, except from `frozen_view`, answering until an operator acts. The first reason is kept.

        Args:
            at: where the read model's own code failed, if that is the reason: the states below that event are right.
        """
        with self._lock:
            ran = self._state in (TaskState.RUNNING, TaskState.WAITING)
            if at is None:
                # Also of a task that its own code has halted before.
                self._leave(None)
            elif self._state is not TaskState.HALTED:
                self._leave(self._shown if ran else None)
            is_news = self._state is not TaskState.HALTED and self._move(self._state, TaskState.HALTED, reason)
            if is_news:
                self._failed_at = at
        if is_news:
            self._log.error("task halted", reason=reason)

    def give_up(self, *, leaves_view: bool = False) -> None:
        """Stops serving and cancels restoration; call `close` next. Returns at once.

        Args:
            leaves_view: whether `left_view` stays, for queries that take an old state. The first call counts.
        """
        with self._giving_up:
            if not self._closing.is_set():
                self._left = (self._shown or self._left) if leaves_view else None
                self._closing.set()

    def _leave(self, view: StoreView | None) -> None:
        with self._giving_up:
            if not self._closing.is_set():
                self._left = view

    def close(self, timeout_seconds: float, reason: str = "", *, leaves_view: bool = False) -> None:
        """Stops serving as `give_up`, waits for a running commit, and frees store and writer. Idempotent.

        If the commit outlasts the timeout, its thread frees the task afterwards. A successor's fencing prevents that
        commit from taking effect.
        """
        self.give_up(leaves_view=leaves_view)
        self._reason = reason or self._reason
        if self._lock.acquire(timeout=timeout_seconds):
            try:
                self._free()
            finally:
                self._lock.release()

    @property
    def _stands_at(self) -> Position | None:
        store = self.replica.store
        return None if store is None else store.position

    def _again_up_to(self, position: Position | None) -> int:
        if position is None or self._role is not Role.ACTIVE:
            return 0
        return again_up_to(self._hosted.stage, position)

    @property
    def _waited_lately(self) -> Waited | None:
        """The wait before, of a task that was resumed lately and has committed nothing since."""
        return self._waited if elapsed() - self._resumed_at < STANDS_AFTER_SECONDS else None

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
        self._loads = None
        if self._writer is not None:
            self._writer.close()
        self.replica.close()

    def _open(self) -> None:
        self._to(TaskState.RESTORING)
        # (a) The store is a copy of the changelog.
        changelog = self.replica.find()
        self._leave(None)
        self.replica.open(changelog, is_owned=self._role is Role.ACTIVE)
        # Until the task answers: the next steps may wait for the broker.
        self._leave(self.replica.whole_view)
        if self._role is Role.ACTIVE:
            self._own()
        else:
            self._catch_up(is_fenced=False)
            self._answer_if_complete()

    def _answer_if_complete(self) -> None:
        if self._state is TaskState.RESTORING and self.replica.is_complete:
            self._to(TaskState.TAILING)
            self._reason = ""
            self._log.info("task tailing", position=self.position, restored=self.replica.restoration.restored)

    def _own(self) -> None:
        hosted, task_id = self._hosted, self.task_id
        store = self._store()
        self._check_owner(store)
        # (b) No predecessor can commit from here on.
        self._writer = open_writer(task_id, hosted.settings, hosted.stage, hosted.topics, hosted.source)
        self._writer.fence(self._closing.is_set)
        self._has_fenced = True
        failpoint("fenced")
        # (c) Therefore the changelog's present end is final.
        self._catch_up(is_fenced=True)
        self._writer.expect(self.replica.end)
        failpoint("restored")
        epoch = self._least_epoch if store.loading is None else max(store.loading.epoch + 1, self._least_epoch)
        begun = first_position(hosted, task_id.partition, 0, epoch, self.replica.changelog_topic_id)
        self._loads = loads(hosted, task_id.partition, store, self._writer, begun, self.replica.restoration)
        if self._loads is None:
            self._run()
            return
        # It would fetch what the load writes.
        self.replica.stop_reading()
        if self._state is TaskState.TAILING:
            self._to(TaskState.RESTORING)
        self._log.info("task loads from files")

    def _run(self) -> None:
        hosted, task_id, store, writer = self._hosted, self.task_id, self._store(), self._writer
        if writer is None:
            raise FatalError(f"task {task_id} is to run, and has fenced no predecessor")
        require_loaded(store)
        self._begin_again_if_needed(store, writer)
        # (d) The epoch rises above that of every previous owner.
        changelog_topic_id = self.replica.changelog_topic_id
        start = starting_position(store.position, hosted, task_id.partition, changelog_topic_id, self._least_epoch)
        # A generation that began to serve before the fencing may be unknown here.
        since = hosted.generations.serves_since(hosted.stage, newest=True)
        codec, letters = hosted.processor.position_codec, hosted.processor.letters
        for position, changes in starting_changes(store, hosted, task_id.partition, start, since, self._closing.is_set):
            if self._closing.is_set():
                raise TaskMigratedError("the task was closed while it was opened")
            schemas, outputs = hosted.schemas.missing(store, position.offset, letters.now_ms())
            write_position(position, codec, store, writer, changes, schemas, outputs)
        position = self._required_position()
        failpoint("position-written")
        self.replica.stop_reading()
        self._epoch = position.epoch
        self._sends, self._following.limit = since is not None, position.offset
        self._to(TaskState.RUNNING)
        # The role changes after the view has the new epoch.
        self._role = Role.ACTIVE
        self._reason = ""
        self._log.info(
            "task running",
            epoch=position.epoch,
            position=position.offset,
            sends=self._sends,
            restored=self.replica.restoration.restored,
        )

    def _begin_again_if_needed(self, store: StateStore, writer: ChangelogWriter) -> None:
        """Deletes the states of a compacted source that may lack deletions."""
        position = store.position
        if position is None or not (why := self._deletions.gone(position)):
            return
        if self._hosted.stands_still:
            # Nothing would be folded again: the states stay until an owner has the class of the model.
            return
        partition, source = self.task_id.partition, self._hosted.source.name
        start = self._hosted.topics.offsets(source, [partition], earliest=True)[partition]
        codec, letters = self._hosted.processor.position_codec, self._hosted.processor.letters
        schemas, outputs = self._hosted.schemas.missing(store, start, letters.now_ms())
        begun, records = begun_again(position, start), lambda: chain(schemas, without_states(store))
        write_records(records, begun, codec, store, writer, outputs)
        self._log.warning("the partition is folded again from its beginning", reason=why, stood_at=position.offset)

    def _check_owner(self, store: StateStore) -> None:
        """Checks that no other application owns the changelog: its writers would be fenced. Raises TaskHaltedError."""
        hosted, position = self._hosted, store.position
        if position is None or position.owner != hosted.stage.mark:
            codec, partition = hosted.processor.position_codec, self.task_id.partition
            changelog = hosted.stage.changelog
            found = last_positions(hosted.settings, hosted.topics, codec, changelog, [partition])
            check_owner(hosted.stage, found.get(partition))

    def _catch_up(self, *, is_fenced: bool) -> None:
        answers = self._state is TaskState.TAILING
        self._apply(self.replica.catch_up(self._closing.is_set, is_fenced=is_fenced, answers=answers))

    def _apply(self, parts: Iterable[Part]) -> None:
        for part in parts:
            will_be_complete = self.replica.passed(part)
            if self._state is TaskState.TAILING and not will_be_complete:
                self._to(TaskState.RESTORING)
            self.replica.apply(part)
            if self._state is TaskState.TAILING and self._store().loading is not None:
                # The owner loads it, and it has a part.
                self._to(TaskState.RESTORING)
            elif self._state is TaskState.TAILING:
                self._shown = self._store().view

    def _store(self) -> StateStore:
        if self.replica.store is None:
            raise FatalError(f"task {self.task_id} is {self._state.value} without a store")
        return self.replica.store

    def _required_position(self) -> Position:
        if self._stands_at is None:
            raise TaskMigratedError("the store has no position")
        return self._stands_at

    def _running(self, *, or_waiting: bool = False) -> tuple[StateStore, ChangelogWriter]:
        """Returns the store and the writer of an owner, which has carried out what `follow` was told.

        Raises:
            TaskMigratedError: the task is no owner now.
            BalanceServiceError: as `decide`; what `follow` was told is not lost.
        """
        is_running = self._state is TaskState.RUNNING or (or_waiting and self._state is TaskState.WAITING)
        if not is_running or self._writer is None:
            raise TaskMigratedError(f"the task is {self._state.value}, not RUNNING")
        store = self._store()
        self._follow(self._following.told(store), store, self._writer)
        return store, self._writer

    def _to(self, state: TaskState) -> None:
        if state not in TRANSITIONS[self._state]:
            raise FatalError(f"task {self.task_id} cannot go from {self._state.value} to {state.value}")
        # An owner that is opened counts from its creation, or from the failure before; so does one that fails to open.
        fails_to_open = self._state is TaskState.RESTORING and state is TaskState.CLOSED
        if self._state is not TaskState.CREATED and not fails_to_open:
            self._since_ms = now_ms()
        self._state = state
        # One assignment, so that no reader sees a view that belongs to another state.
        store = self.replica.store
        self._shown = store.view if store is not None and state in ANSWERING else None
        if state in ANSWERING:
            self._leave(None)
