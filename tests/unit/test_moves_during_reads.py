"""What changes while a state is read: the answer is the owner's only if it still owned the partition after the read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import TopicPartition

from balance_service.cluster.membership import Membership, consumer_config
from balance_service.state.records import Role
from balance_service.state.store.store import StoreView
from tests.support.querying import CUSTOMER, PARTITION, Instance, OneTask, ask

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from balance_service.cluster.membership import Partitions


class Interrupted(Instance):
    """An instance on which something happens during a read, between the state and the answer."""

    happens: Callable[[Interrupted], None]
    only: OneTask

    def task(self, partition: int) -> OneTask | None:
        return self.only if partition == PARTITION else None


def lease_ends(instance: Interrupted) -> None:
    instance.clock.now += 9


def partition_moves(instance: Interrupted) -> None:
    instance.only.view = None


@pytest.mark.parametrize("happens", [lease_ends, partition_moves])
def test_what_was_read_before_is_no_owners_answer(tmp_path: Path, happens: Callable[[Interrupted], None]) -> None:
    instance = Interrupted(tmp_path / "store")
    instance.put("12.34")
    view = instance.store.view
    assert view is not None
    instance.only = OneTask(view, Role.ACTIVE)
    assert ask(instance).text == '{"amount": 12.34}'

    class Slow(StoreView):
        def get(self, key: bytes) -> bytes | None:
            state = super().get(key)
            happens(instance)
            return state

    view.__class__ = Slow
    read = instance.routing.read(PARTITION, CUSTOMER.encode())
    assert read is not None
    assert read.frame is not None
    assert not read.is_owner


@pytest.mark.parametrize("how", ["_on_revoke", "_on_lost"])
def test_a_member_lets_go_of_a_partition_only_after_its_task_is_closed(how: str) -> None:
    told: list[str] = []

    class Consumer:
        def incremental_unassign(self, _partitions: list[TopicPartition]) -> None:
            told.append("the group may give it to another")

    class Listener:
        def assigned(self, partitions: Partitions) -> None: ...

        def revoked(self, _partitions: Partitions) -> None:
            told.append("its task is closed")

        lost = revoked

    member = Membership(
        config=consumer_config({"bootstrap.servers": "127.0.0.1:1", "log_level": 0}, "group", 10_000),
        topics=["topic"],
        session_timeout_ms=10_000,
        listener=Listener(),
        positions=dict,
    )
    consumer: Any = Consumer()
    try:
        getattr(member, how)(consumer, [TopicPartition("topic", 0)])
        assert told == ["its task is closed", "the group may give it to another"]
    finally:
        member._consumer.close()
