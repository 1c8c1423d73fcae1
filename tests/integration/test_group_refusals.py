"""Group errors of a member: reported with a remedy, and cleared once the member joins."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from balance_service.cluster.membership import Membership, consumer_config
from balance_service.kafka.clients import common_config
from balance_service.kafka.topics import Topics
from tests.integration.engines import prepare, settings_for
from tests.support.fakes import IgnoringListener
from tests.support.kafka import joined
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalStack
    from balance_service.settings import Settings

# Below the default minimum of brokers.
TOO_SHORT_MS = 3_000


@pytest.fixture
def settings(stack: LocalStack, names: dict[str, str], tmp_path: Path) -> Settings:
    settings = settings_for(stack, names, tmp_path)
    prepare(Topics(settings), settings)
    return settings


@contextmanager
def member_of(settings: Settings, session_timeout_ms: int) -> Iterator[Membership]:
    member = Membership(
        config=consumer_config(common_config(settings), settings.application_id, session_timeout_ms),
        topics=[settings.topic],
        session_timeout_ms=session_timeout_ms,
        listener=IgnoringListener(),
        positions=dict,
    )
    member.start()
    try:
        yield member
    finally:
        member.stop()


def test_a_rejected_session_timeout_is_named_with_the_brokers_bounds(settings: Settings) -> None:
    with member_of(settings, TOO_SHORT_MS) as member:
        eventually(lambda: bool(member.problem), "the member reports the problem")

    assert f"group '{settings.application_id}' does not admit this member" in member.problem
    assert "Invalid session timeout" in member.problem
    for setting in ("BALANCE_SESSION_TIMEOUT_MS", "group.min.session.timeout.ms", "group.max.session.timeout.ms"):
        assert setting in member.problem


def test_an_incompatible_consumer_in_the_group_is_reported_until_it_leaves(settings: Settings) -> None:
    alien_config = {**common_config(settings), "group.id": settings.application_id}
    with joined(alien_config, settings.topic) as alien, member_of(settings, settings.session_timeout_ms) as member:
        eventually(lambda: bool(member.problem), "the member reports the problem")
        told, had_joined = member.problem, member.joined.is_set()
        alien.close()
        eventually(member.joined.is_set, "the member joins")
        eventually(lambda: not member.problem, "the problem is cleared")

    assert not had_joined
    assert "Inconsistent group protocol" in told
    assert "stop the other members of this group" in told
