"""The micro-batches of one streaming query: collect, combine, hand each task its part to commit.

Spark calls `process` on a thread of its own, one batch at a time. Another commits them, some gathered into one, while
Spark reads the next: the tasks' positions are the truth, not Spark's idea of what is done, so a commit that fails
behind Spark's back costs only the query. At most one batch waits for the committing thread to take it.
"""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import wait
from functools import partial
from typing import TYPE_CHECKING

import structlog

from balance_service.errors import BalanceServiceError, RetriableError, TaskMigratedError
from balance_service.events.combine import PartitionRows, PartitionUpdates, by_partition
from balance_service.events.gathering import Gathered
from balance_service.failpoints import reach
from balance_service.state.records import TaskBatch
from balance_service.state.task_state import TaskState
from balance_service.tracing import TRACEPARENT_HEADER, UNTRACED, SpanKind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Executor, Future
    from pathlib import Path

    from pyspark.sql import DataFrame

    from balance_service.events.decode import Decoder
    from balance_service.metrics import Metrics
    from balance_service.read_models.read_model import ReadModel
    from balance_service.state.commit import Committed
    from balance_service.state.records import KeyedUpdate
    from balance_service.state.task import Task
    from balance_service.state.tasks import Tasks
    from balance_service.tracing import Tracing

    ReadUpdates = Callable[[int, PartitionRows, Sequence[bytes]], Sequence[KeyedUpdate]]

log = structlog.get_logger(__name__)

# A micro-batch may hold a million events, and each link is sent with the span.
_MOST_LINKS = 32
# While there is more to read, what was read is not visible for so much longer, should the next batch take its time.
_LINGER_SECONDS = 3.0


class _NotTogetherError(BalanceServiceError):
    """Only single events tell what the batch comes to, and those of gathered micro-batches are no longer in memory."""


class BatchIncompleteError(BalanceServiceError):
    """A task did not take its part, so the query must end: Spark would go on past it."""


