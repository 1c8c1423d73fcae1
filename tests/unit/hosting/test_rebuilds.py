"""What an instance does for the generations of a read model, step by step."""

from __future__ import annotations

import gc
import re
import time
import weakref
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from balance_service.cluster.directory import SUSPECT_AFTER_SECONDS, PublishedModel, ServerTable
from balance_service.engine.records import NEVER, Compared, Difference, Position, Role, TaskId, TaskSnapshot
from balance_service.engine.task import ANSWERING, Task, TaskState
from balance_service.errors import (
    InvalidInputError,
    NotAuthorizedError,
    RetriableError,
    TaskHaltedError,
    TaskMigratedError,
)
from balance_service.hosting.rebuilds import Rebuilds
from balance_service.kafka.topics import Topic
from balance_service.model.generations import Comparison, Generations, Switch
from balance_service.model.keys import KeyType
from balance_service.model.versions import Versions
from balance_service.process.runtime import elapsed
from balance_service.read_models.balance import Balance
from balance_service.read_models.leaderboard import Leaderboard
from balance_service.read_models.rewards import Rewards
from balance_service.settings import load_settings
from tests.support.fakes import DECLARED, Clock, InMemoryTopics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from balance_service.engine.hosted_stage import HostedStage
    from balance_service.errors import BalanceServiceError

