"""Administration of topics: metadata, configuration, offsets, creation and deletion."""

from __future__ import annotations

import time
from bisect import bisect_right
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import structlog
from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, OffsetSpec, ResourceType

from balance_service.errors import BalanceServiceError, ConfigurationError, RetriableError
from balance_service.kafka.clients import ConnectionErrors, by_remedy, common_config, new_client
from balance_service.process.runtime import Attempts, elapsed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from balance_service.settings import Settings

log = structlog.get_logger(__name__)

_T = TypeVar("_T")

MIN_IN_SYNC = "min.insync.replicas"
# Shorter than the time an instance may take to stop: it waits for the request in flight.
_REQUEST_TIMEOUT_SECONDS = 5.0
_METADATA_TIMEOUT_SECONDS = 1.0
_APPEARS_WITHIN_SECONDS = 20.0
_APPEARS_POLL_SECONDS = 0.1
_FOUND_WITHIN_SECONDS = 2.0
_SECOND_LOOK_SECONDS = 1.0
_RETRY_SECONDS = 0.1
# Of one partition, over hours at growing intervals.
_MOST_ENDS = 64
# The partition's leader or the group's coordinator was elected or moved just now. Kafka's Java client retries these,
# librdkafka does not.
_MOVED = {
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
}
_UNKNOWN_TOPIC = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC)


