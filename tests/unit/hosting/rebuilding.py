"""Instances that rebuild: tasks in a state, an engine that hosts generations of them, and what the directory says."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from balance_service.cluster.directory import ServerTable
from balance_service.engine.records import NEVER, Compared, Position, Role, TaskId, TaskSnapshot
from balance_service.engine.task import ANSWERING, Task, TaskState
from balance_service.hosting.online_rebuilds import Rebuilds
from balance_service.model.generations import Comparison, Generations, Switch
from balance_service.model.versions import Versions
from balance_service.process.runtime import elapsed
from balance_service.read_models.rewards import Rewards
from balance_service.settings import load_settings
from tests.support.fakes import DECLARED, InMemoryTopics

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from balance_service.engine.hosted_stage import HostedStage
    from balance_service.errors import BalanceServiceError


FIRST = Rewards().stages[-1]
BUILT = Generations("rewards").begun(DECLARED).rebuilt(DECLARED, Switch.NEVER, 60, None, "", "")
SWITCHED = BUILT.compared(2, Comparison()).switched(2, "", "")


class Standing(Task):
    """A task in a state, which sends or is silent."""

    def __init__(
        self, generation: int, *, sends: bool, state: TaskState = TaskState.RUNNING, role: Role = Role.ACTIVE
    ) -> None:
        super().__init__(TaskId(FIRST.of_generation(generation).name, 0), cast("HostedStage", None), role)
        self._stands(NEVER)
        self._sends = sends
        self._state = state
        self._shown = cast("Any", object())
        # So that a step compares nothing.
        self.compared = Compared(5, Comparison(), ())
        self.fails_with: BalanceServiceError | None = None
        self.is_given_up = False
        """Whether the failure is one of the write, after the others were fenced."""
        self.inherited = 0

    def inherit(self) -> bool:
        if self.fails_with is not None:
            if self.is_given_up:
                self.give_up()
            raise self.fails_with
        self.inherited += 1
        self._stands(SWITCHED.number)
        self._sends = True
        return True

    def _stands(self, inherited: int) -> None:
        position = Position(5, 1, "id", inherited=inherited)
        self.replica.store = cast("Any", SimpleNamespace(position=position, sizes=None))


class Here:
    """The tasks of a generation in this instance, by partition."""

    def __init__(self, generation: int, *tasks: Task) -> None:
        self.hosted = SimpleNamespace(
            stage=FIRST.of_generation(generation),
            source=SimpleNamespace(name=FIRST.source, partitions=2),
            watermarks=SimpleNamespace(lag=lambda _partition, _position: 0),
            processor=SimpleNamespace(position_codec=None),
        )
        self.name = self.hosted.stage.name
        self.the_tasks = tasks
        self.failures: list[BalanceServiceError] = []

    def task(self, partition: int) -> Task | None:
        return self.the_tasks[partition] if partition < len(self.the_tasks) else None

    @property
    def the_task(self) -> Task:
        return self.the_tasks[0]

    def answering(self) -> dict[int, Task]:
        return {number: task for number, task in enumerate(self.the_tasks) if task.state in ANSWERING}

    def failed(self, _task: Task, error: BalanceServiceError) -> None:
        self.failures.append(error)


class Engine:
    """Hosts generations, and notes which ones are added and removed."""

    def __init__(self, now: Generations, *here: Here) -> None:
        self.now = now
        self.generations = SimpleNamespace(of=lambda _model: self.now, write=self.write, wait=lambda _seconds: None)
        self.versions = Versions([Rewards()], load_settings(), lambda _model: self.now)
        self.settings = SimpleNamespace(num_standby_replicas=0, session_timeout_ms=10_000)
        self.models = {one.hosted.stage.name: one for one in here}
        # Another instance does what is done once.
        self.lease = SimpleNamespace(holds=False)
        for one in here:
            one.hosted.lease = self.lease
        self.changes: list[str] = []
        self.topics: Any = InMemoryTopics()
        for stage in ("rewards", "rewards.g2"):
            self.topics.create(f"balance-service-{stage}-changelog", 2, {})
        self.registry: Any = None

    def read_otherwise(self, _stage: Any) -> list[int]:
        return []

    def add_stage(self, stage: Any) -> None:
        self.changes.append(f"+{stage.name}")
        self.models[stage.name] = Here(stage.generation, Standing(stage.generation, sends=False))

    def remove_stage(self, name: str) -> bool:
        self.changes.append(f"-{name}")
        del self.models[name]
        return True

    def on_change(self) -> None:
        """Publishes nothing."""

    def write(self, _model: str, change: Callable[[Generations], Generations]) -> Generations:
        self.now = change(self.now)
        return self.now


def table_of(tasks: Sequence[TaskSnapshot]) -> ServerTable:
    table = ServerTable(elapsed)
    publish(table, tasks)
    return table


def publish(table: ServerTable, tasks: Sequence[TaskSnapshot]) -> None:
    """Has the only instance publish its tasks."""
    table.hear("a:1", {"incarnation": "i", "models": [], "tasks": [task.record() for task in tasks]}, live=True)


def responsible(engine: Engine, table: ServerTable) -> Rebuilds:
    """The rebuilds of the instance that does what is done once."""
    engine.lease.holds = True
    return Rebuilds(cast("Any", engine), table, Switch.NEVER)


def hosting(now: Generations) -> Engine:
    return Engine(now, Here(1, Standing(1, sends=True)), Here(2, Standing(2, sends=False)))


def running(generation: int, position: int = 5, **more: Any) -> list[TaskSnapshot]:
    """The tasks of a generation, of both partitions."""
    stage = FIRST.of_generation(generation).name
    return [TaskSnapshot(stage, partition, Role.ACTIVE, "RUNNING", 1, position, **more) for partition in range(2)]


def replaced(tasks: list[TaskSnapshot], **changes: Any) -> list[TaskSnapshot]:
    """The tasks, with changes of the last one."""
    return [*tasks[:-1], replace(tasks[-1], **changes)]


class Written(dict[int, str]):
    """The topic that the positions of the changelogs name, by partition."""

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(range(2), "balance-service-rewards.g2-changelog"))
        self.serving_at = 5
        """The position at the ends of the first generation's changelog."""

    def last_positions(self, *of: Any) -> dict[int, Position]:
        offset = 5 if ".g" in of[3] else self.serving_at
        return {p: Position(offset, 1, "id", changelog_topic_id=self[p]) for p in of[4] if p in self}
