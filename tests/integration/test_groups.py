"""Consumer groups: the exclusive group of a rebuild, and errors of a member with their remedies."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Consumer

from balance_service.cluster.membership import Membership, consumer_config
from balance_service.errors import ConfigurationError, RetriableError
from balance_service.hosting.rebuild import ExclusiveGroup
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
    from balance_service.kafka.clients import ClientConfig
    from balance_service.settings import Settings

_SECONDS = 30.0


@pytest.fixture
def settings(stack: LocalStack, names: dict[str, str], tmp_path: Path) -> Settings:
    """Settings of an application whose topics exist."""
    settings = settings_for(stack, names, tmp_path)
    prepare(Topics(settings), settings)
    return settings


def config_of_another(settings: Settings) -> ClientConfig:
    return consumer_config(common_config(settings), settings.application_id, settings.session_timeout_ms)


def test_a_member_that_is_alone_passes_the_check(settings: Settings) -> None:
    topics = Topics(settings)
    with ExclusiveGroup(settings, topics, prepare(topics, settings)) as alone:
        time.sleep(1)
        alone.check()


def test_a_rebuild_refuses_to_start_next_to_another_member(settings: Settings) -> None:
    topics = Topics(settings)
    source = prepare(topics, settings)
    with (
        joined(config_of_another(settings), settings.topic),
        pytest.raises(ConfigurationError, match="1 other instance"),
        ExclusiveGroup(settings, topics, source),
    ):
        pass


def test_a_member_that_joins_during_the_rebuild_is_detected(settings: Settings) -> None:
    topics = Topics(settings)
    source = prepare(topics, settings)
    with ExclusiveGroup(settings, topics, source) as alone:
        other = Consumer(config_of_another(settings))
        other.subscribe([settings.topic])
        try:
            other.poll(1)
            eventually(lambda: topics.group_members() > 1, "the other member requests to join", _SECONDS)
            with pytest.raises(ConfigurationError, match="1 other instance"):
                alone.check()
        finally:
            other.close()


def test_a_member_that_was_expelled_is_told_so_even_after_it_rejoined(settings: Settings) -> None:
    topics = Topics(settings)
    # A member that does not poll for longer than this is expelled, as a process that stood still would be.
    with ExclusiveGroup(settings, topics, prepare(topics, settings), settings.session_timeout_ms) as alone:
        eventually(lambda: topics.group_members() == 0, "the group expels it", _SECONDS)

        def is_back() -> bool:
            alone._consumer.poll(0.1)
            return topics.group_members() == 1 and len(alone._consumer.assignment()) > 0

        eventually(is_back, "it rejoins", _SECONDS)
        with pytest.raises(RetriableError, match="expelled this process"):
            alone.check()


def test_a_member_that_the_group_rejects_is_told_why_at_once(settings: Settings) -> None:
    topics = Topics(settings)
    source = prepare(topics, settings)
    # Below the default minimum of brokers.
    impatient = settings.model_copy(update={"session_timeout_ms": 3_000})
    began = time.monotonic()
    with (
        pytest.raises(ConfigurationError, match=r"Invalid session timeout.*set BALANCE_SESSION_TIMEOUT_MS"),
        ExclusiveGroup(impatient, topics, source),
    ):
        pass
    assert time.monotonic() - began < _SECONDS


def test_an_incompatible_consumer_in_the_group_is_named(settings: Settings) -> None:
    topics = Topics(settings)
    source = prepare(topics, settings)
    with (
        joined({**common_config(settings), "group.id": settings.application_id}, settings.topic),
        pytest.raises(ConfigurationError, match="stop the other members"),
        ExclusiveGroup(settings, topics, source),
    ):
        pass


# Below the default minimum of brokers.
TOO_SHORT_MS = 3_000


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