def in_sync_replicas(replicas: int) -> int:
    """How many of a topic's replicas have a record before it is acknowledged, unless a topic's configuration differs.

    Of three, two: a topic takes records while one replica is away, and then has each on another broker that is left.
    """
    return replicas // 2 + 1 if replicas > 2 else 1


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic as the broker reports it. `topic_id` changes when a topic is deleted and recreated."""

    name: str
    topic_id: str
    partitions: int


class Topics:
    """An admin client. Any thread may call it.

    Every method raises RetriableError if the broker does not answer, NotAuthorizedError if an ACL is missing, and
    ConfigurationError if the brokers refuse the connection and never accepted one.
    """

    def __init__(self, settings: Settings) -> None:
        """Raises ConfigurationError if the client refuses a property."""
        self._settings = settings
        self._errors = ConnectionErrors()
        self._admin = new_client(AdminClient, self._errors.watched(common_config(settings)))

    @property
    def refusal(self) -> str:
        """Why the brokers accept no connection of this client; empty if that is not known."""
        return self._errors.refusal

    def find(self, name: str) -> Topic | None:
        """The topic's present metadata; None if it does not exist."""
        wanted = TopicCollection([name])
        with self._mapped_errors(f"looking up topic {name}", f"Describe on topic '{name}', which Read and Write imply"):
            futures = self._admin.describe_topics(wanted, request_timeout=_REQUEST_TIMEOUT_SECONDS)
            try:
                described = futures[name].result(_REQUEST_TIMEOUT_SECONDS)
            except KafkaException as error:
                if error.args[0].code() not in _UNKNOWN_TOPIC:
                    raise
                described = None
        self._errors.accepted()
        return None if described is None else Topic(name, str(described.topic_id), len(described.partitions))

    def names(self) -> set[str]:
        """The names of all topics that the user may describe."""
        with self._mapped_errors("listing the topics"):
            return {*self._admin.list_topics(timeout=_REQUEST_TIMEOUT_SECONDS).topics}

    def find_patiently(self, name: str) -> Topic | None:
        """As `find`, tried twice: a broker that has just started may not know the topic yet."""
        found = self.find(name)
        if found is None:
            time.sleep(_SECOND_LOOK_SECONDS)
            found = self.find(name)
        return found

    def create(self, name: str, partitions: int, config: Mapping[str, str]) -> Topic:
        """Creates a topic and waits until it appears. A topic that another instance creates at the same time will do.

        It has BALANCE_REPLICATION_FACTOR replicas, and acknowledges a record that `in_sync_replicas` of them have.

        Raises:
            ConfigurationError: the cluster has fewer brokers than BALANCE_REPLICATION_FACTOR.
            RetriableError: it has enough, and some of them are away; as every method.
        """
        replicas = self._settings.replication_factor
        config = {MIN_IN_SYNC: str(in_sync_replicas(replicas)), **config}
        wanted = [NewTopic(name, num_partitions=partitions, replication_factor=replicas, config=config)]
        with self._mapped_errors(f"creating topic {name}", f"Create on topic '{name}', or create it beforehand"):
            try:
                self._admin.create_topics(wanted, request_timeout=_REQUEST_TIMEOUT_SECONDS)[name].result()
                log.info("topic created", topic=name, partitions=partitions)
            except KafkaException as error:
                code = error.args[0].code()
                if code == KafkaError.INVALID_REPLICATION_FACTOR:
                    running, known = self._brokers()
                    if known >= replicas:
                        raise RetriableError(
                            f"topic '{name}' needs {replicas} brokers, and {running} of {known} run: start the others"
                        ) from error
                    raise ConfigurationError(
                        f"BALANCE_REPLICATION_FACTOR {replicas} is more than the cluster has brokers, so topic "
                        f"'{name}' cannot be created; lower it"
                    ) from error
                if code != KafkaError.TOPIC_ALREADY_EXISTS:
                    raise

        def created() -> Topic | None:
            topic = self.find(name)
            return topic if topic is not None and topic.partitions else None

        return _eventually(created, f"topic {name} was created but does not appear")

    def delete(self, name: str) -> None:
        """Deletes a topic and waits until it is gone."""
        with self._mapped_errors(f"deleting topic {name}", f"Delete on topic '{name}'"):
            try:
                self._admin.delete_topics([name], request_timeout=_REQUEST_TIMEOUT_SECONDS)[name].result()
            except KafkaException as error:
                if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                    raise
        _eventually(lambda: self.find(name) is None or None, f"topic {name} is still there after it was deleted")

    def config(self, name: str) -> dict[str, str]:
        """A topic's effective configuration."""
        resource = ConfigResource(ResourceType.TOPIC, name)
        doing = f"reading the configuration of topic {name}"
        with self._mapped_errors(doing, f"DescribeConfigs on topic '{name}'"):
            futures = self._admin.describe_configs([resource], request_timeout=_REQUEST_TIMEOUT_SECONDS)
            entries = futures[resource].result(_REQUEST_TIMEOUT_SECONDS)
        return {key: str(entry.value) for key, entry in entries.items()}

    def offsets(
        self, name: str, partitions: Iterable[int], *, earliest: bool = False, committed: bool = False
    ) -> dict[int, int]:
        """The high watermark of each partition.

        Args:
            earliest: the first available offset instead.
            committed: the last stable offset instead: every transaction below it has ended.
        """
        spec = OffsetSpec.earliest() if earliest else OffsetSpec.latest()
        ends = self._list_offsets(name, partitions, spec, committed=committed)
        if min(ends.values(), default=0) < 0:
            # librdkafka reports a request that was cut off by a broker's shutdown as a success without an offset.
            raise RetriableError(f"Kafka's answer about the offsets of topic {name} was cut off")
        return ends

    def first_since(self, name: str, partition: int, timestamp_ms: int) -> int:
        """The offset of the first record with this timestamp or a later one; the high watermark if there is none."""
        found = self._list_offsets(name, [partition], OffsetSpec.for_timestamp(timestamp_ms))[partition]
        return found if found >= 0 else self.offsets(name, [partition])[partition]

    def group_members(self) -> int:
        """The number of members that the application's consumer group has now."""
        group = self._settings.application_id

        def describe() -> int:
            futures = self._admin.describe_consumer_groups([group], request_timeout=_REQUEST_TIMEOUT_SECONDS)
            try:
                return len(futures[group].result(_REQUEST_TIMEOUT_SECONDS).members)
            except KafkaException as error:
                if error.args[0].code() == KafkaError.GROUP_ID_NOT_FOUND:
                    return 0
                raise

        with self._mapped_errors(f"describing group {group}", f"Describe on group '{group}'"):
            return _retried_while_moved(describe)

    def starting_with(self, prefix: str) -> list[str]:
        """Returns the names of topics that begin so. Raises RetriableError."""
        with self._mapped_errors("listing the topics"):
            topics = self._admin.list_topics(timeout=_REQUEST_TIMEOUT_SECONDS).topics
        return [name for name in topics if name.startswith(prefix)]

    def brokers(self) -> int:
        """The number of brokers in the cluster."""
        with self._mapped_errors("counting the brokers"):
            return len(self._admin.list_topics(timeout=_REQUEST_TIMEOUT_SECONDS).brokers)

    def _brokers(self) -> tuple[int, int]:
        """The number of brokers that run, and of those that run or have a replica of some topic."""
        cluster = self._admin.list_topics(timeout=_REQUEST_TIMEOUT_SECONDS)
        running = {*cluster.brokers}
        of_replicas = {
            broker for topic in cluster.topics.values() for one in topic.partitions.values() for broker in one.replicas
        }
        return len(running), len(running | of_replicas)

    def _list_offsets(
        self, name: str, partitions: Iterable[int], spec: OffsetSpec, *, committed: bool = False
    ) -> dict[int, int]:
        wanted = {TopicPartition(name, partition): spec for partition in partitions}
        if not wanted:
            return {}
        isolation = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED

        def list_offsets() -> dict[int, int]:
            futures = self._admin.list_offsets(
                wanted, isolation_level=isolation, request_timeout=_REQUEST_TIMEOUT_SECONDS
            )
            try:
                return {
                    tp.partition: int(future.result(_REQUEST_TIMEOUT_SECONDS).offset) for tp, future in futures.items()
                }
            except KafkaException:
                self._refresh_leaders(name)
                raise

        with self._mapped_errors(f"reading the offsets of topic {name}", f"Describe on topic '{name}'"):
            return _retried_while_moved(list_offsets)

    def _refresh_leaders(self, name: str) -> None:
        # Kafka refuses a request with an old leader epoch. librdkafka goes on sending that epoch until it refreshes its
        # metadata, which by itself may be minutes later.
        with suppress(KafkaException):
            self._admin.list_topics(name, timeout=_METADATA_TIMEOUT_SECONDS)

    @contextmanager
    def _mapped_errors(self, doing: str, grant: str = "") -> Iterator[None]:
        """Raises the errors of a request by remedy. Arguments as of `by_remedy`."""
        try:
            yield
        except KafkaException as error:
            remedy = by_remedy(error, doing, grant)
            if not isinstance(remedy, RetriableError):
                raise remedy from error
            self._refresh_controller()
            raise self._explained(str(remedy)) from error
        except FutureTimeoutError as error:
            self._refresh_controller()
            silence = f"Kafka at {self._settings.bootstrap_servers} does not answer: {doing} timed out"
            raise self._explained(silence) from error

    def _refresh_controller(self) -> None:
        # librdkafka sends requests to the broker that its last metadata name as the controller. If that broker is gone,
        # each request waits for it, and times out, until the metadata are read again, which by itself takes minutes.
        with suppress(KafkaException):
            self._admin.list_topics(timeout=_METADATA_TIMEOUT_SECONDS)

    def _explained(self, message: str) -> BalanceServiceError:
        self._admin.poll(0)  # serves the callback that records connection errors
        return self._errors.explain(message)


