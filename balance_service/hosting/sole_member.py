"""Membership in the group with every partition, so that no instance works on what a rebuild drops meanwhile."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Self

from confluent_kafka import OFFSET_END, Consumer, KafkaException, TopicPartition

from balance_service.cluster.membership import consumer_config, refusal
from balance_service.errors import BalanceServiceError, ConfigurationError, RetriableError
from balance_service.kafka.clients import by_remedy, common_config, new_client

if TYPE_CHECKING:
    from balance_service.kafka.topics import Topic, Topics
    from balance_service.settings import Settings

_LOOK_EVERY_SECONDS = 0.2
_JOIN_SECONDS = 60.0
# Between joining and the check at the end nothing is polled, however long the changelog takes to read: a day, the most
# that librdkafka takes.
_POLL_INTERVAL_MS = 86_400_000


class SoleMember:
    """The only member of the application's group, while entered. For one thread.

    Raises, when entered:
        ConfigurationError: another member is in the group, or the group does not let this one in.
        RetriableError: the broker does not answer, or gives this process too little.
    """

    def __init__(self, settings: Settings, topics: Topics, source: Topic) -> None:
        self._settings = settings
        self._topics = topics
        self._source = source
        self._assigned: set[int] = set()
        self._was_revoked = False
        config = consumer_config(common_config(settings), settings.application_id, settings.session_timeout_ms)
        self._consumer = new_client(Consumer, {**config, "max.poll.interval.ms": _POLL_INTERVAL_MS})

    def __enter__(self) -> Self:
        try:
            self._consumer.subscribe([self._source.name], on_assign=self._on_assign, on_revoke=self._on_revoke)
            deadline = time.monotonic() + _JOIN_SECONDS
            wanted = set(range(self._source.partitions))
            while self._assigned != wanted:
                if self._topics.group_members() > 1 or time.monotonic() > deadline:
                    self._check_others()
                    raise RetriableError("the group did not give this process every partition in time; try again")
                self._poll(_LOOK_EVERY_SECONDS)
            self._was_revoked = False
            self._check_others()
        except KafkaException as error:
            self._consumer.close()
            raise by_remedy(error, "joining the group") from error
        except BalanceServiceError:
            self._consumer.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._consumer.close()

    def check(self) -> None:
        """Check that no other member has come, and that none can have been here since this one was entered.

        Raises:
            ConfigurationError: another member is in the group, or the group does not let this one in.
            RetriableError: the group has put this process out.
        """
        self._check_others()
        if self._was_revoked:
            raise RetriableError("the group has put this process out, so another may have been at work; try again")

    def _poll(self, seconds: float) -> bool:
        """One poll; whether anything came. Raises ConfigurationError: the group does not let this process in."""
        message = self._consumer.poll(seconds)
        error = None if message is None else message.error()
        refused = None if error is None else refusal(error, self._settings.application_id, [self._source.name])
        if refused is not None:
            raise refused
        return message is not None

    def _check_others(self) -> None:
        while self._poll(0):
            pass
        others = self._topics.group_members() - 1
        if others > 0:
            raise ConfigurationError(
                f"{others} other instance(s) of application id '{self._settings.application_id}' are running; "
                "stop them all, then rebuild"
            )

    def _on_assign(self, consumer: Consumer, assigned: list[TopicPartition]) -> None:
        parts = [TopicPartition(p.topic, p.partition, OFFSET_END) for p in assigned]
        if parts:
            consumer.incremental_assign(parts)
            consumer.pause(parts)
        self._assigned |= {p.partition for p in assigned}

    def _on_revoke(self, consumer: Consumer, revoked: list[TopicPartition]) -> None:
        self._was_revoked = True
        self._assigned -= {p.partition for p in revoked}
        consumer.incremental_unassign(revoked)
