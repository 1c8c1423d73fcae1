"""The engine of one read model in one instance: membership, tasks and stream, wired.

`assigned`, `revoked` and `lost` come on the membership thread; the rest from the thread that owns the engine.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import structlog

from balance_service.avro.codec import AvroCodec
from balance_service.avro.registry import SchemaRegistry
from balance_service.avro.schemas import full_name, load_schema
from balance_service.cluster.membership import Membership, consumer_config
from balance_service.cluster.partitioner import partition_of, partitions_of
from balance_service.cluster.watermarks import Watermarks
from balance_service.errors import RetriableError
from balance_service.events.decode import Decoder
from balance_service.events.spark import start_spark
from balance_service.events.spark_sampler import SparkSampler
from balance_service.events.stream import Stream
from balance_service.kafka.clients import common_config
from balance_service.kafka.topics import Topics
from balance_service.state.addition import Addition
from balance_service.state.fold import Folding
from balance_service.state.opening import TaskContext
from balance_service.state.state_directory import StateDirectory
from balance_service.state.tasks import Tasks
from balance_service.tracing import UNTRACED

if TYPE_CHECKING:
    from collections.abc import Callable

    from balance_service.avro.schemas import Schema
    from balance_service.kafka.topics import Topic
    from balance_service.metrics import Metrics
    from balance_service.read_models.read_model import ReadModel
    from balance_service.settings import Settings
    from balance_service.tracing import Tracing

log = structlog.get_logger(__name__)

T = TypeVar("T")

_RETRY_SECONDS = 2.0


class Engine:
    """Folds the source into the stores of whatever partitions the group assigns."""

    def __init__(
        self,
        settings: Settings,
        read_model: ReadModel,
        metrics: Metrics,
        on_change: Callable[[], None] = lambda: None,
        stopping: threading.Event | None = None,
        tracing: Tracing = UNTRACED,
        on_wait: Callable[[str], None] = lambda _reason: None,
    ) -> None:
        """Take the state directory, reach broker and registry, start Spark; waits for what is not up yet.

        Args:
            on_change: called on any thread when a task's state has changed.
            stopping: once set, waiting is given up.
            on_wait: told why, each time it has to wait for something outside.

        Raises:
            ConfigurationError: a setting, or what it names, is wrong.
            RetriableError: asked to stop while waiting.
        """
        self.settings = settings
        self.read_model = read_model
        self._metrics = metrics
        self._notify = on_change
        self._stopping = stopping or threading.Event()
        self._on_wait = on_wait
        self.state_directory = StateDirectory(settings.state_dir, settings.application_id)
        self.topics = Topics(settings)
        self.source: Topic = self.until_up(self.topics.prepare)
        self.registry = SchemaRegistry.from_settings(settings)
        self.state_codec = self.codec(settings.changelog_topic, read_model.state_schema)
        folding = Folding(
            read_model,
            Addition.of(read_model, self.state_codec),
            self.state_codec,
            self.codec(settings.changelog_topic, load_schema("Position")),
            self.codec(settings.changelog_topic, load_schema("IdempotencyMarker")),
            partial(partition_of, partitions=self.source.partitions),
            partial(partitions_of, partitions=self.source.partitions),
            int(settings.idempotency_window_seconds * 1000),
        )
        context = TaskContext(settings, self.topics, self.source, folding, self.state_directory)
        self.tasks = Tasks(read_model.name, context, self._changed)
        spark = start_spark(settings)
        self._spark = spark
        self.spark_sampler = SparkSampler(spark)
        decoder = Decoder(spark, read_model, self.registry, with_traces=tracing.is_on)
        self.until_up(partial(self._prepare, decoder))
        self.stream = Stream(
            spark, settings, read_model, decoder, self.topics, self.source, self.tasks, metrics, tracing
        )
        self.membership = Membership(
            consumer_config(common_config(settings), settings.application_id, settings.session_timeout_ms),
            settings.topic,
            settings.session_timeout_ms,
            self,
            self._positions,
        )
        self.watermarks = Watermarks(partial(self.topics.offsets, settings.topic, range(self.source.partitions)))

    def codec(self, topic: str, schema: Schema) -> AvroCodec:
        """A codec for one of our own records on one of our own topics; waits for the registry."""
        subject = f"{topic}-{full_name(schema)}"
        return self.until_up(lambda: AvroCodec(self.registry, subject, schema))

    def until_up(self, attempt: Callable[[], T]) -> T:
        """Try until what is needed outside is up. Raises RetriableError once asked to stop."""
        while True:
            try:
                return attempt()
            except RetriableError as error:
                log.warning("waiting", reason=str(error))
                self._on_wait(str(error))
                if self._stopping.wait(_RETRY_SECONDS):
                    raise

    def start(self) -> None:
        """Join the group and begin to fold; returns at once."""
        self.watermarks.start()
        self.spark_sampler.start()
        self.stream.start()
        self.membership.start()

    def stop(self) -> None:
        """Let go of everything. What takes longer than its bound is left to the end of the process."""
        self.membership.stop()
        self.stream.stop(2.0)
        self.watermarks.stop(0.5)
        self.spark_sampler.stop(0.5)
        self._spark.stop()
        self.registry.close()
        self.state_directory.close()

    def assigned(self, partitions: frozenset[int]) -> None:
        """Open a task for each."""
        self._metrics.rebalances.labels("assigned").inc()
        self.tasks.assign(partitions)

    def revoked(self, partitions: frozenset[int]) -> None:
        """Close the tasks; a running commit has half a session, and at most four seconds, to end."""
        self._metrics.rebalances.labels("revoked").inc()
        self.tasks.revoke(partitions, min(self.settings.session_timeout_ms / 2000, 4.0))

    def lost(self, partitions: frozenset[int]) -> None:
        """Close the tasks; a successor may have fenced them already."""
        self._metrics.rebalances.labels("lost").inc()
        self.tasks.revoke(partitions, 1.0)

    def _prepare(self, decoder: Decoder) -> None:
        """Make the first micro-batch as fast as the next ones, before any partition is ours."""
        topic, schemas = self.settings.topic, self.read_model.event_schemas
        ours = [self.registry.register(f"{topic}-{name}", schema) for name, schema in schemas.items()]
        # Each schema that the plan does not know when it comes up costs a new plan.
        decoder.resolve({*ours, *self.registry.schema_ids(topic)})
        decoder.warm_up()

    def _positions(self) -> dict[int, int]:
        return {task.task_id.partition: task.position for task in self.tasks.all() if task.view is not None}

    def _changed(self) -> None:
        self.stream.changed()
        self._notify()