class Lag(NamedTuple):
    """How far a position is behind the end of its partition."""

    records: int
    seconds: float
    """Time since the end passed the position: all records that are older are below the position. 0 without a lag."""
    is_least: bool
    """Whether the end had passed the position before it was first read, so that `seconds` is a lower bound."""


class _End(NamedTuple):
    """An end offset, and when it was first and last read."""

    offset: int
    first: float
    last: float


class _Ends:
    """The end offsets of a partition over time: exact lately, sparser the longer ago.

    One thread adds; any thread may search, in an immutable tuple that is replaced as a whole.
    """

    def __init__(self) -> None:
        self._read: tuple[_End, ...] = ()
        """Rising."""

    def add(self, end: int, now: float) -> None:
        read = self._read
        if read and end < read[-1].offset:
            # The topic was recreated, or lost its end.
            read = ()
        if read and end == read[-1].offset:
            self._read = (*read[:-1], read[-1]._replace(last=now))
            return
        if len(read) >= _MOST_ENDS:
            # Without it, the gap is the smallest for its age.
            at = min(
                range(1, len(read) - 1),
                key=lambda n: (read[n + 1].first - read[n - 1].first) / (now - read[n].first + 1),
            )
            read = read[:at] + read[at + 1 :]
        self._read = (*read, _End(end, now, now))

    def passed(self, position: int) -> tuple[float, bool] | None:
        """Returns the time when the end passed a position, and whether it may have done so earlier; None: not yet."""
        read = self._read
        at = bisect_right(read, position, key=attrgetter("offset"))
        return None if at == len(read) else (read[at].first, at == 0)

    def reached(self, position: int) -> float | None:
        """Returns the last time when the end was read and was not beyond a position; None if that is not known."""
        read = self._read
        at = bisect_right(read, position, key=attrgetter("offset"))
        return read[at - 1].last if at else None