FIRST = Rewards().stages[-1]
BUILT = Generations("rewards").begun(DECLARED).rebuilt(DECLARED, Switch.NEVER, 60, None, "", "")
SWITCHED = BUILT.compared(2, Comparison()).switched(2, "", "")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All instances know at once which generation serves."""
    monkeypatch.setattr("balance_service.hosting.rebuilds._SPREAD_SECONDS", 0.0)


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


def step(engine: Engine, now: Generations) -> None:
    engine.now = now
    Rebuilds(cast("Any", engine), ServerTable(elapsed), Switch.NEVER)._step(now)


def test_a_generation_is_hosted_from_its_rebuild_to_its_drop() -> None:
    engine = Engine(BUILT, Here(1, Standing(1, sends=True)))

    step(engine, BUILT)
    step(engine, BUILT)
    step(engine, BUILT.dropped(2, "", ""))

    assert engine.changes == ["+rewards.g2", "-rewards.g2"]


def test_a_generation_is_dropped_before_the_next_one_needs_its_open_files() -> None:
    engine = Engine(BUILT, Here(1, Standing(1, sends=True)), Here(2, Standing(2, sends=False)))

    step(engine, BUILT.dropped(2, "", "").rebuilt(DECLARED, Switch.NEVER, 60, None, "", ""))

    assert engine.changes == ["-rewards.g2", "+rewards.g3"]


def test_the_serving_generation_takes_the_outputs_over_and_the_former_one_is_opened_again() -> None:
    old, new = Here(1, Standing(1, sends=True)), Here(2, Standing(2, sends=False))

    step(Engine(SWITCHED, old, new), SWITCHED)
    step(Engine(SWITCHED, old, new), SWITCHED)

    assert cast("Standing", new.the_task).inherited == 1
    assert cast("Standing", old.the_task).inherited == 0
    assert [str(error) for error in old.failures] == ["another generation serves"]
    assert new.failures == []


def test_nothing_is_taken_over_before_a_switch() -> None:
    old, new = Here(1, Standing(1, sends=True)), Here(2, Standing(2, sends=False))

    step(Engine(BUILT, old, new), BUILT)

    assert (cast("Standing", new.the_task).inherited, old.failures) == (0, [])


@pytest.mark.parametrize("state", [TaskState.RESTORING, TaskState.WAITING, TaskState.HALTED])
def test_outputs_are_taken_over_only_by_a_task_that_runs(state: TaskState) -> None:
    # One that opens takes them over itself.
    old = Here(1, Standing(1, sends=True))
    new = Here(2, Standing(2, sends=False, state=state))

    step(Engine(SWITCHED, old, new), SWITCHED)

    assert (cast("Standing", new.the_task).inherited, old.failures) == (0, [])


@pytest.mark.parametrize("now", [SWITCHED, SWITCHED.settled()], ids=["within a switch", "after it"])
@pytest.mark.parametrize(
    "old",
    [
        Here(1),
        Here(1, Standing(1, sends=False)),
        *(Here(1, Standing(1, sends=False, state=state)) for state in (TaskState.RESTORING, TaskState.HALTED)),
        Here(1, Standing(1, sends=False, state=TaskState.TAILING, role=Role.STANDBY)),
    ],
    ids=["no task", "runs", "opens", "halted", "standby"],
)
def test_the_serving_generation_begins_to_send_whatever_has_become_of_the_other_one(
    old: Here, now: Generations
) -> None:
    new = Here(2, Standing(2, sends=False))

    step(Engine(now, old, new), now)

    assert (cast("Standing", new.the_task).inherited, new.failures) == (1, [])


def test_the_copy_of_another_generations_owner_elsewhere_is_not_opened_again() -> None:
    old = Here(1, Standing(1, sends=False, state=TaskState.TAILING, role=Role.STANDBY))

    step(Engine(SWITCHED, old, Here(2, Standing(2, sends=False))), SWITCHED)

    # It is not fenced, and follows its owner.
    assert old.failures == []


def test_the_last_generation_begins_to_send_alone() -> None:
    now = SWITCHED.settled().dropped(1, "", "")
    new = Here(2, Standing(2, sends=False))

    step(Engine(now, new), now)

    assert cast("Standing", new.the_task).inherited == 1


@pytest.mark.parametrize("why", [TaskHaltedError("it belongs to another stage"), RetriableError("it is behind")])
def test_a_task_that_still_sends_is_left_alone_if_a_switch_is_refused(why: BalanceServiceError) -> None:
    old, new = Here(1, Standing(1, sends=True)), Here(2, Standing(2, sends=False))
    cast("Standing", new.the_task).fails_with = why

    with pytest.raises(type(why)):
        step(Engine(SWITCHED, old, new), SWITCHED)

    assert (old.failures, new.failures) == ([], [])


def test_a_task_is_opened_again_if_it_is_unknown_whether_it_begins_to_send() -> None:
    old, new = Here(1, Standing(1, sends=True)), Here(2, Standing(2, sends=False))
    task = cast("Standing", new.the_task)
    task.fails_with, task.is_given_up = TaskMigratedError("the task's writer is closed"), True

    with pytest.raises(TaskMigratedError, match="the task's writer is closed"):
        step(Engine(SWITCHED, old, new), SWITCHED)

    told = "it is unknown which generation serves"
    assert ([str(error) for error in new.failures], old.failures) == ([told], [])


def test_a_step_that_fails_keeps_no_store_open() -> None:
    class View:
        """Keeps its store open."""

    views: list[weakref.ref[View]] = []

    class Refused(Standing):
        def inherit(self) -> bool:
            view = View()
            views.append(weakref.ref(view))
            raise RetriableError(f"{self.task_id} is behind")

    old, new = Here(1, Standing(1, sends=True)), Here(2, Refused(2, sends=False))
    gc.disable()
    try:
        with suppress(RetriableError):
            step(Engine(SWITCHED, old, new), SWITCHED)

        assert [view() for view in views] == [None]
    finally:
        gc.enable()


def test_outputs_are_taken_over_once_the_other_instances_have_heard_of_the_switch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("balance_service.hosting.rebuilds._SPREAD_SECONDS", 0.2)
    old, new = Here(1, Standing(1, sends=True)), Here(2, Standing(2, sends=False))
    rebuilds = Rebuilds(cast("Any", Engine(SWITCHED, old, new)), ServerTable(elapsed), Switch.NEVER)

    rebuilds._step(SWITCHED)
    assert cast("Standing", new.the_task).inherited == 0
    time.sleep(0.2)
    rebuilds._step(SWITCHED)

    assert cast("Standing", new.the_task).inherited == 1


def test_a_partition_that_cannot_switch_does_not_keep_the_others_from_it() -> None:
    old = Here(1, Standing(1, sends=True), Standing(1, sends=True))
    new = Here(2, Standing(2, sends=False), Standing(2, sends=False))
    cast("Standing", new.the_tasks[0]).fails_with = RetriableError("it is behind")

    with pytest.raises(RetriableError, match="it is behind"):
        step(Engine(SWITCHED, old, new), SWITCHED)

    assert cast("Standing", new.the_tasks[1]).inherited == 1


def test_an_error_of_a_models_own_code_in_one_partition_does_not_keep_the_others_from_their_step() -> None:
    old = Here(1, Standing(1, sends=True), Standing(1, sends=True))
    new = Here(2, Standing(2, sends=False), Standing(2, sends=False))
    cast("Standing", new.the_tasks[0]).fails_with = cast("Any", ZeroDivisionError())
    engine = Engine(SWITCHED, old, new)
    rebuilds = Rebuilds(cast("Any", engine), ServerTable(elapsed), Switch.NEVER)

    rebuilds._round()

    assert cast("Standing", new.the_tasks[1]).inherited == 1
    told = "a step failed with ZeroDivisionError; the log of the instance has it"
    assert rebuilds.problems == {"rewards": told}
    # Also while no instance is heard.
    status = rebuilds.status("rewards")
    assert status is not None
    assert status.problem == told


@pytest.mark.parametrize(
    ("state", "is_halted", "is_told"), [("HALTED", True, True), ("WAITING", False, True), ("RESTORING", False, False)]
)
def test_a_generation_that_cannot_be_built_says_why_and_where(state: str, *, is_halted: bool, is_told: bool) -> None:
    # One that halts while it opens has no epoch yet.
    stopped = TaskSnapshot("rewards.g2", 1, Role.ACTIVE, state, 0, -1, "the first 3 offsets are gone")
    serving = TaskSnapshot("rewards", 0, Role.ACTIVE, state, 0, -1, "another reason")
    engine = Engine(BUILT, Here(1, Standing(1, sends=True)), Here(2, Standing(2, sends=False)))
    rebuilds = Rebuilds(cast("Any", engine), table_of([serving, stopped]), Switch.NEVER)

    status = rebuilds.status("rewards")

    assert status is not None
    why = f"rewards.g2_1 is {state} at a:1: the first 3 offsets are gone"
    assert [one.halted for one in status.generations][1:] == [why if is_halted else ""]
    assert status.problem == (why if is_told else "")


def buildable(engine: Engine, monkeypatch: pytest.MonkeyPatch, *, free_mib: int) -> Rebuilds:
    """The rebuilds of an instance whose serving stores take 100 MiB, with topics in memory that lose nothing."""
    settings = load_settings()
    engine.settings = cast("Any", settings)
    for name in (FIRST.source, settings.dead_letter_decisions_topic, settings.generations_topic):
        engine.topics.create(name, 2, {})
    task = SimpleNamespace(sizes=SimpleNamespace(store_bytes=50 << 20))
    for here in engine.models.values():
        cast("Any", here).snapshots = lambda: [task, task]
    monkeypatch.setattr("balance_service.engine.database.room_bytes", lambda _path: free_mib << 20)
    monkeypatch.setattr("balance_service.hosting.rebuilds.room_bytes", lambda _path: free_mib << 20)
    return Rebuilds(cast("Any", engine), ServerTable(elapsed), Switch.NEVER)


@pytest.mark.shows("full-disk", "lossy-topics")
def test_a_generation_is_built_only_of_all_events_and_with_room_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(BUILT, Here(1, Standing(1, sends=True)))
    buildable(engine, monkeypatch, free_mib=612).buildable("rewards")

    with pytest.raises(InvalidInputError, match=r"as the one that serves, 100 MiB, and 611 MiB are left.* make room"):
        buildable(engine, monkeypatch, free_mib=611).buildable("rewards")

    lossy = buildable(engine, monkeypatch, free_mib=612)
    engine.topics.configs[FIRST.source]["cleanup.policy"] = "compact"
    with pytest.raises(InvalidInputError, match=r"would be built from what is left: the source topic .* is compacted"):
        lossy.buildable("rewards")


def test_a_new_version_is_built_once_there_is_room_and_the_check_is_made_every_five_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = Generations("rewards").begun(replace(DECLARED, version=0))
    engine, now = Engine(old, Here(1, Standing(1, sends=True))), Clock()
    monkeypatch.setattr("balance_service.hosting.rebuilds.time", SimpleNamespace(monotonic=now))
    rebuilds = buildable(engine, monkeypatch, free_mib=611)
    for _ in range(2):
        with pytest.raises(InvalidInputError, match="make room"):
            rebuilds._upgrade(old)
        # The broker is not asked again.
        monkeypatch.setattr(rebuilds, "buildable", lambda _model: DECLARED)

    now.now += 5
    rebuilds._upgrade(old)

    assert engine.now.building is not None


def test_a_version_that_is_not_begun_because_another_one_is_built_says_so() -> None:
    older = replace(DECLARED, version=0)
    now = Generations("rewards").begun(older).rebuilt(older, Switch.NEVER, 60, None, "", "")

    with pytest.raises(
        RetriableError, match=r"version 1 of 'rewards' is built once generation 2, which is being built"
    ):
        responsible(hosting(now), table_of([]))._upgrade(now)


def test_an_error_is_told_rather_than_what_waits_for_it() -> None:
    engine = Engine(SWITCHED, Here(1, Standing(1, sends=True)), Here(2, Standing(2, sends=False)))
    cast("Standing", engine.models["rewards.g2"].the_task).fails_with = RetriableError("it is behind")

    with pytest.raises(RetriableError, match="it is behind"):
        responsible(engine, table_of([]))._step(SWITCHED)


@pytest.mark.parametrize(
    ("sends_as_of", "state", "is_settled"),
    [
        ((4, 4), "RUNNING", True),
        ((4, NEVER), "RUNNING", False),
        ((4, 0), "RUNNING", False),
        ((4, 3), "RUNNING", False),
        # They have inherited.
        ((4, 4), "WAITING", True),
        ((4, 4), "HALTED", True),
    ],
)
def test_a_switch_is_settled_once_the_owners_of_all_partitions_send_and_know_of_it(
    sends_as_of: tuple[int, int], state: str, *, is_settled: bool
) -> None:
    assert SWITCHED.number == 4
    engine = Engine(SWITCHED, Here(1, Standing(1, sends=False)), Here(2, Standing(2, sends=True)))
    tasks = [
        TaskSnapshot("rewards.g2", partition, Role.ACTIVE, state, 1, 5, sends_as_of=number)
        for partition, number in enumerate(sends_as_of)
    ]

    if is_settled:
        responsible(engine, table_of(tasks))._step(SWITCHED)
    else:
        with pytest.raises(RetriableError, match=r"rewards.g2_\d, which serves, has not taken over yet"):
            responsible(engine, table_of(tasks))._step(SWITCHED)

    assert engine.now.is_settled is is_settled


def table_of(tasks: Sequence[TaskSnapshot]) -> ServerTable:
    table = ServerTable(elapsed)
    publish(table, tasks)
    return table


def publish(table: ServerTable, tasks: Sequence[TaskSnapshot]) -> None:
    """Has the only instance publish its tasks."""
    table.hear("a:1", {"incarnation": "i", "models": [], "tasks": [task.record() for task in tasks]}, live=True)


def published(*found: Comparison | None) -> ServerTable:
    """A directory with the comparison of each partition of the second generation."""
    tasks = [
        TaskSnapshot("rewards.g2", partition, Role.ACTIVE, "RUNNING", 1, 5, comparison=comparison)
        for partition, comparison in enumerate(found)
    ]
    return table_of(tasks)


def responsible(engine: Engine, table: ServerTable) -> Rebuilds:
    """The rebuilds of the instance that does what is done once."""
    engine.lease.holds = True
    return Rebuilds(cast("Any", engine), table, Switch.NEVER)


DROPPED = BUILT.dropped(2, "", "")
MARK = "balance-service\0rewards.g2"


@pytest.fixture(autouse=True)
def owners(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The owners that the positions in dropped changelogs name."""
    owners = {MARK}
    monkeypatch.setattr("balance_service.hosting.rebuilds.owners_of", lambda *_: owners)
    return owners