class MicroBatches:
    """What one query does with its batches. Invariant: a batch starts where the one before ended."""

    def __init__(
        self,
        read_model: ReadModel,
        decoder: Decoder,
        tasks: Tasks,
        members: Mapping[int, Task],
        metrics: Metrics,
        pool: Executor,
        checkpoint: Path,
        most_records: int,
        gathers: bool,
        read_updates: ReadUpdates,
        on_incomplete: Callable[[], None],
        tracing: Tracing = UNTRACED,
    ) -> None:
        """Args:
        most_records: what a batch is bounded to.
        gathers: whether batches may be gathered from the beginning.
        read_updates: `read_again.read_updates`, from its partition on.
        on_incomplete: told that the query must end, if it has not ended yet.
        """
        self._read_model = read_model
        self._decoder = decoder
        self._tasks = tasks
        self._members = members
        self._metrics = metrics
        self._pool = pool
        self._offset_log = checkpoint / "offsets"
        self._most_records = most_records
        self.gathers = gathers
        """Not after a commit failed, until the end of the topic was met: it may have been too large."""
        self._read_updates = read_updates
        self.starts = {partition: task.position for partition, task in members.items()}
        self.incomplete = False
        self._on_incomplete = on_incomplete
        self._tracing = tracing
        self._changed = threading.Condition()
        self._next: Callable[[], Gathered] | None = None
        self._committer: Future[None] | None = None
        self._closed = False

    def process(self, rows: DataFrame, batch_id: int) -> None:
        """Hand over one batch, as the decoder's plan yields it, to be committed.

        Raises:
            BatchIncompleteError: a task did not take its part of this batch or one before.
        """
        began = time.monotonic()
        ends = self._ends(batch_id)
        split = by_partition(rows.toArrow())
        waiting = self._resolve(split)
        self._hand_over(partial(self._gathered, split, waiting, self.starts, ends, began))
        self.starts = ends

    def close(self) -> None:
        """Take no more batches, and wait for the commit that is under way; what waits for its own is read again."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._committer is not None:
            wait([self._committer])

    def _hand_over(self, batch: Callable[[], Gathered]) -> None:
        """Leave a batch to be taken, once the one before is."""
        with self._changed:
            self._changed.wait_for(lambda: self._next is None or self._closed or self.incomplete)
            if self._closed or self.incomplete:
                raise BatchIncompleteError("a task did not take its part of a batch before")
            self._next = batch
            self._changed.notify_all()
        if self._committer is None:
            self._committer = self._pool.submit(self._commit_all)

    def _take(self, timeout_seconds: float | None) -> Callable[[], Gathered] | None:
        """The batch that was handed over, if there is one in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._next is not None or self._closed, timeout_seconds)
            batch, self._next = self._next, None
            self._changed.notify_all()
            return batch

    def _commit_all(self) -> None:
        """Commit batch after batch, or several as one, until closed or one is not committed."""
        gathered: Gathered | None = None
        try:
            while not self._closed:
                if gathered is None or (self.gathers and gathered.may_grow(self._most_records)):
                    batch = self._take(None if gathered is None else _LINGER_SECONDS)
                    if batch is not None:
                        gathered = self._after(gathered, batch())
                        # It holds the rows.
                        del batch
                        continue
                    if gathered is None or self._closed:
                        continue
                self._commit(gathered)
                gathered = None
        except BatchIncompleteError:
            self._end_query()
        except Exception:
            log.exception("batches cannot be committed")
            self._end_query()

    def _after(self, before: Gathered | None, batch: Gathered) -> Gathered:
        """Both as one; if they cannot be, the later one, and the one before is committed."""
        both = batch if before is None else before.and_then(batch, self._read_model.combine)
        if both is None and before is not None:
            self._commit(before)
        return both or batch

    def _resolve(self, split: Mapping[int, PartitionRows]) -> dict[int, str]:
        """Ask the registry about ids that the plan does not know; returns the partitions that must wait, and why."""
        found = {partition: ids for partition, rows in split.items() if (ids := rows.unresolved())}
        try:
            if found and self._decoder.resolve(sorted(set().union(*found.values()))):
                self._end_query()
                raise BatchIncompleteError("the batch holds schemas that the plan does not know yet")
        except RetriableError as error:
            return dict.fromkeys(found, str(error))
        return {}

    def _end_query(self) -> None:
        with self._changed:
            self.incomplete = True
            self._changed.notify_all()
        self._on_incomplete()

    def _ends(self, batch_id: int) -> dict[int, int]:
        # Spark writes its offset log before it runs the batch. The log, unlike the records, also tells of ranges
        # that hold nothing but aborted transactions.
        planned = (self._offset_log / str(batch_id)).read_text(encoding="utf-8").splitlines()[-1]
        (partitions,) = json.loads(planned).values()
        return {int(partition): int(end) for partition, end in partitions.items()}

    def _gathered(
        self,
        split: Mapping[int, PartitionRows],
        waiting: Mapping[int, str],
        starts: Mapping[int, int],
        ends: Mapping[int, int],
        began: float,
    ) -> Gathered:
        """One batch, combined."""
        combine, is_traced = self._read_model.combine, self._tracing.is_on
        parts = {p: rows.combined(combine) for p, rows in split.items() if p not in waiting}
        traceparents = {p: rows.traceparents(_MOST_LINKS) for p, rows in split.items() if is_traced}
        return Gathered(starts, ends, parts, waiting, traceparents, split, began)

    def _commit(self, gathered: Gathered) -> None:
        """Raises BatchIncompleteError if a task did not take its part."""
        commits = []
        for partition, end in gathered.ends.items():
            # A transaction for nothing costs as much as one for a thousand events.
            if partition not in gathered.waiting and end != gathered.starts[partition]:
                part = gathered.parts.get(partition, PartitionUpdates())
                batch = TaskBatch(
                    gathered.starts[partition],
                    end,
                    part.updates,
                    part.events,
                    part.applied,
                    part.ignored,
                    part.dead_letters,
                    partial(self._singles, partition, gathered),
                )
                traces = gathered.traceparents.get(partition, ())[:_MOST_LINKS]
                commits.append(self._pool.submit(self._commit_part, self._members[partition], batch, traces))
        taken = [commit.result() for commit in commits]
        for partition, reason in gathered.waiting.items():
            self._tasks.wait(self._members[partition], reason)
        self._metrics.batch_seconds.observe(time.monotonic() - gathered.began)
        if gathered.waiting or not all(taken):
            raise BatchIncompleteError("a task did not take its part of a batch")
        if not gathered.is_full(self._most_records):
            self.gathers = True

    def _singles(self, partition: int, gathered: Gathered, keys: Sequence[bytes]) -> Sequence[KeyedUpdate]:
        """The events of some keys."""
        rows = gathered.rows.get(partition)
        if rows is None:
            raise _NotTogetherError("single events of gathered micro-batches are asked for")
        return self._read_updates(partition, rows, keys)

    def _commit_part(self, task: Task, batch: TaskBatch, traces: Sequence[str]) -> bool:
        reach("batch-read")
        try:
            done = self._traced(task, batch, traces) if traces else task.process(batch)
        except _NotTogetherError:
            # Nothing was written.
            log.info("batches are committed one by one from here on", task=str(task.task_id))
            self.gathers = False
        except TaskMigratedError as error:
            if task.state is TaskState.RUNNING:
                self._failed(task, error)
        except BalanceServiceError as error:
            self._failed(task, error)
        except Exception as error:
            log.exception("a commit failed", task=str(task.task_id))
            self._failed(task, RetriableError(f"a commit failed: {error}"))
        else:
            self._metrics.committed(task.task_id, done)
            return True
        return False

    def _failed(self, task: Task, error: BalanceServiceError) -> None:
        self.gathers = False
        self._tasks.failed(task, error)

    def _traced(self, task: Task, batch: TaskBatch, traces: Sequence[str]) -> Committed:
        """Commit as part of the first event's trace, linked to the others': one event's trace ends in its commit."""
        attributes: dict[str, str | int] = {
            "messaging.system": "kafka",
            "messaging.operation.type": "process",
            "messaging.operation.name": "commit",
            "messaging.destination.partition.id": str(task.task_id.partition),
            "messaging.batch.message_count": batch.applied,
            "balance.batch.start": batch.start,
            "balance.batch.end": batch.end,
        }
        came_with = {TRACEPARENT_HEADER: traces[0]}
        with self._tracing.span(f"commit {task.task_id}", SpanKind.CONSUMER, attributes, came_with, traces) as span:
            done = task.process(batch)
            span.tell("balance.batch.applied", done.applied)
            span.tell("balance.batch.dead_lettered", done.dead_lettered)
            return done
