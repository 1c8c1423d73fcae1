"""Topics as the broker has them: what there is, how far it goes, and how to make and delete it."""

from __future__ import annotations

import time
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import structlog
from confluent_kafka import (
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import (
    AdminClient,
    ConfigResource,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from balance_service.errors import ConfigurationError, RetriableError
from balance_service.kafka.clients import ConnectionErrors, by_remedy, common_config, new_client

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from balance_service.errors import BalanceServiceError
    from balance_service.settings import Settings

log = structlog.get_logger(__name__)

_T = TypeVar("_T")

# Less than an instance takes to stop at the latest: it waits for the request that is under way.
_REQUEST_TIMEOUT_SECONDS = 5.0
_METADATA_TIMEOUT_SECONDS = 1.0
_APPEARS_WITHIN_SECONDS = 20.0
_FOUND_WITHIN_SECONDS = 2.0
# A partition, or the place of a group, that was made or moved a moment ago. Java's client asks again, librdkafka does
# not.
_MOVED = {
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
}
_LOOK_AGAIN_SECONDS = 1.0
_ASK_AGAIN_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic as the broker has it; `topic_id` changes when a topic is deleted and made anew."""

    name: str
    topic_id: str
    partitions: int


class Topics:
    """Looks topics up, makes and deletes them, tells their offsets. Any thread may call."""

    def __init__(self, settings: Settings) -> None:
        """Raises ConfigurationError if the client refuses a property."""
        self._settings = settings
        self._connection = ConnectionErrors()
        self._admin = new_client(AdminClient, self._connection.watched(common_config(settings)))

    def find(self, name: str) -> Topic | None:
        """A topic as it is now; None if there is none.

        Raises:
            RetriableError: the broker does not answer.
            ConfigurationError: it does not let us in, and never has.
        """
        try:
            described = self._admin.describe_topics(TopicCollection([name]), request_timeout=_REQUEST_TIMEOUT_SECONDS)[
                name
            ].result(_REQUEST_TIMEOUT_SECONDS)
        except KafkaException as error:
            if error.args[0].code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC):
                self._connection.accepted()
                return None
            raise self._by_remedy(error, f"looking up topic {name}", _describe(name)) from error
        except FutureTimeoutError as error:
            raise self._silent(f"topic {name}") from error
        self._connection.accepted()
        return Topic(name, str(described.topic_id), len(described.partitions))

    def find_patiently(self, name: str) -> Topic | None:
        """The same, looked for twice: a broker that has just started may not have heard of it yet. Raises as `find`."""
        found = self.find(name)
        if found is None:
            time.sleep(_LOOK_AGAIN_SECONDS)
            found = self.find(name)
        return found

    def ensure(self, name: str, partitions: int, config: Mapping[str, str]) -> Topic:
        """A topic, created if missing. Raises as `create`."""
        return self.find(name) or self.create(name, partitions, config)

    def create(self, name: str, partitions: int, config: Mapping[str, str]) -> Topic:
        """Create a topic and wait until it appears; one that somebody else creates meanwhile will do.

        Raises:
            ConfigurationError: the cluster has fewer brokers than BALANCE_REPLICATION_FACTOR.
            RetriableError: the broker does not answer.
        """
        topic = NewTopic(
            name,
            num_partitions=partitions,
            replication_factor=self._settings.replication_factor,
            config=dict(config),
        )
        try:
            self._admin.create_topics([topic], request_timeout=_REQUEST_TIMEOUT_SECONDS)[name].result()
            log.info("topic created", topic=name, partitions=partitions)
        except KafkaException as error:
            code = error.args[0].code()
            if code == KafkaError.INVALID_REPLICATION_FACTOR:
                raise ConfigurationError(
                    f"BALANCE_REPLICATION_FACTOR {self._settings.replication_factor} is more than the "
                    f"cluster has brokers, so topic '{name}' cannot be created; lower it"
                ) from error
            # Another instance, started at the same moment, may have been first.
            if code != KafkaError.TOPIC_ALREADY_EXISTS:
                grant = f"Create on topic '{name}', or create it beforehand"
                raise self._by_remedy(error, f"creating topic {name}", grant) from error
        deadline = time.monotonic() + _APPEARS_WITHIN_SECONDS
        while (created := self.find(name)) is None or created.partitions == 0:
            if time.monotonic() > deadline:
                raise RetriableError(f"topic {name} was created but does not appear")
            time.sleep(0.1)
        return created

    def config(self, name: str) -> dict[str, str]:
        """A topic's configuration as it is in effect. Raises RetriableError if the broker does not answer."""
        resource = ConfigResource(ResourceType.TOPIC, name)
        try:
            entries = self._admin.describe_configs([resource], request_timeout=_REQUEST_TIMEOUT_SECONDS)[
                resource
            ].result(_REQUEST_TIMEOUT_SECONDS)
        except KafkaException as error:
            raise self._by_remedy(
                error, f"reading the configuration of topic {name}", f"DescribeConfigs on topic '{name}'"
            ) from error
        except FutureTimeoutError as error:
            raise self._silent(f"the configuration of topic {name}") from error
        return {key: str(entry.value) for key, entry in entries.items()}

    def delete(self, name: str) -> None:
        """Delete a topic and wait until it is gone."""
        try:
            self._admin.delete_topics([name], request_timeout=_REQUEST_TIMEOUT_SECONDS)[name].result()
        except KafkaException as error:
            if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise self._by_remedy(error, f"deleting topic {name}", f"Delete on topic '{name}'") from error
        deadline = time.monotonic() + _APPEARS_WITHIN_SECONDS
        while self.find(name) is not None:
            if time.monotonic() > deadline:
                raise RetriableError(f"topic {name} is still there after it was deleted")
            time.sleep(0.1)

    def delete_before(self, name: str, offsets: Mapping[int, int]) -> None:
        """Delete the records of some partitions below an offset each.

        Raises:
            NotAuthorizedError: the broker does not let us.
            RetriableError: it does not answer.
        """
        wanted = [TopicPartition(name, partition, offset) for partition, offset in offsets.items()]
        if not wanted:
            return
        try:
            for future in self._admin.delete_records(wanted, request_timeout=_REQUEST_TIMEOUT_SECONDS).values():
                future.result(_REQUEST_TIMEOUT_SECONDS)
        except KafkaException as error:
            raise self._by_remedy(error, f"deleting records of topic {name}", f"Delete on topic '{name}'") from error
        except FutureTimeoutError as error:
            raise self._silent(f"the records to be deleted from topic {name}") from error

    def offsets(
        self, name: str, partitions: Iterable[int], *, earliest: bool = False, committed: bool = False
    ) -> dict[int, int]:
        """Per partition the high watermark.

        Args:
            earliest: the first offset still there instead.
            committed: the last stable offset instead, up to which every transaction has ended.

        Raises:
            RetriableError: the broker does not answer.
        """
        spec = OffsetSpec.earliest() if earliest else OffsetSpec.latest()
        ends = self._list_offsets(name, partitions, spec, committed=committed)
        if min(ends.values(), default=0) < 0:
            # librdkafka tells of a request that a broker's end cut off as a success without an offset.
            raise RetriableError(f"Kafka's answer about the offsets of topic {name} was cut off")
        return ends

    def first_since(self, name: str, partition: int, timestamp_ms: int) -> int:
        """The offset of the first record that is not older than this; the high watermark if there is none.

        Raises:
            RetriableError: the broker does not answer.
        """
        found = self._list_offsets(name, [partition], OffsetSpec.for_timestamp(timestamp_ms))[partition]
        return found if found >= 0 else self.offsets(name, [partition])[partition]

    def _list_offsets(
        self, name: str, partitions: Iterable[int], spec: OffsetSpec, *, committed: bool = False
    ) -> dict[int, int]:
        wanted = {TopicPartition(name, partition): spec for partition in partitions}
        if not wanted:
            return {}
        isolation = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED

        def asked() -> dict[int, int]:
            futures = self._admin.list_offsets(
                wanted, isolation_level=isolation, request_timeout=_REQUEST_TIMEOUT_SECONDS
            )
            try:
                return {
                    tp.partition: int(future.result(_REQUEST_TIMEOUT_SECONDS).offset) for tp, future in futures.items()
                }
            except KafkaException:
                self._learn_leaders(name)
                raise

        try:
            return _once_found(asked)
        except KafkaException as error:
            doing, grant = f"reading the offsets of topic {name}", f"Describe on topic '{name}'"
            raise self._by_remedy(error, doing, grant) from error
        except FutureTimeoutError as error:
            raise self._silent(f"the offsets of topic {name}") from error

    def group_members(self) -> int:
        """How many members the application's consumer group has now."""
        group = self._settings.application_id

        def asked() -> int:
            futures = self._admin.describe_consumer_groups([group], request_timeout=_REQUEST_TIMEOUT_SECONDS)
            return len(futures[group].result(_REQUEST_TIMEOUT_SECONDS).members)

        try:
            return _once_found(asked)
        except KafkaException as error:
            if error.args[0].code() == KafkaError.GROUP_ID_NOT_FOUND:
                return 0
            raise self._by_remedy(error, f"describing group {group}", f"Describe on group '{group}'") from error
        except FutureTimeoutError as error:
            raise self._silent(f"group {group}") from error

    def _by_remedy(self, error: KafkaException, doing: str, grant: str = "") -> BalanceServiceError:
        remedy = by_remedy(error, doing, grant)
        return self._explained(str(remedy)) if isinstance(remedy, RetriableError) else remedy

    def _silent(self, about: str) -> BalanceServiceError:
        return self._explained(f"Kafka at {self._settings.bootstrap_servers} does not answer about {about}")

    def _explained(self, message: str) -> BalanceServiceError:
        self._admin.poll(0)  # lets the connection report
        return self._connection.explain(message)

    def _learn_leaders(self, name: str) -> None:
        # Asked for offsets under a leader epoch that is over, Kafka refuses; librdkafka goes on asking under it until
        # it looks its metadata up again, which by itself may be minutes later.
        with suppress(KafkaException):
            self._admin.list_topics(name, timeout=_METADATA_TIMEOUT_SECONDS)

    def brokers(self) -> int:
        """How many brokers there are. Raises RetriableError if none answers."""
        try:
            return len(self._admin.list_topics(timeout=_REQUEST_TIMEOUT_SECONDS).brokers)
        except KafkaException as error:
            raise self._by_remedy(error, "counting the brokers") from error


def _once_found(ask: Callable[[], _T]) -> _T:
    """What is answered; asked again for a while where what answers has just moved. Raises KafkaException."""
    deadline = time.monotonic() + _FOUND_WITHIN_SECONDS
    while True:
        try:
            return ask()
        except KafkaException as error:
            if error.args[0].code() not in _MOVED or time.monotonic() > deadline:
                raise
        time.sleep(_ASK_AGAIN_SECONDS)


def _describe(name: str) -> str:
    return f"Describe on topic '{name}', which Read and Write imply"
