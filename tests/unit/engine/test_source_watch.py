"""Looking at the source: what is wrong with it is told, by a look that never fails, until it is well again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from balance_service.engine.source_watch import SourceCheck
from balance_service.errors import RetriableError
from balance_service.kafka.topics import Topic

OURS = Topic("balance", "id", 2)


class Broker:
    """The source as it is now, as long as the broker is up."""

    def __init__(self) -> None:
        self.topic: Topic | None = OURS
        self.is_up = True

    def find_patiently(self, _name: str) -> Topic | None:
        if not self.is_up:
            raise RetriableError("the broker is down")
        return self.topic


@pytest.fixture
def broker() -> Broker:
    return Broker()


class Watched:
    """A stage without tasks, and the check of its source."""

    def __init__(self, broker: Broker) -> None:
        self.tasks: Any = SimpleNamespace(
            hosted=SimpleNamespace(topics=broker, source=OURS), answering=dict, source_problem=""
        )
        self._check = SourceCheck(cast("Any", self.tasks))

    def problem(self) -> str:
        self._check.run_once()
        problem: str = self.tasks.source_problem
        return problem


@pytest.fixture
def watched(broker: Broker) -> Watched:
    return Watched(broker)


def test_an_unchanged_source_is_no_problem(watched: Watched) -> None:
    assert watched.problem() == ""


def test_a_broker_that_does_not_respond_is_a_problem_until_it_does(watched: Watched, broker: Broker) -> None:
    broker.is_up = False
    while_down = watched.problem()
    broker.is_up = True

    assert (while_down, watched.problem()) == ("the broker is down", "")


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (None, "was deleted or recreated"),
        (Topic("balance", "another", 2), "recreated"),
        (Topic("balance", "id", 3), "3"),
    ],
    ids=["gone", "recreated", "more partitions"],
)
def test_a_replaced_source_is_a_problem_even_without_tasks(
    watched: Watched, broker: Broker, now: Topic | None, said: str
) -> None:
    broker.topic = now

    assert said in watched.problem()
