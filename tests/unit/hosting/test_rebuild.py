"""A rebuild's replay, while the group, the broker or Spark do what they may; no Kafka."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from balance_service.engine.dead_letter import Letter, Status
from balance_service.engine.records import TaskId
from balance_service.errors import ConfigurationError, FatalError
from balance_service.hosting import rebuild
from balance_service.hosting.engine import Patience
from balance_service.hosting.rebuild import letters_after_switch, replay
from balance_service.process.runtime import thread_failures

if TYPE_CHECKING:
    from collections.abc import Sequence

END = 10


class Fakes:
    """An engine with a task, of which each look is one of those given; the last is for ever."""

    def __init__(self, *looks: tuple[frozenset[int], int], members: int = 1) -> None:
        """Args:
        looks: the partitions that are assigned, and the task's position.
        """
        self._looks = list(looks)
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
                if len(fakes._looks) > 1:
                    fakes._looks.pop(0)
                return fakes._looks[0][0]

        topics = SimpleNamespace(offsets=lambda *_: {0: END}, group_members=lambda: members)
        memberships = SimpleNamespace(of={"t": Membership()})
        self.engine: Any = SimpleNamespace(topics=topics, memberships=memberships, start=self.started.set)
        tasks = SimpleNamespace(all=self._tasks, snapshots=list)
        tasks.hosted = SimpleNamespace(source=SimpleNamespace(name="t", partitions=1))
        self.tasks: Any = tasks

    def replay(self, failures: Sequence[BaseException] = ()) -> float:
        return replay(self.engine, self.tasks, Patience(threading.Event(), print), lambda *_: None, failures)

    def _tasks(self) -> list[Any]:
        assigned, position = self._looks[0]
        return [SimpleNamespace(task_id=TaskId("m", 0), position=position)] if assigned else []


OURS = frozenset({0})
NONE: frozenset[int] = frozenset()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rebuild, "_LOOK_EVERY_SECONDS", 0.0)


def test_a_replay_ends_when_every_event_is_folded() -> None:
    fakes = Fakes((OURS, 0), (OURS, 4), (OURS, END))

    assert fakes.replay() >= 0
    assert fakes.started.is_set()


def test_a_replay_continues_after_the_group_lost_it_for_a_while() -> None:
    assert Fakes((OURS, 0), (OURS, 4), (NONE, 4), (NONE, 4), (OURS, 4), (OURS, END)).replay() >= 0


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


WAITING = Letter(0, "balance-overflow", Status.WAITING, 0, 0, -1, b"k")


def letter(offset: int, status: Status = Status.WAITING, *, is_sent: bool = False) -> Letter:
    return replace(WAITING, offset=offset, status=status, is_sent=is_sent)


@pytest.mark.shows("rebuild")
def test_a_rebuild_within_a_switch_keeps_what_the_generation_that_sends_knows() -> None:
    # The serving generation has read the records below 5, the one that sends those below 8.
    ours = {at: letter(at) for at in (0, 1, 2, 3)}
    theirs = {
        0: letter(0),
        1: letter(1, Status.DISCARDED),
        2: letter(2, Status.APPLIED, is_sent=True),
        6: letter(6),
        7: letter(7, Status.DISCARDED),
    }

    known = letters_after_switch(ours, theirs, 5, 8, 9)

    assert {at: (one.status, one.is_sent) for at, one in known.items()} == {
        0: (Status.WAITING, False),
        1: (Status.DISCARDED, False),
        2: (Status.WAITING, True),
        # The one that sends has applied it.
        3: (Status.WAITING, True),
        6: (Status.WAITING, False),
        7: (Status.DISCARDED, False),
    }
    assert [at for at, one in known.items() if not one.is_in_topic] == [3]


def test_dead_letters_of_records_that_the_generation_that_sends_has_not_read_are_made_again() -> None:
    ours = {4: letter(4), 9: letter(9), 10: letter(10, Status.DISCARDED)}

    assert sorted(letters_after_switch(ours, {4: letter(4)}, 20, 8, 9)) == [4, 10]
