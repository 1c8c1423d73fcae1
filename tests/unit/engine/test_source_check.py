"""Looking at the source: what is wrong with it is told, by a look that never fails, until it is well again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from balance_service.engine.source_check import SourceCheck
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


@pytest.fixture
def check(broker: Broker) -> SourceCheck:
    topics: Any = broker
    no_tasks: Any = SimpleNamespace(answering=dict)
    return SourceCheck(topics, OURS, no_tasks)


def test_a_source_that_is_as_it_was_is_no_problem(check: SourceCheck) -> None:
    check.look()

    assert check.problem == ""


def test_a_broker_that_does_not_answer_is_a_problem_until_it_does(check: SourceCheck, broker: Broker) -> None:
    broker.is_up = False
    check.look()
    while_down = check.problem
    broker.is_up = True
    check.look()

    assert (while_down, check.problem) == ("the broker is down", "")


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (None, "was deleted or made anew"),
        (Topic("balance", "another", 2), "made anew"),
        (Topic("balance", "id", 3), "3"),
    ],
    ids=["gone", "made anew", "more partitions"],
)
def test_a_source_that_is_another_is_a_problem_though_there_are_no_tasks(
    check: SourceCheck, broker: Broker, now: Topic | None, said: str
) -> None:
    broker.topic = now
    check.look()

    assert said in check.problem
