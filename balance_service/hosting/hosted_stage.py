"""One stage as an instance hosts it: its tasks, what feeds them, and what it needs to answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from balance_service.avro.schemas import is_shipped, subject_of
from balance_service.engine.fold import Folding
from balance_service.engine.joining import Joining
from balance_service.engine.opening import TaskContext
from balance_service.engine.source_check import SourceCheck
from balance_service.engine.task_state import TaskState
from balance_service.engine.tasks import Tasks
from balance_service.errors import (
    FatalError,
    NotAuthorizedError,
    RetriableError,
    StoreCorruptedError,
    TaskMigratedError,
)
from balance_service.model.read_model import ReadModel
from balance_service.observability.tracing import UNTRACED
from balance_service.spark.decode import Decoder
from balance_service.spark.feed import Feed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from threading import Semaphore

    from opentelemetry.trace import Tracer
    from pyspark.sql import SparkSession

    from balance_service.avro.registry import SchemaRegistry
    from balance_service.engine.letters.decisions import Decisions, Verdict
    from balance_service.engine.store.directory import StateDirectory
    from balance_service.engine.work import Work
    from balance_service.http.routing import Readable
    from balance_service.kafka.topics import Topic, Topics
    from balance_service.kafka.watermarks import Watermarks
    from balance_service.model.event import State
    from balance_service.model.stage import Stage
    from balance_service.observability.metrics import Metrics
    from balance_service.settings import Settings
    from balance_service.spark.rehearsal import Rehearsal


class Shared(Protocol):
    """What the stages of one instance share."""

    settings: Settings
    topics: Topics
    registry: SchemaRegistry
    state_directory: StateDirectory
    spark: SparkSession
    rehearsal: Rehearsal
    metrics: Metrics
    tracer: Tracer
    on_change: Callable[[], None]
    openings: Semaphore


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedStage:
    """A stage, and what works on it; `source` is the topic as it was when the instance started."""

    stage: Stage
    read_model: ReadModel | None
    """None of a stage of retries."""
    work: Work
    source: Topic
    watermarks: Watermarks
    decoder: Decoder
    feed: Feed
    tasks: Tasks
    source_check: SourceCheck

    @property
    def name(self) -> str:
        """The stage's."""
        return self.stage.name

    @property
    def is_last(self) -> bool:
        """Whether it is the one that folds or emits, and has the read model's name."""
        return self.read_model is not None and not self.stage.passes_on

    @property
    def folds(self) -> ReadModel | None:
        """The read model of which it keeps the states; None if it keeps none."""
        return self.work.read_model if isinstance(self.work, Folding) else None

    @property
    def problems(self) -> Sequence[str]:
        """Why some partition is not folded now; empty while all is well."""
        return [problem for problem in (self.feed.problem, self.source_check.problem) if problem]

    def state(self, frame: bytes) -> State:
        """A framed state as a record."""
        return self._folding.state_codec.decode(frame)

    def view(self, frame: bytes) -> Any:
        """What a query answers of a framed state."""
        return self._folding.read_model.told(self.state(frame))

    def number(self, name: str) -> Callable[[bytes], Any]:
        """Framed state → a field of what a query answers of it that is a number, or null."""
        if type(self._folding.read_model).view is ReadModel.view:
            return self._folding.state_codec.number(name)
        return lambda frame: self.view(frame)[name]

    def damaged(self, partition: int, read: Readable, error: StoreCorruptedError) -> None:
        """The store of a partition was found to be damaged while a task was read: it is to be restored.

        Unless another task has taken that one's place: its store is another too.
        """
        task = self.tasks.task(partition)
        if task is not None and task is read:
            self.tasks.failed(task, error)

    def decide(self, partition: int, offsets: Sequence[int], verdict: Verdict) -> Mapping[int, str]:
        """Carry out a decision about dead letters of a partition that is owned here. Takes a commit's time.

        Returns:
            Why it was not, by offset, for those about which it makes no sense.

        Raises:
            BalanceServiceError: it could not be, or nobody knows.
        """
        task = self.tasks.task(partition)
        if task is None:
            raise TaskMigratedError(f"partition {partition} is not here")
        try:
            return task.decide(offsets, verdict)
        except (NotAuthorizedError, RetriableError, StoreCorruptedError) as error:
            self.tasks.failed(task, error)
            raise
        except TaskMigratedError as error:
            # Fenced while nothing is folded: nobody else would notice.
            if task.state is TaskState.RUNNING:
                self.tasks.failed(task, error)
            raise

    def positions(self) -> dict[tuple[str, int], int]:
        """Of the source's partitions of which a task answers."""
        return {
            (self.source.name, task.task_id.partition): task.position
            for task in self.tasks.all()
            if task.view is not None and task.position >= 0
        }

    def learn_schemas(self, registry: SchemaRegistry) -> None:
        """Learn every schema of the source: one that a plan does not know when it comes up costs a new plan.

        Ours are registered, for we write such events. The schemas of others' topics are their producers' to register:
        a version of ours, which may have but some columns, would be the newest there.

        Raises:
            RetriableError: the registry does not answer.
        """
        if not self.stage.schemas:
            return
        topic, schemas = self.stage.written_to, filter(is_shipped, self.stage.schemas.values())
        ours = [registry.register(subject_of(topic, schema), schema) for schema in schemas]
        self.decoder.resolve({*ours, *registry.schema_ids(topic)})

    @property
    def _folding(self) -> Folding:
        if not isinstance(self.work, Folding):
            raise FatalError(f"stage {self.name} has no states, and was asked for one")
        return self.work


def host(
    stage: Stage,
    read_model: ReadModel | None,
    work: Work,
    decisions: Decisions,
    source: Topic,
    watermarks: Watermarks,
    shared: Shared,
) -> HostedStage:
    """Put a stage together; nothing of it runs yet."""
    settings, topics = shared.settings, shared.topics
    decoder = Decoder(shared.spark, read_model, stage, shared.registry, with_traces=shared.tracer is not UNTRACED)
    joined = work.joined if isinstance(work, Joining) else None
    feed = Feed(
        spark=shared.spark,
        scratch=shared.state_directory.scratch,
        rehearsal=shared.rehearsal,
        settings=settings,
        source=source.name,
        read_model=read_model,
        stage=stage,
        decoder=decoder,
        topics=topics,
        known_end=watermarks.end,
        joined=joined,
        metrics=shared.metrics,
        tracer=shared.tracer,
    )
    context = TaskContext(
        settings=settings,
        stage=stage,
        topics=topics,
        source=source,
        work=work,
        decisions=decisions,
        joined=joined,
        state_directory=shared.state_directory,
    )
    tasks = Tasks(stage.name, context, feed, shared.on_change, shared.openings)
    return HostedStage(
        stage=stage,
        read_model=read_model,
        work=work,
        source=source,
        watermarks=watermarks,
        decoder=decoder,
        feed=feed,
        tasks=tasks,
        source_check=SourceCheck(topics, source, tasks, may_drop=stage.retries),
    )
