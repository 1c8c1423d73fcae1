"""Consumer groups: the exclusive group of a rebuild, and errors of a member with their remedies."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Consumer, KafkaError

from balance_service.cluster.membership import Guard, Membership, consumer_config, group_of, guard_config
from balance_service.errors import ConfigurationError, FatalError, RetriableError
from balance_service.hosting.offline_rebuild import ExclusiveGroup
from balance_service.kafka.clients import common_config
from balance_service.kafka.topics import Topics
from tests.integration.engines import prepare, settings_for
from tests.support.fakes import GUARDED, IgnoringListener
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


def old_config(settings: Settings) -> ClientConfig:
    """Returns an instance of an earlier version: its group has the name of the guard group, and another assignor."""
    return consumer_config(common_config(settings), settings.application_id, settings.session_timeout_ms)


def group(settings: Settings) -> str:
    return group_of(settings.application_id, settings.topic)


def test_a_member_that_is_alone_passes_the_check(settings: Settings) -> None:
    topics = Topics(settings)
    with ExclusiveGroup(settings, topics, prepare(topics, settings)) as alone:
        time.sleep(1)
        alone.check()


def test_a_rebuild_refuses_to_start_next_to_another_member(settings: Settings) -> None:
    topics = Topics(settings)
    source = prepare(topics, settings)
    with (
        joined(guard_config(settings), settings.topic),
        pytest.raises(ConfigurationError, match="1 other instance"),
        ExclusiveGroup(settings, topics, source),
    ):
        pass


def test_a_member_that_joins_during_the_rebuild_is_detected(settings: Settings) -> None:
    topics = Topics(settings)
    source = prepare(topics, settings)
    with ExclusiveGroup(settings, topics, source) as alone:
        other = Consumer(guard_config(settings))
        other.subscribe([settings.topic])
        try:
            other.poll(1)
            eventually(lambda: topics.group_members() > 1, "the other member requests to join", _SECONDS)
            with pytest.raises(ConfigurationError, match="1 other instance"):
                alone.check()
        finally:
            other.close()


def test_a_member_that_was_expelled_learns_it_even_after_it_rejoined(settings: Settings) -> None:
    topics = Topics(settings)
    # A member that does not poll for longer than this is expelled, as a process that stood still would be.
    with ExclusiveGroup(settings, topics, prepare(topics, settings), settings.session_timeout_ms) as alone:
        eventually(lambda: topics.group_members() == 0, "the group expels it", _SECONDS)

        def is_back() -> bool:
            alone._consumer.poll(0.1)
            return topics.group_members() == 1 and alone._is_member

        eventually(is_back, "it rejoins", _SECONDS)
        with pytest.raises(RetriableError, match="expelled this process"):
            alone.check()


def test_a_member_that_the_group_rejects_learns_why_at_once(settings: Settings) -> None:
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
        joined(old_config(settings), settings.topic),
        pytest.raises(ConfigurationError, match="stop the other members"),
        ExclusiveGroup(settings, topics, source),
    ):
        pass


# Below the default minimum of brokers.
TOO_SHORT_MS = 3_000


@contextmanager
def member_of(settings: Settings, session_timeout_ms: int, guarded: threading.Event = GUARDED) -> Iterator[Membership]:
    member = Membership(
        config=consumer_config(common_config(settings), group(settings), session_timeout_ms),
        topic=settings.topic,
        session_timeout_ms=session_timeout_ms,
        listener=IgnoringListener(),
        positions=lambda _topic: {},
        guarded=guarded,
    )
    member.start()
    try:
        yield member
    finally:
        member.stop()


def test_a_rejected_session_timeout_is_named_with_the_brokers_bounds(settings: Settings) -> None:
    with member_of(settings, TOO_SHORT_MS) as member:
        eventually(lambda: bool(member.problem), "the member reports the problem")

    assert f"group '{group(settings)}' does not admit this member" in member.problem
    assert "Invalid session timeout" in member.problem
    for setting in ("BALANCE_SESSION_TIMEOUT_MS", "group.min.session.timeout.ms", "group.max.session.timeout.ms"):
        assert setting in member.problem


def test_an_incompatible_consumer_in_the_group_is_reported_until_it_leaves(settings: Settings) -> None:
    alien_config = {**common_config(settings), "group.id": group(settings)}
    with joined(alien_config, settings.topic) as alien, member_of(settings, settings.session_timeout_ms) as member:
        eventually(lambda: bool(member.problem), "the member reports the problem")
        told, had_joined = member.problem, member.joined.is_set()
        alien.close()
        eventually(member.joined.is_set, "the member joins")
        eventually(lambda: not member.problem, "the problem is cleared")

    assert not had_joined
    assert "Inconsistent group protocol" in told
    assert "stop the other members of this group" in told


@contextmanager
def guard_of(settings: Settings) -> Iterator[Guard]:
    guard = Guard(settings)
    guard.start()
    try:
        yield guard
    finally:
        guard.stop()


@pytest.mark.shows("owner")
def test_no_instance_of_an_earlier_version_runs_next_to_one_of_this_version(settings: Settings) -> None:
    with joined(old_config(settings), settings.topic) as old, guard_of(settings) as guard:
        eventually(lambda: bool(guard.problem), "the guard is refused")
        was_refused, had_joined = guard.problem, guard.joined.is_set()
        old.close()
        eventually(guard.joined.is_set, "the guard is admitted once the other one has left")

        late = Consumer(old_config(settings))
        late.subscribe([settings.topic])
        try:
            told = _first_error(late)
        finally:
            late.close()

    assert "stop the other members of this group, for example instances of an earlier version" in was_refused
    assert not had_joined
    assert told == KafkaError.INCONSISTENT_GROUP_PROTOCOL


def _first_error(consumer: Consumer) -> int | None:
    """Returns the code of the first error that a consumer reports."""
    message = consumer.poll(_SECONDS)
    error = None if message is None else message.error()
    return None if error is None else error.code()


def test_instances_of_this_version_guard_together(settings: Settings) -> None:
    with guard_of(settings) as one, guard_of(settings) as other:
        eventually(lambda: one.joined.is_set() and other.joined.is_set(), "both are admitted")
        assert Topics(settings).group_members() == 2
        assert (one.problem, other.problem) == ("", "")


def test_a_member_joins_its_group_only_once_the_guard_is_admitted(settings: Settings) -> None:
    guarded = threading.Event()
    with member_of(settings, settings.session_timeout_ms, guarded) as member:
        time.sleep(1)
        joined_before = member.joined.is_set()
        guarded.set()
        eventually(member.joined.is_set, "the member joins")

    assert not joined_before


def test_a_guard_that_is_refused_after_it_was_admitted_ends_the_instance(settings: Settings) -> None:
    refused = KafkaError(KafkaError.INCONSISTENT_GROUP_PROTOCOL)
    guard = Guard(settings)
    try:
        guard.note(refused)
        guard.joined.set()
        with pytest.raises(FatalError, match="stop the other members"):
            guard.note(refused)
    finally:
        guard.stop()
