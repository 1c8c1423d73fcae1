"""The lease, which ends before another instance can own the partitions; errors that keep a member out of its group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from confluent_kafka import Consumer, KafkaError, TopicPartition
from hypothesis import given
from hypothesis import strategies as st

from balance_service.cluster.membership import consumer_config
from balance_service.kafka.lease import Lease
from balance_service.process.runtime import elapsed
from tests.support.fakes import SESSION_MS, Clock, lone_member

if TYPE_CHECKING:
    from collections.abc import Iterator

    from balance_service.cluster.membership import Membership


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lease(clock: Clock) -> Lease:
    return Lease(SESSION_MS, clock)


def test_a_lease_does_not_hold_before_the_group_has_confirmed_it(lease: Lease) -> None:
    assert not lease.holds


@pytest.mark.shows("owner")
def test_a_confirmed_lease_holds_for_the_session_less_a_second(lease: Lease, clock: Clock) -> None:
    lease.renew(clock.now)

    clock.now += 8.999
    assert lease.holds
    clock.now += 0.001
    assert not lease.holds


@pytest.mark.shows("owner")
def test_a_lease_counts_from_when_the_request_was_sent_not_answered(lease: Lease, clock: Clock) -> None:
    sent_at = clock.now
    clock.now += 5
    lease.renew(sent_at)

    clock.now += 3.999
    assert lease.holds
    clock.now += 0.001
    assert not lease.holds


def test_a_membership_counts_its_lease_from_before_the_request(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("balance_service.cluster.membership.elapsed", clock)
    member = lone_member(positions={0: 5})
    member.lease = Lease(SESSION_MS, clock)
    member.partitions = frozenset({0})
    try:
        member.renew()
        clock.now += 5
        member.confirmed(None, [TopicPartition("topic", 0, 5)])

        clock.now += 3.999
        assert member.lease.holds
        clock.now += 0.001
        assert not member.lease.holds
    finally:
        member.stop()


FORBIDDEN, UNKNOWN = KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.UNKNOWN_MEMBER_ID


@pytest.mark.shows("owner")
@pytest.mark.parametrize(
    ("codes", "holds"), [([None, FORBIDDEN], True), ([UNKNOWN, UNKNOWN], False), ([FORBIDDEN], False), ([], False)]
)
def test_a_lease_is_renewed_only_if_the_group_has_accepted_a_partition(codes: list[int | None], *, holds: bool) -> None:
    member = lone_member(positions={0: 5})
    member.partitions = frozenset({0})
    answered = []
    for number, code in enumerate(codes):
        answer: Any = SimpleNamespace(error=None if code is None else KafkaError(code), partition=number)
        answered.append(answer)
    member.renew()
    try:
        member.confirmed(None, answered)

        assert member.lease.holds is holds
    finally:
        member.stop()


@pytest.mark.shows("owner")
def test_a_member_asks_only_for_the_partitions_that_the_group_has_assigned_to_it() -> None:
    # A task may still answer after its partition has moved.
    positions = {0: 5, 1: 6}
    member = lone_member(positions=positions)
    member.stop()
    asked: list[list[tuple[str, int, int]]] = []

    def commit(*, offsets: list[TopicPartition], asynchronous: bool) -> None:
        assert asynchronous
        asked.append([(one.topic, one.partition, one.offset) for one in offsets])

    member._consumer = cast("Any", SimpleNamespace(commit=commit))
    member.renew()
    assert asked == []

    member.partitions = frozenset({1})
    member.renew()
    assert asked == [[("topic", 1, 6)]]

    # One whose task has just begun to answer does not wait for the next renewal.
    member.confirmed(None, [TopicPartition("topic", 1, 6)])
    member.renew()
    assert len(asked) == 1
    member.partitions = frozenset({*positions})
    member.renew()
    assert sorted(asked[1]) == [("topic", 0, 5), ("topic", 1, 6)]


@pytest.mark.parametrize("how", ["lost", "stopped"])
def test_a_former_member_holds_no_lease(how: str) -> None:
    member = lone_member()
    member.start()
    member.lease.renew(elapsed())
    assert member.lease.holds
    if how == "lost":
        member._on_lost(IgnoringConsumer(), [TopicPartition("topic", 0)])
        held = member.lease.holds
        member.stop()
    else:
        member.stop()
        held = member.lease.holds
    assert not held


class IgnoringConsumer(Consumer):
    """A consumer that ignores unassignments."""

    def __init__(self) -> None:
        super().__init__({"bootstrap.servers": "127.0.0.1:1", "group.id": "group", "log_level": 0})

    def incremental_unassign(self, partitions: list[TopicPartition]) -> None: ...


def test_an_answer_after_the_end_of_the_lease_does_not_renew_it(lease: Lease, clock: Clock) -> None:
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


def test_a_member_never_resets_offsets() -> None:
    config = consumer_config({"bootstrap.servers": "b"}, "g", SESSION_MS)

    assert config["auto.offset.reset"] == "error"
    assert config["enable.auto.commit"] is False


def test_user_properties_do_not_override_those_of_the_group() -> None:
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


def test_user_properties_do_not_change_the_cooperative_assignment() -> None:
    config = consumer_config({"partition.assignment.strategy": "range"}, "g", SESSION_MS)

    assert config["partition.assignment.strategy"] == "cooperative-sticky"


@pytest.mark.parametrize("session_ms", [3_000, 10_000, 300_000])
def test_there_are_several_heartbeats_per_session(session_ms: int) -> None:
    interval = consumer_config({}, "g", session_ms)["heartbeat.interval.ms"]

    assert isinstance(interval, int)
    assert 0 < interval <= session_ms / 3


def test_a_member_that_never_joined_closes_its_client_when_it_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    client = SimpleNamespace(close=lambda: closed.append("the client"))
    monkeypatch.setattr("balance_service.cluster.membership.new_client", lambda *_: client)

    lone_member().stop()

    assert closed == ["the client"]


@pytest.fixture
def member() -> Iterator[Membership]:
    member = lone_member()
    yield member
    member.stop()


@pytest.mark.parametrize(
    "code",
    [
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._TRANSPORT,
        KafkaError._AUTO_OFFSET_RESET,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.REBALANCE_IN_PROGRESS,
        KafkaError.UNKNOWN_MEMBER_ID,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
    ],
)
def test_an_error_that_passes_by_itself_is_no_problem(member: Membership, code: int) -> None:
    member.note(KafkaError(code))

    assert member.problem == ""


def test_a_full_group_is_reported_with_the_setting_of_its_bound(member: Membership) -> None:
    member.note(KafkaError(KafkaError.GROUP_MAX_SIZE_REACHED))

    assert member.problem.startswith("group 'group' does not admit this member (")
    assert member.problem.endswith("); run fewer instances, or raise the brokers' group.max.size")


def test_the_latest_problem_is_reported_until_a_confirmed_lease() -> None:
    member = lone_member(positions={0: 5})
    member.partitions = frozenset({0})
    member.note(KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED))
    forbidden = member.problem
    member.note(KafkaError(KafkaError.INCONSISTENT_GROUP_PROTOCOL))
    refused = member.problem
    member.renew()
    member.confirmed(None, [TopicPartition("topic", 0, 5)])
    member.stop()

    assert "the brokers do not allow" in forbidden
    assert "stop the other members of this group" in refused
    assert member.problem == ""


def test_a_lease_that_ended_was_confirmed_all_the_same(lease: Lease, clock: Clock) -> None:
    assert not lease.was_confirmed

    lease.renew(clock.now)
    lease.revoke()

    assert lease.was_confirmed
