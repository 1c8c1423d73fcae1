"""What the group refuses a member for: told with what to do, and over once the member is let in."""

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

# Below the least that brokers take, unless they are told otherwise.
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


def test_a_session_timeout_that_the_brokers_do_not_take_is_named_with_their_bounds(settings: Settings) -> None:
    with member_of(settings, TOO_SHORT_MS) as member:
        eventually(lambda: bool(member.problem), "it says what is wrong")

    assert f"group '{settings.application_id}' does not admit this member" in member.problem
    assert "Invalid session timeout" in member.problem
    for setting in ("BALANCE_SESSION_TIMEOUT_MS", "group.min.session.timeout.ms", "group.max.session.timeout.ms"):
        assert setting in member.problem


def test_a_consumer_of_another_kind_in_the_group_is_told_of_until_it_is_gone(settings: Settings) -> None:
    alien_config = {**common_config(settings), "group.id": settings.application_id}
    with joined(alien_config, settings.topic) as alien, member_of(settings, settings.session_timeout_ms) as member:
        eventually(lambda: bool(member.problem), "it says what is wrong")
        told, had_joined = member.problem, member.joined.is_set()
        alien.close()
        eventually(member.joined.is_set, "it is let in")
        eventually(lambda: not member.problem, "that is over")

    assert not had_joined
    assert "Inconsistent group protocol" in told
    assert "stop the other members of this group" in told
