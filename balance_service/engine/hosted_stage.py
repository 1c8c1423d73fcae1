"""A stage of a read model in this instance."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from balance_service.engine.fold import FoldProcessor
from balance_service.engine.progress import Progress
from balance_service.engine.schema_records import NO_SCHEMAS
from balance_service.errors import FatalError
from balance_service.kafka.partitioner import Partitioning
from balance_service.model.keys import TEXT
from balance_service.model.read_model import ReadModel

if TYPE_CHECKING:
    from collections.abc import Callable

    from balance_service.engine.decisions import DecisionLog
    from balance_service.engine.hosted_generations import HostedGenerations
    from balance_service.engine.processor import StageProcessor
    from balance_service.engine.schema_records import SchemaRecords
    from balance_service.engine.state_directory import StateDirectory
    from balance_service.engine.tables import JoinedTables
    from balance_service.kafka.lease import Lease
    from balance_service.kafka.topics import Topic, Topics, Watermarks
    from balance_service.model.events import State
    from balance_service.model.keys import KeyType
    from balance_service.model.stage import Stage
    from balance_service.model.stream import Partitioner
    from balance_service.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedStage:
    """A declared stage with the topics, codecs and settings that its tasks share in this instance.

    `read_model` is None for a stage of retries, `joined` for a stage that joins with no table. `source` is the topic as
    it was when the instance started, and `lease` that of this instance on its partitions.
    """

    stage: Stage
    read_model: ReadModel | None
    settings: Settings
    topics: Topics
    source: Topic
    lease: Lease
    watermarks: Watermarks
    processor: StageProcessor
    decisions: DecisionLog
    state_directory: StateDirectory
    generations: HostedGenerations
    joined: JoinedTables | None = None
    schemas: SchemaRecords = NO_SCHEMAS
    stands_still: str = ""
    """Why the stage's tasks answer and fold nothing; empty if they fold."""
    progress: Progress = field(default_factory=Progress)

    @property
    def name(self) -> str:
        return self.stage.name

    @property
    def is_last(self) -> bool:
        """Whether the stage folds or emits. It has the name of its read model then."""
        return self.read_model is not None and not self.stage.passes_on

    @property
    def key_type(self) -> KeyType:
        """The type of the states' keys; text without states."""
        return TEXT if self.folds is None else self.folds.key_type

    @property
    def partitioning(self) -> Partitioning:
        """Where the source's keys are."""
        return Partitioning(self.source.partitions, self.partitioner, self.stage.key_format)

    @property
    def partitioner(self) -> Partitioner:
        """The function that places the keys of the stage's states.

        A stage without states looks for no key. It has always the same, so that the source's may change.
        """
        return "murmur2" if self.folds is None else self.stage.partitioner

    @property
    def misplaced(self) -> str:
        """A sentence about keys that lie on other partitions than the partitioner says; empty if there are none."""
        return self.processor.misplaced.problem if isinstance(self.processor, FoldProcessor) else ""

    @property
    def folds(self) -> ReadModel | None:
        """The read model whose states the stage keeps, or None if it keeps none."""
        return self.processor.read_model if isinstance(self.processor, FoldProcessor) else None

    def state(self, frame: bytes) -> State:
        return self._folding.frames.codec.decode(frame)

    @property
    def answers_when_halted(self) -> bool:
        """As the read model declares it. A stage without states answers nothing."""
        return self.folds is not None and self.folds.answers_when_halted

    def view(self, frame: bytes) -> Any:
        """Returns what a query answers for a framed state."""
        return self._folding.read_model.view_of(self.state(frame))

    def number(self, name: str) -> Callable[[bytes], Any]:
        """Returns a function from a framed state to a numeric field of its view, which may be null."""
        if type(self._folding.read_model).view is ReadModel.view:
            return self._folding.frames.codec.number(name)
        return lambda frame: self.view(frame)[name]

    @property
    def _folding(self) -> FoldProcessor:
        if not isinstance(self.processor, FoldProcessor):
            raise FatalError(f"stage {self.name} has no states, and was asked for one")
        return self.processor
