"""The engine of an instance: one group membership, one Spark session, and the stages that share them.

A helper thread of the event loop creates, starts and stops the engine. The membership thread calls `assigned`,
`revoked` and `lost`, and reads the positions. Any thread may read the stages and their problems.
"""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import structlog

from balance_service.avro.registry import SchemaRegistry
from balance_service.avro.schemas import load_schema
from balance_service.cluster.membership import Membership, consumer_config
from balance_service.engine.assembly import Surroundings, processor_of, table_contexts
from balance_service.engine.database import limit_open_files
from balance_service.engine.decisions import DecisionLog
from balance_service.engine.hosted_stage import HostedStage
from balance_service.engine.source_watch import Purge, SourceCheck
from balance_service.engine.stateless import JoinProcessor
from balance_service.engine.tables import JoinedTables, Tables
from balance_service.engine.tasks import Tasks
from balance_service.errors import RetriableError
from balance_service.kafka.clients import common_config, producer_config
from balance_service.kafka.topic_specs import prepare_topics
from balance_service.kafka.topics import Topics, Watermarks
from balance_service.observability.tracing import UNTRACED
from balance_service.process import open_files
from balance_service.process.runtime import PeriodicThread
from balance_service.spark.decode import Decoder
from balance_service.spark.row_query import in_short
from balance_service.spark.self_test import SelfTest
from balance_service.spark.session import SparkSampler, start_spark
from balance_service.spark.shared_queries import Slots
from balance_service.spark.task_runner import TaskRunner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from opentelemetry.trace import Tracer

    from balance_service.cluster.membership import Partitions
    from balance_service.engine.state_directory import StateDirectory
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
# A query that replaces another runs beside it, and so may halves of one that failed.
_QUERIES_OF_A_PARTITION = 6
_SAMPLE_EVERY_SECONDS = 5.0
# As often as Kafka Streams does.
_PURGE_EVERY_SECONDS = 30.0


class Patience:
    """Retries while a broker or the registry is not up yet; ends when the instance stops."""

    def __init__(self, stopping: threading.Event, on_wait: Callable[[str], None]) -> None:
        """Args:
        on_wait: called with the reason before each wait, and with an empty text when the wait is over.
        """
        self._stopping = stopping
        self._on_wait = on_wait

    def until_up(self, attempt: Callable[[], T]) -> T:
        """Repeats an attempt until it succeeds. Raises RetriableError once the instance stops."""
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


