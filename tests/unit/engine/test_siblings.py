"""The generations of a partition in one instance: which one sends, whom an opening task fences, and at which rate."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balance_service.engine import siblings as module
from balance_service.engine import task as task_module
from balance_service.engine.dead_letter import Letter
from balance_service.engine.records import SILENT, Position, Role, TaskId
from balance_service.engine.siblings import Siblings
from balance_service.engine.task import Task
from balance_service.errors import RetriableError
from balance_service.model.generations import Comparison, Generations, Switch
from balance_service.read_models.rewards import Rewards
from tests.support.fakes import DECLARED, Clock

if TYPE_CHECKING:
    from collections.abc import Mapping

    from balance_service.engine.hosted_stage import HostedStage
    from balance_service.engine.tasks import Tasks
    from balance_service.errors import BalanceServiceError
    from balance_service.model.read_model import ReadModel
    from balance_service.model.stage import Stage

FIRST = Generations("rewards").begun(DECLARED)
BUILT = FIRST.rebuilt(DECLARED, Switch.NEVER, 60, 100, "", "")
SWITCHED = BUILT.compared(2, Comparison()).switched(2, "", "")


def stage(generation: int, model: ReadModel | None = None) -> Stage:
    return (model or Rewards()).stages[-1].of_generation(generation)


def hosted(generation: int, model: ReadModel | None = None) -> Any:
    letters = SimpleNamespace(first_needed=lambda view: view.needed)
    return SimpleNamespace(
        stage=stage(generation, model),
        settings=None,
        topics=None,
        source=None,
        stands_still="",
        processor=SimpleNamespace(letters=letters),
    )


class Standing(Task):
    """A task that has opened and stands at a position; without one, it has not opened yet."""

    def __init__(self, generation: int, position: Position | None, role: Role = Role.ACTIVE) -> None:
        super().__init__(TaskId(stage(generation).name, 0), cast("HostedStage", None), role)
        if position is not None:
            self.replica.store = cast("Any", SimpleNamespace(position=position))
            self._shown = cast("Any", SimpleNamespace(position=position, needed=position.offset))
        self.told: list[Mapping[int, Letter]] = []

    def follow(self, decided: Mapping[int, Letter]) -> None:
        self.told.append(decided)


def at(offset: int, emitted_up_to: int = 0) -> Position:
    return Position(offset, 1, "id", emitted_up_to=emitted_up_to)


class Here:
    """The tasks of one generation in this instance, by partition."""

    def __init__(self, generation: int, tasks: Mapping[int, Task], model: ReadModel | None = None) -> None:
        self.hosted = hosted(generation, model)
        self.name = self.hosted.stage.name
        self._tasks = tasks

    def task(self, partition: int) -> Task | None:
        return self._tasks.get(partition)


def siblings(now: Generations, *here: Here) -> Siblings:
    made = Siblings(lambda: now)
    for one in here:
        made.add(cast("Tasks", one))
    return made


def test_the_only_generation_does_not_start_silent() -> None:
    assert siblings(FIRST, Here(1, {})).starts_silent(stage(1), 0) is False


@pytest.mark.parametrize(("now", "generation"), [(BUILT, 2), (SWITCHED, 1)])
def test_a_generation_that_does_not_serve_starts_silent_even_if_no_other_one_has_opened(
    now: Generations, generation: int
) -> None:
    assert siblings(now, Here(1, {}), Here(2, {})).starts_silent(stage(generation), 0) is True


@pytest.mark.parametrize(("emitted_up_to", "is_silent"), [(0, True), (9, True), (SILENT, False)])
def test_the_serving_generation_starts_silent_if_another_one_sends(emitted_up_to: int, *, is_silent: bool) -> None:
    old = Here(1, {0: Standing(1, at(5, emitted_up_to))})

    assert siblings(SWITCHED, old, Here(2, {})).starts_silent(stage(2), 0) is is_silent


def test_the_serving_generation_waits_until_the_others_of_its_partition_have_opened() -> None:
    elsewhere = {1: Standing(1, at(5))}
    for tasks in ({}, elsewhere, {0: Standing(1, None)} | elsewhere):
        with pytest.raises(RetriableError, match="rewards_0 must open first: it may send the outputs"):
            siblings(SWITCHED, Here(1, tasks), Here(2, {})).starts_silent(stage(2), 0)


def test_a_task_that_is_closed_says_nothing_about_who_sends() -> None:
    closed = Standing(1, at(5, SILENT))
    closed.give_up()

    with pytest.raises(RetriableError, match="must open first"):
        siblings(SWITCHED, Here(1, {0: closed}), Here(2, {})).starts_silent(stage(2), 0)


def test_a_dropped_generation_is_not_asked() -> None:
    known = siblings(SWITCHED, Here(1, {}), Here(2, {}))

    known.remove(1)

    assert known.starts_silent(stage(2), 0) is False


class Fencing:
    """Writers that note what they fence."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fenced: list[str] = []
        self.closed: list[str] = []
        self.fails_with: BalanceServiceError | None = None
        monkeypatch.setattr(module, "open_writer", self.open)

    def open(self, task_id: TaskId, _settings: object, of: Stage, _topics: object, _source: object) -> Any:
        assert task_id.stage == of.name

        def fence(_should_stop: object) -> None:
            if self.fails_with is not None:
                raise self.fails_with
            self.fenced.append(of.transactional_id(task_id.partition))

        return SimpleNamespace(fence=fence, close=lambda: self.closed.append(of.name))


