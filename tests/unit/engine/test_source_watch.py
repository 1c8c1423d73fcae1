"""Checks of a source topic, and of what topics may lose."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from structlog.testing import capture_logs

from balance_service.engine.records import Role
from balance_service.engine.source_watch import LossCheck, SourceCheck
from balance_service.errors import RetriableError
from balance_service.kafka.topic_specs import CHANGELOG, FOREVER
from balance_service.kafka.topics import Topic
from balance_service.model.placing import stages_of
from balance_service.read_models.balance import Balance
from balance_service.settings import load_settings
from tests.support.fakes import Clock, InMemoryTopics

if TYPE_CHECKING:
    from collections.abc import Sequence

OURS = Topic("balance", "id", 2)
(STAGE,) = stages_of(Balance(), load_settings())
CHANGELOG_OF_2 = STAGE.of_generation(2).changelog


class Broker:
    """A source topic from offset 5 to 9. Does not respond if it is down."""

    def __init__(self) -> None:
        self.topic: Topic | None = OURS
        self.is_up = True

    def find_patiently(self, _name: str) -> Topic | None:
        self._respond()
        return self.topic

    def offsets(self, _name: str, partitions: Sequence[int], *, earliest: bool = False) -> dict[int, int]:
        return dict.fromkeys(partitions, 5 if earliest else 9)

    def _respond(self) -> None:
        if not self.is_up:
            raise RetriableError("the broker is down")


@pytest.fixture
def broker() -> Broker:
    return Broker()


class Watched:
    """A stage without tasks, and the check of its source."""

    def __init__(self, broker: Broker) -> None:
        self.tasks: Any = SimpleNamespace(
            hosted=SimpleNamespace(topics=broker, source=OURS), with_states=dict, source_problem=""
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


def test_an_outage_is_logged_when_it_begins_and_when_it_ends(watched: Watched, broker: Broker) -> None:
    with capture_logs() as logs:
        for is_up in (True, False, False, False, True, True):
            broker.is_up = is_up
            watched.problem()

    events = ["the source cannot be looked at", "the source can be looked at again"]
    assert [line["event"] for line in logs] == events


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


@pytest.mark.parametrize(("position", "is_reopened"), [(3, True), (5, False), (6, False)])
def test_a_retry_task_whose_next_records_were_dropped_is_reopened_rather_than_halted(
    broker: Broker, position: int, is_reopened: bool
) -> None:
    checked: list[Any] = []
    task = SimpleNamespace(role=Role.ACTIVE, position=position, check_log=lambda *log: checked.append(log))
    failed: list[Any] = []
    hosted = SimpleNamespace(topics=broker, source=OURS, stage=SimpleNamespace(retries=True))
    tasks: Any = SimpleNamespace(hosted=hosted, with_states=lambda: {1: task}, failed=lambda *why: failed.append(why))

    SourceCheck(tasks).run_once()

    assert (len(failed), len(checked)) == (is_reopened, not is_reopened)


class Configured:
    """A stage of generation 2, whose topics are in memory, with one running task."""

    def __init__(self) -> None:
        settings = load_settings()
        stage = STAGE.of_generation(2)
        self.topics = InMemoryTopics(balance=2)
        for name in (stage.changelog, settings.dead_letter_decisions_topic, settings.generations_topic):
            self.topics.create(name, 1, CHANGELOG if name == stage.changelog else FOREVER)
        self.is_built = False
        self.halted: list[str] = []
        hosted = SimpleNamespace(
            topics=self.topics,
            settings=settings,
            stage=stage,
            name=stage.name,
            generations=SimpleNamespace(builds=lambda _stage: self.is_built),
        )
        task = SimpleNamespace(halt=self.halted.append)
        self.tasks: Any = SimpleNamespace(hosted=hosted, answering=lambda: {0: task}, losses=())

    def losses(self) -> str:
        LossCheck(self.tasks).run_once()
        return " ".join(self.tasks.losses)


@pytest.mark.shows("lossy-topics")
@pytest.mark.parametrize(
    ("topic", "changed", "said"),
    [
        ("balance", {"cleanup.policy": "compact"}, "'balance' is compacted, so the model cannot be rebuilt from it"),
        ("balance", {"retention.ms": "86400000"}, "'balance' has a finite retention.ms"),
        (CHANGELOG_OF_2, {"cleanup.policy": "delete"}, "other than 'compact'"),
        ("balance-service-generations", {"retention.bytes": "1"}, "may drop which generation of a read model serves"),
        ("balance-service-dead-letter-decisions", {"cleanup.policy": "compact"}, "may drop operators' decisions"),
    ],
)
def test_a_topic_that_begins_to_lose_records_is_reported_until_it_keeps_them_again(
    topic: str, changed: dict[str, str], said: str
) -> None:
    here = Configured()
    assert here.losses() == ""
    before = here.topics.configs[topic]

    here.topics.configs[topic] = {**before, **changed}
    assert said in here.losses()

    # The applied events are right, so the tasks go on.
    assert here.halted == []
    here.topics.configs[topic] = before
    assert here.losses() == ""


@pytest.mark.shows("lossy-topics")
def test_a_generation_is_not_built_from_what_a_lossy_topic_has_left() -> None:
    here = Configured()
    here.is_built = True
    assert (here.losses(), here.halted) == ("", [])

    here.topics.configs["balance"]["cleanup.policy"] = "compact"
    here.losses()

    assert "it would be built from what is left: the source topic 'balance' is compacted" in here.halted[0]


def test_an_outage_is_logged_once_however_often_configurations_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    here, now = Configured(), Clock()
    monkeypatch.setattr("balance_service.engine.source_watch.time.monotonic", now)
    check = LossCheck(here.tasks)

    def fail(*_: object, **__: object) -> None:
        raise RetriableError("the broker is down")

    with capture_logs() as logs, monkeypatch.context() as outage:
        outage.setattr("balance_service.engine.source_watch.losses", fail)
        for _ in range(5):
            check.run_once()
            now.now += 15

    assert [line["event"] for line in logs] == ["the configuration of topics cannot be looked at"]


def test_configurations_are_read_at_most_every_15_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    here, now = Configured(), Clock()
    monkeypatch.setattr("balance_service.engine.source_watch.time.monotonic", now)
    check = LossCheck(here.tasks)
    check.run_once()
    here.topics.configs["balance"]["retention.ms"] = "1"

    now.now += 14.9
    check.run_once()
    assert here.tasks.losses == []
    now.now += 0.1
    check.run_once()
    assert len(here.tasks.losses) == 1