@pytest.mark.parametrize("other", ["balance\0service-rewards.g2", ""], ids=["another application", "an old record"])
def test_a_changelog_that_another_application_may_use_is_not_deleted(owners: set[str], other: str) -> None:
    engine = Engine(DROPPED, Here(1, Standing(1, sends=True)))
    engine.topics = SimpleNamespace(find=lambda name: Topic(name, "id", 2), delete=pytest.fail)
    rebuilds = responsible(engine, table_of([TaskSnapshot("rewards", 0, Role.ACTIVE, "RUNNING", 1, 5)]))
    owners.add(other)

    with pytest.raises(RetriableError, match=r"is not deleted, because its positions name .* as owner"):
        rebuilds._step(DROPPED)


def test_a_dropped_changelog_is_deleted_once_no_instance_has_a_task_of_it_and_again_after_a_late_one() -> None:
    engine = Engine(DROPPED, Here(1, Standing(1, sends=True)))
    table, deleted, forgotten = ServerTable(elapsed), list[str](), list[str]()
    engine.topics = SimpleNamespace(find=lambda name: Topic(name, "id", 2), delete=deleted.append)
    engine.registry = SimpleNamespace(forget=forgotten.append)
    rebuilds = responsible(engine, table)

    found = []
    for stages in (["rewards.g2"], [], [], ["rewards", "rewards.g2"], ["rewards"]):
        publish(table, [TaskSnapshot(stage, 0, Role.ACTIVE, "RUNNING", 1, 5) for stage in stages])
        rebuilds._step(DROPPED)
        found.append(len(deleted))

    assert found == [0, 1, 1, 1, 2]
    assert {*deleted} == {"balance-service-rewards.g2-changelog"}
    assert forgotten == deleted


