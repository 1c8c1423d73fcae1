"""Runs tasks: each pulls the events of its partition from a Spark query, folds and commits them, at its own pace.

The thread that supervises a task calls `TaskRunner.run`, and is the only one to do so for that partition. Tasks share
queries, and nothing else: while one waits for a query, or fails, the others continue.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import structlog
from opentelemetry.trace import SpanKind

from balance_service.engine.batch import PartitionUpdates, TaskBatch
from balance_service.engine.changelog_writer import SecondWriterError
from balance_service.engine.task import TaskState
from balance_service.errors import BalanceServiceError, RetriableError, TaskMigratedError
from balance_service.kafka.clients import reader_config
from balance_service.kafka.log_reader import LogReader
from balance_service.kafka.messages import TRACEPARENT_HEADER
from balance_service.observability.other_records import DeadRecords, OtherRecords
from balance_service.observability.tracing import UNTRACED, W3C, links_to, open_span
from balance_service.process.failpoints import failpoint
from balance_service.spark.combine import EventsNotKeptError, PartitionRows, end_of
from balance_service.spark.gathering import Gathering
from balance_service.spark.redrive import Redrive, read_singles
from balance_service.spark.row_query import BatchEndedError, QueryEndedError, QueryInterruptedError, RowQuery
from balance_service.spark.rows_apart import RowsApart, RowsApartEndedError
from balance_service.spark.session import jvm_has_ended, one_record, read_source, require_jvm
from balance_service.spark.shared_queries import SharedQueries

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from opentelemetry.trace import Tracer
    from pyspark.sql import DataFrame, SparkSession

    from balance_service.engine.commit import Committed
    from balance_service.engine.hosted_stage import HostedStage
    from balance_service.engine.task import Task
    from balance_service.observability.metrics import Metrics
    from balance_service.spark.decode import Decoder
    from balance_service.spark.shared_queries import Slots, TaskRows
    from balance_service.spark.trials import Trials

log = structlog.get_logger(__name__)

_IDLE_SECONDS = 0.25
# How long rows wait that must not be applied yet, before the task looks again.
_AT_END_SECONDS = 0.005
# The most that a task commits at once at a bounded rate, so that it never waits for long: a comparison binds it.
_PACED_SECONDS = 0.25
_LOOK_EVERY_SECONDS = 1.0
_BACK_OFF_SECONDS = 1.0
_WARM_UP_SECONDS = 10.0
_POSTPONED_SECONDS = 10.0
# Events that arrived since the previous query are committed first.
_SETTLE_SECONDS = 3.0
# So long, a query may hand over nothing of a partition whose next record Kafka serves to another reader.
_STALL_SECONDS = 30.0


class _AnotherQueryError(BalanceServiceError):
    """Another query must read the events since the position again; the message is the reason in the metric."""


class _WaitError(BalanceServiceError):
    """Something else that the task needs, such as a joined table, is not available at present."""


class _QueryStalledError(QueryEndedError):
    """The query hands over nothing, though there are records."""


class TaskRunner:
    """Runs the tasks of one stage."""

    def __init__(
        self,
        hosted: HostedStage,
        decoder: Decoder,
        spark: SparkSession,
        slots: Slots,
        metrics: Metrics,
        tracer: Tracer = UNTRACED,
    ) -> None:
        read_model, stage = hosted.read_model, hosted.stage
        self._spark = spark
        self._scratch = hosted.state_directory.scratch
        self._suspects = hosted.state_directory.suspects_path
        self._settings = hosted.settings
        self._source = hosted.source.name
        self._combine = read_model.combine if read_model is not None and stage.by is None else None
        self._folding = read_model if read_model is not None and stage.by is None and read_model.has_states() else None
        self._redrive = Redrive(
            spark=spark,
            settings=hosted.settings,
            topics=hosted.topics,
            source=self._source,
            decoder=decoder,
            has_states=self._folding is not None,
        )
        self._decoder = decoder
        self._topics = hosted.topics
        self._known_end = hosted.watermarks.end
        self._joined = hosted.joined
        self._stage, self._generations = stage, hosted.generations
        self._pacing = threading.Lock()
        self._paced_until = 0.0
        self._metrics = metrics
        self._other_records = OtherRecords(stage.name, self._source, stage.event_schemas)
        self._dead_records = DeadRecords(stage.name, self._source)
        self._tracer = tracer
        without_slots = partial(metrics.without_slots, hosted.name)
        # Prometheus sees no increase if a series begins at one.
        without_slots(queries=0)
        self._queries = SharedQueries(hosted.name, self._query, slots, without_slots)
        self._gatherings: dict[int, Gathering] = {}
        self._progress = hosted.progress
        self._trials: dict[int, Trials] = {}
        self._begun: set[int] = set()

    def check_resumption(self, partition: int, interrupted: threading.Event) -> None:
        """Waits until the joined tables are read to their current ends. Raises as `JoinedTables.catch_up`."""
        if self._joined is not None:
            self._joined.catch_up(partition, interrupted.is_set)

    def has_begun(self, partition: int) -> bool:
        """Whether Spark has begun to read the partition for a task here, or has failed to."""
        return partition in self._begun

    def stop(self, timeout_seconds: float) -> bool:
        """Stops the queries; returns whether they ended in time. No task may run any more."""
        return self._queries.stop(timeout_seconds)

    def warm_up(self, schema_ids: Collection[int]) -> None:
        """Reads a record from memory, so that the JVM loads most of the code that the first event needs.

        Args:
            schema_ids: those that the decoder knows.

        Raises:
            FatalError: Spark's JVM has ended.
        """
        record = partial(one_record, self._spark, min(schema_ids, default=0))
        try:
            with RowQuery(self._spark, self._scratch, lambda _: self._decoder.updates(record()), {0: 0}) as query:
                if (batch := query.rows[0].pull(_WARM_UP_SECONDS)) is not None:
                    rows = PartitionRows(pa.Table.from_batches([batch]))
                    _ = self._updates_of(rows)
        except QueryEndedError as error:
            require_jvm(self._spark, error)
            log.warning("the first query will start more slowly", reason=str(error))

    def run(self, task: Task, interrupted: threading.Event) -> None:
        """Folds and commits until interrupted, or until the task must wait or is halted.

        Raises:
            FatalError: Spark's JVM has ended, or Spark decodes nothing any more.
            BalanceServiceError: as `Task.process`; the caller closes the task.
        """
        partition, reason = task.task_id.partition, "opened"
        try:
            while not interrupted.is_set() and task.state is TaskState.RUNNING:
                try:
                    self._run_query(task, reason, interrupted)
                except (_AnotherQueryError, EventsNotKeptError) as needed:
                    reason = str(needed)
                except RowsApartEndedError:
                    reason = "read apart"
                except _WaitError as error:
                    task.wait(str(error))
                except QueryInterruptedError:
                    return
                except BatchEndedError:
                    reason = "batch ended"
                except QueryEndedError as error:
                    require_jvm(self._spark, error)
                    reason = "stalled" if isinstance(error, _QueryStalledError) else "failed"
                    self._progress.failed(partition, task.position, str(error))
                    self._begun.add(partition)
                    interrupted.wait(_BACK_OFF_SECONDS)
        except SecondWriterError:
            self._metrics.second_writers.inc()
            raise
        except TaskMigratedError:
            # The task was halted or told to close while a batch was being committed: nothing was committed.
            if task.state is TaskState.RUNNING:
                raise

    def _run_query(self, task: Task, reason: str, interrupted: threading.Event) -> None:
        partition, began = task.task_id.partition, time.monotonic()
        gathering = self._gathering(partition)
        # Before the query, because starting one is expensive, and one that cannot commit would be restarted repeatedly.
        if not self._catch_up_tables(partition, interrupted):
            return
        task.follow_sender()
        left_out = self._skip(task)
        part_of = partial(self._part, partition, pa.array(left_out, pa.int64()))
        with self._rows(task, left_out, interrupted) as rows:
            start, bounded = rows.position, _BoundedRows(rows.pull, task, self._most_rows)
            self._metrics.query_started(task.task_id, reason, time.monotonic() - began)
            looked_at = unread_at = time.monotonic()
            is_unread = False
            retry_at = looked_at + _SETTLE_SECONDS
            while not interrupted.is_set() and task.state is TaskState.RUNNING:
                if rows.change_over(start):
                    self._metrics.query_started(task.task_id, "replaced")
                    # The other query reads them again.
                    bounded.rest = None
                if task.follow_sender():
                    left_out = task.left_out()
                    part_of = partial(self._part, partition, pa.array(left_out, pa.int64()))
                # At a bounded rate, events that are gathered for seconds would be applied in bursts at full speed.
                end = self._known_end(partition) if self._generations.max_rate(self._stage) is None else None
                gathered = gathering.gather(bounded.pull, _IDLE_SECONDS, end, part_of, interrupted)
                # Only now: a query that fails on its first read has started too, and Spark's consumer needs a moment.
                self._progress.reads(partition)
                self._begun.add(partition)
                if task.position != start:
                    raise _AnotherQueryError("set aside")
                began = time.monotonic()
                if gathered and not self._catch_up_tables(partition, interrupted):
                    return
                for part in gathered:
                    committed = self._commit(part, start, frozenset(left_out), task, gathering)
                    self._pace(committed, interrupted)
                    start = part.end
                if gathered:
                    gathering.committed(began)
                elif began - looked_at > _LOOK_EVERY_SECONDS:
                    passed = self._pass_over(start, frozenset(left_out), task, interrupted)
                    task.note_seen()
                    looked_at = time.monotonic()
                    start, is_unread = start if passed is None else passed, passed is None
                if gathered or not is_unread or bounded.rest is not None:
                    is_unread, unread_at = False, time.monotonic()
                elif time.monotonic() - unread_at > _STALL_SECONDS:
                    raise _QueryStalledError(
                        f"Spark hands over nothing, though Kafka has had a record since offset {start} "
                        f"for {_STALL_SECONDS:.0f} s"
                    )
                if began > retry_at:
                    retry_at = time.monotonic() + self._try_again(task, interrupted)

    def _skip(self, task: Task) -> list[int]:
        """Moves the position past records that are left out, since a query may fail or stall at them.

        Returns:
            The offsets from the new position on that are left out.
        """
        if not (left_out := task.left_out()):
            return left_out
        start, limit = task.position, task.limit
        end = next((at for at, offset in enumerate(left_out, start) if at != offset), start + len(left_out))
        end = end if limit is None else min(end, limit)
        if end <= start:
            return left_out
        task.process(TaskBatch(start, PartitionUpdates(end), left_out=frozenset(left_out)))
        return left_out[end - start :]

    @contextmanager
    def _rows(
        self, task: Task, left_out: Collection[int], interrupted: threading.Event
    ) -> Iterator[TaskRows | RowsApart]:
        """Gives the rows of a query; those that are read apart where two queries in a row have failed."""
        partition = task.task_id.partition
        if partition not in self._trials:
            self._trials[partition] = self._redrive.trials(self._suspects(task.task_id))
        trials = self._trials[partition]
        if not trials.may_query(task.position):
            yield RowsApart(self._redrive, trials, task, left_out, interrupted.is_set)
            return
        has_failed = False
        try:
            with self._queries.rows(partition, lambda: task.position, interrupted.is_set) as rows:
                yield rows
        except QueryEndedError as error:
            has_failed = not isinstance(error, BatchEndedError | QueryInterruptedError)
            raise
        finally:
            # A task may end before it notices that its query has ended with the JVM.
            if has_failed or jvm_has_ended(self._spark):
                if (position := task.position) >= 0:
                    trials.query_failed(position)
            elif not interrupted.is_set():
                trials.forget()

    def _most_rows(self) -> int | None:
        """Returns how many events a commit may have; None unless the generation is built at a bounded rate."""
        max_rate = self._generations.max_rate(self._stage)
        return None if max_rate is None else max(1, int(max_rate * _PACED_SECONDS))

    def _pace(self, events: int, interrupted: threading.Event) -> None:
        """Waits as long as the generation is built at a bounded rate that these events have exceeded."""
        if (max_rate := self._generations.max_rate(self._stage)) is None:
            return
        with self._pacing:
            self._paced_until = until = max(self._paced_until, time.monotonic()) + events / max_rate
        while self._generations.max_rate(self._stage) is not None and (left := until - time.monotonic()) > 0:
            if interrupted.wait(min(left, _PACED_SECONDS)):
                return

    def _catch_up_tables(self, partition: int, interrupted: threading.Event) -> bool:
        """Waits until the joined tables are read to their current ends; returns whether that was not interrupted."""
        try:
            self.check_resumption(partition, interrupted)
        except RetriableError as error:
            raise _WaitError(str(error)) from error
        return not interrupted.is_set() or self._joined is None

    def _query(self, positions: Mapping[int, int], is_interrupted: Callable[[], bool]) -> RowQuery:
        def plan(positions: Mapping[int, int]) -> DataFrame:
            return self._decoder.updates(self._records(positions))

        return RowQuery(self._spark, self._scratch, plan, positions, is_interrupted)

    def _records(self, positions: Mapping[int, int]) -> DataFrame:
        return read_source(self._spark, self._settings, self._source, positions)

    def _gathering(self, partition: int) -> Gathering:
        if partition not in self._gatherings:
            leaves_states = self._folding is not None and not self._folding.outputs
            most_rows = self._settings.max_records_per_batch
            self._gatherings[partition] = Gathering(most_rows, self._combine, leaves_states)
        return self._gatherings[partition]

    def _try_again(self, task: Task, interrupted: threading.Event) -> float:
        """Retries the dead letters that are due; returns the seconds until the next check."""
        due = task.due()
        if not due.again and not due.forgotten:
            return _LOOK_EVERY_SECONDS
        partition = task.task_id.partition
        try:
            if not self._catch_up_tables(partition, interrupted):
                return 0.0
            path = self._suspects(task.task_id)
            batch = self._redrive.batch(partition, task.position, due, path.with_suffix(".letters"))
        except (RetriableError, _WaitError) as error:
            log.warning("dead letters are tried again later", task=str(task.task_id), error=str(error))
            return _POSTPONED_SECONDS
        failpoint("letters-read")
        done = task.process(batch)
        self._metrics.redriven(task.task_id, len(batch.retried), done)
        if done.healed:
            letters = task.letters_at(batch.retried)
            closed = {at: letter for at, letter in letters.items() if not letter.status.is_open}
            self._generations.follow(self._stage, partition, closed)
        log.info("dead letters tried again", task=str(task.task_id), letters=len(batch.retried), applied=done.healed)
        return 0.0

    def _part(self, partition: int, left_out: pa.Array, table: pa.Table) -> PartitionUpdates:
        """Combines the decoded rows of a part, except those at `left_out`."""
        end = end_of(table)
        if len(left_out):
            table = table.filter(pc.invert(pc.is_in(table["offset"], left_out)))
            if not table.num_rows:
                return PartitionUpdates(end)
        rows = PartitionRows(table)
        if (unresolved := rows.unresolved()).num_rows:
            try:
                known = self._redrive.known(unresolved)
            except RetriableError as error:
                raise _WaitError(str(error)) from error
            if known.num_rows:
                rows = PartitionRows(self._redrive.resolved(partition, table, known))
        updates = self._updates_of(rows)
        return replace(
            updates,
            end=end,
            singles=partial(read_singles, self._settings, self._source, partition, rows),
            traces=() if self._tracer is UNTRACED else rows.traceparents(),
        )

    def _updates_of(self, rows: PartitionRows) -> PartitionUpdates:
        return rows.uncombined() if self._folding is None else rows.folded_by(self._folding)

    def _commit(
        self, updates: PartitionUpdates, start: int, left_out: frozenset[int], task: Task, gathering: Gathering
    ) -> int:
        """Returns the number of committed records; offsets may be missing between them."""
        began = time.monotonic()
        batch = TaskBatch(start, updates, left_out=left_out)
        failpoint("batch-read")
        try:
            done = commit_traced(self._tracer, task, batch) if updates.traces else task.process(batch)
        except BalanceServiceError:
            # A transaction that timed out looks as if another producer had fenced it. A closed task gave the batch up.
            if task.state is not TaskState.CLOSED:
                gathering.failed()
            raise
        self._metrics.committed(task.task_id, done)
        self._other_records.tell(done.others)
        self._dead_records.tell(task.task_id.partition, done.causes, done.refused)
        self._metrics.batch_seconds.observe(time.monotonic() - began)
        return done.applied + done.ignored + done.duplicates + done.dead_lettered

    def _pass_over(self, start: int, left_out: frozenset[int], task: Task, interrupted: threading.Event) -> int | None:
        """Moves the position past offsets without committed records: control records and aborted transactions.

        Spark reports records only, so the position would otherwise stay below the end of the partition. Returns the
        position; None if there is a committed record, which Spark is to hand over.
        """
        partition, topic = task.task_id.partition, self._source
        end = self._known_end(partition)
        if end is None or end <= start:
            return start
        try:
            stable = self._topics.offsets(topic, [partition], committed=True)[partition]
            stable = stable if (limit := task.limit) is None else min(stable, limit)
            if stable <= start:
                return start
            config = reader_config(self._settings)
            with LogReader(config, topic, {partition: start}, {partition: stable}) as reader:
                while reader.unfinished:
                    if interrupted.is_set():
                        return start
                    if reader.read():
                        return None
        except RetriableError as error:
            log.warning("the offsets after the position cannot be read", task=str(task.task_id), error=str(error))
            return start
        task.process(TaskBatch(start, PartitionUpdates(stable), left_out=left_out))
        return stable


class _BoundedRows:
    """The rows of a task up to its `stop` and its `limit`, and as many as it may take at once; the rest waits here."""

    def __init__(
        self,
        pull: Callable[[float], pa.RecordBatch | None],
        task: Task,
        most: Callable[[], int | None] = lambda: None,
    ) -> None:
        """Args:
        most: returns how many rows a pull returns; None if there is no such limit.
        """
        self.rest: pa.RecordBatch | None = None
        """Rows that wait."""
        self._pull = pull
        self._task = task
        self._most = most
        self._end = 0

    def pull(self, timeout_seconds: float) -> pa.RecordBatch | None:
        """Returns the rows that have arrived, as the query's own `pull`; None too if all are to wait."""
        stop, limit, most = self._task.stop, self._task.limit, self._most()
        if stop is None and limit is None and most is None:
            batch, self.rest = self.rest, None
            batch = batch if batch is not None else self._pull(timeout_seconds)
            self._end = self._end if batch is None else end_of(batch)
            return batch
        # Rows that were returned may still be to be committed: the task then pulls again.
        has_committed = self._task.position >= self._end
        if stop is not None and has_committed and self._task.position >= stop.offset:
            stop.reached.set()
        if self.rest is None:
            self.rest = self._pull(timeout_seconds)
        if self.rest is None:
            return None
        offsets = self.rest["offset"]
        ends = (None if stop is None else stop.offset, limit)
        first = offsets[0].as_py()
        end = min((offset for offset in ends if offset is not None), default=end_of(self.rest))
        # Most often, all are beyond it: the task waits there.
        if first >= end:
            if stop is not None and has_committed and first >= stop.offset:
                stop.reached.set()
            time.sleep(_AT_END_SECONDS)
            return None
        below = self.rest.slice(0, bisect_left(offsets.to_pylist(), end)).slice(0, most)
        self._end = end_of(below)
        self.rest = self.rest.slice(below.num_rows) if below.num_rows < self.rest.num_rows else None
        return below


def commit_traced(tracer: Tracer, task: Task, batch: TaskBatch) -> Committed:
    """Commits in a span that continues the first of the batch's traces and links to the others.

    Raises as `Task.process`.
    """
    traces = batch.updates.traces
    attributes: dict[str, str | int] = {
        "messaging.system": "kafka",
        "messaging.operation.type": "process",
        "messaging.operation.name": "commit",
        "messaging.destination.partition.id": str(task.task_id.partition),
        "messaging.batch.message_count": batch.updates.applied,
        "balance.batch.start": batch.start,
        "balance.batch.end": batch.end,
    }
    name = f"commit {task.task_id}"
    parent = W3C.extract({TRACEPARENT_HEADER: traces[0]})
    with open_span(tracer, name, SpanKind.CONSUMER, attributes, parent=parent, links=links_to(traces)) as span:
        done = task.process(batch)
        span.set_attribute("balance.batch.applied", done.applied)
        span.set_attribute("balance.batch.dead_lettered", done.dead_lettered)
        return done
