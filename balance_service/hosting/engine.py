"""The engine of one instance: one membership, one Spark, and the stages that share them.

`assigned`, `revoked` and `lost` come on the membership thread; the rest from the thread that owns the engine.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import structlog

from balance_service.avro.registry import SchemaRegistry
from balance_service.avro.schemas import load_schema
from balance_service.cluster.membership import Membership, consumer_config
from balance_service.engine.letters.decisions import Decisions
from balance_service.engine.purge import Purge
from balance_service.engine.store.options import limit_open_files
from balance_service.engine.tables.joined import JoinedTables
from balance_service.engine.tables.tables import Tables
from balance_service.errors import RetriableError
from balance_service.hosting.hosted_stage import HostedStage, host
from balance_service.hosting.table_contexts import table_contexts
from balance_service.hosting.works import Surroundings, work_of
from balance_service.kafka.clients import common_config, producer_config
from balance_service.kafka.partitioner import partition_of
from balance_service.kafka.topic_setup import prepare_topics
from balance_service.kafka.topics import Topics
from balance_service.kafka.watermarks import Watermarks
from balance_service.observability.tracing import UNTRACED
from balance_service.process import open_files
from balance_service.process.runtime import PeriodicThread
from balance_service.spark.rehearsal import Rehearsal
from balance_service.spark.row_query import in_short
from balance_service.spark.sampler import SparkSampler
from balance_service.spark.session import start_spark

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from opentelemetry.trace import Tracer

    from balance_service.cluster.membership import Partitions
    from balance_service.engine.store.directory import StateDirectory
    from balance_service.kafka.topics import Topic
    from balance_service.model.read_model import ReadModel
    from balance_service.model.stage import Stage
    from balance_service.observability.metrics import Metrics
    from balance_service.settings import Settings

log = structlog.get_logger(__name__)

T = TypeVar("T")

_RETRY_SECONDS = 2.0
_STOP_TASKS_SECONDS = 3.0
_LEAST_STOP_SECONDS = 0.5
_STOP_WORKERS_SECONDS = 0.5
_WATERMARKS_EVERY_SECONDS = 1.0
CHECK_EVERY_SECONDS = 5.0
_SAMPLE_EVERY_SECONDS = 5.0
# As often as Kafka Streams does.
_PURGE_EVERY_SECONDS = 30.0


class Patience:
    """Waits for what is needed outside and is not up yet; ends when the instance is told to stop."""

    def __init__(self, stopping: threading.Event, on_wait: Callable[[str], None]) -> None:
        """Args:
        on_wait: told why, each time, and an empty text once it is over.
        """
        self._stopping = stopping
        self._on_wait = on_wait

    def until_up(self, attempt: Callable[[], T]) -> T:
        """Try until it succeeds. Raises RetriableError once told to stop."""
        while True:
            try:
                done = attempt()
            except RetriableError as error:
                log.warning("waiting", reason=str(error))
                self._on_wait(str(error))
                if self._stopping.wait(_RETRY_SECONDS):
                    raise
            else:
                self._on_wait("")
                return done


def _most_tasks(stages: Sequence[Stage], prepared: Mapping[str, Topic]) -> int:
    """The tasks that an instance has where it is the only one, and the partitions of tables that it follows then."""
    tables = {join.table.topic for stage in stages for join in stage.joins}
    topics = [*(stage.source for stage in stages), *tables]
    return sum(prepared[topic].partitions for topic in topics)


def _decisions(stage: Stage, settings: Settings, around: Surroundings) -> Decisions:
    """What is kept of operators' decisions about a stage's dead letters."""
    topic = settings.dead_letter_decisions_topic
    codec = around.codec(topic, load_schema("DeadLetterDecision"))
    return Decisions(topic=topic, codec=codec, stage=stage.name, source_topic_id=around.topic_id(stage.source))


class Engine:
    """Does the work of some stages on whatever partitions the group assigns."""

    def __init__(
        self,
        settings: Settings,
        state_directory: StateDirectory,
        stages: Sequence[Stage],
        models: Iterable[ReadModel],
        metrics: Metrics,
        patience: Patience,
        *,
        on_change: Callable[[], None] = lambda: None,
        tracer: Tracer = UNTRACED,
    ) -> None:
        """Reach broker and registry, start Spark; waits for what is not up yet.

        Args:
            state_directory: closed when the engine stops.
            models: that the stages are of.
            on_change: called on any thread when a task's state has changed.

        Raises:
            ConfigurationError: a setting, or what it names, is wrong.
            RetriableError: told to stop while waiting.
        """
        until_up = patience.until_up
        self.settings = settings
        self.metrics = metrics
        self.tracer = tracer
        self.on_change = on_change
        self.state_directory = state_directory
        self.topics = Topics(settings)
        prepared = until_up(partial(prepare_topics, self.topics, settings, stages))
        sources = {stage.source: prepared[stage.source] for stage in stages}
        tasks, brokers = _most_tasks(stages, prepared), until_up(self.topics.brokers)
        self.open_files = files = open_files.divided(tasks, brokers, open_files.limit())
        log.info(
            "open files",
            limit=files.limit,
            need=files.need,
            per_store=files.per_store,
            openings=files.openings,
            connections=files.connections,
        )
        limit_open_files(files.per_store)
        self.openings = threading.Semaphore(files.openings)
        self.registry = SchemaRegistry.from_settings(settings)
        contexts = partial(table_contexts, settings, self.topics, self.registry, prepared, stages)
        self.tables = Tables(until_up(contexts), self.state_directory)
        around = Surroundings(
            registry=self.registry,
            partitions=lambda name: prepared[name].partitions,
            topic_id=lambda name: prepared[name].topic_id,
            config=self.topics.config,
            joined=self._joined,
            largest_bytes=int(str(producer_config(settings)["message.max.bytes"])),
            retry_every_ms=int(settings.retry_every_seconds * 1000),
            idempotency_window_ms=int(settings.idempotency_window_seconds * 1000),
        )
        by_name = {model.name: model for model in models}
        work = {stage.name: until_up(partial(work_of, stage, by_name.get(stage.owner), around)) for stage in stages}
        decisions = {stage.name: until_up(partial(_decisions, stage, settings, around)) for stage in stages}
        # While a task's query ends, its successor's may begin; and one is for the rehearsal.
        slots = 2 * sum(sources[stage.source].partitions for stage in stages) + 1
        self.spark = start_spark(settings, state_directory.scratch, slots)
        self.rehearsal = Rehearsal(self.spark, state_directory.scratch)
        self.spark_sampler = SparkSampler(self.spark)
        self.watermarks = {
            name: Watermarks(partial(self.topics.offsets, name, range(source.partitions)))
            for name, source in sources.items()
        }
        self.stages: Mapping[str, HostedStage] = {
            stage.name: host(
                stage,
                by_name.get(stage.owner),
                work[stage.name],
                decisions[stage.name],
                sources[stage.source],
                self.watermarks[stage.source],
                self,
            )
            for stage in stages
        }
        # A JVM's first query is slow. It is run before a partition is assigned, while the schemas are learnt.
        with ThreadPoolExecutor(1, "rehearsal") as pool:
            rehearsed = pool.submit(next(iter(self.stages.values())).feed.rehearse)
            for hosted in self.stages.values():
                until_up(partial(hosted.learn_schemas, self.registry))
            rehearsed.result()
        self.membership = Membership(
            config=consumer_config(common_config(settings), settings.application_id, settings.session_timeout_ms),
            topics=list(sources),
            session_timeout_ms=settings.session_timeout_ms,
            listener=self,
            positions=self._positions,
        )
        self._workers = (
            # One for each topic: where a leader is away, no other topic waits for it.
            *(
                PeriodicThread(f"watermarks-{name}", _WATERMARKS_EVERY_SECONDS, w.refresh)
                for name, w in self.watermarks.items()
            ),
            *(
                PeriodicThread(f"source-check-{name}", CHECK_EVERY_SECONDS, hosted.source_check.look)
                for name, hosted in self.stages.items()
            ),
            *(
                PeriodicThread(
                    f"purge-{name}",
                    _PURGE_EVERY_SECONDS,
                    Purge(self.topics, hosted.source.name, hosted.tasks, hosted.work.letters).look,
                )
                for name, hosted in self.stages.items()
                if settings.purge_rekeyed and hosted.stage.reads_rekeyed
            ),
            PeriodicThread("spark-sampler", _SAMPLE_EVERY_SECONDS, self.spark_sampler.take),
        )

    @property
    def models(self) -> Mapping[str, HostedStage]:
        """By read model, the stage that has its name: the last."""
        return {name: hosted for name, hosted in self.stages.items() if hosted.is_last}

    def stages_of(self, read_model: str) -> Sequence[HostedStage]:
        """All stages of a read model."""
        return [hosted for hosted in self.stages.values() if hosted.stage.owner == read_model]

    @property
    def problems(self) -> list[str]:
        """Why some partition is not folded now; empty while all is well."""
        return [problem for hosted in self.stages.values() for problem in hosted.problems]

    def _joined(self, stage: Stage) -> JoinedTables:
        return JoinedTables(joins=stage.joins, tables=self.tables, topics=self.topics, partition_of=partition_of)

    def start(self) -> None:
        """Join the group and begin to fold; returns at once."""
        for worker in self._workers:
            worker.start()
        self.membership.start()

    def stop(self) -> None:
        """Let go of everything. What takes longer than its bound is left to the end of the process."""
        self.membership.stop()
        # All are told before the first is waited for: what each waits for may be the same broker.
        for hosted in self.stages.values():
            hosted.tasks.stop(0.0)
        for worker in self._workers:
            worker.stop(0.0)
        deadline = time.monotonic() + _STOP_WORKERS_SECONDS
        for worker in self._workers:
            worker.stop(max(0.0, deadline - time.monotonic()))
        # Nothing may use Spark while it stops. A thread that hangs in it ends with the process, and Spark does too.
        deadline = time.monotonic() + _STOP_TASKS_SECONDS
        ended = [hosted.tasks.stop(max(0.0, deadline - time.monotonic())) for hosted in self.stages.values()]
        self.tables.stop(max(_LEAST_STOP_SECONDS, deadline - time.monotonic()))
        if all(ended):
            try:
                self.spark.stop()
            except Exception as error:  # py4j raises many things where the JVM has ended
                log.warning("Spark could not be stopped", error=in_short(error))
        self.registry.close()
        self.state_directory.close()

    def assigned(self, partitions: Partitions) -> None:
        """Open the tasks of each."""
        self.metrics.rebalances.labels("assigned").inc()
        for hosted, own in self._of_stages(partitions):
            hosted.tasks.assign(own)

    def revoked(self, partitions: Partitions) -> None:
        """Close the tasks; running commits have half a session, and at most four seconds, to end."""
        self.metrics.rebalances.labels("revoked").inc()
        self._let_go(partitions, min(self.settings.session_timeout_ms / 2000, 4.0))

    def lost(self, partitions: Partitions) -> None:
        """Close the tasks; successors may have fenced them already."""
        self.metrics.rebalances.labels("lost").inc()
        self._let_go(partitions, 1.0)

    def _let_go(self, partitions: Partitions, timeout_seconds: float) -> None:
        deadline = time.monotonic() + timeout_seconds
        leaving = [task for hosted, own in self._of_stages(partitions) for task in hosted.tasks.dismiss(own)]
        for task in leaving:
            task.close(max(0.0, deadline - time.monotonic()))
        if leaving:
            self.on_change()

    def _of_stages(self, partitions: Partitions) -> Iterator[tuple[HostedStage, Iterable[int]]]:
        for hosted in self.stages.values():
            yield hosted, [number for topic, number in partitions if topic == hosted.source.name]

    def _positions(self) -> dict[tuple[str, int], int]:
        """Of each partition, the least of its tasks': tools take for the lag of the group what is behind it."""
        positions: dict[tuple[str, int], int] = {}
        for hosted in self.stages.values():
            for partition, position in hosted.positions().items():
                positions[partition] = min(position, positions.get(partition, position))
        return positions
