"""Keeps one streaming query over exactly the tasks that are running.

A change of the set of tasks ends the query; the next one starts from the tasks' own positions. Threads: the stream's
own thread starts, watches and stops queries; Spark calls each batch on another, under the batch lock; changes are
told by any thread, as an event.
"""

from __future__ import annotations

import gc
import re
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from balance_service.errors import FatalError, RetriableError, TaskHaltedError
from balance_service.events.micro_batch import MicroBatches
from balance_service.events.optimizer import Optimizer
from balance_service.events.read_again import read_updates
from balance_service.events.spark import read_source
from balance_service.state.opening import check_same_log
from balance_service.state.records import Role
from balance_service.tracing import UNTRACED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

    from balance_service.events.decode import Decoder
    from balance_service.kafka.topics import Topic, Topics
    from balance_service.metrics import Metrics
    from balance_service.read_models.read_model import ReadModel
    from balance_service.settings import Settings
    from balance_service.state.task import Task
    from balance_service.state.tasks import Tasks
    from balance_service.tracing import Tracing

log = structlog.get_logger(__name__)

_LOOK_EVERY_SECONDS = 0.5
_BACK_OFF_SECONDS = 1.0
_SETTLE_SECONDS = 0.05
_MOST_SETTLINGS = 4
_CHECK_LOG_EVERY_SECONDS = 5.0
_MAX_COMMITTERS = 32
# Handles of the JVM's objects are parts of cycles, and of each micro-batch they hold plan and code there, 0.2 MB.
_COLLECT_EVERY_BATCHES = 64
# Deep in the causes, where one of Spark's tasks met it.
_FORBIDDEN = re.compile(r"Not authorized to access topics: \[[^\]]*\]")


