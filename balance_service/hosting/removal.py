"""Deletes what a read model that no instance hosts any more has left: changelogs, topics between stages, subjects.

Nothing but names tells what is left: the class may be gone.
"""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING

from confluent_kafka import KafkaException, Producer

from balance_service.avro.own_schemas import OwnSchemas
from balance_service.avro.registry import SchemaRegistry
from balance_service.avro.schemas import load_schema
from balance_service.cluster.directory import PublishedModel
from balance_service.cluster.generations import GenerationLog
from balance_service.engine.inheritance import owners_of
from balance_service.errors import ConfigurationError
from balance_service.kafka.clients import by_remedy, new_client, transactional_config
from balance_service.kafka.log_reader import reader_to_end
from balance_service.kafka.producers import connect
from balance_service.kafka.topics import Topics
from balance_service.model.binding import recorded_subjects
from balance_service.model.stage import Stage, model_and_generation, rekeyed_topics

if TYPE_CHECKING:
    from collections.abc import Iterator

    from balance_service.settings import Settings

_FENCE_SECONDS = 15.0
# Instances' clocks may differ by as much (guarantees).
_CLOCKS_SECONDS = 30.0


class Removal:
    """The topics of a read model that no instance hosts."""

    def __init__(self, settings: Settings, model: str) -> None:
        """Finds what is left.

        Raises:
            ConfigurationError: an instance hosts the model, nothing is left of it, or another application owns it.
            RetriableError: a broker or the registry does not respond.
        """
        self._settings, self._model = settings, model
        self._topics = Topics(settings)
        with closing(OwnSchemas(SchemaRegistry.from_settings(settings))) as schemas:
            log = GenerationLog(settings, self._topics, schemas)
            hosted = self._hosted(schemas)
            if addresses := hosted.pop(model, None):
                raise ConfigurationError(
                    f"'{model}' is hosted at {', '.join(addresses)}: remove it from BALANCE_MODELS there, and restart "
                    "the instances. One that was killed counts until the group has given its partitions to others: "
                    f"wait {self._silent_seconds:.0f} s"
                )
            others = {*hosted, *log.known} - {model}
            names = self._topics.names()
            self._stages = [stage for stage in self._stages_in(names) if not _is_of_another(stage.name, model, others)]
            self.topics = [
                topic
                for stage in self._stages
                # Its changelog last: by that, an interrupted removal finds the stage again.
                for topic in (*self._rekeyed(stage), stage.changelog)
                if topic in names
            ]
            # Several stages may write one topic.
            self.topics = [*dict.fromkeys(self.topics)]
            if not self.topics:
                raise ConfigurationError(
                    f"application id '{settings.application_id}' has no topic of a read model '{model}'; "
                    "BALANCE_APPLICATION_ID and the model's `name` must be those of the instances that hosted it"
                )
            self._refuse_foreign(schemas)

    def run(self) -> None:
        """Deletes all that is left. May be run again if it was interrupted. Raises as `__init__`."""
        topics, recorded = self._topics, recorded_subjects(self._settings.application_id, self._model)
        with closing(SchemaRegistry.from_settings(self._settings)) as registry:
            for stage in self._stages:
                changelog = topics.find(stage.changelog)
                for partition in range(0 if changelog is None else changelog.partitions):
                    self._end_transaction(stage.changelog, stage.transactional_id(partition))
            for topic in self.topics:
                # In this order: once the topic is gone, none looks for its subjects.
                registry.forget(topic)
                topics.delete(topic)
            registry.forget_all(recorded)

    @property
    def _silent_seconds(self) -> float:
        return self._settings.session_timeout_ms / 1000 + _CLOCKS_SECONDS

    def _stages_in(self, names: set[str]) -> Iterator[Stage]:
        prefix, application = f"{self._settings.application_id}-", self._settings.application_id
        for topic in sorted(names):
            name = topic.removeprefix(prefix).removesuffix("-changelog")
            if topic == f"{prefix}{name}-changelog" and _is_of(name, self._model):
                yield Stage(name=name, owner=self._model, source="", application_id=application)

    def _rekeyed(self, stage: Stage) -> tuple[str, ...]:
        return tuple(f"{stage.application_id}-{name}" for name in rekeyed_topics(stage.name, self._model))

    def _hosted(self, schemas: OwnSchemas) -> dict[str, list[str]]:
        """Returns the addresses of the instances that host each read model, or did within the last seconds."""
        settings, schema = self._settings, load_schema("ApplicationServer")
        topic = self._topics.find(settings.application_servers_topic)
        if topic is None:
            return {}
        codec = schemas.codec(topic.name, schema)
        since_ms = (time.time() - self._silent_seconds) * 1000
        latest: dict[str, list[PublishedModel]] = {}
        with reader_to_end(settings, self._topics, topic) as reader:
            for message in reader:
                # A record that no instance has signed can prevent the removal, not cause it.
                key, value = message.key() or b"", message.value()
                if schemas.learn(key, value):
                    continue
                address = key.decode(errors="replace")
                latest[address] = []
                if value is not None and message.timestamp()[1] >= since_ms:
                    latest[address] += map(PublishedModel.of, codec.decode(value)["models"])
        hosted: dict[str, list[str]] = {}
        for address, found in latest.items():
            for name in {model_and_generation(one.name)[0] for one in found}:
                hosted.setdefault(name, []).append(address)
        return hosted

    def _refuse_foreign(self, schemas: OwnSchemas) -> None:
        schema = load_schema("Position")
        for stage in self._stages:
            if (changelog := self._topics.find(stage.changelog)) is None:
                continue
            codec = schemas.codec(stage.changelog, schema)
            if foreign := owners_of(self._settings, self._topics, codec, changelog) - {stage.mark}:
                named = ", ".join(sorted(owner.replace("\0", "/") or "no stage" for owner in foreign))
                raise ConfigurationError(
                    f"the positions in '{changelog.name}' name {named} as owner, so nothing is deleted: if no other "
                    "application uses the topic, delete it by Kafka's own tools"
                )

    def _end_transaction(self, changelog: str, transactional_id: str) -> None:
        """Aborts the transaction that a killed instance has left open: readers of other topics wait for its end.

        It also fences an instance that is paused.
        """
        producer = new_client(Producer, transactional_config(self._settings, transactional_id))
        connect(producer, changelog)
        try:
            producer.init_transactions(_FENCE_SECONDS)
        except KafkaException as error:
            grant = f"Write on transactional id '{transactional_id}'"
            raise by_remedy(error, f"ending the transaction of '{transactional_id}'", grant) from error


def _is_of(stage: str, model: str) -> bool:
    """Whether a stage has a name of the model's: of a generation, or of a stage that re-keys."""
    return model_and_generation(stage)[0] == model or bool(rekeyed_topics(stage, model))


def _is_of_another(stage: str, model: str, others: set[str]) -> bool:
    """Whether a stage is of another model, whose name begins as that of a stage of this one."""
    return any(other.startswith(f"{model}-by-") and _is_of(stage, other) for other in others)
