"""A rebuild's replay, while the group, the broker or Spark do what they may; no Kafka."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from balance_service.engine.records import TaskId
from balance_service.errors import ConfigurationError, FatalError
from balance_service.hosting import offline_rebuild
from balance_service.hosting.engine import StartupRetries
from balance_service.hosting.offline_rebuild import replay
from balance_service.model.generations import Generations, Switch
from balance_service.process.runtime import thread_failures
from tests.support.fakes import DECLARED

if TYPE_CHECKING:
    from collections.abc import Sequence

END = 10


class Fakes:
    """An engine with a task: it has the given looks one after the other, and keeps the last."""

    def __init__(self, *looks: tuple[frozenset[int], int], members: int = 1) -> None:
        """Args:
        looks: the partitions that are assigned, and the task's position.
        """
        self.looks = list(looks)
        self.started = threading.Event()
        joined = threading.Event()
        joined.set()
        fakes = self

        class Membership:
            @property
            def joined(self) -> threading.Event:
                return joined

            @property
            def partitions(self) -> frozenset[int]:
                if len(fakes.looks) > 1:
                    fakes.looks.pop(0)
                return fakes.looks[0][0]

        topics = SimpleNamespace(offsets=lambda *_: {0: END}, group_members=lambda: members)
        memberships = SimpleNamespace(of={"t": Membership()})
        self.engine: Any = SimpleNamespace(topics=topics, memberships=memberships, start=self.started.set)
        tasks = SimpleNamespace(all=self._tasks, snapshots=list)
        tasks.hosted = SimpleNamespace(source=SimpleNamespace(name="t", partitions=1))
        self.tasks: Any = tasks

    def replay(self, failures: Sequence[BaseException] = ()) -> float:
        return replay(self.engine, self.tasks, StartupRetries(threading.Event(), print), lambda *_: None, failures)

    def _tasks(self) -> list[Any]:
        assigned, position = self.looks[0]
        return [SimpleNamespace(task_id=TaskId("m", 0), position=position)] if assigned else []


OURS = frozenset({0})
NONE: frozenset[int] = frozenset()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline_rebuild, "_LOOK_EVERY_SECONDS", 0.0)


def test_a_replay_ends_when_every_event_is_folded() -> None:
    fakes = Fakes((OURS, 0), (OURS, 4), (OURS, END))

    assert fakes.replay() >= 0
    assert fakes.started.is_set()


def test_a_replay_continues_after_the_group_lost_it_for_a_while() -> None:
    assert Fakes((OURS, 0), (OURS, 4), (NONE, 4), (NONE, 4), (OURS, 4), (OURS, END)).replay() >= 0


@pytest.mark.parametrize("goes_on", [False, True], ids=["nobody else", "instances have built another one since"])
def test_a_rebuild_that_stalled_settles_only_what_it_has_begun(*, goes_on: bool) -> None:
    begun = Generations("m").begun(DECLARED).replaced(DECLARED)
    now = begun.settled().rebuilt(DECLARED, Switch.NEVER, 60, None, "", "").switched(3, "", "") if goes_on else begun
    deleted: list[str] = []
    found: Any = SimpleNamespace(
        generations=SimpleNamespace(write=lambda _model, change: change(now)),
        registry=SimpleNamespace(forget=lambda _name: None),
        topics=SimpleNamespace(delete=deleted.append),
    )

    offline_rebuild.settle(found, begun, [cast("Any", SimpleNamespace(changelog="m-changelog"))])

    assert deleted == ([] if goes_on else ["m-changelog"])


def test_another_member_of_the_group_ends_a_replay() -> None:
    with pytest.raises(ConfigurationError, match="another instance has joined"):
        Fakes((OURS, 0), (NONE, 0), members=2).replay()


def test_a_failed_thread_ends_a_replay() -> None:
    def fail() -> None:
        raise FatalError("Spark's JVM has ended")

    before = threading.excepthook
    with thread_failures(lambda: None) as failures:
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()

        with pytest.raises(FatalError, match="Spark's JVM has ended; run it again"):
            Fakes((OURS, 0)).replay(failures)
    assert threading.excepthook is before
