"""The changelog of a dropped generation is deleted once no instance can use it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from balance_service.cluster.directory import ServerTable
from balance_service.engine.records import Role, TaskSnapshot
from balance_service.errors import (
    NotAuthorizedError,
    RetriableError,
)
from balance_service.kafka.topics import Topic
from balance_service.process.runtime import elapsed
from tests.support.fakes import Clock
from tests.unit.hosting.rebuilding import BUILT, Engine, Here, Standing, publish, responsible, table_of

pytestmark = pytest.mark.usefixtures("at_once", "owners", "written")

DROPPED = BUILT.dropped(2, "", "")


@pytest.mark.parametrize("other", ["balance\0service-rewards.g2", ""], ids=["another application", "an old record"])
def test_a_changelog_that_another_application_may_use_is_not_deleted(owners: set[str], other: str) -> None:
    engine = Engine(DROPPED, Here(1, Standing(1, sends=True)))
    engine.topics = SimpleNamespace(find=lambda name: Topic(name, "id", 2), delete=pytest.fail)
    rebuilds = responsible(engine, table_of([TaskSnapshot("rewards", 0, Role.ACTIVE, "RUNNING", 1, 5)]))
    owners.add(other)

    with pytest.raises(RetriableError, match=r"is not deleted, because its positions name .* as owner"):
        rebuilds.step(DROPPED)


def test_a_dropped_changelog_is_deleted_once_no_instance_has_a_task_of_it_and_again_after_a_late_one() -> None:
    engine = Engine(DROPPED, Here(1, Standing(1, sends=True)))
    table, deleted, forgotten = ServerTable(elapsed), list[str](), list[str]()
    engine.topics = SimpleNamespace(find=lambda name: Topic(name, "id", 2), delete=deleted.append)
    engine.registry = SimpleNamespace(forget=forgotten.append)
    rebuilds = responsible(engine, table)

    found = []
    for stages in (["rewards.g2"], [], [], ["rewards", "rewards.g2"], ["rewards"]):
        publish(table, [TaskSnapshot(stage, 0, Role.ACTIVE, "RUNNING", 1, 5) for stage in stages])
        rebuilds.step(DROPPED)
        found.append(len(deleted))

    assert found == [0, 1, 1, 1, 2]
    assert {*deleted} == {"balance-service-rewards.g2-changelog"}
    assert forgotten == deleted


def test_a_killed_instance_keeps_a_dropped_changelog_until_the_group_has_given_its_partitions_away() -> None:
    engine, clock, deleted = Engine(DROPPED, Here(1, Standing(1, sends=True))), Clock(), list[str]()
    engine.topics = SimpleNamespace(find=lambda name: Topic(name, "id", 2), delete=deleted.append)
    engine.registry = SimpleNamespace(forget=lambda _name: None)
    table = ServerTable(clock)
    rebuilds = responsible(engine, table)
    for address, stages in (("a:1", ["rewards"]), ("killed:1", ["rewards.g2"])):
        tasks = [TaskSnapshot(stage, 0, Role.ACTIVE, "RUNNING", 1, 5).record() for stage in stages]
        table.hear(address, {"incarnation": "i", "models": [], "tasks": tasks}, live=True)

    clock.now += 10
    rebuilds.step(DROPPED)
    assert deleted == []
    clock.now += 1
    rebuilds.step(DROPPED)

    assert deleted == ["balance-service-rewards.g2-changelog"]


def test_a_changelog_that_a_late_instance_created_again_is_deleted_although_its_task_was_never_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(DROPPED, Here(1, Standing(1, sends=True)))
    topics = {"balance-service-rewards.g2-changelog"}
    engine.topics = SimpleNamespace(
        find=lambda name: Topic(name, "id", 2) if name in topics else None, delete=topics.remove
    )
    engine.registry = SimpleNamespace(forget=lambda _name: None)
    rebuilds = responsible(engine, table_of([TaskSnapshot("rewards", 0, Role.ACTIVE, "RUNNING", 1, 5)]))
    rebuilds.step(DROPPED)
    assert not topics

    topics.add("balance-service-rewards.g2-changelog")
    rebuilds.step(DROPPED)
    assert topics
    monkeypatch.setattr("balance_service.hosting.dropped_changelogs._LOOK_AGAIN_SECONDS", 0.0)
    rebuilds.step(DROPPED)

    assert not topics


def test_a_changelog_that_cannot_be_deleted_is_not_tried_again_at_once() -> None:
    engine = Engine(DROPPED, Here(1, Standing(1, sends=True)))
    tried = list[str]()

    def forget(changelog: str) -> None:
        tried.append(changelog)
        raise NotAuthorizedError("Delete is missing")

    engine.topics = SimpleNamespace(find=lambda name: Topic(name, "id", 2))
    engine.registry = SimpleNamespace(forget=forget)
    rebuilds = responsible(engine, table_of([TaskSnapshot("rewards", 0, Role.ACTIVE, "RUNNING", 1, 5)]))

    for _ in range(3):
        with pytest.raises(NotAuthorizedError):
            rebuilds.step(DROPPED)

    assert len(tried) == 1
