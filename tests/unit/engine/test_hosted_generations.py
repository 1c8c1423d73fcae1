"""The generations of a partition in one instance: which one serves, which one sends, and what they tell each other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from balance_service.engine.dead_letter import Letter
from balance_service.engine.hosted_generations import HostedGenerations
from balance_service.engine.records import Position, Role, TaskId
from balance_service.engine.store import offset_of
from balance_service.engine.task import Task, TaskState
from balance_service.errors import RetriableError
from balance_service.model.generations import Comparison, Generations, Switch
from balance_service.read_models.rewards import Rewards
from tests.support.fakes import DECLARED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from balance_service.engine.hosted_stage import HostedStage
    from balance_service.model.stage import Stage

FIRST = Generations("rewards").begun(DECLARED)
BUILT = FIRST.rebuilt(DECLARED, Switch.NEVER, 60, 100, "", "")
SWITCHED = BUILT.compared(2, Comparison()).switched(2, "", "")


def stage(generation: int) -> Stage:
    return Rewards().stages[-1].of_generation(generation)


class Standing(Task):
    """A task that has opened and stands at a position; without one, it has not opened yet."""

    def __init__(
        self, generation: int, position: Position | None, role: Role = Role.ACTIVE, *, sends: bool = False
    ) -> None:
        super().__init__(TaskId(stage(generation).name, 0), cast("HostedStage", None), role)
        if position is not None:
            view = SimpleNamespace(position=position, needed=position.offset)
            self.replica.store = cast("Any", SimpleNamespace(position=position, view=view))
            self._shown = cast("Any", view)
        self._sends = sends

    @property
    def told(self) -> list[Mapping[int, Letter]]:
        return [*self._following._told]


def at(offset: int) -> Position:
    return Position(offset, 1, "id")


class Here:
    """The tasks of one generation in this instance, by partition."""

    def __init__(self, generation: int, tasks: Mapping[int, Standing]) -> None:
        self.generation = generation
        self._tasks = tasks

    def task(self, partition: int) -> Standing | None:
        return self._tasks.get(partition)


def hosted(now: Generations, *here: Here) -> HostedGenerations:
    made = HostedGenerations(lambda: now)
    for one in here:
        made.add(one.generation, one)
    return made


@pytest.mark.parametrize(
    ("now", "since"), [(FIRST, (0, None)), (BUILT, (0, None)), (SWITCHED, (None, SWITCHED.number))]
)
def test_one_generation_serves_and_since_the_record_that_says_so(
    now: Generations, since: tuple[int | None, int | None]
) -> None:
    of = hosted(now)

    assert (of.serves_since(stage(1)), of.serves_since(stage(2))) == since
    assert (of.serves(stage(1)), of.serves(stage(2))) == (since[0] is not None, since[1] is not None)


def test_a_generation_serves_since_the_last_switch_to_it_and_not_since_a_later_record() -> None:
    back = SWITCHED.settled().switched(1, "", "")

    assert hosted(back.settled()).serves_since(stage(1)) == back.number


def test_a_switch_that_an_instance_has_not_heard_of_counts_if_the_topic_is_read_to_its_end() -> None:
    of = HostedGenerations(lambda: BUILT, lambda: SWITCHED)

    assert (of.serves_since(stage(1)), of.serves_since(stage(1), newest=True)) == (0, None)
    assert (of.serves_since(stage(2)), of.serves_since(stage(2), newest=True)) == (None, SWITCHED.number)


def test_it_is_unknown_who_serves_while_the_topic_cannot_be_read() -> None:
    def fail() -> Generations:
        raise RetriableError("the broker does not respond")

    of = HostedGenerations(lambda: BUILT, fail)

    assert of.serves_since(stage(1)) == 0
    with pytest.raises(RetriableError, match="does not respond"):
        of.serves_since(stage(1), newest=True)


def numbers(of: HostedGenerations, generation: int) -> list[int]:
    return [other.generation for other in of.others(stage(generation))]


def test_the_other_generations_are_those_that_have_a_changelog_hosted_here_or_not() -> None:
    replaced = SWITCHED.replaced(DECLARED)

    assert (numbers(hosted(FIRST), 1), numbers(hosted(BUILT), 1), numbers(hosted(BUILT), 2)) == (
        [],
        [2],
        [1],
    )
    # Those that an offline rebuild replaced, until the new one has taken over.
    assert (numbers(hosted(replaced), 3), numbers(hosted(replaced.settled()), 3)) == ([1, 2], [])
    assert [other.changelog for other in hosted(BUILT).others(stage(1))] == [stage(2).changelog]


@pytest.mark.parametrize("has_halted", [False, True])
def test_the_sender_is_the_other_generation_that_sends_even_if_it_has_halted(*, has_halted: bool) -> None:
    old, new = Standing(1, at(9), sends=True), Standing(2, at(4))
    of = hosted(BUILT, Here(1, {0: old}), Here(2, {0: new}))
    if has_halted:
        old._state = TaskState.RUNNING
        old.halt("its code fails")

    view = of.sender(stage(2), 0)

    assert view is not None
    assert offset_of(view) == 9
    # None is elsewhere, and none sends in place of the one that does.
    assert (of.sender(stage(2), 1), of.sender(stage(1), 0)) == (None, None)


def test_a_task_that_is_closed_sends_no_more() -> None:
    old = Standing(1, at(9), sends=True)
    of = hosted(BUILT, Here(1, {0: old}))

    old.give_up()

    assert of.sender(stage(2), 0) is None


def test_a_generation_that_is_removed_is_not_asked() -> None:
    of = hosted(BUILT, Here(1, {0: Standing(1, at(9), sends=True)}))

    of.remove(1)

    assert of.sender(stage(2), 0) is None


DECIDED = {7: Letter(7, "schema-id-unknown", cast("Any", None), 0, 0, -1, None)}


def test_a_decision_is_carried_out_by_the_owners_of_the_other_generations() -> None:
    old, new = Standing(1, at(9)), Standing(2, at(9))
    here = [Here(1, {0: old}), Here(2, {0: new})]

    hosted(SWITCHED, *here).follow(stage(2), 0, DECIDED)

    assert (old.told, new.told) == ([DECIDED], [])


@pytest.mark.parametrize("tasks", [{}, {0: Standing(1, at(9), Role.STANDBY)}, {1: Standing(1, at(9))}])
def test_a_decision_is_not_carried_out_where_the_partition_is_not_owned(tasks: dict[int, Standing]) -> None:
    here = Here(1, tasks)

    hosted(SWITCHED, here, Here(2, {})).follow(stage(2), 0, DECIDED)

    assert [told for task in tasks.values() for told in task.told] == []


def test_a_standby_that_is_promoted_is_notified_since_it_may_have_read_the_decisions_already() -> None:
    promoted = Standing(1, None, Role.STANDBY)
    promoted._has_fenced = True

    hosted(SWITCHED, Here(1, {0: promoted}), Here(2, {})).follow(stage(2), 0, DECIDED)

    assert promoted.told == [DECIDED]


def test_no_decision_is_nothing_to_follow() -> None:
    old = Standing(1, at(9))

    hosted(SWITCHED, Here(1, {0: old}), Here(2, {})).follow(stage(2), 0, {})

    assert old.told == []
