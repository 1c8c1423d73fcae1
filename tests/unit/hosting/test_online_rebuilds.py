"""The steps of an instance for the generations of a read model."""

from __future__ import annotations

import time
import weakref
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from balance_service.cluster.directory import SUSPECT_AFTER_SECONDS, PublishedModel, ServerTable
from balance_service.engine.records import NEVER, Compared, Difference, Position, Role, TaskSnapshot
from balance_service.engine.task import Task, TaskState
from balance_service.errors import (
    InvalidInputError,
    RetriableError,
    TaskHaltedError,
    TaskMigratedError,
)
from balance_service.hosting.online_rebuilds import Rebuilds
from balance_service.model.generations import Comparison, Generations, Switch
from balance_service.model.keys import ColumnKey
from balance_service.model.versions import Versions
from balance_service.process.runtime import elapsed
from balance_service.read_models.leaderboard import Leaderboard
from balance_service.settings import load_settings
from tests.support.collector import no_collector
from tests.support.fakes import DECLARED, Clock

if TYPE_CHECKING:
    from collections.abc import Iterator

    from balance_service.errors import BalanceServiceError
from tests.unit.hosting.rebuilding import BUILT, SWITCHED, Engine, Here, Standing, hosting, responsible, table_of

pytestmark = pytest.mark.usefixtures("at_once", "owners", "written")


def step(engine: Engine, now: Generations) -> None:
    engine.now = now
    Rebuilds(cast("Any", engine), ServerTable(elapsed), Switch.NEVER).step(now)


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
    with no_collector():
        with suppress(RetriableError):
            step(Engine(SWITCHED, old, new), SWITCHED)

        assert [view() for view in views] == [None]


def test_outputs_are_taken_over_once_the_other_instances_have_heard_of_the_switch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("balance_service.hosting.online_rebuilds._SPREAD_SECONDS", 0.2)
    old, new = Here(1, Standing(1, sends=True)), Here(2, Standing(2, sends=False))
    rebuilds = Rebuilds(cast("Any", Engine(SWITCHED, old, new)), ServerTable(elapsed), Switch.NEVER)

    rebuilds.step(SWITCHED)
    assert cast("Standing", new.the_task).inherited == 0
    time.sleep(0.2)
    rebuilds.step(SWITCHED)

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
    # Also while the directory is silent.
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


def test_a_version_that_is_not_begun_because_another_one_is_built_says_so() -> None:
    older = replace(DECLARED, version=0)
    now = Generations("rewards").begun(older).rebuilt(older, Switch.NEVER, 60, None, "", "")

    with pytest.raises(
        RetriableError, match=r"version 1 of 'rewards' is built once generation 2, which is being built"
    ):
        responsible(hosting(now), table_of([])).step(now)


def test_an_error_takes_precedence_over_what_waits_for_it() -> None:
    engine = Engine(SWITCHED, Here(1, Standing(1, sends=True)), Here(2, Standing(2, sends=False)))
    cast("Standing", engine.models["rewards.g2"].the_task).fails_with = RetriableError("it is behind")

    with pytest.raises(RetriableError, match="it is behind"):
        responsible(engine, table_of([])).step(SWITCHED)


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
        responsible(engine, table_of(tasks)).step(SWITCHED)
    else:
        with pytest.raises(RetriableError, match=r"rewards.g2_\d, which serves, has not taken over yet"):
            responsible(engine, table_of(tasks)).step(SWITCHED)

    assert engine.now.is_settled is is_settled


def published(*found: Comparison | None) -> ServerTable:
    """A directory with the comparison of each partition of the second generation."""
    tasks = [
        TaskSnapshot("rewards.g2", partition, Role.ACTIVE, "RUNNING", 1, 5, comparison=comparison)
        for partition, comparison in enumerate(found)
    ]
    return table_of(tasks)


@pytest.mark.parametrize("found", [(None, None), (Comparison(2), None), (Comparison(2),)])
def test_a_comparison_counts_once_each_partition_has_one(found: tuple[Comparison | None, ...]) -> None:
    engine = hosting(BUILT)

    responsible(engine, published(*found)).step(BUILT)

    assert engine.now is BUILT


def test_the_comparisons_of_all_partitions_are_added_up() -> None:
    engine = hosting(BUILT)

    responsible(engine, published(Comparison(2, 1), Comparison(3, 0, 1))).step(BUILT)

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
        responsible(engine, table).step(BUILT)
    assert engine.now is BUILT

    # The other instance has ended.
    clock.now += SUSPECT_AFTER_SECONDS + 1
    table.hear("a:1", {"incarnation": "i", "models": hosted, "tasks": records["a:1"]}, live=True)
    responsible(engine, table).step(BUILT)
    assert engine.now.comparison == Comparison(4)


def test_a_switch_that_is_refused_fences_no_other_writer() -> None:
    automatic = Generations("rewards").begun(DECLARED).rebuilt(DECLARED, Switch.ALWAYS, 60, None, "", "")
    engine, table = hosting(automatic), published(Comparison(2), Comparison(3))
    without = {**PublishedModel("rewards", 2, "murmur2").record(), "versions": []}
    table.hear("b:1", {"incarnation": "i", "models": [without], "tasks": []}, live=True)
    written = list[str]()
    engine.generations.write = lambda model, _change: written.append(model)

    with pytest.raises(InvalidInputError, match="b:1 without version 1"):
        responsible(engine, table).step(automatic)

    assert written == []


def test_differences_name_their_keys_as_queries_do() -> None:
    board, key = Leaderboard(), ColumnKey("product_id", is_number=True)
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
        responsible(engine, published(Comparison(2), Comparison(3))).step(BUILT)

    assert (engine.now.serving, engine.now.comparison) == (1, None)


def test_another_instance_than_the_owner_of_partition_0_adds_nothing_up() -> None:
    engine = hosting(BUILT)

    Rebuilds(cast("Any", engine), published(Comparison(2), Comparison(3)), Switch.NEVER).step(BUILT)

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

    monkeypatch.setattr("balance_service.hosting.online_rebuilds.compare", comparing)
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


def test_a_comparison_ends_while_the_generation_that_is_built_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = [], []

    def comparing(*_: object) -> Iterator[None]:
        begun.append(1)
        try:
            while True:
                yield
        finally:
            ended.append(1)

    monkeypatch.setattr("balance_service.hosting.online_rebuilds.compare", comparing)
    engine = hosting(BUILT)
    building = engine.models["rewards.g2"].the_tasks[0]
    building.compared = None
    rebuilds = Rebuilds(cast("Any", engine), ServerTable(elapsed), Switch.NEVER)

    rebuilds.step(BUILT)
    assert (len(begun), len(ended)) == (1, 0)
    building._state = TaskState.WAITING
    with no_collector():
        rebuilds.step(BUILT)
    assert (len(begun), len(ended)) == (1, 1)
    building._state = TaskState.RUNNING
    rebuilds.step(BUILT)
    assert (len(begun), len(ended)) == (2, 1)
