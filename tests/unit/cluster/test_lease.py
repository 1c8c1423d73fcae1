"""The lease: it ends before anybody can have succeeded its holder."""

from __future__ import annotations

import pytest
from confluent_kafka import Consumer, TopicPartition
from hypothesis import given
from hypothesis import strategies as st

from balance_service.cluster.membership import Lease, consumer_config
from balance_service.process.runtime import elapsed
from tests.support.fakes import SESSION_MS, Clock, lone_member


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lease(clock: Clock) -> Lease:
    return Lease(SESSION_MS, clock)


def test_a_lease_does_not_hold_before_the_group_has_confirmed_it(lease: Lease) -> None:
    assert not lease.holds


def test_a_confirmed_lease_holds_for_the_session_less_a_second(lease: Lease, clock: Clock) -> None:
    lease.renew(clock.now)

    clock.now += 8.999
    assert lease.holds
    clock.now += 0.001
    assert not lease.holds


def test_a_lease_counts_from_when_the_request_was_sent_not_answered(lease: Lease, clock: Clock) -> None:
    sent_at = clock.now
    clock.now += 5
    lease.renew(sent_at)

    clock.now += 3.999
    assert lease.holds
    clock.now += 0.001
    assert not lease.holds


def test_a_membership_counts_its_lease_from_before_it_asked(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("balance_service.cluster.membership.elapsed", clock)
    member = lone_member(positions={("topic", 0): 5})
    member.lease = Lease(SESSION_MS, clock)
    member.partitions = frozenset({("topic", 0)})
    try:
        member._renew()
        clock.now += 5
        member._committed(None, [TopicPartition("topic", 0, 5)])

        clock.now += 3.999
        assert member.lease.holds
        clock.now += 0.001
        assert not member.lease.holds
    finally:
        member._consumer.close()


@pytest.mark.parametrize("how", ["lost", "stopped"])
def test_a_member_that_is_none_any_more_holds_no_lease(how: str) -> None:
    member = lone_member()
    member.start()
    member.lease.renew(elapsed())
    assert member.lease.holds
    if how == "lost":
        member._on_lost(Consuming(), [TopicPartition("topic", 0)])
        held = member.lease.holds
        member.stop()
    else:
        member.stop()
        held = member.lease.holds
    assert not held


class Consuming(Consumer):
    """A consumer of which it does not matter what it gives up."""

    def __init__(self) -> None:
        super().__init__({"bootstrap.servers": "127.0.0.1:1", "group.id": "group", "log_level": 0})

    def incremental_unassign(self, partitions: list[TopicPartition]) -> None: ...


def test_an_answer_that_comes_after_the_lease_would_have_ended_renews_nothing(lease: Lease, clock: Clock) -> None:
    sent_at = clock.now
    clock.now += 30
    lease.renew(sent_at)

    assert not lease.holds


def test_an_older_confirmation_does_not_shorten_the_lease(lease: Lease, clock: Clock) -> None:
    lease.renew(clock.now)
    lease.renew(clock.now - 5)

    clock.now += 8.9
    assert lease.holds


def test_a_revoked_lease_does_not_hold(lease: Lease, clock: Clock) -> None:
    lease.renew(clock.now)
    lease.revoke()

    assert not lease.holds


def test_a_revoked_lease_holds_again_once_it_is_confirmed(lease: Lease, clock: Clock) -> None:
    lease.renew(clock.now)
    lease.revoke()
    lease.renew(clock.now)

    assert lease.holds


@given(
    session_ms=st.integers(3_000, 300_000),
    renewals=st.lists(st.tuples(st.floats(0, 100), st.floats(0, 10)), max_size=10),
    later=st.floats(0, 400),
)
def test_a_lease_never_outlasts_the_session_of_its_last_request(
    session_ms: int, renewals: list[tuple[float, float]], later: float
) -> None:
    clock = Clock()
    lease = Lease(session_ms, clock)
    last_sent = float("-inf")
    for pause, answered_after in renewals:
        clock.now += pause
        sent_at = last_sent = clock.now
        clock.now += answered_after
        lease.renew(sent_at)
    clock.now += later

    assert not lease.holds or clock.now < last_sent + session_ms / 1000


def test_a_member_never_lets_kafka_choose_where_to_begin() -> None:
    config = consumer_config({"bootstrap.servers": "b"}, "g", SESSION_MS)

    assert config["auto.offset.reset"] == "error"
    assert config["enable.auto.commit"] is False


def test_the_users_properties_do_not_replace_the_groups_own() -> None:
    config = consumer_config(
        {"auto.offset.reset": "latest", "group.id": "x", "session.timeout.ms": 1, "client.rack": "r"},
        "g",
        SESSION_MS,
    )

    assert (config["auto.offset.reset"], config["group.id"], config["session.timeout.ms"]) == (
        "error",
        "g",
        SESSION_MS,
    )
    assert config["client.rack"] == "r"


def test_a_members_partitions_come_and_go_one_by_one_whatever_the_users_properties_are() -> None:
    config = consumer_config({"partition.assignment.strategy": "range"}, "g", SESSION_MS)

    assert config["partition.assignment.strategy"] == "cooperative-sticky"


@pytest.mark.parametrize("session_ms", [3_000, 10_000, 300_000])
def test_heartbeats_come_several_times_a_session(session_ms: int) -> None:
    interval = consumer_config({}, "g", session_ms)["heartbeat.interval.ms"]

    assert isinstance(interval, int)
    assert 0 < interval <= session_ms / 3