class Watermarks:
    """The end offset of each partition as last read, which lag is measured against.

    One thread refreshes it; any thread may read it.
    """

    def __init__(self, topic: str, read: Callable[[], Mapping[int, int]], clock: Callable[[], float] = elapsed) -> None:
        """Args:
        topic: its name, for the log.
        read: returns the end offset of each partition; raises BalanceServiceError if the broker does not respond.
        """
        self._topic = topic
        self._read = read
        self._clock = clock
        self._known: tuple[Mapping[int, int], float] = ({}, float("-inf"))
        self.problem = ""
        """Why the ends could not be read last; empty if they were."""
        self._ends: dict[int, _Ends] = {}
        self._attempts = Attempts(log, "the source's end is not known", "the source's end is known again")

    def refresh(self) -> None:
        read_at = self._clock()
        try:
            self._known = (self._read(), read_at)
        except BalanceServiceError as error:
            self.problem = str(error)
            self._attempts.failed(error, topic=self._topic)
            return
        self.problem = ""
        self._attempts.succeeded()
        for partition, end in self._known[0].items():
            self._ends.setdefault(partition, _Ends()).add(end, read_at)

    @property
    def read_at(self) -> float:
        """When the ends were read last, as a reading of the clock; minus infinity before that."""
        return self._known[1]

    @property
    def age_seconds(self) -> float:
        return self._clock() - self.read_at

    def end(self, partition: int) -> int | None:
        """The end offset of a partition; None before the first refresh."""
        return self._known[0].get(partition)

    def lag(self, partition: int, position: int) -> int | None:
        """The number of records from a position to the end; None if either is unknown."""
        end = self.end(partition)
        return None if end is None or position < 0 else max(0, end - position)

    def age(self, partition: int, position: int) -> float | None:
        """The seconds since a position was known to include all records of a partition; None if it is not known.

        It may have done so later, but no reading of the end shows that.
        """
        ends = self._ends.get(partition)
        reached = None if ends is None or position < 0 else ends.reached(position)
        return None if reached is None else max(0.0, self._clock() - reached)

    def lag_in_time(self, partition: int, position: int) -> Lag | None:
        """The lag of a position in records and seconds; None if it is unknown."""
        records, ends = self.lag(partition, position), self._ends.get(partition)
        if records is None or ends is None:
            return None
        passed = ends.passed(position) if records else None
        if passed is None:
            return Lag(records, 0.0, is_least=False)
        return Lag(records, max(0.0, self._clock() - passed[0]), passed[1])


def _retried_while_moved(request: Callable[[], _T]) -> _T:
    """Repeats a request for two seconds while its leader or coordinator is moving. Raises KafkaException."""
    deadline = time.monotonic() + _FOUND_WITHIN_SECONDS
    while True:
        try:
            return request()
        except KafkaException as error:
            if error.args[0].code() not in _MOVED or time.monotonic() > deadline:
                raise
        time.sleep(_RETRY_SECONDS)


def _eventually(look: Callable[[], _T | None], otherwise: str) -> _T:
    """Polls until a value is found. Raises RetriableError with the sentence `otherwise` if it takes too long."""
    deadline = time.monotonic() + _APPEARS_WITHIN_SECONDS
    while (found := look()) is None:
        if time.monotonic() > deadline:
            raise RetriableError(otherwise)
        time.sleep(_APPEARS_POLL_SECONDS)
    return found