@pytest.fixture
def fencing(monkeypatch: pytest.MonkeyPatch) -> Fencing:
    return Fencing(monkeypatch)


def fenced_task(generation: int) -> Standing:
    task = Standing(generation, None)
    task._has_fenced = True
    return task


def test_an_opening_task_fences_the_predecessors_of_the_other_generations_lowest_first(fencing: Fencing) -> None:
    here = [Here(3, {}), Here(1, {0: Standing(1, None)}), Here(2, {})]

    siblings(SWITCHED, *here).fence_others(hosted(2), 0, lambda: False)

    assert fencing.fenced == ["-rewards-0", "-rewards.g3-0"]
    assert fencing.closed == ["rewards", "rewards.g3"]


def test_an_opening_task_fences_a_generation_that_is_not_hosted_here_yet(fencing: Fencing) -> None:
    siblings(SWITCHED, Here(1, {})).fence_others(hosted(1), 0, lambda: False)

    assert fencing.fenced == ["-rewards.g2-0"]


def test_a_task_here_that_has_fenced_its_predecessor_is_not_fenced(fencing: Fencing) -> None:
    siblings(SWITCHED, Here(1, {0: fenced_task(1)}), Here(2, {})).fence_others(hosted(2), 0, lambda: False)

    assert fencing.fenced == []


def test_the_successor_of_a_closed_task_may_be_elsewhere(fencing: Fencing) -> None:
    closed = fenced_task(1)
    closed.give_up()

    siblings(SWITCHED, Here(1, {0: closed}), Here(2, {})).fence_others(hosted(2), 0, lambda: False)

    assert fencing.fenced == ["-rewards-0"]


def test_a_writer_that_cannot_fence_is_closed_and_the_task_does_not_open(fencing: Fencing) -> None:
    fencing.fails_with = RetriableError("the coordinator does not respond")

    with pytest.raises(RetriableError, match="does not respond"):
        siblings(SWITCHED, Here(1, {}), Here(2, {})).fence_others(hosted(2), 0, lambda: False)

    assert fencing.closed == ["rewards"]


def test_a_task_that_could_not_fence_its_predecessor_has_not_fenced_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_should_stop: object) -> None:
        raise RetriableError("the coordinator does not respond")

    writer = SimpleNamespace(fence=fail, close=lambda: None)
    monkeypatch.setattr(task_module, "open_writer", lambda *_: writer)
    of = hosted(1)
    of.siblings = siblings(SWITCHED, Here(2, {}))
    task = Task(TaskId("rewards", 0), of)
    owned = Position(0, 1, "id", owner=of.stage.mark)
    task.replica.store = cast("Any", SimpleNamespace(position=owned))

    with pytest.raises(RetriableError, match="does not respond"):
        task._own()

    assert task.has_fenced is False


def test_two_tasks_of_a_partition_do_not_fence_at_once() -> None:
    of = siblings(SWITCHED)

    def try_to_fence(partition: int) -> bool:
        lock = cast("Any", of.fencing(partition))
        got: list[bool] = []
        thread = threading.Thread(target=lambda: got.append(lock.acquire(blocking=False)))
        thread.start()
        thread.join()
        return got[0]

    with of.fencing(0):
        found = try_to_fence(0), try_to_fence(1)

    assert found == (False, True)


DECIDED = {7: Letter(7, "schema-id-unknown", cast("Any", None), 0, 0, -1, None)}


def test_a_decision_is_carried_out_by_the_owners_of_the_other_generations() -> None:
    old, new = Standing(1, at(9)), Standing(2, at(9))
    here = [Here(1, {0: old}), Here(2, {0: new})]

    siblings(SWITCHED, *here).follow(stage(2), 0, DECIDED)

    assert (old.told, new.told) == ([DECIDED], [])


@pytest.mark.parametrize("tasks", [{}, {0: Standing(1, at(9), Role.STANDBY)}, {1: Standing(1, at(9))}])
def test_a_decision_is_not_carried_out_where_the_partition_is_not_owned(tasks: dict[int, Standing]) -> None:
    here = Here(1, tasks)

    siblings(SWITCHED, here, Here(2, {})).follow(stage(2), 0, DECIDED)

    assert [told for task in tasks.values() for told in task.told] == []