def test_a_killed_instance_keeps_a_dropped_changelog_until_the_group_has_given_its_partitions_away() -> None:
    engine, clock, deleted = Engine(DROPPED, Here(1, Standing(1, sends=True))), Clock(), list[str]()
    engine.topics = SimpleNamespace(find=lambda name: Topic(name, "id", 2), delete=deleted.append)
    engine.registry = SimpleNamespace(forget=lambda _name: None)
    table = ServerTable(clock)
    rebuilds = responsible(engine, table)
    for address, stages in (("a:1", ["rewards"]), ("killed:1", ["rewards.g2"])):
        tasks = [TaskSnapshot(stage, 0, Role.ACTIVE, "RUNNING", 1, 5).record() for stage in stages]
        table.hear(address, {"incarnation": "i", "models": [], "tasks": tasks}, live=True)

    clock.now += 10
    rebuilds._step(DROPPED)
    assert deleted == []
    clock.now += 1
    rebuilds._step(DROPPED)

    assert deleted == ["balance-service-rewards.g2-changelog"]


def test_a_changelog_that_a_late_instance_created_again_is_deleted_although_its_task_was_never_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(DROPPED, Here(1, Standing(1, sends=True)))
    topics = {"balance-service-rewards.g2-changelog"}
    engine.topics = SimpleNamespace(
        find=lambda name: Topic(name, "id", 2) if name in topics else None, delete=topics.remove
    )
    engine.registry = SimpleNamespace(forget=lambda _name: None)
    rebuilds = responsible(engine, table_of([TaskSnapshot("rewards", 0, Role.ACTIVE, "RUNNING", 1, 5)]))
    rebuilds._step(DROPPED)
    assert not topics

    topics.add("balance-service-rewards.g2-changelog")
    rebuilds._step(DROPPED)
    assert topics
    monkeypatch.setattr("balance_service.hosting.rebuilds._LOOK_AGAIN_SECONDS", 0.0)
    rebuilds._step(DROPPED)

    assert not topics


