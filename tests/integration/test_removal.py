"""`drop MODEL --all`: it deletes the topics and subjects of a read model that no instance hosts, and no others."""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer

from balance_service.avro.codec import AvroCodec
from balance_service.avro.registry import SchemaRegistry
from balance_service.avro.schemas import load_schema, subject_of
from balance_service.cli.main import cli
from balance_service.cluster.directory import PublishedModel
from balance_service.errors import ConfigurationError
from balance_service.kafka.clients import producer_config, transactional_config
from balance_service.kafka.topics import Topics
from balance_service.settings import Settings, load_settings
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from click.testing import Result

    from balance_service.devtools.local.stack import LocalStack

COMPACTED = {"cleanup.policy": "compact"}
LEFT = (
    "cities-by-city",
    "cities-by-city-changelog",
    # Of several sources: of one with two re-keys, the first one is into a topic of the stage's own name.
    "cities-by-house-from-us",
    "cities-by-house-from-us-changelog",
    "cities-by-street",
    "cities-by-street-from-eu.towns-changelog",
    "cities-by-street-from-us-changelog",
    "cities-changelog",
    "cities.g2-changelog",
)
OTHERS = ("citiesx-changelog", "cities-by-zip-changelog", "cities-dead-letters")


@pytest.fixture
def settings(stack: LocalStack, names: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("BALANCE_BOOTSTRAP_SERVERS", stack.bootstrap_servers)
    monkeypatch.setenv("BALANCE_SCHEMA_REGISTRY_URL", stack.schema_registry_url)
    monkeypatch.setenv("BALANCE_APPLICATION_ID", names["application_id"])
    return load_settings()


class Left:
    """What a read model `cities`, and others, have left in an application."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._topics = settings, Topics(settings)
        self.application = settings.application_id
        with closing(SchemaRegistry.from_settings(settings)) as registry:
            for name in (*LEFT, *OTHERS):
                topic = self._topics.create(f"{self.application}-{name}", 2, COMPACTED)
                schema = load_schema("Position")
                registry.register(subject_of(topic.name, schema), schema)
            for version in (1, 2):
                for suffix in ("", "-from-eu.towns"):
                    registry.register(f"{self.application}-cities-v{version}-Player{suffix}", load_schema("Player"))
            registry.register(f"{self.application}-cities-vat-v1-Player", load_schema("Player"))

    @property
    def topics(self) -> set[str]:
        return {name.removeprefix(f"{self.application}-") for name in self._of_us(self._topics.names())}

    @property
    def subjects(self) -> set[str]:
        with closing(SchemaRegistry.from_settings(self._settings)) as registry:
            return {name.removeprefix(f"{self.application}-") for name in self._of_us(registry.client.get_subjects())}

    def _of_us(self, names: Any) -> list[str]:
        return [name for name in names if name.startswith(f"{self.application}-")]

    def publish(self, *models: str, at: float | None = None) -> None:
        """An instance publishes which read models it hosts; without any, its farewell."""
        settings, schema = self._settings, load_schema("ApplicationServer")
        topic = settings.application_servers_topic
        if self._topics.find(topic) is None:
            self._topics.create(topic, 1, COMPACTED)
        with closing(SchemaRegistry.from_settings(settings)) as registry:
            codec = AvroCodec(registry, subject_of(topic, schema), schema)
        hosted = [PublishedModel(name, 2, "murmur2").record() for name in models]
        record = {"address": "10.0.0.1:5051", "incarnation": "i", "models": hosted, "tasks": []}
        value = codec.encode(record) if models else None
        producer = Producer(producer_config(settings))
        timestamp_ms = int((time.time() if at is None else at) * 1000)
        producer.produce(topic, value, b"10.0.0.1:5051", timestamp=timestamp_ms)
        assert producer.flush(30) == 0


@pytest.fixture
def left(settings: Settings) -> Left:
    return Left(settings)


def dropped(*given: str, answer: str = "") -> Result:
    from click.testing import CliRunner

    return CliRunner().invoke(cli, ["drop", "cities", "--all", *given], input=answer)


def test_what_is_left_of_a_model_is_deleted_and_nothing_else(settings: Settings, left: Left) -> None:
    left.publish("cities-by-zip", "citiesx")
    hanging = Producer(transactional_config(settings, f"{left.application}-cities-0"))
    hanging.init_transactions(30)
    hanging.begin_transaction()
    hanging.produce(f"{left.application}-cities-dead-letters", b"v", b"k", partition=0)
    hanging.flush(30)

    done = dropped("--yes")

    assert done.exit_code == 0, (done.output, done.exception)
    assert done.stdout.splitlines()[:-1] == [f"{left.application}-{name}" for name in LEFT]
    eventually(lambda: not left.topics & {*LEFT}, lambda: str(left.topics), 30)
    assert left.topics >= {*OTHERS}
    subjects = left.subjects
    assert not [subject for subject in subjects if subject.startswith((*LEFT, "cities-v1", "cities-v2"))], subjects
    assert [subject for subject in subjects if subject.startswith("cities-vat-v1")], subjects
    dead, topics = f"{left.application}-cities-dead-letters", Topics(settings)
    # The open transaction was aborted: no reader waits for it.
    eventually(
        lambda: topics.offsets(dead, [0], committed=True) == topics.offsets(dead, [0]),
        lambda: str(topics.offsets(dead, [0], committed=True)),
        30,
    )


def test_a_model_that_an_instance_hosts_is_not_deleted(left: Left) -> None:
    left.publish("cities.g2")

    refused = dropped("--yes")

    assert isinstance(refused.exception, ConfigurationError)
    assert "'cities' is hosted at 10.0.0.1:5051: remove it from BALANCE_MODELS there" in str(refused.exception)
    assert left.topics >= {*LEFT}


def test_an_instance_that_was_removed_or_killed_long_ago_does_not_count(left: Left) -> None:
    left.publish("cities", at=time.time() - 600)
    assert dropped(answer="n\n").exit_code == 1

    left.publish("cities")
    left.publish()
    asked = dropped(answer="n\n")

    assert asked.exit_code == 1
    assert "Delete these topics?" in asked.output
    assert left.topics >= {*LEFT}


def test_a_name_without_topics_is_refused(settings: Settings) -> None:
    refused = dropped("--yes")

    assert isinstance(refused.exception, ConfigurationError)
    assert f"application id '{settings.application_id}' has no topic of a read model 'cities'" in str(refused.exception)