def test_a_standby_that_is_promoted_is_told_since_it_may_have_read_the_decisions_already() -> None:
    promoted = fenced_task(1)
    promoted._role = Role.STANDBY

    siblings(SWITCHED, Here(1, {0: promoted}), Here(2, {})).follow(stage(2), 0, DECIDED)

    assert promoted.told == [DECIDED]


def test_no_decision_is_nothing_to_follow() -> None:
    old = Standing(1, at(9))

    siblings(SWITCHED, Here(1, {0: old}), Here(2, {})).follow(stage(2), 0, {})

    assert old.told == []


def test_a_record_is_needed_while_another_generation_may_retry_it() -> None:
    old = Standing(1, at(9))
    cast("Any", old.view).needed = 3

    assert siblings(SWITCHED, Here(1, {0: old}), Here(2, {0: Standing(2, at(9))})).first_needed(stage(2), 0) == 3


def test_records_are_needed_from_the_least_position_of_the_other_generations_on() -> None:
    here = [Here(1, {0: Standing(1, at(9))}), Here(2, {0: Standing(2, at(4)), 1: Standing(2, at(2))})]
    known = siblings(SWITCHED, *here)

    assert [known.first_needed(stage(number), 0) for number in (1, 2, 3)] == [4, 9, 4]


@pytest.mark.parametrize("tasks", [{}, {0: Standing(2, None)}])
def test_every_record_is_needed_while_a_position_is_unknown(tasks: dict[int, Standing]) -> None:
    here = [Here(1, {0: Standing(1, at(9))}), Here(2, tasks)]

    assert siblings(SWITCHED, *here).first_needed(stage(1), 0) == 0


@pytest.mark.parametrize(
    ("position", "limit"), [(Position(7, 1, "id"), 7), (Position(7, 1, "id", emitted_up_to=SILENT), None), (None, 0)]
)
def test_no_generation_goes_beyond_the_sending_one_that_stands_still(
    position: Position | None, limit: int | None
) -> None:
    still = Here(1, {0: Standing(1, position)})
    still.hosted.stands_still = "its class is not here"

    assert siblings(BUILT, still, Here(2, {})).still_at(stage(2), 0) == limit


def test_a_generation_that_is_folded_limits_no_other() -> None:
    assert siblings(BUILT, Here(1, {0: Standing(1, at(7))}), Here(2, {})).still_at(stage(2), 0) is None


def test_the_predecessor_of_a_generation_that_this_instance_leaves_alone_is_fenced_too(fencing: Fencing) -> None:
    siblings(BUILT, Here(1, {})).fence_others(hosted(1), 0, lambda: False)

    assert fencing.fenced == ["-rewards.g2-0"]


def test_every_record_is_needed_by_a_generation_that_is_built_elsewhere() -> None:
    assert siblings(BUILT, Here(1, {0: Standing(1, at(9))})).first_needed(stage(1), 0) == 0


def test_a_lone_generation_needs_no_record_for_others() -> None:
    assert siblings(FIRST, Here(1, {0: Standing(1, at(9))})).first_needed(stage(1), 0) > 10**18


def paced(monkeypatch: pytest.MonkeyPatch, now: Generations) -> tuple[Siblings, Clock]:
    clock = Clock()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock))
    return siblings(now), clock


@pytest.mark.parametrize(("now", "generation"), [(FIRST, 1), (BUILT, 1), (SWITCHED, 1), (SWITCHED, 2)])
def test_only_a_generation_that_is_built_waits(
    monkeypatch: pytest.MonkeyPatch, now: Generations, generation: int
) -> None:
    of, _ = paced(monkeypatch, now)

    assert [of.seconds_after(stage(generation), 10**6) for _ in range(2)] == [0.0, 0.0]


def test_without_a_rate_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    of, _ = paced(monkeypatch, FIRST.rebuilt(DECLARED, Switch.NEVER, 60, None, "", ""))

    assert of.seconds_after(stage(2), 10**6) == 0.0


def test_time_without_events_is_not_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    of, clock = paced(monkeypatch, BUILT)

    first = of.seconds_after(stage(2), 100)
    clock.now += 3_600
    after_a_pause = of.seconds_after(stage(2), 100)

    assert (first, after_a_pause) == (1.0, 1.0)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 1_000)), min_size=1, max_size=20))
def test_the_tasks_of_an_instance_keep_the_rate_together(commits: list[tuple[int, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        of, clock = paced(patch, BUILT)
        free = dict.fromkeys(range(4), clock.now)
        for task, events in commits:
            # The next commit of a task begins after its wait.
            clock.now = max(clock.now, free[task])
            free[task] = clock.now + of.seconds_after(stage(2), events)

    events = sum(events for _, events in commits)
    assert max(free.values()) - 1000.0 >= events / 100 - 1e-6
