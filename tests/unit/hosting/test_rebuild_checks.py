"""Whether a generation is built and whether it serves: what it would lack, and what says so."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from balance_service.cluster.directory import PublishedModel, ServerTable
from balance_service.errors import (
    InvalidInputError,
    RetriableError,
)
from balance_service.hosting.online_rebuilds import Rebuilds
from balance_service.model.generations import Comparison, Generations, Switch
from balance_service.model.versions import Versions
from balance_service.process.runtime import elapsed
from balance_service.read_models.balance import Balance
from balance_service.settings import load_settings
from tests.support.fakes import DECLARED, Clock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from balance_service.engine.records import TaskSnapshot

from tests.unit.hosting.rebuilding import (
    BUILT,
    FIRST,
    SWITCHED,
    Engine,
    Here,
    Standing,
    Written,
    hosting,
    replaced,
    responsible,
    running,
    table_of,
)

pytestmark = pytest.mark.usefixtures("at_once", "owners", "written")


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
    monkeypatch.setattr("balance_service.hosting.rebuild_checks.room_bytes", lambda _path: free_mib << 20)
    return Rebuilds(cast("Any", engine), ServerTable(elapsed), Switch.NEVER)


@pytest.mark.shows("full-disk", "lossy-topics")
def test_a_generation_is_built_only_of_all_events_and_with_room_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(BUILT, Here(1, Standing(1, sends=True)))
    buildable(engine, monkeypatch, free_mib=612).checks.buildable("rewards")

    with pytest.raises(InvalidInputError, match=r"as the one that serves, 100 MiB, and 611 MiB are left.* make room"):
        buildable(engine, monkeypatch, free_mib=611).checks.buildable("rewards")

    lossy = buildable(engine, monkeypatch, free_mib=612)
    engine.topics.configs[FIRST.source]["cleanup.policy"] = "compact"
    with pytest.raises(InvalidInputError, match=r"would be built from what is left: the source topic .* is compacted"):
        lossy.checks.buildable("rewards")


def test_a_new_version_is_built_once_there_is_room_and_the_check_is_made_every_five_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = Generations("rewards").begun(replace(DECLARED, version=0))
    engine, now = Engine(old, Here(1, Standing(1, sends=True))), Clock()
    monkeypatch.setattr("balance_service.hosting.online_rebuilds.time", SimpleNamespace(monotonic=now))
    rebuilds = buildable(engine, monkeypatch, free_mib=611)
    for _ in range(2):
        with pytest.raises(InvalidInputError, match="make room"):
            rebuilds.step(old)
        # The broker is not asked again.
        monkeypatch.setattr(rebuilds.checks, "buildable", lambda _model: DECLARED)

    now.now += 5
    rebuilds.step(old)

    assert engine.now.building is not None


AUTOMATIC = Generations("rewards").begun(DECLARED).rebuilt(DECLARED, Switch.ALWAYS, 60, None, "", "")
READY = BUILT.compared(2, Comparison(5))
NOT_RUNNING = "; queries for its keys would get 503"
NOT_HERE = "no instance runs rewards.g2_1, so that queries for its keys would get 503"


def refused_switch(now: Generations, tasks: Sequence[TaskSnapshot], to: int = 2) -> str:
    with pytest.raises(InvalidInputError) as caught:
        Rebuilds(cast("Any", hosting(now)), table_of(tasks), Switch.NEVER).checks.check_switch(now, to, anyway=False)
    why, _, remedy = str(caught.value).partition(". With ")
    assert remedy == f"`anyway` (`--anyway`), generation {to} serves all the same"
    return why


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

    assert rebuilds.checks.check_switch(READY, 2, anyway=True) == why


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

    assert rebuilds.checks.check_switch(READY, 2, anyway=False) == ""

    # By as much as the comparison allows.
    written.serving_at = 10_005
    assert rebuilds.checks.check_switch(READY, 2, anyway=False) == ""
    written.serving_at = 60_000
    assert refused_switch(READY, [*former, *running(2)]) == (
        "rewards.g2_0 is 59995 records behind generation 1, and its answers would be; "
        "rewards.g2_1 is 59995 records behind generation 1, and its answers would be"
    )


def test_a_switch_is_refused_until_the_instance_has_heard_of_the_others() -> None:
    rebuilds = Rebuilds(cast("Any", hosting(READY)), ServerTable(elapsed), Switch.NEVER)

    with pytest.raises(RetriableError, match="has not heard of any other yet"):
        rebuilds.checks.check_switch(READY, 2, anyway=True)


def test_a_generation_that_was_not_compared_serves_only_anyway() -> None:
    why = "generation 2 has not been compared with 1 yet"

    assert refused_switch(BUILT, running(2)) == why
    rebuilds = Rebuilds(cast("Any", hosting(BUILT)), table_of(running(2)), Switch.NEVER)
    assert rebuilds.checks.check_switch(BUILT, 2, anyway=True) == why


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
        Rebuilds(cast("Any", hosting(READY)), table, Switch.NEVER).checks.check_switch(READY, 2, anyway=True)


@pytest.mark.shows("looks-first")
@pytest.mark.parametrize("tasks", [tasks for tasks, _ in UNFIT])
def test_a_generation_that_is_not_fit_to_serve_does_not_do_so_by_itself(tasks: list[TaskSnapshot]) -> None:
    engine = hosting(AUTOMATIC)
    compared = [replace(task, comparison=Comparison(5)) for task in tasks]

    with suppress(RetriableError):
        responsible(engine, table_of(compared)).step(AUTOMATIC)

    assert (engine.now.serving, engine.now.comparison) == (1, None)


def of_balance(now: Generations, *, start: int) -> tuple[Engine, Rebuilds]:
    """The engine and the rebuilds of an instance, whose source with two partitions begins at an offset now."""
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
    return engine, Rebuilds(cast("Any", engine), table_of(tasks), Switch.NEVER)


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
    engine, rebuilds = of_balance(begun_at(first, second, switch), start=now)

    rebuilds.step(engine.now)

    assert (engine.now.serving, engine.now.comparison) == (1, Comparison(10))
    why = (
        f"generation 2 begins at offset 500 of balance-0, and 1 at {first}: what only the events before say is in 1 "
        "alone, and is deleted with it"
    )
    status = rebuilds.status("balance")
    assert status is not None
    assert status.problem == why
    with pytest.raises(InvalidInputError, match=re.escape(why)):
        rebuilds.checks.check_switch(engine.now, 2, anyway=False)
    assert rebuilds.checks.check_switch(engine.now, 2, anyway=True) == why


@pytest.mark.parametrize(("first", "second", "now"), [(0, 0, 0), (500, 500, 500), (500, 500, 300)])
def test_a_generation_whose_history_begins_where_that_of_the_serving_one_does_serves(
    written: Written, first: int, second: int, now: int
) -> None:
    written |= dict.fromkeys(range(2), "balance-service-balance.g2-changelog")
    engine, rebuilds = of_balance(begun_at(first, second), start=now)

    rebuilds.step(engine.now)

    assert engine.now.serving == 2


def test_the_way_back_to_the_generation_with_all_events_is_open_and_the_way_forth_is_not(
    written: Written,
) -> None:
    forth = begun_at(0, 500, Switch.NEVER).compared(2, Comparison(5)).switched(2, "", "")
    written |= dict.fromkeys(range(2), "balance-service-balance-changelog")
    assert of_balance(forth, start=500)[1].checks.check_switch(forth, 1, anyway=False) == ""

    back = forth.switched(1, "", "")
    with pytest.raises(InvalidInputError, match="generation 2 begins at offset 500 of balance-0"):
        of_balance(back, start=500)[1].checks.check_switch(back, 2, anyway=False)


@pytest.mark.shows("lossy-topics")
def test_a_generation_is_not_begun_if_first_events_are_gone_unless_that_is_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = Generations("balance").begun(DECLARED)
    engine, _ = of_balance(first, start=500)
    rebuilds = buildable(engine, monkeypatch, free_mib=10_000)

    with pytest.raises(InvalidInputError, match=r"the first 500 offsets of balance-0 are gone.*FINITE_RETENTION"):
        rebuilds.checks.buildable("balance")
    engine.settings = engine.settings.model_copy(update={"allow_finite_retention": True})

    assert rebuilds.checks.buildable("balance").begins == (500, 500)


def test_a_generation_is_not_begun_if_records_between_two_stages_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(BUILT, Here(1, Standing(1, sends=True)))
    rebuilds = buildable(engine, monkeypatch, free_mib=10_000)
    engine.settings = engine.settings.model_copy(update={"allow_finite_retention": True})
    engine.topics.starts[FIRST.source] = 500

    with pytest.raises(
        InvalidInputError, match=r"the first 500 offsets of .* are gone, and are not made.*APPLICATION_ID"
    ):
        rebuilds.checks.buildable("rewards")
