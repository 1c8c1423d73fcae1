"""Partitions that move during a read: an answer is the owner's only if the instance still owns the partition after it.

Damage is reported for the task that was read, even if another task has replaced it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import TopicPartition

from balance_service.engine.records import Role
from balance_service.engine.store import StoreView
from balance_service.errors import StoreCorruptedError
from balance_service.http.routing import ACTIVE, STANDBY
from balance_service.http.scan import CountScan
from tests.support.fakes import lone_member
from tests.support.querying import ASKER, CUSTOMER, PARTITION, Instance, OneTask, ask

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from balance_service.cluster.membership import Partitions
    from balance_service.http.answer import Answer
    from balance_service.http.routing import LocalCopy
    from balance_service.http.scan import Steps, View


class Interrupted(Instance):
    """An instance with an event during a read, between the state and the answer."""

    happens: Callable[[Interrupted], None]
    only: OneTask

    def task(self, partition: int) -> OneTask | None:
        return self.only if partition == PARTITION else None


def lease_ends(instance: Interrupted) -> None:
    instance.clock.now += 9


def partition_moves(instance: Interrupted) -> None:
    instance.only.view = None


@pytest.mark.shows("owner")
@pytest.mark.parametrize("happens", [lease_ends, partition_moves])
def test_a_read_before_a_move_is_not_the_answer_of_the_owner(
    tmp_path: Path, happens: Callable[[Interrupted], None]
) -> None:
    instance = Interrupted(tmp_path / "store")
    instance.put("12.34")
    view = instance.store.view
    assert view is not None
    instance.only = OneTask(view, Role.ACTIVE)
    assert ask(instance).text == '{"amount":12.34}'

    class Slow(StoreView):
        def get(self, key: bytes) -> bytes | None:
            state = super().get(key)
            happens(instance)
            return state

    view.__class__ = Slow
    copy = instance.routing.copy(PARTITION)
    assert copy is not None
    read = instance.routing.read(copy, CUSTOMER.encode())
    assert read.frame is not None
    assert read.role == STANDBY


@pytest.mark.shows("owner")
def test_a_lease_of_other_partitions_is_none_of_a_standbys_partition(tmp_path: Path) -> None:
    instance = Interrupted(tmp_path / "store")
    instance.put("12.34")
    view = instance.store.view
    assert view is not None
    instance.only = OneTask(view, Role.STANDBY)
    instance.lease.renew(instance.clock.now)
    assert instance.lease.holds

    copy = instance.routing.copy(PARTITION)
    assert copy is not None
    # It may become the owner during the read, and what it read is a standby's.
    instance.only.role = Role.ACTIVE

    assert not instance.routing.is_owned(copy)
    assert instance.routing.read(copy, CUSTOMER.encode()).role != ACTIVE


@pytest.fixture
def replaced(tmp_path: Path) -> Interrupted:
    """An instance whose task is replaced before its damage is found."""
    instance = Interrupted(tmp_path / "store")
    view = instance.store.view
    assert view is not None
    instance.only = OneTask(view, Role.ACTIVE)
    instance.happens = lambda one: setattr(one, "only", OneTask(one.store.view, Role.ACTIVE))
    return instance


def test_damage_found_by_a_query_is_reported_for_the_task_that_was_read(replaced: Interrupted) -> None:
    read = replaced.only

    class Damaged(StoreView):
        def get(self, _key: bytes) -> bytes | None:
            replaced.happens(replaced)
            raise StoreCorruptedError("checksum mismatch")

    assert read.view is not None
    read.view.__class__ = Damaged

    assert ask(replaced).status == 503
    assert replaced.damaged_tasks == [read]
    assert replaced.only is not read


def test_damage_in_a_state_is_reported_for_the_task_that_was_read(replaced: Interrupted) -> None:
    read = replaced.only
    replaced.store.write([(CUSTOMER.encode(), b"no frame")], 1)
    read.view = replaced.store.view

    class Replaced(StoreView):
        def get(self, key: bytes) -> bytes | None:
            frame = super().get(key)
            replaced.happens(replaced)
            return frame

    assert read.view is not None
    read.view.__class__ = Replaced

    assert ask(replaced).status == 503
    assert replaced.damaged_tasks == [read]
    assert replaced.only is not read


def test_damage_found_by_a_scan_is_reported_for_the_task_that_was_read(replaced: Interrupted) -> None:
    read = replaced.only

    class DamagedCount(CountScan):
        def read(self, copies: Sequence[LocalCopy], view: View) -> Steps[int]:
            if copies[0].task is read:
                replaced.happens(replaced)
                raise StoreCorruptedError("checksum mismatch")
            return CountScan.read(self, copies, view)

    async def scanned() -> Answer:
        scatter = replaced.scatter("/api/models/balance")
        try:
            scan = DamagedCount()
            return (await scatter.gather("count", scan, ASKER, partitions=[PARTITION])).answer(scan)
        finally:
            await scatter.proxy.close()

    assert asyncio.run(scanned()).status == 200
    assert replaced.damaged_tasks == [read]


@pytest.mark.parametrize("how", ["_on_revoke", "_on_lost"])
def test_a_member_releases_a_partition_only_after_its_task_is_closed(how: str) -> None:
    told: list[str] = []

    class Consumer:
        def incremental_unassign(self, _partitions: list[TopicPartition]) -> None:
            told.append("the group may give it to another")

    class Listener:
        def assigned(self, topic: str, partitions: Partitions) -> None: ...

        def revoked(self, topic: str, partitions: Partitions) -> None:
            told.append("its task is closed")

        lost = revoked

    member = lone_member(Listener())
    consumer: Any = Consumer()
    try:
        getattr(member, how)(consumer, [TopicPartition("topic", 0)])
        assert told == ["its task is closed", "the group may give it to another"]
    finally:
        member.stop()
