"""The choice of standbys: equal on all instances, and stable."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balance_service.cluster.directory import PublishedModel, ServerTable
from balance_service.cluster.standbys import StandbyChooser, chosen
from balance_service.engine.records import Role, TaskSnapshot
from tests.support.fakes import Clock

ADDRESSES = st.sets(st.integers(1, 60).map(lambda n: f"host-{n}:5051"), min_size=1, max_size=12)


@given(ADDRESSES, st.integers(0, 4), st.randoms())
def test_the_choice_is_independent_of_the_order_of_the_instances(
    addresses: set[str], replicas: int, random: Any
) -> None:
    shuffled = sorted(addresses)
    random.shuffle(shuffled)
    owner = shuffled[0]

    standbys = chosen("balance_0", shuffled, owner, replicas)

    assert standbys == chosen("balance_0", sorted(addresses), owner, replicas)
    assert owner not in standbys
    assert len(standbys) == len(set(standbys)) == min(replicas, len(addresses) - 1)


@given(ADDRESSES, st.integers(1, 4))
def test_only_the_standbys_of_an_instance_that_leaves_move(addresses: set[str], replicas: int) -> None:
    before = chosen("balance_0", addresses, None, replicas)
    gone = min(addresses)

    after = chosen("balance_0", addresses - {gone}, None, replicas)

    assert [a for a in before if a != gone] == after[: len([a for a in before if a != gone])]


def test_standbys_are_spread_over_the_instances() -> None:
    addresses = [f"host-{n}:5051" for n in range(5)]

    first = [chosen(f"balance_{p}", addresses, None, 1)[0] for p in range(500)]

    assert min(first.count(address) for address in addresses) > 60


def record(address: str, role: Role, epoch: int, model: str = "balance", state: str = "RUNNING") -> dict[str, Any]:
    task = TaskSnapshot("balance", 0, role, state, epoch, 1).record()
    tasks = [task] if model == "balance" else []
    models = [PublishedModel(model, 1, "murmur2", versions=(1,)).record()]
    return {"address": address, "incarnation": "i", "models": models, "tasks": tasks}


def standby(address: str, model: str = "balance") -> dict[str, Any]:
    return record(address, Role.STANDBY, 0, model, "TAILING")


# The one that ranks highest with the partition comes first.
RANKED = chosen("balance_0", ("a", "b", "c"), None, 3)


class Cluster:
    """Instances `a`, `b` and `c`; one owns partition 0."""

    def __init__(self, owner: str = "a") -> None:
        self.clock = Clock()
        self.table = ServerTable(self.clock)
        self.choosers = {name: self.chooser(name) for name in ("a", "b", "c")}
        for _ in range(5):
            self.clock.now += 1
            self.hear("a", "b", "c", owner=owner)
            self.standing_by()

    def chooser(self, name: str, replicas: int = 1, table: ServerTable | None = None) -> StandbyChooser:
        return StandbyChooser(
            table=table or self.table,
            read_model="balance",
            partitions=1,
            address=name,
            replicas=replicas,
            clock=self.clock,
        )

    def hear(self, *names: str, owner: str = "a", epoch: int = 1) -> None:
        for name in names:
            said = record(name, Role.ACTIVE, epoch) if name == owner else standby(name)
            self.table.hear(name, said, live=True)

    def standing_by(self) -> list[str]:
        return [name for name, chooser in self.choosers.items() if chooser.partitions() == frozenset({0})]


def test_all_instances_choose_the_same_single_standby() -> None:
    assert len(Cluster().standing_by()) == 1


def test_a_standby_stays_when_the_owner_falls_silent() -> None:
    cluster = Cluster()
    before = cluster.standing_by()
    for _ in range(30):
        cluster.clock.now += 1
        cluster.hear("b", "c")

        assert cluster.standing_by() == before


@pytest.mark.parametrize("owner", ["a", "b", "c"])
def test_a_standby_stays_while_the_owner_restores(owner: str) -> None:
    cluster = Cluster(owner)
    before = cluster.standing_by()
    for _ in range(30):
        cluster.clock.now += 1
        cluster.hear(*{"a", "b", "c"} - {owner}, owner=owner)
        cluster.table.hear(owner, record(owner, Role.ACTIVE, 0, state="RESTORING"), live=True)

        assert cluster.standing_by() == before


def test_another_instance_stands_by_when_the_standby_falls_silent() -> None:
    cluster = Cluster()
    (silent,) = cluster.standing_by()
    (other,) = {"b", "c"} - {silent}
    for _ in range(4):
        cluster.clock.now += 1
        cluster.hear("a", other)
        cluster.standing_by()

    assert other in cluster.standing_by()


def test_a_standby_that_is_no_longer_chosen_is_kept_for_seconds() -> None:
    first, second, third = RANKED
    cluster = Cluster(owner=first)
    assert cluster.standing_by() == [second]

    moments = []
    for _ in range(16):
        cluster.hear(*RANKED, owner=third, epoch=2)
        moments.append(cluster.standing_by())
        cluster.clock.now += 1

    assert moments == [sorted([first, second])] * 15 + [[first]]


def test_an_owner_does_not_stand_by_for_its_own_partition() -> None:
    cluster = Cluster()
    (first,) = cluster.standing_by()
    cluster.hear(first, owner=first, epoch=2)

    assert cluster.choosers[first].partitions() == frozenset()
    cluster.hear("a", owner="a", epoch=3)
    assert cluster.choosers[first].partitions() == frozenset({0})


def test_standbys_do_not_change_while_the_brokers_are_unreachable() -> None:
    cluster = Cluster()
    before = cluster.standing_by()
    for _ in range(60):
        cluster.clock.now += 1

        assert cluster.standing_by() == before

    for name in before:
        cluster.hear(name)
        assert cluster.standing_by() == before
    cluster.hear("a", "b", "c")
    assert cluster.standing_by() == before


def test_a_starting_instance_does_not_choose_before_it_had_time_to_hear_the_others() -> None:
    cluster = Cluster()
    lowest = RANKED[-1]
    table = ServerTable(cluster.clock)
    chooser = cluster.chooser(lowest, table=table)
    table.hear("a", record("a", Role.ACTIVE, 1), live=False)
    chosen_for = [chooser.partitions()]
    for moment in range(30):
        cluster.clock.now += 0.5
        table.hear(lowest, standby(lowest), live=True)
        if moment > 4:
            for name in RANKED[:-1]:
                table.hear(name, standby(name), live=True)
        chosen_for.append(chooser.partitions())

    assert set(chosen_for) == {frozenset()}


def test_a_starting_instance_stands_by_within_seconds() -> None:
    cluster = Cluster()
    (first,) = cluster.standing_by()
    started = cluster.chooser(first)
    chosen_for = []
    for _ in range(6):
        cluster.hear("a", "b", "c")
        chosen_for.append(started.partitions())
        cluster.clock.now += 1

    assert chosen_for == [frozenset()] * 4 + [frozenset({0})] * 2


def test_after_a_pause_an_instance_does_not_choose_by_its_own_old_records() -> None:
    cluster = Cluster()
    before = cluster.standing_by()
    cluster.clock.now += 3600
    cluster.hear(*{"b", "c"} - {*before})

    assert cluster.standing_by() == before


def test_after_a_pause_a_standby_stays_until_records_arrive() -> None:
    cluster = Cluster()
    before = cluster.standing_by()
    cluster.clock.now += 3600

    assert cluster.standing_by() == before


def test_a_dropped_standby_does_not_return_while_no_record_arrives() -> None:
    first, _, third = RANKED
    cluster = Cluster(owner=first)
    cluster.standing_by()
    for _ in range(16):
        cluster.hear(*RANKED, owner=third, epoch=2)
        cluster.standing_by()
        cluster.clock.now += 1
    cluster.clock.now += 60

    assert cluster.standing_by() == [first]


def test_an_instance_that_does_not_host_the_read_model_is_not_chosen() -> None:
    cluster = Cluster()
    (chosen_before,) = cluster.standing_by()
    (other,) = {"b", "c"} - {chosen_before}
    cluster.table.hear(chosen_before, standby(chosen_before, "leaderboard"), live=True)

    assert other in cluster.standing_by()


def test_an_instance_stands_by_for_a_partition_without_an_owner() -> None:
    cluster = Cluster()
    cluster.hear("a", "b", "c", owner="nobody")

    assert len(cluster.standing_by()) == 1


def test_without_replicas_no_instance_stands_by() -> None:
    cluster = Cluster()

    assert cluster.chooser("b", replicas=0).partitions() == frozenset()