def test_a_changelog_that_cannot_be_deleted_is_not_tried_again_at_once() -> None:
    engine = Engine(DROPPED, Here(1, Standing(1, sends=True)))
    tried = list[str]()

    def forget(changelog: str) -> None:
        tried.append(changelog)
        raise NotAuthorizedError("Delete is missing")

    engine.topics = SimpleNamespace(find=lambda name: Topic(name, "id", 2))
    engine.registry = SimpleNamespace(forget=forget)
    rebuilds = responsible(engine, table_of([TaskSnapshot("rewards", 0, Role.ACTIVE, "RUNNING", 1, 5)]))

    for _ in range(3):
        with pytest.raises(NotAuthorizedError):
            rebuilds._step(DROPPED)

    assert len(tried) == 1


class Written(dict[int, str]):
    """The topic that the positions of the changelogs name, by partition."""

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(range(2), "balance-service-rewards.g2-changelog"))
        self.serving_at = 5
        """The position at the ends of the first generation's changelog."""

    def last_positions(self, *of: Any) -> dict[int, Position]:
        offset = 5 if ".g" in of[3] else self.serving_at
        return {p: Position(offset, 1, "id", changelog_topic_id=self[p]) for p in of[4] if p in self}


@pytest.fixture(autouse=True)
def written(monkeypatch: pytest.MonkeyPatch) -> Written:
    written = Written()
    monkeypatch.setattr("balance_service.hosting.rebuilds.last_positions", written.last_positions)
    return written


def hosting(now: Generations) -> Engine:
    return Engine(now, Here(1, Standing(1, sends=True)), Here(2, Standing(2, sends=False)))


@pytest.mark.parametrize("found", [(None, None), (Comparison(2), None), (Comparison(2),)])
def test_a_comparison_counts_once_each_partition_has_one(found: tuple[Comparison | None, ...]) -> None:
    engine = hosting(BUILT)

    responsible(engine, published(*found))._step(BUILT)

    assert engine.now is BUILT


def test_the_comparisons_of_all_partitions_are_added_up() -> None:
    engine = hosting(BUILT)

    responsible(engine, published(Comparison(2, 1), Comparison(3, 0, 1)))._step(BUILT)

    assert engine.now.building is not None
    assert engine.now.comparison == Comparison(5, 1, 1)


def test_a_comparison_waits_for_the_standbys_that_the_running_instances_allow() -> None:
    engine, clock = hosting(BUILT), Clock()
    engine.settings.num_standby_replicas = 1
    table = ServerTable(clock)
    built = [TaskSnapshot("rewards.g2", p, Role.ACTIVE, "RUNNING", 1, 5, comparison=Comparison(2)) for p in range(2)]
    hosted = [PublishedModel(f"rewards{number}", 2, "murmur2").record() for number in ("", ".g2")]
    records = {"a:1": [task.record() for task in built], "b:1": []}
    for address, tasks in records.items():
        table.hear(address, {"incarnation": "i", "models": hosted, "tasks": tasks}, live=True)

    with pytest.raises(RetriableError, match=r"rewards.g2_0 does not have its standbys yet"):
        responsible(engine, table)._step(BUILT)
    assert engine.now is BUILT

    # The other instance has ended.
    clock.now += SUSPECT_AFTER_SECONDS + 1
    table.hear("a:1", {"incarnation": "i", "models": hosted, "tasks": records["a:1"]}, live=True)
    responsible(engine, table)._step(BUILT)
    assert engine.now.comparison == Comparison(4)


def test_a_switch_that_is_refused_fences_no_other_writer() -> None:
    automatic = Generations("rewards").begun(DECLARED).rebuilt(DECLARED, Switch.ALWAYS, 60, None, "", "")
    engine, table = hosting(automatic), published(Comparison(2), Comparison(3))
    without = {**PublishedModel("rewards", 2, "murmur2").record(), "versions": []}
    table.hear("b:1", {"incarnation": "i", "models": [without], "tasks": []}, live=True)
    written = list[str]()
    engine.generations.write = lambda model, _change: written.append(model)

    with pytest.raises(InvalidInputError, match="b:1 without version 1"):
        responsible(engine, table)._step(automatic)

    assert written == []


