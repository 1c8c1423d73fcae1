"""The engine of an instance: its group memberships, one Spark session, and the stages that share them.

A helper thread of the event loop creates, starts and stops the engine. The threads of the memberships call `assigned`,
`revoked` and `lost`, and read the positions. Any thread may read the stages and their problems.
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

import pyarrow as pa
import structlog

from balance_service.avro.own_schemas import OwnSchemas
from balance_service.avro.registry import SchemaRegistry
from balance_service.avro.schemas import load_schema
from balance_service.cluster.generations import GenerationLog
from balance_service.cluster.membership import Memberships
from balance_service.engine.assembly import StageServices, processor_of
from balance_service.engine.database import Database, limit_open_files
from balance_service.engine.decisions import DecisionLog
from balance_service.engine.hosted_generations import HostedGenerations
from balance_service.engine.hosted_stage import HostedStage
from balance_service.engine.inheritance import last_frames
from balance_service.engine.joined_tables import JoinedTables
from balance_service.engine.records import TaskId
from balance_service.engine.schema_records import SchemaRecords, SentSchemas
from balance_service.engine.source_watch import LossCheck, SourceCheck
from balance_service.engine.stalled import StalledStage
from balance_service.engine.stateless import JoinProcessor
from balance_service.engine.tables import Tables, table_contexts
from balance_service.engine.tasks import Tasks
from balance_service.errors import RetriableError
from balance_service.kafka.clients import producer_config
from balance_service.kafka.schema_texts import text_in
from balance_service.kafka.signing import ControlRecords, begin_to_sign
from balance_service.kafka.topic_specs import prepare_topics
from balance_service.kafka.topics import Topics, Watermarks
from balance_service.model.generations import Generations
from balance_service.model.stage import model_and_generation
from balance_service.model.versions import Versions
from balance_service.observability.tracing import UNTRACED
from balance_service.process import open_files
from balance_service.process.failpoints import failpoint
from balance_service.process.runtime import Attempts, Awake, PeriodicThread, collect_garbage
from balance_service.spark.decode import Decoder
from balance_service.spark.row_query import in_short
from balance_service.spark.session import SparkSampler, start_spark
from balance_service.spark.shared_queries import Slots
from balance_service.spark.task_runner import TaskRunner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from opentelemetry.trace import Tracer

    from balance_service.cluster.membership import Partitions
    from balance_service.engine.state_directory import StateDirectory
    from balance_service.engine.tasks import Runner
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
# A query runs next to the one that it replaces, and those of single partitions next to one that failed.
_QUERIES_OF_A_PARTITION = 6
_SAMPLE_EVERY_SECONDS = 5.0
_LOOK_EVERY_SECONDS = 1.0
_COLLECT_EVERY_SECONDS = 300.0


class StartupRetries:
    """Retries while a broker or the registry is not up yet; ends when the instance stops."""

    def __init__(self, stopping: threading.Event, on_wait: Callable[[str], None]) -> None:
        """Args:
        on_wait: called with the reason before each wait, and with an empty text when the wait is over.
        """
        self._stopping = stopping
        self._on_wait = on_wait

    def until_up(self, attempt: Callable[[], T]) -> T:
        """Repeats an attempt until it succeeds. Raises RetriableError once the instance stops."""
        attempts = Attempts(log, "waiting", "the wait is over")
        while True:
            try:
                done = attempt()
            except RetriableError as error:
                attempts.failed(error)
                self._on_wait(str(error))
                if self._stopping.wait(_RETRY_SECONDS):
                    raise
            else:
                attempts.succeeded()
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
        retries: StartupRetries,
        *,
        on_change: Callable[[], None] = lambda: None,
        tracer: Tracer = UNTRACED,
    ) -> None:
        """Connects to broker and registry and starts Spark; waits for those that are not up yet.

        Args:
            state_directory: closed when the engine stops.
            stages: of the newest versions of the read models, in their first generations; and of retries.
            models: the read models, in all of their versions.
            on_change: called on any thread when a task's state has changed.

        Raises:
            ConfigurationError: a setting, or a topic or schema that it names, is not usable.
            RetriableError: the instance stopped while it waited.
        """
        until_up = retries.until_up
        self.settings = settings
        self.metrics = metrics
        self.on_change = on_change
        self.state_directory = state_directory
        self.topics = Topics(settings)
        self.registry = SchemaRegistry.from_settings(settings)
        self.schemas = OwnSchemas(self.registry, self._text)
        """Those of the application's own records."""
        self._tracer = tracer
        self.generations = until_up(partial(GenerationLog, settings, self.topics, self.schemas))
        """Which generations of the read models there are; followed once the engine starts."""
        decisions_topic = settings.dead_letter_decisions_topic
        self.decision_records = ControlRecords.of(settings, decisions_topic)
        self.versions = versions = Versions(models, settings, self.generations.of)
        self._prepared = until_up(partial(self._prepare, stages))
        known = {generation.name for stage in stages for generation in self.live(stage)}
        until_up(partial(begin_to_sign, settings, self.topics, decisions_topic))
        until_up(self._begin)
        if not self.generations.known:
            until_up(partial(self._settle, stages))
        if self.schemas.has_fingerprints:
            log.info("records name schemas by fingerprints; releases before this one cannot read them")
        versions.check_serving()
        # Another instance may have begun them, with other versions.
        stages = [generation for stage in stages for generation in self.live(stage)]
        for stage in stages:
            if stage.name not in known:
                until_up(partial(self._prepare_also, stage))
            if versions.has_changed(stage.owner, stage.generation):
                log.warning("a read model is declared in another way, and its version is not", stage=stage.name)
        prepared = self._prepared
        sources = {stage.source: prepared[stage.source] for stage in stages}
        tasks, brokers = _most_tasks(stages, prepared), until_up(self.topics.brokers)
        # A second generation of each read model, as far as there is room.
        alone = [live[0] for model in versions.with_states if len(live := versions.live(model)) == 1]
        self._more_tasks = 0
        for partitions in sorted(sources[stage.source].partitions for stage in alone):
            more = self._more_tasks + partitions
            if open_files.need_of(tasks + more, brokers, len(sources)) <= open_files.limit():
                self._more_tasks = more
        self.open_files = files = open_files.divided(
            tasks + self._more_tasks, brokers, open_files.limit(), len(sources)
        )
        log.info(
            "open files",
            limit=files.limit,
            need=files.need,
            per_store=files.per_store,
            openings=files.openings,
            connections=files.connections,
        )
        limit_open_files(files.per_store)
        contexts = partial(table_contexts, settings, self.topics, self.registry, prepared, stages)
        self.tables = Tables(until_up(contexts), state_directory)
        self.watermarks = {
            name: Watermarks(name, partial(self.topics.offsets, name, range(source.partitions)))
            for name, source in sources.items()
        }
        self.table_watermarks = {
            name: Watermarks(name, partial(self.topics.offsets, name, range(prepared[name].partitions)))
            for name in {join.table.topic for stage in stages for join in stage.joins}
        }
        partitions = sum(sources[stage.source].partitions for stage in stages)
        # Twice: for one more generation of each.
        self._slots = Slots(2 * _QUERIES_OF_A_PARTITION * partitions)
        self.memberships = Memberships(settings, sources, self, self._positions)
        self._openings = threading.Semaphore(files.openings)
        self._hosted_generations: dict[str, HostedGenerations] = {}
        self._changing = threading.RLock()
        """Held while stages are added, and while the group's partitions change."""
        self.stages: Mapping[str, Tasks] = {}
        self._decoders: dict[str, Decoder] = {}
        """By the stage's name."""
        with ExitStack() as on_failure:
            # Kafka takes a while to admit the first member, and so does Spark to start.
            self.memberships.guard()
            on_failure.callback(self.memberships.stop)
            # The warm-up runs one more, and so do records that are decoded again.
            self.spark = start_spark(settings, state_directory.scratch, self._slots.total + 1)
            self.spark_sampler = SparkSampler(self.spark)
            warm_ups = [until_up(partial(self._host_if_live, stage)) for stage in stages]
            self._wipe_dropped()
            on_failure.pop_all()
        # The first query of a JVM is slow. It runs while the instance joins its group and opens its tasks.
        self._warm_up = threading.Thread(target=next(filter(None, warm_ups), None), name="warm-up", daemon=True)
        self._warm_up.start()
        self._workers = [*self._all_workers()]
        self._stage_workers = {name: [*self._workers_of(tasks)] for name, tasks in self.stages.items()}
        self._has_begun = False
        self._has_started = False
        self.awake = Awake()

    @property
    def has_begun(self) -> bool:
        """Whether all running tasks have read their events at once, at some time since the start."""
        if not self._has_begun:
            self._has_begun = not self._warm_up.is_alive() and all(tasks.have_begun for tasks in self.stages.values())
        return self._has_begun

    @property
    def models(self) -> Mapping[str, Tasks]:
        """The last stages of the read models, by their names: that of generation N > 1 is `<model>.gN`."""
        return {name: tasks for name, tasks in self.stages.items() if tasks.hosted.is_last}

    def stages_of(self, read_model: str) -> Sequence[Tasks]:
        """The stages that a read model's answers come from."""
        return [tasks for tasks in self.serving_stages if tasks.hosted.stage.owner == read_model]

    @property
    def serving_stages(self) -> Sequence[Tasks]:
        """All stages but those of generations that do not serve."""
        return [tasks for tasks in self.stages.values() if self._serves(tasks.hosted)]

    def _serves(self, hosted: HostedStage) -> bool:
        return not hosted.is_last or self.generations.serving(hosted.stage.owner) == hosted.stage.generation

    @property
    def control_records(self) -> Sequence[ControlRecords]:
        """The topics whose records control what serves and what counts."""
        return [self.generations.records, self.decision_records]

    @property
    def problems(self) -> list[str]:
        """Why some partition is not folded now; empty if all are."""
        return [problem for tasks in self.stages.values() for problem in tasks.problems]

    def read_otherwise(self, stage: Stage) -> list[int]:
        """Returns the ids of the schemas whose records had other values by the rules that a generation began under.

        None is known of a generation that this instance does not fold.
        """
        decoder = self._decoders.get(stage.name)
        declared = self.generations.of(stage.owner).declarations.get(stage.generation)
        if decoder is None or declared is None or stage.passes_on:
            return []
        return sorted(known for known, rules in decoder.rules.items() if rules > declared.decoder_rules)

    def start(self) -> None:
        """Joins the groups and starts to process. Returns at once."""
        with self._changing:
            self._has_started = True
            for worker in (*self._workers, *chain(*self._stage_workers.values())):
                worker.start()
        self.generations.start()
        self.memberships.start()

    def _wipe_dropped(self) -> None:
        """Removes the stores of generations that were dropped while this instance did not run, or started."""
        for name, path in self.state_directory.stores():
            if name not in self.stages and self.versions.of(model_and_generation(name)[0]):
                log.info("the store of a dropped generation is removed", stage=name)
                Database.wipe(path)

    def live(self, stage: Stage) -> list[Stage]:
        """Returns the last stage of a read model in each generation that is hosted here; another stage has one."""
        has_generations = stage.owner in self.versions.with_states and not stage.passes_on
        return self.versions.live(stage.owner) if has_generations else [stage]

    def add_stage(self, stage: Stage) -> None:
        """Hosts one more stage, of a source that is read already, and owns the partitions of it that are owned here.

        Raises:
            ConfigurationError: a topic of it, or a schema, is not usable.
            RetriableError: the broker or the registry does not respond.
        """
        partitions = self._prepared[stage.source].partitions
        if stage.generation > 1 and partitions > self._more_tasks:
            raise RetriableError(
                f"{stage.name} needs more open files for its {partitions} tasks than are left: wait until another "
                "generation is dropped, or raise `ulimit -Hn` and restart the instance"
            )
        self._prepare_also(stage)
        self._host(stage)
        self._more_tasks -= partitions
        tasks = self.stages[stage.name]
        workers = [*self._workers_of(tasks)]
        with self._changing:
            self._stage_workers[stage.name] = workers
            if self._has_started:
                for worker in workers:
                    worker.start()
            tasks.assign(self.memberships.of[stage.source].partitions)
        self.on_change()

    def remove_stage(self, name: str) -> bool:
        """Closes the tasks of a stage, and removes their stores. Returns False if they did not close in time."""
        with self._changing:
            tasks = self.stages[name]
            workers = self._stage_workers.pop(name, [])
        for worker in workers:
            worker.stop(_STOP_WORKERS_SECONDS)
        if not tasks.stop(_STOP_TASKS_SECONDS):
            return False
        with self._changing:
            self._decoders.pop(name, None)
            self.stages = {other: kept for other, kept in self.stages.items() if other != name}
            stage = tasks.hosted.stage
            self._hosted_generations[stage.owner].remove(stage.generation)
        self._more_tasks += tasks.hosted.source.partitions
        for partition in range(tasks.hosted.source.partitions):
            Database.wipe(self.state_directory.store_path(TaskId(name, partition)))
            failpoint("store-removed")
        # Otherwise malloc keeps what the tasks have freed, although no other rebuild may come.
        pa.default_memory_pool().release_unused()
        self.on_change()
        self.metrics.forget_stage(name)
        return True

    def stop(self) -> None:
        """Releases everything. A part that takes longer than its timeout is left to the end of the process."""
        self.memberships.stop()
        self.generations.stop(_STOP_WORKERS_SECONDS)
        # All stages get the request before the first one is awaited: they may all wait for the same broker.
        for tasks in self.stages.values():
            tasks.stop(0.0)
        workers = [*self._workers, *chain(*self._stage_workers.values())]
        for worker in workers:
            worker.stop(0.0)
        deadline = time.monotonic() + _STOP_WORKERS_SECONDS
        for worker in workers:
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

    def assigned(self, topic: str, partitions: Partitions) -> None:
        """Opens the tasks of the partitions."""
        self.metrics.rebalances.labels("assigned").inc()
        with self._changing:
            for tasks in self._reading(topic):
                tasks.assign(partitions)

    def revoked(self, topic: str, partitions: Partitions) -> None:
        """Closes the tasks. A running commit may take half a session timeout, and at most four seconds, to end."""
        self.metrics.rebalances.labels("revoked").inc()
        self._release(topic, partitions, min(self.settings.session_timeout_ms / 2000, 4.0))

    def lost(self, topic: str, partitions: Partitions) -> None:
        """Closes the tasks, whose successors may have fenced them already."""
        self.metrics.rebalances.labels("lost").inc()
        self._release(topic, partitions, 1.0, leaves_views=True)

    def _prepare(self, stages: Sequence[Stage]) -> Mapping[str, Topic]:
        """Prepares the topics of all live generations. Raises as `prepare_topics`."""
        live = [generation for stage in stages for generation in self.live(stage)]
        try:
            return prepare_topics(self.topics, self.settings, live)
        except RetriableError:
            # The changelog of a generation that is dropped during the start is gone.
            self.generations.refresh()
            raise

    def _prepare_also(self, stage: Stage) -> None:
        """Prepares the topics of one more stage. The others keep their ids, which show whether a topic was replaced.

        Raises as `prepare_topics`.
        """
        self._prepared = {**prepare_topics(self.topics, self.settings, [stage]), **self._prepared}

    def _begin(self) -> None:
        """Writes what the first generations of new read models are folded by, and from where on."""
        begun = {}
        for name in self.versions.with_states:
            if name not in self.generations.known:
                source = self._prepared[self.versions.stage(name, 1).source]
                starts = self.topics.offsets(source.name, range(source.partitions), earliest=True)
                begun[name] = self.versions.declaration(name).beginning_at(starts)
        self.generations.begin(begun)

    def _text(self, key: bytes) -> bytes | None:
        """Returns the text of a schema of re-keyed rows, which another version of a stage has passed on."""
        rekeyed = {tasks.hosted.stage.source for tasks in self.stages.values() if tasks.hosted.stage.reads_rekeyed}
        return text_in(self.settings, self.topics, sorted(rekeyed), key)

    def _settle(self, stages: Iterable[Stage]) -> None:
        """Keeps to the form of the records in the changelogs of an application whose models have no states."""
        for stage in stages:
            partitions = range(self._prepared[stage.source].partitions)
            for frame in last_frames(self.settings, self.topics, stage.changelog, partitions).values():
                if self.schemas.settle(frame, stage.changelog):
                    return

    def _host_if_live(self, stage: Stage) -> Callable[[], None] | None:
        """As `_host`; but leaves a generation alone that was dropped since the start, and lost its changelog."""
        try:
            return self._host(stage)
        except RetriableError:
            self.generations.refresh()
            if stage.name in {live.name for live in self.live(stage)}:
                raise
            log.info("a generation was dropped during the start", stage=stage.name)
            self._more_tasks += self._prepared[stage.source].partitions
            return None

    def _host(self, stage: Stage) -> Callable[[], None] | None:
        """Adds the tasks of a stage. Returns what warms Spark up for them; None for a stage that stands still."""
        hosted = self._hosted(stage)
        runner, warm_up = self._runner(hosted)
        tasks = Tasks(hosted, runner, self.on_change, self._openings)
        hosted.generations.add(stage.generation, tasks)
        with self._changing:
            self.stages = {**self.stages, stage.name: tasks}
        return warm_up

    def _runner(self, hosted: HostedStage) -> tuple[Runner, Callable[[], None] | None]:
        if hosted.stands_still:
            return StalledStage(hosted.stands_still), None
        with_traces = self._tracer is not UNTRACED
        decoder = Decoder(self.spark, hosted.read_model, hosted.stage, self.schemas, with_traces=with_traces)
        self._decoders[hosted.stage.name] = decoder
        known = decoder.resolve_all()
        runner = TaskRunner(hosted, decoder, self.spark, self._slots, self.metrics, self._tracer)
        return runner, partial(runner.warm_up, known)

    def _hosted(self, stage: Stage) -> HostedStage:
        settings, prepared = self.settings, self._prepared
        services = StageServices(
            schemas=self.schemas,
            partitions=lambda name: prepared[name].partitions,
            topic_id=lambda name: prepared[name].topic_id,
            config=self.topics.config,
            joined=self._joined,
            largest_bytes=int(str(producer_config(settings)["message.max.bytes"])),
            retry_every_ms=int(settings.retry_every_seconds * 1000),
            idempotency_window_ms=int(settings.idempotency_window_seconds * 1000),
        )
        model = self.versions.read_model(stage)
        decisions_topic = settings.dead_letter_decisions_topic
        processor = processor_of(stage, model, services)
        generations = HostedGenerations(
            partial(self.generations.of, stage.owner), partial(self.generations.newest, stage.owner)
        )
        is_last = model is not None and not stage.passes_on
        decisions = DecisionLog(
            records=self.decision_records,
            codec=services.codec(decisions_topic, load_schema("DeadLetterDecision")),
            stage=stage.identity,
            source_topic_id=prepared[stage.source].topic_id,
        )
        return HostedStage(
            stage=stage,
            read_model=model,
            settings=settings,
            topics=self.topics,
            source=prepared[stage.source],
            lease=self.memberships.of[stage.source].lease,
            watermarks=self.watermarks[stage.source],
            processor=processor,
            decisions=decisions,
            schemas=self._schemas_of(stage),
            state_directory=self.state_directory,
            # An earlier stage has one generation.
            generations=self._hosted_generations.setdefault(stage.owner, generations)
            if is_last
            else HostedGenerations(lambda: Generations(stage.owner)),
            joined=processor.joined if isinstance(processor, JoinProcessor) else None,
            stands_still=self.versions.why_still(stage),
        )

    def _schemas_of(self, stage: Stage) -> SchemaRecords:
        """Returns the texts that the tasks of a stage write, once its codecs are made."""
        decisions, sent = self.settings.dead_letter_decisions_topic, list[SentSchemas]()
        if texts := self.schemas.records(decisions):
            topic = self.topics.find_patiently(decisions)
            partitions = 1 if topic is None else topic.partitions
            sent.append(SentSchemas(decisions, partitions, texts, self.decision_records.headers))
        if stage.passes_on and (texts := self.schemas.records(stage.rekeyed)):
            partitions = self._prepared[stage.rekeyed].partitions
            sent.append(SentSchemas(stage.rekeyed, partitions, texts, lambda _key, _text: {}))
        return SchemaRecords(self.schemas.records(stage.changelog), sent)

    def _joined(self, stage: Stage) -> JoinedTables:
        return JoinedTables(joins=stage.joins, tables=self.tables, topics=self.topics)

    def _all_workers(self) -> Iterator[PeriodicThread]:
        # One for each topic: a topic without a leader delays no other.
        for name, watermarks in (*self.watermarks.items(), *self.table_watermarks.items()):
            yield PeriodicThread(f"watermarks-{name}", _WATERMARKS_EVERY_SECONDS, watermarks.refresh)
        yield PeriodicThread("spark-sampler", _SAMPLE_EVERY_SECONDS, self.spark_sampler.take)
        yield PeriodicThread("progress", _LOOK_EVERY_SECONDS, self._look)
        # Not during the start, which ends with a collection.
        yield PeriodicThread("garbage-collection", _COLLECT_EVERY_SECONDS, collect_garbage, begins_at_once=False)

    def _look(self) -> None:
        self.awake.beat()
        for tasks in self.stages.values():
            tasks.look()

    def _workers_of(self, tasks: Tasks) -> Iterator[PeriodicThread]:
        source, losses = SourceCheck(tasks), LossCheck(tasks)

        def check() -> None:
            source.run_once()
            losses.run_once()

        yield PeriodicThread(f"source-check-{tasks.name}", CHECK_EVERY_SECONDS, check)

    def _release(
        self, topic: str, partitions: Partitions, timeout_seconds: float, *, leaves_views: bool = False
    ) -> None:
        deadline = time.monotonic() + timeout_seconds
        with self._changing:
            leaving = [
                task for tasks in self._reading(topic) for task in tasks.dismiss(partitions, leaves_views=leaves_views)
            ]
        for task in leaving:
            task.close(max(0.0, deadline - time.monotonic()))
        if leaving:
            self.on_change()

    def _reading(self, topic: str) -> list[Tasks]:
        """Returns the stages that read a topic, in all generations."""
        return [tasks for tasks in self.stages.values() if tasks.hosted.source.name == topic]

    def _positions(self, topic: str) -> dict[int, int]:
        """Returns the least position of the tasks of each partition, from which tools compute the group's lag."""
        positions: dict[int, int] = {}
        for tasks in self._reading(topic):
            for partition, position in tasks.positions().items() if self._serves(tasks.hosted) else ():
                positions[partition] = min(position, positions.get(partition, position))
        return positions


def _most_tasks(stages: Sequence[Stage], prepared: Mapping[str, Topic]) -> int:
    """Returns how many tasks and table partitions the only instance of an application has."""
    tables = {join.table.topic for stage in stages for join in stage.joins}
    topics = [*(stage.source for stage in stages), *tables]
    return sum(prepared[topic].partitions for topic in topics)
