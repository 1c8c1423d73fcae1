"""What a read model has sent before it is rebuilt: kept over the deletion of its changelog, and not sent again."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from confluent_kafka import KafkaException, Producer

from balance_service.avro.codec import AvroCodec
from balance_service.avro.schemas import load_schema, subject_of
from balance_service.errors import RetriableError
from balance_service.kafka.bounded_reader import reader_of_all
from balance_service.kafka.clients import by_remedy, producer_config
from balance_service.state.opening import open_writer
from balance_service.state.records import POSITION_KEY, Position, TaskId

if TYPE_CHECKING:
    from balance_service.avro.registry import SchemaRegistry
    from balance_service.kafka.topics import Topic, Topics
    from balance_service.settings import Settings, Stage

_DELIVERY_SECONDS = 30.0


class SentBefore:
    """Up to which offset of each partition of its source a stage has sent, as its changelog says."""

    def __init__(
        self, settings: Settings, topics: Topics, registry: SchemaRegistry, stage: Stage, source: Topic
    ) -> None:
        """Read it. Raises RetriableError if a broker or the registry does not answer."""
        self._settings = settings
        self._topics = topics
        self._stage = stage
        self._source = source
        schema = load_schema("Position")
        self._codec = AvroCodec(registry, subject_of(stage.changelog, schema), schema)
        self._fence()
        self._up_to = self._read()

    def keep(self, changelog: Topic) -> None:
        """Write it to the changelog that was made anew, as where each partition begins.

        Interrupted before, what was sent is found from what is in the topics that it was sent to.

        Raises:
            RetriableError: the broker does not answer.
        """
        partitions = [*self._up_to]
        starts = self._topics.offsets(self._source.name, partitions, earliest=True)
        producer = Producer(producer_config(self._settings))
        failures = []
        try:
            for partition in partitions:
                producer.produce(
                    changelog.name,
                    self._codec.encode(self._beginning(partition, starts[partition], changelog).record()),
                    POSITION_KEY,
                    partition,
                    on_delivery=lambda error, _message: failures.append(error) if error else None,
                )
            unsent = producer.flush(_DELIVERY_SECONDS)
        except KafkaException as error:
            raise by_remedy(error, "writing what was sent before", f"Write on topic '{changelog.name}'") from error
        if failures:
            raise by_remedy(KafkaException(failures[0]), "writing what was sent before")
        if unsent:
            raise RetriableError("what was sent before could not be written in time; run the rebuild again")

    def _fence(self) -> None:
        """End what an instance that is cut off may have left open: committed later, it would be sent a second time."""
        for partition in range(self._source.partitions):
            task_id = TaskId(self._stage.name, partition)
            with closing(open_writer(task_id, self._settings, self._stage, self._topics, self._source)) as writer:
                writer.fence()

    def _beginning(self, partition: int, start: int, changelog: Topic) -> Position:
        # Not from the first that is left, unless that is allowed: the task says then what is gone.
        return Position(
            start if self._settings.allow_finite_retention else 0,
            0,
            self._source.topic_id,
            changelog_topic_id=changelog.topic_id,
            source=f"{self._source.name}:{partition}",
            emitted_up_to=self._up_to[partition],
        )

    def _read(self) -> dict[int, int]:
        changelog = self._topics.find(self._stage.changelog)
        if changelog is None:
            return {}
        found: dict[int, int] = {}
        with reader_of_all(self._settings, self._topics, changelog) as reader:
            while reader.unfinished:
                for message in reader.read():
                    partition, value = message.partition(), message.value()
                    if message.key() == POSITION_KEY and partition is not None and value is not None:
                        position = Position.of(self._codec.decode(value))
                        # Of a source that was made anew, nothing was sent.
                        is_ours = position.source_topic_id == self._source.topic_id
                        found[partition] = max(position.offset, position.emitted_up_to) if is_ours else 0
        return found