AUTOMATIC = Generations("rewards").begun(DECLARED).rebuilt(DECLARED, Switch.ALWAYS, 60, None, "", "")
READY = BUILT.compared(2, Comparison(5))
NOT_RUNNING = "; queries for its keys would get 503"
NOT_HERE = "no instance runs rewards.g2_1, so that queries for its keys would get 503"


def running(generation: int, position: int = 5, **more: Any) -> list[TaskSnapshot]:
    """The tasks of a generation, of both partitions."""
    stage = FIRST.of_generation(generation).name
    return [TaskSnapshot(stage, partition, Role.ACTIVE, "RUNNING", 1, position, **more) for partition in range(2)]


def refused_switch(now: Generations, tasks: Sequence[TaskSnapshot], to: int = 2) -> str:
    with pytest.raises(InvalidInputError) as caught:
        Rebuilds(cast("Any", hosting(now)), table_of(tasks), Switch.NEVER).check_switch(now, to, anyway=False)
    why, _, remedy = str(caught.value).partition(". With ")
    assert remedy == f"`anyway` (`--anyway`), generation {to} serves all the same"
    return why


def replaced(tasks: list[TaskSnapshot], **changes: Any) -> list[TaskSnapshot]:
    """The tasks, with changes of the last one."""
    return [*tasks[:-1], replace(tasks[-1], **changes)]


UNFIT: list[tuple[list[TaskSnapshot], str]] = [
    (
        replaced(running(2), state="HALTED", reason="its own code failed"),
        f"rewards.g2_1 is HALTED at a:1: its own code failed{NOT_RUNNING}",
    ),
    (replaced(running(2), state="RESTORING"), f"rewards.g2_1 is RESTORING at a:1{NOT_RUNNING}"),
    (replaced(running(2), state="WAITING"), "rewards.g2_1 is WAITING at a:1; its answers would stand still"),
]
NOT_OPENED: list[tuple[list[TaskSnapshot], str]] = [
    (running(2)[:1], NOT_HERE),
    (replaced(running(2), role="STANDBY"), NOT_HERE),
    (replaced(running(2), state="RESTORING", epoch=0), f"rewards.g2_1 is RESTORING at a:1{NOT_RUNNING}"),
]


@pytest.mark.shows("looks-first")
@pytest.mark.parametrize(("tasks", "why"), [*UNFIT, *NOT_OPENED])
def test_a_switch_to_a_generation_that_is_not_fit_to_serve_is_refused_and_says_what_would_be_lost(
    tasks: list[TaskSnapshot], why: str
) -> None:
    assert refused_switch(READY, tasks) == why
    rebuilds = Rebuilds(cast("Any", hosting(READY)), table_of(tasks), Switch.NEVER)

    assert rebuilds.check_switch(READY, 2, anyway=True) == why


def test_a_switch_back_to_a_generation_that_does_not_run_is_refused_too() -> None:
    halted = replaced(running(1), state="HALTED", reason="its own code failed")

    why = refused_switch(SWITCHED, [*halted, *running(2)], to=1)

    assert why.startswith("rewards_1 is HALTED at a:1: its own code failed")


@pytest.mark.parametrize("state", ["HALTED", "RESTORING", "no task"])
def test_the_serving_generation_may_be_halted_or_gone_and_its_changelog_says_where_it_stood(
    written: Written, state: str
) -> None:
    former = [] if state == "no task" else [replace(task, state=state, epoch=0, position=-1) for task in running(1)]
    rebuilds = Rebuilds(cast("Any", hosting(READY)), table_of([*former, *running(2)]), Switch.NEVER)

    assert rebuilds.check_switch(READY, 2, anyway=False) == ""

    # By as much as the comparison allows.
    written.serving_at = 10_005
    assert rebuilds.check_switch(READY, 2, anyway=False) == ""
    written.serving_at = 60_000
    assert refused_switch(READY, [*former, *running(2)]) == (
        "rewards.g2_0 is 59995 records behind generation 1, and its answers would be; "
        "rewards.g2_1 is 59995 records behind generation 1, and its answers would be"
    )


def test_a_switch_is_refused_until_the_instance_has_heard_of_the_others() -> None:
    rebuilds = Rebuilds(cast("Any", hosting(READY)), ServerTable(elapsed), Switch.NEVER)

    with pytest.raises(RetriableError, match="has not heard of any other yet"):
        rebuilds.check_switch(READY, 2, anyway=True)


def test_a_generation_that_was_not_compared_serves_only_anyway() -> None:
    why = "generation 2 has not been compared with 1 yet"

    assert refused_switch(BUILT, running(2)) == why
    rebuilds = Rebuilds(cast("Any", hosting(BUILT)), table_of(running(2)), Switch.NEVER)
    assert rebuilds.check_switch(BUILT, 2, anyway=True) == why


