"""The micro-batches of one streaming query: collect, combine, hand each task its part to commit.

Spark calls `process` on a thread of its own, one batch at a time. A batch is committed on a pool, while Spark reads
the next one: the tasks' positions are the truth, not Spark's idea of what is done, so a commit that fails behind
Spark's back costs only the query. At most one batch is being committed.
"""

from __future__ import annotations

import json
import time
from functools import partial
from typing import TYPE_CHECKING

import structlog

from balance_service.errors import BalanceServiceError, RetriableError, TaskMigratedError
from balance_service.events.combine import PartitionRows, PartitionUpdates, by_partition
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

log = structlog.get_logger(__name__)

# A micro-batch may hold a million events, and each link is sent with the span.
_MOST_LINKS = 32


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
        read_records: Callable[[int, Sequence[int]], DataFrame],
        on_incomplete: Callable[[], None],
        tracing: Tracing = UNTRACED,
    ) -> None:
        """Args:
        read_records: partition and offsets → the source's records there, once more, and maybe others.
        on_incomplete: told that the query must end, if it has not ended yet.
        """
        self._read_model = read_model
        self._decoder = decoder
        self._tasks = tasks
        self._members = members
        self._metrics = metrics
        self._pool = pool
        self._offset_log = checkpoint / "offsets"
        self._read_records = read_records
        self.starts = {partition: task.position for partition, task in members.items()}
        self.incomplete = False
        self._on_incomplete = on_incomplete
        self._tracing = tracing
        self._committing: Future[bool] | None = None
        self._closed = False

    def process(self, rows: DataFrame, batch_id: int) -> None:
        """Begin to commit one batch, as the decoder's plan yields it, once the one before is committed.

        Raises:
            BatchIncompleteError: a task did not take its part of this batch or the one before.
        """
        began = time.monotonic()
        ends = self._ends(batch_id)
        split = by_partition(rows.toArrow())
        waiting = self._resolve(split)
        self._settle()
        self._committing = self._pool.submit(self._commit, split, waiting, self.starts, ends, began)
        self.starts = ends

    def close(self) -> None:
        """Take no more batches, and wait for the one that is being committed."""
        self._closed = True
        if self._committing is not None:
            self._committing.result()

    def _settle(self) -> None:
        """Wait for the batch before."""
        if self._closed or (self._committing is not None and not self._committing.result()):
            self._end_query()
            raise BatchIncompleteError("a task did not take its part of the batch before")

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
        self.incomplete = True
        self._on_incomplete()

    def _ends(self, batch_id: int) -> dict[int, int]:
        # Spark writes its offset log before it runs the batch. The log, unlike the records, also tells of ranges
        # that hold nothing but aborted transactions.
        planned = (self._offset_log / str(batch_id)).read_text(encoding="utf-8").splitlines()[-1]
        (partitions,) = json.loads(planned).values()
        return {int(partition): int(end) for partition, end in partitions.items()}

    def _commit(
        self,
        split: Mapping[int, PartitionRows],
        waiting: Mapping[int, str],
        starts: Mapping[int, int],
        ends: Mapping[int, int],
        began: float,
    ) -> bool:
        """Commit a batch; whether every task took its part. If not, the query must end even if no batch follows."""
        complete = False
        try:
            complete = self._commit_parts(split, waiting, starts, ends)
        finally:
            self._metrics.batch_seconds.observe(time.monotonic() - began)
            if not complete:
                self._end_query()
        return complete

    def _commit_parts(
        self,
        split: Mapping[int, PartitionRows],
        waiting: Mapping[int, str],
        starts: Mapping[int, int],
        ends: Mapping[int, int],
    ) -> bool:
        commits = []
        for partition, end in ends.items():
            if partition not in waiting:
                rows = split.get(partition)
                part = PartitionUpdates() if rows is None else rows.combined(self._read_model.combine)
                batch = TaskBatch(
                    starts[partition],
                    end,
                    part.updates,
                    part.events,
                    part.applied,
                    part.ignored,
                    part.dead_letters,
                    partial(self._singles, partition, rows),
                )
                traces = rows.traceparents(_MOST_LINKS) if rows is not None and self._tracing.is_on else []
                commits.append(self._pool.submit(self._commit_part, self._members[partition], batch, traces))
        taken = [commit.result() for commit in commits]
        for partition, reason in waiting.items():
            self._tasks.wait(self._members[partition], reason)
        return not waiting and all(taken)

    def _singles(self, partition: int, rows: PartitionRows | None, keys: Sequence[bytes]) -> Sequence[KeyedUpdate]:
        if rows is None:
            return ()
        updates = rows.updates_of(keys)
        return rows.singly(updates, self._read_records(partition, updates["offset"].to_pylist()).toArrow())

    def _commit_part(self, task: Task, batch: TaskBatch, traces: Sequence[str]) -> bool:
        reach("batch-read")
        try:
            done = self._traced(task, batch, traces) if traces else task.process(batch)
        except TaskMigratedError as error:
            if task.state is TaskState.RUNNING:
                self._tasks.failed(task, error)
            return False
        except BalanceServiceError as error:
            self._tasks.failed(task, error)
            return False
        except Exception as error:
            log.exception("a commit failed", task=str(task.task_id))
            self._tasks.failed(task, RetriableError(f"a commit failed: {error}"))
            return False
        self._metrics.committed(task.task_id, done)
        return True

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
