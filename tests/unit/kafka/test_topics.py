"""Requests while a coordinator moves; watermarks and lag."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from structlog.testing import capture_logs

from balance_service.errors import ConfigurationError, RetriableError
from balance_service.kafka import topics as module
from balance_service.kafka.topics import Lag, Topic, Topics, Watermarks
from balance_service.settings import load_settings
from tests.support.fakes import Clock

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

pytestmark = pytest.mark.usefixtures("no_environment")

TWO_MEMBERS = SimpleNamespace(members=[None, None])


class Admin:
    """An admin client that answers each request with the next of these answers, and then always with the last."""

    def __init__(self, *answers: KafkaError | SimpleNamespace) -> None:
        self._next: Iterator[KafkaError | SimpleNamespace] = iter(answers)
        self._last = answers[-1]
        self.refreshed = 0

    def describe_consumer_groups(self, groups: list[str], **_: float) -> Mapping[str, Future[Any]]:
        answer = next(self._next, self._last)
        future: Future[Any] = Future()
        if isinstance(answer, KafkaError):
            future.set_exception(KafkaException(answer))
        else:
            future.set_result(answer)
        return dict.fromkeys(groups, future)

    def list_topics(self, **_: float) -> None:
        self.refreshed += 1

    def poll(self, _seconds: float) -> None: ...


def topics_of(monkeypatch: pytest.MonkeyPatch, admin: Admin) -> Topics:
    monkeypatch.setattr(module, "new_client", lambda *_: admin)
    return Topics(load_settings(bootstrap_servers="127.0.0.1:1"))


@pytest.mark.parametrize(
    "code",
    [KafkaError.NOT_COORDINATOR, KafkaError.COORDINATOR_NOT_AVAILABLE, KafkaError.COORDINATOR_LOAD_IN_PROGRESS],
)
def test_a_request_is_retried_while_the_coordinator_moves(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    assert topics_of(monkeypatch, Admin(KafkaError(code), TWO_MEMBERS)).group_members() == 2


def test_a_coordinator_that_does_not_appear_in_time_is_a_retriable_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FOUND_WITHIN_SECONDS", 0.2)

    with pytest.raises(RetriableError, match="describing group"):
        topics_of(monkeypatch, Admin(KafkaError(KafkaError.NOT_COORDINATOR))).group_members()


@pytest.mark.parametrize(("replicas", "in_sync"), [(1, 1), (2, 1), (3, 2), (5, 3)])
def test_a_majority_of_the_replicas_of_a_created_topic_has_each_acknowledged_record(
    monkeypatch: pytest.MonkeyPatch, replicas: int, in_sync: int
) -> None:
    asked: list[Any] = []

    class Creating:
        def create_topics(self, wanted: list[Any], **_: float) -> Mapping[str, Future[None]]:
            asked.extend(wanted)
            done: Future[None] = Future()
            done.set_result(None)
            return {"orders": done}

    monkeypatch.setattr(module, "new_client", lambda *_: Creating())
    topics = Topics(load_settings(bootstrap_servers="127.0.0.1:1", replication_factor=replicas))
    monkeypatch.setattr(topics, "find", lambda name: Topic(name, "id", 1))

    topics.create("orders", 1, {"cleanup.policy": "delete"})

    (topic,) = asked
    assert topic.config == {"cleanup.policy": "delete", "min.insync.replicas": str(in_sync)}
    assert topic.replication_factor == replicas


@pytest.mark.parametrize(
    ("replicas_of_others", "error", "why"),
    [
        ([1, 2, 3], RetriableError, "topic 'orders' needs 3 brokers, and 2 of 3 run: start the others"),
        ([1, 2], ConfigurationError, "BALANCE_REPLICATION_FACTOR 3 is more than the cluster has brokers"),
    ],
)
def test_a_topic_that_a_broker_is_away_for_is_created_later(
    monkeypatch: pytest.MonkeyPatch, replicas_of_others: list[int], error: type[Exception], why: str
) -> None:
    class Refusing:
        def create_topics(self, _wanted: list[Any], **_: float) -> Mapping[str, Future[None]]:
            refused: Future[None] = Future()
            refused.set_exception(KafkaException(KafkaError(KafkaError.INVALID_REPLICATION_FACTOR)))
            return {"orders": refused}

        def list_topics(self, **_: float) -> SimpleNamespace:
            partition = SimpleNamespace(replicas=replicas_of_others)
            topic = SimpleNamespace(partitions={0: partition})
            return SimpleNamespace(brokers={1: None, 2: None}, topics={"others": topic})

    monkeypatch.setattr(module, "new_client", lambda *_: Refusing())
    topics = Topics(load_settings(bootstrap_servers="127.0.0.1:1", replication_factor=3))

    with pytest.raises(error, match=why):
        topics.create("orders", 1, {})


def test_a_request_that_times_out_makes_the_next_one_look_for_another_controller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    admin = Admin(KafkaError(KafkaError._TIMED_OUT, "Timed out waiting for controller"), TWO_MEMBERS)
    topics = topics_of(monkeypatch, admin)

    with pytest.raises(RetriableError, match="waiting for controller"):
        topics.group_members()

    assert admin.refreshed == 1
    assert topics.group_members() == 2
    assert admin.refreshed == 1


class Broker:
    """Returns the ends of a topic; fails while it is down."""

    def __init__(self) -> None:
        self.ends: Mapping[int, int] = {0: 100, 1: 5}
        self.is_up = True

    def read(self) -> Mapping[int, int]:
        if not self.is_up:
            raise RetriableError("the broker is down")
        return self.ends


@pytest.fixture
def broker() -> Broker:
    return Broker()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watermarks(broker: Broker, clock: Clock) -> Watermarks:
    return Watermarks("t", broker.read, clock)


def test_lag_is_unknown_before_the_broker_was_asked(watermarks: Watermarks) -> None:
    assert watermarks.lag(0, 10) is None
    assert watermarks.age_seconds == float("inf")


def test_lag_is_the_end_less_the_position(watermarks: Watermarks) -> None:
    watermarks.refresh()

    assert (watermarks.lag(0, 90), watermarks.lag(1, 5)) == (10, 0)


def test_an_outage_is_logged_when_it_begins_and_when_it_ends(clock: Clock) -> None:
    is_up = False

    def read() -> Mapping[int, int]:
        if not is_up:
            raise RetriableError("the broker does not respond")
        return {0: 1}

    watermarks = Watermarks("t", read, clock)
    with capture_logs() as logs:
        for _ in range(20):
            watermarks.refresh()
        is_up = True
        for _ in range(20):
            watermarks.refresh()

    assert [line["event"] for line in logs] == ["the source's end is not known", "the source's end is known again"]


def test_lag_is_never_negative(watermarks: Watermarks) -> None:
    watermarks.refresh()

    assert watermarks.lag(1, 6) == 0


def test_lag_of_a_task_without_a_position_is_unknown(watermarks: Watermarks) -> None:
    watermarks.refresh()

    assert watermarks.lag(0, -1) is None


def test_lag_of_an_unknown_partition_is_unknown(watermarks: Watermarks) -> None:
    watermarks.refresh()

    assert watermarks.lag(2, 0) is None


def test_watermarks_are_as_old_as_their_request(broker: Broker, clock: Clock) -> None:
    def slowly() -> Mapping[int, int]:
        clock.now += 2
        return broker.read()

    watermarks = Watermarks("t", slowly, clock)
    watermarks.refresh()
    clock.now += 1

    assert watermarks.age_seconds == 3


def test_a_position_is_as_old_as_the_last_reading_of_an_end_that_it_has_reached(
    watermarks: Watermarks, broker: Broker, clock: Clock
) -> None:
    assert watermarks.age(0, 100) is None
    for end in (100, 100, 110, 110, 110):
        broker.ends = {0: end}
        watermarks.refresh()
        clock.now += 1

    assert watermarks.age(0, 99) is None
    assert watermarks.age(0, 100) == watermarks.age(0, 109) == 4
    assert watermarks.age(0, 110) == watermarks.age(0, 1_000) == 1
    assert watermarks.age(0, -1) is None
    assert watermarks.age(7, 100) is None


def test_lag_in_time_begins_when_the_end_passes_the_position(
    watermarks: Watermarks, broker: Broker, clock: Clock
) -> None:
    watermarks.refresh()
    assert watermarks.lag_in_time(0, 100) == Lag(0, 0.0, is_least=False)

    for _ in range(5):
        clock.now += 1
        broker.ends = {0: broker.ends[0] + 10}
        watermarks.refresh()

    # The ends after each second are 110, 120, 130, 140 and 150.
    assert watermarks.lag_in_time(0, 150) == Lag(0, 0.0, is_least=False)
    assert watermarks.lag_in_time(0, 149) == Lag(1, 0.0, is_least=False)
    assert watermarks.lag_in_time(0, 120) == Lag(30, 2.0, is_least=False)
    assert watermarks.lag_in_time(0, 119) == Lag(31, 3.0, is_least=False)


def test_lag_in_time_has_a_lower_bound_if_it_began_before_the_first_reading(
    watermarks: Watermarks, clock: Clock
) -> None:
    watermarks.refresh()
    clock.now += 30
    watermarks.refresh()

    assert watermarks.lag_in_time(0, 99) == Lag(1, 30.0, is_least=True)


def test_lag_in_time_is_unknown_without_an_end_or_a_position(watermarks: Watermarks) -> None:
    assert watermarks.lag_in_time(0, 10) is None
    watermarks.refresh()
    assert watermarks.lag_in_time(0, -1) is None


def test_lag_in_time_is_known_for_hours_and_is_kept_in_bounded_memory(
    watermarks: Watermarks, broker: Broker, clock: Clock
) -> None:
    began = clock.now
    for _ in range(10_000):
        watermarks.refresh()
        clock.now += 1
        broker.ends = {0: broker.ends[0] + 1}

    for seconds in (5, 60, 600, 6_000):
        lag = watermarks.lag_in_time(0, 100 + int(clock.now - began) - seconds - 1)
        assert lag is not None
        assert seconds * 0.8 <= lag.seconds <= seconds
    assert len(watermarks._ends[0]._read) <= 64


def test_lag_in_time_starts_over_with_a_source_that_was_recreated(
    watermarks: Watermarks, broker: Broker, clock: Clock
) -> None:
    watermarks.refresh()
    clock.now += 60
    broker.ends = {0: 3}
    watermarks.refresh()
    clock.now += 1

    assert watermarks.lag_in_time(0, 2) == Lag(1, 1.0, is_least=True)


def test_a_silent_broker_leaves_the_last_watermarks_to_grow_old(
    watermarks: Watermarks, broker: Broker, clock: Clock
) -> None:
    watermarks.refresh()
    broker.is_up = False
    clock.now += 5
    watermarks.refresh()

    assert watermarks.lag(0, 90) == 10
    assert watermarks.age_seconds == 5