@pytest.mark.parametrize("last", ["another topic", None])
def test_a_switch_to_a_generation_whose_changelog_is_not_the_one_that_it_wrote_is_refused(
    written: Written, last: str | None
) -> None:
    if last is None:
        del written[1]
    else:
        written[1] = last

    why = refused_switch(READY, running(2))

    assert why.startswith("the changelog 'balance-service-rewards.g2-changelog' was deleted or recreated")


def test_what_no_instance_can_fold_serves_not_even_anyway() -> None:
    table = table_of(running(2))
    without = {**PublishedModel("rewards", 2, "murmur2").record(), "versions": []}
    table.hear("b:1", {"incarnation": "i", "models": [without], "tasks": []}, live=True)

    with pytest.raises(InvalidInputError, match="b:1 without version 1"):
        Rebuilds(cast("Any", hosting(READY)), table, Switch.NEVER).check_switch(READY, 2, anyway=True)


@pytest.mark.shows("looks-first")
@pytest.mark.parametrize("tasks", [tasks for tasks, _ in UNFIT])
def test_a_generation_that_is_not_fit_to_serve_does_not_do_so_by_itself(tasks: list[TaskSnapshot]) -> None:
    engine = hosting(AUTOMATIC)
    compared = [replace(task, comparison=Comparison(5)) for task in tasks]

    with suppress(RetriableError):
        responsible(engine, table_of(compared))._step(AUTOMATIC)

    assert (engine.now.serving, engine.now.comparison) == (1, None)


def of_balance(now: Generations, *, start: int) -> Rebuilds:
    """The rebuilds of an instance, whose source with two partitions begins at an offset now."""
    engine = Engine(now)
    engine.versions = Versions([Balance()], load_settings(), lambda _model: now)
    for number in now.live:
        here, stage = Here(number, Standing(number, sends=False)), engine.versions.stage("balance", number)
        here.hosted.stage, here.hosted.source.name, here.hosted.lease = stage, "balance", engine.lease
        engine.models[stage.name] = here
        engine.topics.create(stage.changelog, 2, {})
    engine.topics.create("balance", 2, {})
    engine.topics.starts["balance"] = start
    engine.lease.holds = True
    tasks = [
        replace(task, stage=f"balance{generation}", comparison=Comparison(5))
        for number, generation in ((1, ""), (2, ".g2"))
        for task in running(number)
    ]
    return Rebuilds(cast("Any", engine), table_of(tasks), Switch.NEVER)


def begun_at(first: int, second: int, switch: Switch = Switch.ALWAYS) -> Generations:
    """Two generations, which began when the source did at these offsets. The second one is built."""
    older, newer = (replace(DECLARED, begins=(offset, offset)) for offset in (first, second))
    return Generations("balance").begun(older).rebuilt(newer, switch, 60, None, "", "")


@pytest.mark.shows("looks-first", "lossy-topics")
@pytest.mark.parametrize("switch", [Switch.ALWAYS, Switch.WHEN_EQUAL])
@pytest.mark.parametrize(("first", "second", "now"), [(0, 500, 500), (0, 0, 500), (300, 500, 500), (300, 300, 500)])
def test_a_generation_that_lacks_first_events_does_not_serve_by_itself_and_says_why(
    written: Written, switch: Switch, first: int, second: int, now: int
) -> None:
    written |= dict.fromkeys(range(2), "balance-service-balance.g2-changelog")
    rebuilds = of_balance(begun_at(first, second, switch), start=now)
    engine = cast("Engine", rebuilds._engine)

    rebuilds._step(engine.now)

    assert (engine.now.serving, engine.now.comparison) == (1, Comparison(10))
    why = (
        f"generation 2 begins at offset 500 of balance-0, and 1 at {first}: what only the events before say is in 1 "
        "alone, and is deleted with it"
    )
    status = rebuilds.status("balance")
    assert status is not None
    assert status.problem == why
    with pytest.raises(InvalidInputError, match=re.escape(why)):
        rebuilds.check_switch(engine.now, 2, anyway=False)
    assert rebuilds.check_switch(engine.now, 2, anyway=True) == why


@pytest.mark.parametrize(("first", "second", "now"), [(0, 0, 0), (500, 500, 500), (500, 500, 300)])
def test_a_generation_whose_history_begins_where_that_of_the_serving_one_does_serves(
    written: Written, first: int, second: int, now: int
) -> None:
    written |= dict.fromkeys(range(2), "balance-service-balance.g2-changelog")
    rebuilds = of_balance(begun_at(first, second), start=now)
    engine = cast("Engine", rebuilds._engine)

    rebuilds._step(engine.now)

    assert engine.now.serving == 2


