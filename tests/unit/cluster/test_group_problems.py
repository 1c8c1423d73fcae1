"""Which of the group's errors a member tells as a problem, and until when."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import KafkaError, TopicPartition

from tests.support.fakes import lone_member

if TYPE_CHECKING:
    from collections.abc import Iterator

    from balance_service.cluster.membership import Membership


@pytest.fixture
def member() -> Iterator[Membership]:
    member = lone_member()
    with closing(member._consumer):
        yield member


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
def test_what_passes_by_itself_or_is_told_by_others_is_no_problem(member: Membership, code: int) -> None:
    member._note(KafkaError(code))

    assert member.problem == ""


def test_a_full_group_is_told_with_its_bound(member: Membership) -> None:
    member._note(KafkaError(KafkaError.GROUP_MAX_SIZE_REACHED))

    assert member.problem.startswith("group 'group' does not let this member in (")
    assert member.problem.endswith("); run fewer instances, or raise the brokers' group.max.size")


def test_the_latest_problem_is_told_and_a_confirmed_lease_ends_it(member: Membership) -> None:
    member._note(KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED))
    forbidden = member.problem
    member._note(KafkaError(KafkaError.INCONSISTENT_GROUP_PROTOCOL))
    refused = member.problem
    member._sent_at = 0.0
    member._committed(None, [TopicPartition("topic", 0, 5)])

    assert "the brokers do not allow" in forbidden
    assert "stop what else takes part in this group" in refused
    assert member.problem == ""