class Stream:
    """The micro-batch processor of one read model in one instance."""

    def __init__(
        self,
        spark: SparkSession,
        settings: Settings,
        read_model: ReadModel,
        decoder: Decoder,
        topics: Topics,
        source: Topic,
        tasks: Tasks,
        metrics: Metrics,
        tracing: Tracing = UNTRACED,
    ) -> None:
        self._spark = spark
        self._optimizer = Optimizer(spark)
        self._settings = settings
        self._read_model = read_model
        self._decoder = decoder
        self._topics = topics
        self._source = source
        self._tasks = tasks
        self._metrics = metrics
        self._tracing = tracing
        self._gathers = True
        self._changed = threading.Event()
        self._stopping = threading.Event()
        self._batch_lock = threading.Lock()
        self._pool = ThreadPoolExecutor(_MAX_COMMITTERS, thread_name_prefix="commit")
        self._thread = threading.Thread(target=self._run, name="stream", daemon=True)
        self.problem = ""
        """Why nothing is folded now; empty while all is well."""

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()

    def changed(self) -> None:
        """The set of running tasks may have changed."""
        self._changed.set()

    def stop(self, timeout_seconds: float) -> None:
        """End the query, within the bound."""
        self._stopping.set()
        self._changed.set()
        self._thread.join(timeout_seconds)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _run(self) -> None:
        while not self._stopping.is_set():
            # Without tasks, too: that the source is gone may be why they were taken away.
            if self._changed.wait(_CHECK_LOG_EVERY_SECONDS):
                self._settle()
            try:
                self._run_query()
            except Exception as error:
                # Spark and py4j raise many things. The tasks' positions are the truth, so starting anew is safe.
                if self._stopping.is_set():
                    return
                if not _jvm_lives(self._spark):
                    raise FatalError("Spark's JVM has ended") from error
                self.problem = _in_short(error)
                log.warning("the stream cannot go on for now", error=self.problem)
                self._stopping.wait(_BACK_OFF_SECONDS)
                self._changed.set()

    def _settle(self) -> None:
        """Tasks that are opened together come up moments apart: one query for all, instead of one after the other."""
        for _ in range(_MOST_SETTLINGS):
            self._changed.clear()
            if self._stopping.wait(_SETTLE_SECONDS) or not self._changed.is_set():
                return

    def _run_query(self) -> None:
        tasks = self._intact_tasks()
        if self._stopping.is_set():
            return
        if not tasks:
            self.problem = self._what_became_of_the_source()
            return
        with tempfile.TemporaryDirectory(prefix="balance-checkpoint-", ignore_cleanup_errors=True) as folder:
            checkpoint = Path(folder)
            batches = MicroBatches(
                self._read_model,
                self._decoder,
                self._tasks,
                tasks,
                self._metrics,
                self._pool,
                checkpoint,
                self._settings.max_records_per_batch,
                self._gathers,
                partial(read_updates, self._spark, self._settings),
                self.changed,
                self._tracing,
            )
            query = self._start(batches, checkpoint)
            log.info("query started", positions=batches.starts)
            try:
                self._watch(query, tasks, batches)
            finally:
                self._end(query, batches)

    def _end(self, query: StreamingQuery, batches: MicroBatches) -> None:
        try:
            query.stop()
        finally:
            # Spark's thread may still be in a batch. After this no position moves but by the next query.
            with self._batch_lock:
                batches.close()
            self._gathers = batches.gathers

    def _intact_tasks(self) -> dict[int, Task]:
        """The running tasks whose source is still the log they were folding."""
        self._check_log()
        return self._tasks.running()

    def _what_became_of_the_source(self) -> str:
        try:
            check_same_log(self._source, self._topics.find_patiently(self._source.name))
        except TaskHaltedError as halted:
            return str(halted)
        return ""

    def _check_log(self) -> None:
        """Halt the tasks whose source was cut short, made anew or repartitioned, standbys among them."""
        tasks = self._tasks.answering()
        if not tasks:
            return
        name = self._source.name
        topic = self._topics.find_patiently(name)
        if self._stopping.is_set():
            return
        exists = topic is not None and topic.partitions > max(tasks)
        start = self._topics.offsets(name, tasks, earliest=True) if exists else {}
        # A standby has no need of events that its owner has applied, and no position before the first commit. Asked
        # before the positions: meanwhile it may become the owner.
        needed = {p: start.get(p, 0) if task.role is Role.ACTIVE else -1 for p, task in tasks.items()}
        positions = {partition: task.position for partition, task in tasks.items()}
        end = self._topics.offsets(name, tasks) if exists else {}
        for partition, task in tasks.items():
            task.check_log(topic, needed[partition], positions[partition], end.get(partition, 0))

    def _start(self, batches: MicroBatches, checkpoint: Path) -> StreamingQuery:
        def process(rows: DataFrame, batch_id: int) -> None:
            try:
                with self._batch_lock:
                    batches.process(rows, batch_id)
            except Exception as error:
                # Without its cause: Spark takes the traceback apart with a pattern that overflows the JVM's stack on
                # a long one, and then the query neither runs nor ends.
                raise RetriableError(_in_short(error)) from None
            finally:
                if batch_id % _COLLECT_EVERY_BATCHES == 0:
                    gc.collect()

        # Decoded in the query's own plan: a second one, made for each batch, would copy every row once more.
        updates = self._decoder.updates(read_source(self._spark, self._settings, batches.starts))
        updates = self._optimizer.once(updates)
        writer = updates.writeStream.foreachBatch(process).option("checkpointLocation", str(checkpoint))
        return writer.start()

    def _watch(self, query: StreamingQuery, tasks: Mapping[int, Task], batches: MicroBatches) -> None:
        checked = time.monotonic()
        while not self._stopping.is_set():
            self._changed.wait(_LOOK_EVERY_SECONDS)
            self._changed.clear()
            if batches.incomplete or self._tasks.running() != tasks:
                self._changed.set()
                return
            if time.monotonic() - checked > _CHECK_LOG_EVERY_SECONDS:
                self._check_log()
                checked = time.monotonic()
            if not query.isActive:
                failure = query.exception()
                raise RetriableError(_in_short(failure) if failure else "the query ended by itself")
            # Not left to the next batch: on a quiet topic it may never come.
            self.problem = ""


def _in_short(error: Exception) -> str:
    forbidden = _FORBIDDEN.search(str(error))
    if forbidden is not None:
        return f"the brokers do not allow Spark to read: {forbidden[0]}; grant this user Read there (docs/security.md)"
    # py4j names the Java exception in the second line.
    lines = str(error).strip().splitlines()[:2]
    return " ".join(line.strip() for line in lines) if lines else type(error).__name__


def _jvm_lives(spark: SparkSession) -> bool:
    gateway: Any = spark.sparkContext._gateway
    return gateway is not None and gateway.proc.poll() is None
