"""Feeds running tasks: each pulls the events of its partition, folds and commits them, in a pace of its own.

`Feed.run` is called by the thread that supervises the task, and by no other for that partition. Tasks share nothing
but Spark: while one starts a query, waits or fails, the others go on.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import structlog

from balance_service.engine.records import TaskBatch
from balance_service.engine.task import TaskState
from balance_service.errors import BalanceServiceError, RetriableError, TaskMigratedError
from balance_service.kafka.clients import reader_config
from balance_service.kafka.log_reader import LogReader
from balance_service.observability.tracing import UNTRACED
from balance_service.process.failpoints import reach
from balance_service.spark.combine import PartitionRows, PartitionUpdates
from balance_service.spark.commit_span import commit_traced
from balance_service.spark.gathering import Gathered, Gathering, end_of
from balance_service.spark.redrive import Redrive
from balance_service.spark.rehearsal import Failures
from balance_service.spark.row_query import BatchEndedError, QueryEndedError, QueryInterruptedError, RowQuery
from balance_service.spark.session import read_source, require_jvm
from balance_service.spark.singles import read_singles

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence

    from opentelemetry.trace import Tracer
    from pyspark.sql import DataFrame, SparkSession

    from balance_service.engine.hosted_stage import HostedStage
    from balance_service.engine.records import KeyedUpdate
    from balance_service.engine.task import Task
    from balance_service.observability.metrics import Metrics
    from balance_service.spark.decode import Decoder
    from balance_service.spark.rehearsal import Rehearsal

log = structlog.get_logger(__name__)

_IDLE_SECONDS = 0.25
_LOOK_EVERY_SECONDS = 1.0
_BACK_OFF_SECONDS = 1.0
_REHEARSAL_SECONDS = 1.0
_POSTPONED_SECONDS = 10.0
# What has come since the query before goes first.
_SETTLE_SECONDS = 3.0
# A query that has lasted so long without a row reads, and there is none.
_READS_SECONDS = 5.0


class _AnotherQueryError(BalanceServiceError):
    """The events since the position have to be read again; the message is the metric's reason."""


class _WaitError(BalanceServiceError):
    """What the task needs besides its events is not there for now."""