def test_the_way_back_to_the_generation_with_all_events_is_open_and_the_way_forth_is_not(
    written: Written,
) -> None:
    forth = begun_at(0, 500, Switch.NEVER).compared(2, Comparison(5)).switched(2, "", "")
    written |= dict.fromkeys(range(2), "balance-service-balance-changelog")
    assert of_balance(forth, start=500).check_switch(forth, 1, anyway=False) == ""

    back = forth.switched(1, "", "")
    with pytest.raises(InvalidInputError, match="generation 2 begins at offset 500 of balance-0"):
        of_balance(back, start=500).check_switch(back, 2, anyway=False)


@pytest.mark.shows("lossy-topics")
def test_a_generation_is_not_begun_if_first_events_are_gone_unless_that_is_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = Generations("balance").begun(DECLARED)
    engine = cast("Engine", of_balance(first, start=500)._engine)
    rebuilds = buildable(engine, monkeypatch, free_mib=10_000)

    with pytest.raises(InvalidInputError, match=r"the first 500 offsets of balance-0 are gone.*FINITE_RETENTION"):
        rebuilds.buildable("balance")
    engine.settings = engine.settings.model_copy(update={"allow_finite_retention": True})

    assert rebuilds.buildable("balance").begins == (500, 500)


def test_a_generation_is_not_begun_if_records_between_two_stages_were_purged(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(BUILT, Here(1, Standing(1, sends=True)))
    rebuilds = buildable(engine, monkeypatch, free_mib=10_000)
    engine.settings = engine.settings.model_copy(update={"allow_finite_retention": True})
    engine.topics.starts[FIRST.source] = 500

    with pytest.raises(InvalidInputError, match=r"the first 500 offsets of .* were deleted after.*APPLICATION_ID"):
        rebuilds.buildable("rewards")


def test_differences_name_their_keys_as_queries_do() -> None:
    board, key = Leaderboard(), KeyType("product_id", is_number=True)
    now = Generations("leaderboard").begun(DECLARED).rebuilt(DECLARED, Switch.NEVER, 60, None, "", "")
    engine = Engine(now)
    engine.versions = Versions([board], load_settings(), lambda _model: now)
    compared = Compared(5, Comparison(different=1), (Difference(key.encode(7), {"a": 1}, None),))
    built = SimpleNamespace(hosted=SimpleNamespace(folds=board), all=lambda: [SimpleNamespace(compared=compared)])
    engine.models = {"leaderboard.g2": cast("Any", built)}

    found = Rebuilds(cast("Any", engine), ServerTable(elapsed), Switch.NEVER).differences("leaderboard")

    assert found is not None
    assert [one.record() for one in found] == [{"key": "7", "serving": {"a": 1}, "building": None}]


def test_a_comparison_says_nothing_about_a_generation_that_was_begun_since() -> None:
    engine = hosting(BUILT)
    engine.now = BUILT.dropped(2, "", "").rebuilt(DECLARED, Switch.ALWAYS, 60, None, "", "")

    with suppress(InvalidInputError):
        responsible(engine, published(Comparison(2), Comparison(3)))._step(BUILT)

    assert (engine.now.serving, engine.now.comparison) == (1, None)


def test_another_instance_than_the_owner_of_partition_0_adds_nothing_up() -> None:
    engine = hosting(BUILT)

    Rebuilds(cast("Any", engine), published(Comparison(2), Comparison(3)), Switch.NEVER)._step(BUILT)

    assert engine.now is BUILT


@pytest.mark.parametrize(
    ("max_rate", "behind", "is_compared"),
    [(None, 9_000, True), (1_000, 9_000, False), (1_000, 500, True), (1_000, 501, False), (1, 1, True), (1, 2, False)],
)
def test_a_throttled_generation_is_compared_once_it_can_catch_up_within_seconds(
    monkeypatch: pytest.MonkeyPatch, max_rate: int | None, behind: int, *, is_compared: bool
) -> None:
    compared = []

    def comparing(_serving: object, _building: object, tasks: tuple[Task, Task]) -> Iterator[None]:
        compared.append(tasks)
        while True:
            yield

    monkeypatch.setattr("balance_service.hosting.rebuilds.compare", comparing)
    serving = Standing(1, sends=True), Standing(1, sends=True)
    building = Standing(2, sends=False), Standing(2, sends=False)
    for task in serving:
        task.replica.store = cast(
            "Any", SimpleNamespace(position=Position(5 + behind, 1, "id", inherited=BUILT.number), sizes=None)
        )
    for task in building:
        task.compared = None
    rebuilt = Generations("rewards").begun(DECLARED).rebuilt(DECLARED, Switch.NEVER, 60, max_rate, "", "")

    step(Engine(rebuilt, Here(1, *serving), Here(2, *building)), rebuilt)

    assert bool(compared) is is_compared