class Engine:
    """Processes the partitions that the group assigns to this instance, for each of its stages."""

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
        """Connects to broker and registry and starts Spark; waits for those that are not up yet.

        Args:
            state_directory: closed when the engine stops.
            models: the read models that the stages belong to.
            on_change: called on any thread when a task's state has changed.

        Raises:
            ConfigurationError: a setting, or a topic or schema that it names, is not usable.
            RetriableError: the instance stopped while it waited.
        """
        until_up = patience.until_up
        self.settings = settings
        self.metrics = metrics
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
        self.registry = SchemaRegistry.from_settings(settings)
        contexts = partial(table_contexts, settings, self.topics, self.registry, prepared, stages)
        self.tables = Tables(until_up(contexts), state_directory)
        self.watermarks = {
            name: Watermarks(partial(self.topics.offsets, name, range(source.partitions)))
            for name, source in sources.items()
        }
        hosted = self._hosted(stages, {model.name: model for model in models}, prepared, patience)
        partitions = sum(sources[stage.source].partitions for stage in stages)
        slots = Slots(_QUERIES_OF_A_PARTITION * partitions)
        # The self-test and the warm-up run one more.
        self.spark = start_spark(settings, state_directory.scratch, slots.total + 1)
        self.spark_sampler = SparkSampler(self.spark)
        self_test = SelfTest(self.spark, state_directory.scratch)
        decoders = [
            Decoder(self.spark, stage.read_model, stage.stage, self.registry, with_traces=tracer is not UNTRACED)
            for stage in hosted
        ]
        runners = [
            TaskRunner(stage, decoder, self.spark, self_test, slots, metrics, tracer)
            for stage, decoder in zip(hosted, decoders, strict=True)
        ]
        openings = threading.Semaphore(files.openings)
        self.stages: Mapping[str, Tasks] = {
            stage.name: Tasks(stage, runner, on_change, openings) for stage, runner in zip(hosted, runners, strict=True)
        }
        known = [until_up(decoder.resolve_all) for decoder in decoders]
        # The first query of a JVM is slow. It runs while the instance joins its group and opens its tasks.
        self._warm_up = threading.Thread(target=runners[0].warm_up, args=(known[0],), name="warm-up", daemon=True)
        self._warm_up.start()
        self.membership = Membership(
            config=consumer_config(common_config(settings), settings.application_id, settings.session_timeout_ms),
            topics=list(sources),
            session_timeout_ms=settings.session_timeout_ms,
            listener=self,
            positions=self._positions,
        )
        self._workers = [*self._all_workers()]
        self._has_begun = False

    @property
    def has_begun(self) -> bool:
        """Whether all running tasks have read their events at once, at some time since the start."""
        if not self._has_begun:
            self._has_begun = not self._warm_up.is_alive() and all(tasks.have_begun for tasks in self.stages.values())
        return self._has_begun

    @property
    def models(self) -> Mapping[str, Tasks]:
        """The last stage of each read model, which has the model's name."""
        return {name: tasks for name, tasks in self.stages.items() if tasks.hosted.is_last}

    def stages_of(self, read_model: str) -> Sequence[Tasks]:
        return [tasks for tasks in self.stages.values() if tasks.hosted.stage.owner == read_model]

    @property
    def problems(self) -> list[str]:
        """Why some partition is not folded now; empty if all are."""
        return [problem for tasks in self.stages.values() for problem in tasks.problems]

    def start(self) -> None:
        """Joins the group and starts to process. Returns at once."""
        for worker in self._workers:
            worker.start()
        self.membership.start()

    def stop(self) -> None:
        """Releases everything. A part that takes longer than its timeout is left to the end of the process."""
        self.membership.stop()
        # All stages get the request before the first one is awaited: they may all wait for the same broker.
        for tasks in self.stages.values():
            tasks.stop(0.0)
        for worker in self._workers:
            worker.stop(0.0)
        deadline = time.monotonic() + _STOP_WORKERS_SECONDS
        for worker in self._workers:
            worker.stop(max(0.0, deadline - time.monotonic()))
        # No thread may use Spark while it stops. If one hangs in it, both end with the process.
        deadline = time.monotonic() + _STOP_TASKS_SECONDS
        ended = [tasks.stop(max(0.0, deadline - time.monotonic())) for tasks in self.stages.values()]
        self.tables.stop(max(_LEAST_STOP_SECONDS, deadline - time.monotonic()))
        self._warm_up.join(max(0.0, deadline - time.monotonic()))
        if all(ended) and not self._warm_up.is_alive():
            try:
                self.spark.stop()
            except Exception as error:  # py4j raises many types when the JVM has ended
                log.warning("Spark could not be stopped", error=in_short(error))
        self.registry.close()
        self.state_directory.close()

    def assigned(self, partitions: Partitions) -> None:
        """Opens the tasks of the partitions."""
        self.metrics.rebalances.labels("assigned").inc()
        for tasks, own in self._by_stage(partitions):
            tasks.assign(own)

    def revoked(self, partitions: Partitions) -> None:
        """Closes the tasks. A running commit may take half a session timeout, and at most four seconds, to end."""
        self.metrics.rebalances.labels("revoked").inc()
        self._release(partitions, min(self.settings.session_timeout_ms / 2000, 4.0))

    def lost(self, partitions: Partitions) -> None:
        """Closes the tasks, whose successors may have fenced them already."""
        self.metrics.rebalances.labels("lost").inc()
        self._release(partitions, 1.0)

    def _hosted(
        self,
        stages: Sequence[Stage],
        models: Mapping[str, ReadModel],
        prepared: Mapping[str, Topic],
        patience: Patience,
    ) -> list[HostedStage]:
        settings = self.settings
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

        def hosted(stage: Stage) -> HostedStage:
            model = models.get(stage.owner)
            decisions_topic = settings.dead_letter_decisions_topic
            processor = processor_of(stage, model, around)
            return HostedStage(
                stage=stage,
                read_model=model,
                settings=settings,
                topics=self.topics,
                source=prepared[stage.source],
                watermarks=self.watermarks[stage.source],
                processor=processor,
                decisions=DecisionLog(
                    topic=decisions_topic,
                    codec=around.codec(decisions_topic, load_schema("DeadLetterDecision")),
                    stage=stage.name,
                    source_topic_id=prepared[stage.source].topic_id,
                ),
                state_directory=self.state_directory,
                joined=processor.joined if isinstance(processor, JoinProcessor) else None,
            )

        return [patience.until_up(partial(hosted, stage)) for stage in stages]

    def _joined(self, stage: Stage) -> JoinedTables:
        return JoinedTables(joins=stage.joins, tables=self.tables, topics=self.topics)

    def _all_workers(self) -> Iterator[PeriodicThread]:
        # One for each topic: a topic without a leader delays no other.
        for name, watermarks in self.watermarks.items():
            yield PeriodicThread(f"watermarks-{name}", _WATERMARKS_EVERY_SECONDS, watermarks.refresh)
        for name, tasks in self.stages.items():
            yield PeriodicThread(f"source-check-{name}", CHECK_EVERY_SECONDS, SourceCheck(tasks).run_once)
            if self.settings.purge_rekeyed and tasks.hosted.stage.reads_rekeyed:
                yield PeriodicThread(f"purge-{name}", _PURGE_EVERY_SECONDS, Purge(tasks).run_once)
        yield PeriodicThread("spark-sampler", _SAMPLE_EVERY_SECONDS, self.spark_sampler.take)

    def _release(self, partitions: Partitions, timeout_seconds: float) -> None:
        deadline = time.monotonic() + timeout_seconds
        leaving = [task for tasks, own in self._by_stage(partitions) for task in tasks.dismiss(own)]
        for task in leaving:
            task.close(max(0.0, deadline - time.monotonic()))
        if leaving:
            self.on_change()

    def _by_stage(self, partitions: Partitions) -> Iterator[tuple[Tasks, Iterable[int]]]:
        for tasks in self.stages.values():
            yield tasks, [number for topic, number in partitions if topic == tasks.hosted.source.name]

    def _positions(self) -> dict[tuple[str, int], int]:
        """Returns the least position of the tasks of each partition, from which tools compute the group's lag."""
        positions: dict[tuple[str, int], int] = {}
        for tasks in self.stages.values():
            for partition, position in tasks.positions().items():
                positions[partition] = min(position, positions.get(partition, position))
        return positions


def _most_tasks(stages: Sequence[Stage], prepared: Mapping[str, Topic]) -> int:
    """Returns how many tasks and table partitions the only instance of an application has."""
    tables = {join.table.topic for stage in stages for join in stage.joins}
    topics = [*(stage.source for stage in stages), *tables]
    return sum(prepared[topic].partitions for topic in topics)
