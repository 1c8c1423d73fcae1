"""A replica answers only while it is exactly as a commit of the owner left it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import structlog

from balance_service.engine.changelog_reader import Part
from balance_service.engine.completeness import Completeness
from balance_service.engine.records import Role, StoreSizes, TaskId
from balance_service.engine.replica import Replica
from balance_service.engine.task import Task, TaskState
from balance_service.errors import RetriableError, StoreCorruptedError
from tests.support.fakes import Clock

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from balance_service.engine.hosted_stage import HostedStage

TASK = TaskId("balance", 0)


def up_to(changelog_offset: int, *, is_whole: bool = True) -> Part:
    return Part([], changelog_offset, is_whole)


def replica_of(context: Any = None) -> Replica:
    return Replica(TASK, cast("HostedStage", context), structlog.get_logger())


class Reading:
    """A replica with given parts; records the state of its task when each part is applied."""

    def __init__(self) -> None:
        self.store: Any = SimpleNamespace(view="a view", position=None, loading=None)
        self.restoration = SimpleNamespace(restored=0)
        self.is_complete = False
        self.parts: list[Part] = []
        self.applied_while: list[TaskState] = []
        self.task: Any = None

    def tail(self) -> Iterator[Part]:
        yield from self.parts
        self.parts = []

    def close(self) -> None: ...

    def passed(self, part: Part) -> bool:
        return part.is_whole

    def apply(self, _part: Part) -> None:
        self.applied_while.append(self.task.state)


class SlowReader:
    """A changelog reader whose replay takes some time and yields whole commits."""

    is_whole = True
    whole_up_to = 8
    met_end = True

    def __init__(self, clock: Clock, seconds: int) -> None:
        self._clock = clock
        self._seconds = seconds

    def replay(self, *_: object, **__: object) -> Sequence[Part]:
        self._clock.now += self._seconds
        return ()

    def tail(self) -> Sequence[Part]:
        return ()


@pytest.fixture
def reading() -> Reading:
    return Reading()


@pytest.fixture
def standby(reading: Reading) -> Task:
    task = Task(TASK, cast("HostedStage", None))
    task.replica = cast("Replica", reading)
    reading.task = task
    task._to(TaskState.RESTORING)
    return task


def test_a_replica_is_complete_only_at_a_position_record_and_if_it_missed_nothing() -> None:
    clock, replica = Clock(), replica_of()
    replica.completeness = Completeness(lambda: 0, clock)
    before = replica.passed(up_to(5))
    replica.completeness.met_end()
    part, whole = replica.passed(up_to(6, is_whole=False)), replica.passed(up_to(7))
    clock.now += 600

    assert (before, part, whole, replica.passed(up_to(8))) == (False, False, True, False)


def test_records_read_after_an_hour_without_the_changelog_are_not_applied() -> None:
    clock, replica = Clock(), replica_of()
    replica.completeness = Completeness(lambda: 7, clock)
    replica.completeness.met_end()
    clock.now += 3_601
    replica.completeness.look()

    with pytest.raises(RetriableError, match="tombstones may be gone"):
        replica.passed(up_to(7))


def test_a_store_that_reaches_beyond_the_changelogs_end_is_rejected() -> None:
    topics = SimpleNamespace(offsets=lambda *_, **__: {0: 8})
    replica = replica_of(SimpleNamespace(topics=topics, stage=SimpleNamespace(changelog="changelog")))
    replica.store = cast("Any", SimpleNamespace(changelog_offset=5, written_up_to=9))
    replica._reader = cast("Any", object())

    with pytest.raises(StoreCorruptedError, match="beyond the changelog's end 8"):
        [*replica.catch_up(lambda: False, is_fenced=True, answers=False)]


def test_a_standby_that_read_part_of_a_commit_does_not_answer_until_it_has_read_the_rest(
    standby: Task, reading: Reading
) -> None:
    standby._to(TaskState.TAILING)
    answers = [standby.view is not None]
    for is_whole in (True, False):
        reading.parts = [up_to(5, is_whole=is_whole)]
        standby.tail()
        answers.append(standby.view is not None)
    reading.is_complete = True
    standby.tail()

    assert answers == [True, True, False]
    # The task also stops answering before the part is written to the store.
    assert reading.applied_while == [TaskState.TAILING, TaskState.RESTORING]
    assert (standby.state, str(standby.view)) == (TaskState.TAILING, "a view")


@pytest.mark.parametrize(("seconds", "answers"), [(599, True), (600, False)])
def test_a_standby_that_restored_for_ten_minutes_answers_only_after_it_reached_the_end(
    monkeypatch: pytest.MonkeyPatch, seconds: int, answers: bool
) -> None:
    clock, task = Clock(), Task(TASK, cast("HostedStage", None), Role.STANDBY, "the one before failed")
    topics = SimpleNamespace(offsets=lambda *_, **__: {0: 8})
    replica = replica_of(SimpleNamespace(topics=topics, stage=SimpleNamespace(changelog="changelog")))
    replica.completeness = Completeness(replica._end, clock)
    replica.store = cast(
        "Any",
        SimpleNamespace(
            changelog_offset=5, written_up_to=5, position=None, loading=None, view="a view", sizes=StoreSizes()
        ),
    )
    replica._reader = cast("Any", SlowReader(clock, seconds))
    monkeypatch.setattr(replica, "find", lambda: None)
    monkeypatch.setattr(replica, "open", lambda *_, **__: None)
    task.replica = replica
    task.open()
    opened = task.view is not None
    task.tail()

    assert (opened, task.state, str(task.view)) == (answers, TaskState.TAILING, "a view")
    assert task.snapshot().reason == ""


def test_a_standby_does_not_answer_from_a_part_of_the_files() -> None:
    replica = replica_of()
    replica.completeness.met_end()
    replica._reader = cast("Any", SimpleNamespace(is_whole=True))
    found = []
    for loading in (object(), None):
        replica.store = cast("Any", SimpleNamespace(loading=loading))
        found.append(replica.is_complete)

    assert found == [False, True]


def test_a_tailing_standby_stops_to_answer_when_its_owner_begins_to_load(standby: Task, reading: Reading) -> None:
    standby._to(TaskState.TAILING)
    assert standby.view is not None
    reading.store = SimpleNamespace(view="a part", position=None, loading=object())
    reading.parts = [up_to(8)]

    standby.tail()

    assert [standby.state, standby.view] == [TaskState.RESTORING, None]


def test_a_restoring_standby_answers_only_when_it_is_complete(standby: Task, reading: Reading) -> None:
    standby.tail()
    before = standby.state
    reading.is_complete = True
    standby.tail()

    assert (before, standby.state) == (TaskState.RESTORING, TaskState.TAILING)
