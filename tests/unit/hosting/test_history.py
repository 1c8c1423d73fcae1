"""The history has the deeds of operators and of the service from both topics, the newest first."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from balance_service.engine.decisions import DeadLetterDecision, Decision
from balance_service.errors import RetriableError
from balance_service.hosting.history import History
from balance_service.model.generations import Comparison, Declaration, Generations, Switch
from balance_service.process.runtime import iso_time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


FIRST = Declaration(1, "f", "r", "s", own_view=False)
EQUAL, DIFFERENT = Comparison(equal=3), Comparison(3, 1, 0, 2)


class Decided:
    """A topic of decisions. Counts how often it is read."""

    def __init__(self, *decisions: DeadLetterDecision) -> None:
        self.decisions = [*decisions]
        self.reads = 0
        self.is_up = True

    def end(self, _topics: object) -> tuple[object, ...]:
        return ("id", len(self.decisions))

    def read(self, _settings: object, _topics: object) -> Iterator[DeadLetterDecision]:
        self.reads += 1
        if not self.is_up:
            raise RetriableError("the broker does not respond")
        return iter(self.decisions)


def history(decided: Decided, *steps: Generations) -> History:
    stage = SimpleNamespace(hosted=SimpleNamespace(decisions=decided))
    engine: Any = SimpleNamespace(
        stages={"m": stage, "n": stage}, settings=None, topics=None, generations=SimpleNamespace(history=steps)
    )
    return History(engine)


def decision(seconds: int, offset: int = 42) -> DeadLetterDecision:
    at = BEGAN + timedelta(seconds=seconds)
    return DeadLetterDecision(f"m/1:{offset}", Decision.DISCARD, "key-null", at, "alice", "a test", "s")


def steps_of(*transitions: Callable[[Generations], Generations]) -> list[Generations]:
    """The states of a read model after its first start, and after each of some transitions, ten seconds apart."""
    states = [Generations("m").begun(FIRST)]
    for transition in transitions:
        states.append(transition(states[-1]))
    return [replace(state, at=BEGAN + timedelta(seconds=10 * n)) for n, state in enumerate(states)]


def built(switch: Switch) -> Callable[[Generations], Generations]:
    return lambda now: now.rebuilt(FIRST, switch, 60, None, "bob", "states were lost")


def test_decisions_and_steps_have_one_order() -> None:
    found = history(Decided(decision(5)), *steps_of(built(Switch.NEVER))).last()

    assert [(one.action, one.by, one.about, one.detail, one.reason) for one in found] == [
        ("rebuild", "bob", "m", "generation 1 serves, 2 is being built", "states were lost"),
        ("discard", "alice", "m/1:42", "its cause was key-null", "a test"),
        ("begin", "the service", "m", "generation 1 serves", "it is hosted for the first time"),
    ]
    assert found[1].at == "2026-01-01T00:00:05.000Z"


def test_a_step_of_the_service_itself_says_so_and_why() -> None:
    steps = steps_of(built(Switch.WHEN_EQUAL), lambda now: now.compared(2, EQUAL), lambda now: now.settled())

    settled, switched, *_ = history(Decided(), *steps).last()

    assert (switched.by, switched.reason) == ("the service", "it has caught up, and all states are equal")
    assert switched.detail == "generation 2 serves, 1 is kept"
    assert (settled.by, settled.reason) == ("the service", "generation 2 has taken over all partitions")


def test_a_drop_says_which_generation_was_dropped() -> None:
    cancelled = steps_of(built(Switch.NEVER), lambda now: now.dropped(2, "alice", "its fold is wrong"))
    former = steps_of(
        built(Switch.ALWAYS),
        lambda now: now.compared(2, DIFFERENT),
        lambda now: now.settled(),
        lambda now: now.dropped(1, "", "kept for its time"),
    )

    # Steps of several read models alternate.
    others = [replace(one, model="n") for one in former]
    mixed = sorted([*cancelled, *others], key=lambda one: one.at)

    found = history(Decided(), *mixed).last()
    assert [(one.about, one.detail) for one in found if one.action == "drop"] == [
        ("n", "generation 2 serves, 1 is dropped"),
        ("m", "generation 1 serves, 2 is dropped"),
    ]


def test_a_comparison_has_its_counts() -> None:
    last, *_ = history(Decided(), *steps_of(built(Switch.NEVER), lambda now: now.compared(2, DIFFERENT))).last()

    assert last.detail == (
        "generation 1 serves, 2 is ready; keys: 3 equal, 1 different, 0 in generation 1 alone, 2 in generation 2 alone"
    )


def test_an_offline_rebuild_names_what_it_replaced() -> None:
    last, *_ = history(Decided(), *steps_of(lambda now: now.replaced(FIRST))).last()

    assert (last.by, last.detail) == ("balance-service rebuild --offline", "generation 2 serves, 1 is dropped")


def test_the_history_has_the_last_two_hundred() -> None:
    found = history(Decided(*(decision(n, offset=n) for n in range(300)))).last()

    assert [one.about for one in found] == [f"m/1:{n}" for n in range(299, 99, -1)]


def test_decisions_are_read_again_only_if_there_are_more() -> None:
    decided = Decided(decision(1))
    told = history(decided)
    first = told.last()

    assert told.last() == first
    assert decided.reads == 1
    decided.decisions.append(decision(2, offset=43))
    assert [one.about for one in told.last()] == ["m/1:43", "m/1:42"]
    assert decided.reads == 2


def test_decisions_that_could_not_be_read_are_read_the_next_time() -> None:
    decided = Decided(decision(1))
    told = history(decided)
    decided.is_up = False
    with pytest.raises(RetriableError):
        told.last()

    decided.is_up = True
    assert len(told.last()) == 1


def test_actions_are_made_of_the_newest_decisions_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def counted(at_ms: int) -> str | None:
        made.append(at_ms)
        return iso_time(at_ms)

    monkeypatch.setattr("balance_service.hosting.history.iso_time", counted)
    found = history(Decided(*(decision(n, offset=n) for n in range(500)))).last()

    assert [one.about for one in found] == [f"m/1:{n}" for n in range(499, 299, -1)]
    assert len(made) == len(found)
