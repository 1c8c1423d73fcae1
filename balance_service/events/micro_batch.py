"""The micro-batches of one streaming query: decode, combine, hand each task its part to commit.

Spark calls `process` on a thread of its own, one batch at a time; the tasks of a batch commit on a pool.
"""

from __future__ import annotations

import json
import time
from functools import partial
from typing import TYPE_CHECKING

import structlog

from balance_service.errors import BalanceServiceError, RetriableError, TaskMigratedError
from balance_service.events.combine import PartitionUpdates, by_partition, singles
from balance_service.state.records import TaskBatch
from balance_service.state.task import TaskState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from concurrent.futures import Executor
    from pathlib import Path

    import pyarrow as pa
    from pyspark.sql import DataFrame

    from balance_service.events.decode import Decoder
    from balance_service.metrics import Metrics
    from balance_service.read_models.read_model import ReadModel
    from balance_service.state.records import SingleUpdate
    from balance_service.state.task import Task
    from balance_service.state.tasks import Tasks

log = structlog.get_logger(__name__)


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
    ) -> None:
        self._read_model = read_model
        self._decoder = decoder
        self._tasks = tasks
        self._members = members
        self._metrics = metrics
        self._pool = pool
        self._offset_log = checkpoint / "offsets"
        self.starts = {partition: task.position for partition, task in members.items()}
        self.incomplete = False

    def process(self, records: DataFrame, batch_id: int) -> None:
        """Commit one batch.

        Raises:
            BatchIncompleteError: a task did not take its part; the query must not go on.
        """
        began = time.monotonic()
        ends = self._ends(batch_id)
        parts, waiting = self._decoded(records)
        read = partial(self._singles, records)
        commits = {
            self._members[partition]: self._pool.submit(
                self._commit, self._members[partition], self._part(partition, end, parts, read)
            )
            for partition, end in ends.items()
            if partition not in waiting
        }
        taken = [commit.result() for commit in commits.values()]
        for partition, reason in waiting.items():
            self._tasks.wait(self._members[partition], reason)
        self._metrics.batch_seconds.observe(time.monotonic() - began)
        if waiting or not all(taken):
            self.incomplete = True
            raise BatchIncompleteError("a task did not take its part of the batch")
        self.starts = ends

    def _ends(self, batch_id: int) -> dict[int, int]:
        # Spark writes its offset log before it runs the batch. The log, unlike the records, also tells of ranges
        # that hold nothing but aborted transactions.
        planned = (self._offset_log / str(batch_id)).read_text(encoding="utf-8").splitlines()[-1]
        (partitions,) = json.loads(planned).values()
        return {int(partition): int(end) for partition, end in partitions.items()}

    def _decoded(self, records: DataFrame) -> tuple[dict[int, PartitionUpdates], dict[int, str]]:
        """The batch by partition, and the partitions that must wait for the registry, with the reason."""
        unknown: set[int] = set()
        while True:
            table = self._decoder.decode(records, unknown)
            parts = by_partition(table, self._read_model.combine)
            unresolved = frozenset().union(*(part.unresolved for part in parts.values()))
            if not unresolved:
                return parts, {}
            try:
                unknown |= self._decoder.resolve(sorted(unresolved))
            except RetriableError as error:
                return parts, {p: str(error) for p, part in parts.items() if part.unresolved}

    def _part(
        self,
        partition: int,
        end: int,
        parts: Mapping[int, PartitionUpdates],
        read: partial[Sequence[SingleUpdate]],
    ) -> TaskBatch:
        part = parts.get(partition, PartitionUpdates())
        return TaskBatch(
            self.starts[partition],
            end,
            part.updates,
            part.applied,
            part.ignored,
            part.dead_letters,
            partial(read, partition),
        )

    def _singles(self, records: DataFrame, partition: int, keys: Sequence[bytes]) -> Sequence[SingleUpdate]:
        table: pa.Table = self._decoder.decode_keys(records, partition, keys)
        return singles(table)

    def _commit(self, task: Task, batch: TaskBatch) -> bool:
        try:
            done = task.process(batch)
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
