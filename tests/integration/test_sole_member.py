"""The sole member of a group: whatever comes while a rebuild drops things is seen."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Consumer

from balance_service.cluster.membership import consumer_config
from balance_service.errors import ConfigurationError, RetriableError
from balance_service.hosting.sole_member import SoleMember
from balance_service.kafka.clients import common_config
from balance_service.kafka.topics import Topics
from tests.integration.engines import prepare, settings_for
from tests.support.kafka import joined
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalStack
    from balance_service.kafka.clients import ClientConfig
    from balance_service.settings import Settings

_SECONDS = 30.0


@pytest.fixture
def settings(stack: LocalStack, names: dict[str, str], tmp_path: Path) -> Settings:
    return settings_for(stack, names, tmp_path)


def config_of_another(settings: Settings) -> ClientConfig:
    """Of another instance's member."""
    return consumer_config(common_config(settings), settings.application_id, settings.session_timeout_ms)


def test_who_is_alone_may_go_on(settings: Settings) -> None:
    topics = Topics(settings)
    with SoleMember(settings, topics, prepare(topics, settings)) as alone:
        time.sleep(1)
        alone.check()


def test_a_member_that_was_there_before_is_refused(settings: Settings) -> None:
    topics = Topics(settings)
    source = prepare(topics, settings)
    with (
        joined(config_of_another(settings), settings.topic),
        pytest.raises(ConfigurationError, match="1 other instance"),
        SoleMember(settings, topics, source),
    ):
        pass


def test_a_member_that_comes_meanwhile_is_seen(settings: Settings) -> None:
    topics = Topics(settings)
    source = prepare(topics, settings)
    with SoleMember(settings, topics, source) as alone:
        other = Consumer(config_of_another(settings))
        other.subscribe([settings.topic])
        try:
            other.poll(1)
            eventually(lambda: topics.group_members() > 1, "the other asks to join", _SECONDS)
            with pytest.raises(ConfigurationError, match="1 other instance"):
                alone.check()
        finally:
            other.close()


def test_who_was_put_out_is_told_though_it_is_let_in_again(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    # As a process that stood still for longer than its session.
    monkeypatch.setattr("balance_service.hosting.sole_member._POLL_INTERVAL_MS", settings.session_timeout_ms)
    topics = Topics(settings)
    with SoleMember(settings, topics, prepare(topics, settings)) as alone:
        eventually(lambda: topics.group_members() == 0, "the group has put it out", _SECONDS)

        def is_back() -> bool:
            alone._consumer.poll(0.1)
            return topics.group_members() == 1 and len(alone._consumer.assignment()) > 0

        eventually(is_back, "it is let in again", _SECONDS)
        with pytest.raises(RetriableError, match="put this process out"):
            alone.check()


def test_who_the_group_does_not_let_in_is_told_why_at_once(settings: Settings) -> None:
    topics = Topics(settings)
    source = prepare(topics, settings)
    # Below the least that brokers take, unless they are told otherwise.
    impatient = settings.model_copy(update={"session_timeout_ms": 3_000})
    began = time.monotonic()
    with (
        pytest.raises(ConfigurationError, match=r"Invalid session timeout.*set BALANCE_SESSION_TIMEOUT_MS"),
        SoleMember(impatient, topics, source),
    ):
        pass
    assert time.monotonic() - began < _SECONDS


def test_a_consumer_of_another_kind_is_told_of(settings: Settings) -> None:
    topics = Topics(settings)
    source = prepare(topics, settings)
    with (
        joined({**common_config(settings), "group.id": settings.application_id}, settings.topic),
        pytest.raises(ConfigurationError, match="stop what else takes part"),
        SoleMember(settings, topics, source),
    ):
        pass