class Feed:
    """The events of each running task of a stage, by a query of its own."""

    def __init__(
        self,
        hosted: HostedStage,
        decoder: Decoder,
        spark: SparkSession,
        rehearsal: Rehearsal,
        metrics: Metrics,
        tracer: Tracer = UNTRACED,
    ) -> None:
        read_model, stage = hosted.read_model, hosted.stage
        self._spark = spark
        self._scratch = hosted.state_directory.scratch
        self._rehearsal = rehearsal
        self._settings = hosted.settings
        self._source = hosted.source.name
        self._combine = read_model.combine if read_model is not None and stage.by is None else None
        self._has_states = read_model is not None and stage.by is None and read_model.has_states()
        self._redrive = Redrive(
            spark=spark,
            settings=hosted.settings,
            topics=hosted.topics,
            source=self._source,
            decoder=decoder,
            has_states=self._has_states,
        )
        self._decoder = decoder
        self._topics = hosted.topics
        self._known_end = hosted.watermarks.end
        self._joined = hosted.joined
        self._metrics = metrics
        self._tracer = tracer
        self._gatherings: dict[int, Gathering] = {}
        self._problems: dict[int, str] = {}

    @property
    def problem(self) -> str:
        """Why some partition is not folded now; empty while all is well."""
        return next(iter(self._problems.copy().values()), "")

    def rehearse(self) -> None:
        """Read a little, so that the JVM has loaded and compiled much of what the first task needs.

        Where that partition cannot be read now, others can, and the start goes on.

        Raises:
            FatalError: Spark's JVM has ended.
        """
        try:
            start = self._topics.offsets(self._source, [0], earliest=True)[0]
            with RowQuery(self._spark, self._scratch, partial(self._records, 0, start), start) as query:
                query.pull(_REHEARSAL_SECONDS)
        except RetriableError as error:
            require_jvm(self._spark, error)
            log.warning("the first query will start more slowly", reason=str(error))

    def run(self, task: Task, interrupted: threading.Event) -> None:
        """Fold until interrupted, or until the task has to wait or is halted.

        Raises:
            FatalError: Spark's JVM has ended, or Spark runs no query any more.
            BalanceServiceError: as `Task.process`; the task is to be closed.
        """
        partition, reason, failures = task.task_id.partition, "opened", Failures()
        try:
            while not interrupted.is_set() and task.state is TaskState.RUNNING:
                try:
                    self._run_query(task, reason, interrupted, failures)
                except _AnotherQueryError as needed:
                    reason = str(needed)
                except _WaitError as error:
                    task.wait(str(error))
                except QueryInterruptedError:
                    return
                except BatchEndedError:
                    reason = "batch ended"
                except QueryEndedError as error:
                    require_jvm(self._spark, error)
                    reason = "failed"
                    self._problems[partition] = str(error)
                    log.warning("the query has ended; another is started", task=str(task.task_id), error=str(error))
                    if failures.another():
                        self._rehearsal.doubt(interrupted.is_set)
                    interrupted.wait(_BACK_OFF_SECONDS)
        except TaskMigratedError:
            # Halted or told to close while a batch was on its way: nothing was committed.
            if task.state is TaskState.RUNNING:
                raise
        finally:
            self._problems.pop(partition, None)

    def _run_query(self, task: Task, reason: str, interrupted: threading.Event, failures: Failures) -> None:
        """Feed the task by one query, until interrupted."""
        partition, start, began = task.task_id.partition, task.position, time.monotonic()
        gathering = self._gathering(partition)
        # Before a query is started, which costs: else one that cannot commit would be started again and again.
        if not self._catch_up(partition, interrupted):
            return
        part_of = partial(self._part, pa.array(task.left_out(), pa.int64()))
        rows = partial(self._rows, partition, start)
        with RowQuery(self._spark, self._scratch, rows, start, interrupted.is_set) as query:
            self._metrics.query_started(task.task_id, reason, time.monotonic() - began)
            log.info("query started", task=str(task.task_id), position=start, reason=reason)
            looked = time.monotonic()
            tried, reads = looked + _SETTLE_SECONDS, looked + _READS_SECONDS
            while not interrupted.is_set() and task.state is TaskState.RUNNING:
                gathered = gathering.gather(query, _IDLE_SECONDS, self._known_end(partition), part_of, interrupted)
                # Not before: a query that fails as soon as it reads has started, too.
                self._problems.pop(partition, None)
                began = time.monotonic()
                if gathered or began > reads:
                    failures.over()
                if gathered and not self._catch_up(partition, interrupted):
                    return
                for part in gathered:
                    self._commit(part, start, task, gathering)
                    start = part.end
                if gathered:
                    gathering.committed(began)
                elif began - looked > _LOOK_EVERY_SECONDS:
                    start = self._pass_over(start, task, interrupted)
                    looked = time.monotonic()
                if began > tried:
                    tried = time.monotonic() + self._try_again(task, interrupted)

    def _catch_up(self, partition: int, interrupted: threading.Event) -> bool:
        """Have the tables read to where they end now; whether that was not interrupted."""
        if self._joined is not None:
            try:
                self._joined.catch_up(partition, interrupted.is_set)
            except RetriableError as error:
                raise _WaitError(str(error)) from error
        return not interrupted.is_set() or self._joined is None

    def _rows(self, partition: int, start: int) -> DataFrame:
        return self._decoder.updates(self._records(partition, start))

    def _records(self, partition: int, start: int) -> DataFrame:
        return read_source(self._spark, self._settings, self._source, partition, start)

    def _gathering(self, partition: int) -> Gathering:
        if partition not in self._gatherings:
            self._gatherings[partition] = Gathering(self._settings.max_records_per_batch, self._combine)
        return self._gatherings[partition]

    def _try_again(self, task: Task, interrupted: threading.Event) -> float:
        """Have the dead letters tried again that are due; in how many seconds to look for others."""
        due = task.due()
        if not due.again and not due.forgotten:
            return _LOOK_EVERY_SECONDS
        partition = task.task_id.partition
        try:
            if not self._catch_up(partition, interrupted):
                return 0.0
            batch = self._redrive.batch(partition, task.position, due)
        except (RetriableError, _WaitError) as error:
            log.warning("dead letters are tried again later", task=str(task.task_id), error=str(error))
            return _POSTPONED_SECONDS
        reach("letters-read")
        done = task.process(batch)
        self._metrics.redriven(task.task_id, len(batch.retried), done)
        log.info("dead letters tried again", task=str(task.task_id), letters=len(batch.retried), applied=done.healed)
        return 0.0

    def _part(self, left_out: pa.Array, table: pa.Table) -> Gathered:
        """What some events come to, those at some offsets aside."""
        end = end_of(table)
        if len(left_out):
            table = table.filter(pc.invert(pc.is_in(table["offset"], left_out)))
            if not table.num_rows:
                return Gathered(PartitionUpdates(), end)
        rows = PartitionRows(table)
        try:
            if (unresolved := rows.unresolved()) and self._decoder.resolve(sorted(unresolved)):
                raise _AnotherQueryError("new schema")
        except RetriableError as error:
            raise _WaitError(str(error)) from error
        traces = () if self._tracer is UNTRACED else rows.traceparents()
        updates = rows.combined(self._combine) if self._has_states else rows.as_they_came()
        return Gathered(updates, end, traces, rows)

    def _commit(self, gathered: Gathered, start: int, task: Task, gathering: Gathering) -> None:
        began, part = time.monotonic(), gathered.updates
        batch = TaskBatch(
            start,
            gathered.end,
            part.updates,
            part.events,
            part.applied,
            part.ignored,
            part.dead_letters,
            partial(self._singles, task.task_id.partition, gathered.rows),
        )
        reach("batch-read")
        try:
            done = commit_traced(self._tracer, task, batch, gathered.traces) if gathered.traces else task.process(batch)
        except BalanceServiceError:
            # A transaction that outlasted its time looks as if a successor had fenced it.
            gathering.failed()
            raise
        self._metrics.committed(task.task_id, done)
        self._metrics.batch_seconds.observe(time.monotonic() - began)

    def _singles(self, partition: int, rows: PartitionRows | None, keys: Sequence[bytes]) -> Sequence[KeyedUpdate]:
        """The events of some keys, each with its record."""
        if rows is None:
            # Nothing was written. What is read again is gathered in parts that keep their events.
            raise _AnotherQueryError("single events")
        return read_singles(self._settings, self._source, partition, rows, keys)

    def _pass_over(self, start: int, task: Task, interrupted: threading.Event) -> int:
        """Move the position over offsets that hold nothing committed: control records and aborted transactions.

        Spark tells of records alone, so after those the position would stand below the end for ever.
        """
        partition, topic = task.task_id.partition, self._source
        end = self._known_end(partition)
        if end is None or end <= start:
            return start
        try:
            stable = self._topics.offsets(topic, [partition], committed=True)[partition]
            if stable <= start:
                return start
            config = reader_config(self._settings)
            with LogReader(config, topic, {partition: start}, {partition: stable}) as reader:
                while reader.unfinished:
                    if interrupted.is_set() or reader.read():
                        return start
        except RetriableError as error:
            log.warning("what lies behind the position is not known", task=str(task.task_id), error=str(error))
            return start
        task.process(TaskBatch(start, stable))
        return stable
