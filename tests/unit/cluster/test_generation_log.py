"""The topic of generations as an instance knows it: when it is read again, and what counts while it cannot be read."""

from __future__ import annotations

import itertools
import threading
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from balance_service.avro.codec import AvroCodec
from balance_service.avro.own_schemas import OwnSchemas
from balance_service.avro.registry import NoRegistry, SchemaRegistry
from balance_service.avro.schemas import load_schema, subject_of
from balance_service.cluster import generations as module
from balance_service.cluster.generations import GenerationLog
from balance_service.errors import ConfigurationError, RetriableError
from balance_service.kafka.topics import Topic
from balance_service.model.generations import Generations, Switch
from balance_service.settings import load_settings
from tests.support.fakes import DECLARED, FakeRegistry
from tests.support.waiting import eventually

ONE = Generations("rewards").begun(DECLARED)
BUILT = ONE.rebuilt(DECLARED, Switch.NEVER, 60, None, "", "")
COMMIT_FAILED = KafkaException(KafkaError(KafkaError.UNKNOWN))
"""A broker answers a commit with it if it fences the producer at that time."""


def was_replaced(now: Generations) -> Generations:
    return now.replaced(DECLARED)


class Records(list[Any]):
    def close(self) -> None: ...


class Broker:
    """The topic of generations in memory. A read may fail, or wait until it is let go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.settings = load_settings()
        self.registry: SchemaRegistry = FakeRegistry()
        self.texts: dict[bytes, bytes] = {}
        """Records in front of the states."""
        self.states: list[Generations] = []
        self.reads = 0
        self.changelogs: list[str] = []
        self.fails_with: Exception | None = None
        self.goes_on = threading.Event()
        self.goes_on.set()
        monkeypatch.setattr(module, "reader_to_end", lambda *_, **__: closing(self._read()))

    def find(self, name: str) -> Topic | None:
        return Topic(name, "id", 1)

    def starting_with(self, prefix: str) -> list[str]:
        return [name for name in self.changelogs if name.startswith(prefix)]

    def log(self) -> GenerationLog:
        topics: Any = self
        return GenerationLog(self.settings, topics, OwnSchemas(self.registry))

    def _read(self) -> Records:
        self.reads += 1
        assert self.goes_on.wait(30)
        if self.fails_with is not None:
            raise self.fails_with
        schema = load_schema("Generations")
        codec = AvroCodec(self.registry, subject_of(self.settings.generations_topic, schema), schema)
        states = [(state.model.encode(), codec.encode(state.record())) for state in self.states]
        return Records(
            SimpleNamespace(
                key=lambda key=key: key,
                value=lambda value=value: value,
                headers=list,
                partition=lambda: 0,
                offset=lambda at=at: at,
            )
            for at, (key, value) in enumerate([*self.texts.items(), *states])
        )


class Writer:
    """A producer whose first commit fails, before or after the broker has committed."""

    def __init__(self, broker: Broker, *, is_committed: bool) -> None:
        self._broker, self._is_committed = broker, is_committed
        self._writes = False
        self.commits = 0

    def list_topics(self, *_: Any) -> None: ...

    def init_transactions(self, _seconds: float) -> None: ...

    def begin_transaction(self) -> None:
        self._writes = False

    def produce(self, *_: Any, **__: Any) -> None:
        self._writes = True

    def commit_transaction(self, _seconds: float) -> None:
        self.commits += 1
        fails = self.commits == 1
        if self._writes and (self._is_committed or not fails):
            self._broker.states.append(BUILT)
        if fails:
            raise COMMIT_FAILED

    def purge(self) -> None: ...


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch, no_environment: None) -> Broker:
    return Broker(monkeypatch)


@pytest.mark.shows("outputs-once")
def test_the_newest_state_is_that_at_the_topics_present_end(broker: Broker) -> None:
    broker.states = [ONE]
    log = broker.log()
    broker.states.append(BUILT)

    assert (log.of("rewards").newest, log.newest("rewards").newest) == (1, 2)
    assert log.of("rewards") == BUILT


@pytest.mark.shows("outputs-once")
@pytest.mark.parametrize("is_committed", [True, False])
def test_a_commit_that_failed_with_an_unknown_error_is_looked_up_and_not_written_twice(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, is_committed: bool
) -> None:
    broker.states = [ONE]
    writer = Writer(broker, is_committed=is_committed)
    monkeypatch.setattr(module, "prepare_generations", lambda *_: None)
    monkeypatch.setattr(module, "new_client", lambda *_: writer)
    monkeypatch.setattr(module, "wait_for_deliveries", lambda *_: 0)

    written = broker.log().write("rewards", lambda _: BUILT)

    assert (written, broker.states, writer.commits) == (BUILT, [ONE, BUILT], 2)


LATER = ["balance-service-rewards-changelog", "balance-service-rewards.g3-changelog"]


@pytest.mark.shows("control")
@pytest.mark.parametrize("is_offline", [False, True], ids=["start", "offline rebuild"])
@pytest.mark.parametrize(
    ("states", "changelogs", "why"),
    [([BUILT], [], "its number is 2, and 1 is next"), ([], LATER, "delete balance-service-rewards.g3-changelog")],
    ids=["its first records are gone", "the topic was deleted"],
)
def test_a_history_without_its_beginning_is_not_begun_again(
    broker: Broker,
    monkeypatch: pytest.MonkeyPatch,
    states: list[Generations],
    changelogs: list[str],
    why: str,
    *,
    is_offline: bool,
) -> None:
    broker.states, broker.changelogs = states, changelogs
    writer = Writer(broker, is_committed=True)
    monkeypatch.setattr(module, "prepare_generations", lambda *_: None)
    monkeypatch.setattr(module, "new_client", lambda *_: writer)
    log = broker.log()

    with pytest.raises(ConfigurationError, match=why):
        log.write("rewards", was_replaced) if is_offline else log.begin({"rewards": DECLARED})

    assert writer.commits == 0


def test_a_model_that_has_had_one_generation_does_not_depend_on_the_topic(broker: Broker) -> None:
    broker.states = [ONE]
    log = broker.log()
    broker.fails_with = RetriableError("the partition has no leader")

    assert log.newest("rewards") == ONE
    # Nor does one without a record.
    assert log.newest("balance").serving == 1


@pytest.mark.shows("outputs-once")
def test_a_changelog_of_another_generation_shows_that_the_instance_has_missed_something(broker: Broker) -> None:
    broker.states = [ONE]
    log = broker.log()
    broker.fails_with = RetriableError("the partition has no leader")
    broker.changelogs = ["balance-service-rewards-changelog", "balance-service-rewards.g3-changelog"]

    with pytest.raises(RetriableError, match="no leader"):
        log.newest("rewards")
    assert log.newest("balance").serving == 1


@pytest.mark.shows("outputs-once")
def test_who_serves_is_unknown_while_the_topic_cannot_be_read_of_a_model_that_has_had_two_generations(
    broker: Broker,
) -> None:
    # The other one is dropped: another instance may have begun a third one since.
    broker.states = [ONE, BUILT, BUILT.dropped(2, "", "")]
    log = broker.log()
    broker.fails_with = RetriableError("the partition has no leader")

    with pytest.raises(RetriableError, match="no leader"):
        log.newest("rewards")


def test_one_read_serves_all_that_have_asked_before_it_began(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    log = broker.log()
    ticks = itertools.count()
    asked: list[int] = []

    def tick() -> int:
        asked.append(next(ticks))
        return asked[-1]

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=tick))
    broker.goes_on.clear()
    threads = [threading.Thread(target=log.refresh, daemon=True) for _ in range(5)]
    threads[0].start()
    eventually(lambda: broker.reads == 2, "the first one reads")
    # It has read a part already, so the others are not served by it.
    for thread in threads[1:]:
        thread.start()
    eventually(lambda: len(asked) == 6, "the others have asked")
    broker.goes_on.set()
    for thread in threads:
        thread.join(30)

    assert broker.reads == 3
    log.refresh()
    assert broker.reads == 4


def test_a_read_that_failed_serves_no_caller(broker: Broker) -> None:
    broker.states = [ONE, BUILT]
    log = broker.log()
    broker.fails_with = RetriableError("the partition has no leader")
    with pytest.raises(RetriableError):
        log.refresh()

    broker.fails_with = None
    broker.states.append(BUILT.dropped(2, "", ""))

    assert log.newest("rewards").live == [1]


def test_the_history_has_every_state_that_counts_in_the_order_of_the_topic(broker: Broker) -> None:
    broker.states = [ONE, BUILT]
    log = broker.log()
    assert [*log.history] == [ONE, BUILT]

    # The second one is no step from the first.
    dropped = BUILT.dropped(2, "alice", "a test")
    broker.states += [BUILT, dropped]
    log.refresh()

    assert [*log.history] == [ONE, BUILT, dropped]


def test_the_first_state_settles_the_form_of_the_applications_records(broker: Broker) -> None:
    without, topic = OwnSchemas(NoRegistry()), broker.settings.generations_topic
    without.codec(topic, load_schema("Generations"))
    broker.texts = without.records(topic)
    topics: Any = broker
    broker.registry = without
    # The application has a registry by now, and began without one.
    broker.states, later = [ONE], OwnSchemas(FakeRegistry())

    log = GenerationLog(broker.settings, topics, later)

    assert log.of("rewards") == ONE
    assert log.records.refused == {}
    assert later.has_fingerprints
    assert later.records(topic) == broker.texts


def test_an_empty_topic_leaves_the_form_to_the_setting_until_another_process_writes(broker: Broker) -> None:
    topics: Any = broker
    ours = OwnSchemas(FakeRegistry())
    log = GenerationLog(broker.settings, topics, ours)
    assert not ours.has_fingerprints

    without, topic = OwnSchemas(NoRegistry()), broker.settings.generations_topic
    without.codec(topic, load_schema("Generations"))
    broker.texts, broker.registry, broker.states = without.records(topic), without, [ONE]
    log.refresh()

    assert log.of("rewards") == ONE
    assert ours.has_fingerprints


def test_an_application_that_began_with_a_registry_is_not_read_without_one(broker: Broker) -> None:
    broker.states = [ONE]
    topics: Any = broker

    with pytest.raises(ConfigurationError, match="set it to the registry that this application began with"):
        GenerationLog(broker.settings, topics, OwnSchemas(NoRegistry()))
