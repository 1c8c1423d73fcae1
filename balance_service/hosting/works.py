"""What the tasks of a stage do with their batches, put together of the read model's declaration."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from balance_service.avro.codec import AvroCodec
from balance_service.avro.schemas import Schema, load_schema, subject_of
from balance_service.avro.types import fields_of
from balance_service.cluster.partitioner import partition_of, partitions_of, partitions_of_keys
from balance_service.errors import FatalError
from balance_service.kafka.clients import producer_config
from balance_service.kafka.topic_policies import MAX_MESSAGE_BYTES, is_compacted
from balance_service.model.keys import KeyType
from balance_service.state.emission import Emission
from balance_service.state.fold import Folding
from balance_service.state.joining import Joining
from balance_service.state.letters.decisions import Decisions
from balance_service.state.letters.letters import Letters
from balance_service.state.outputs import Target, sender_of
from balance_service.state.passing import Emitting, Rekeying
from balance_service.state.retrying import Retrying
from balance_service.state.tables.joined import JoinedTables

if TYPE_CHECKING:
    from collections.abc import Mapping

    from balance_service.avro.registry import SchemaRegistry
    from balance_service.kafka.topics import Topic, Topics
    from balance_service.model.catalogue import StageOf
    from balance_service.model.outputs import Emit
    from balance_service.model.read_model import ReadModel
    from balance_service.settings import Settings, Stage
    from balance_service.state.tables.tables import Tables
    from balance_service.state.work import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Works:
    """Makes the work of stages. Every call may raise RetriableError, or ConfigurationError for a refused schema."""

    settings: Settings
    topics: Topics
    registry: SchemaRegistry
    tables: Tables
    prepared: Mapping[str, Topic]
    """The topics that the stages read and send to."""

    def of(self, stage: StageOf) -> Work:
        """What the tasks of a stage do."""
        names, read_model = stage.names, stage.read_model
        position_codec = self._codec(names.changelog, load_schema("Position"))
        letters = Letters(
            codec=self._codec(names.changelog, load_schema("Letter")),
            every_ms=int(self.settings.retry_every_seconds * 1000),
            keeps_order=not names.passes_on and read_model is not None and read_model.keeps_order,
        )
        if read_model is None:
            (target,) = (self._target(topic, names) for topic in names.targets)
            return Retrying(source=names.source, target=target, position_codec=position_codec, letters=letters)
        if names.passes_on:
            target = self._target(names.rekeyed, names)
            if stage.leg.makes is not None:
                return self._joining(stage, stage.leg.makes, target, position_codec, letters)
            return Rekeying(source=names.source, target=target, position_codec=position_codec, letters=letters)
        if not read_model.has_states():
            for topic, schema in read_model.sent_schemas():
                self._codec(topic, schema)
            return Emitting(
                read_model=read_model.name,
                source=names.source,
                records=stage.leg.records,
                outputs=[(emit, self._target(emit.topic, names), self._made(emit)) for emit in read_model.outputs],
                position_codec=position_codec,
                letters=letters,
            )
        return self._folding(read_model, names, position_codec, letters)

    def decisions(self, stage: StageOf) -> Decisions:
        """What is kept of operators' decisions about a stage's dead letters."""
        topic = self.settings.dead_letter_decisions_topic
        return Decisions(
            topic=topic,
            codec=self._codec(topic, load_schema("DeadLetterDecision")),
            stage=stage.names.name,
            source_topic_id=self.prepared[stage.names.source].topic_id,
        )

    def _joining(
        self, stage: StageOf, makes: str, target: Target, position_codec: AvroCodec, letters: Letters
    ) -> Joining:
        schema, by = load_schema(makes), str(stage.leg.by)
        key_type = KeyType.of(by, fields_of(schema)[by])
        if key_type is None:
            raise FatalError(f"stage {stage.names.name} goes on by '{by}', which is no key")
        if stage.leg.next_table is not None:
            # A table has its keys as text, whatever they are of.
            key_type = KeyType(by, is_number=False)
        return Joining(
            source=stage.names.source,
            record=stage.leg.records[0],
            joined=JoinedTables(
                joins=stage.leg.joins, tables=self.tables, topics=self.topics, partition_of=partition_of
            ),
            schema=schema,
            codec=self._codec(target.topic, schema),
            key_type=key_type,
            target=target,
            position_codec=position_codec,
            letters=letters,
        )

    def _folding(self, read_model: ReadModel, names: Stage, position_codec: AvroCodec, letters: Letters) -> Folding:
        state_codec = self._codec(names.changelog, read_model.state_schema)
        partitions = self.prepared[names.source].partitions
        return Folding(
            read_model=read_model,
            acceleration=read_model.acceleration(state_codec),
            state_codec=state_codec,
            largest_bytes=self._largest_bytes(self.topics.config(names.changelog)),
            position_codec=position_codec,
            letters=letters,
            marker_codec=self._codec(names.changelog, load_schema("IdempotencyMarker")),
            partitions_of=partial(partitions_of, partitions=partitions),
            partitions_of_keys=partial(partitions_of_keys, partitions=partitions),
            idempotency_window_ms=int(self.settings.idempotency_window_seconds * 1000),
            emission=self._emission(read_model, names),
        )

    def _emission(self, read_model: ReadModel, names: Stage) -> Emission | None:
        if not read_model.outputs:
            return None
        (emit,) = read_model.outputs
        return Emission(
            read_model=read_model,
            emit=emit,
            target=self._target(emit.topic, names),
            codec=self._made(emit) or self._codec(emit.topic, read_model.state_schema),
            source=names.source,
        )

    def _made(self, emit: Emit) -> AvroCodec | None:
        return None if emit.record is None else self._codec(emit.topic, load_schema(emit.record))

    def _codec(self, topic: str, schema: Schema) -> AvroCodec:
        return AvroCodec(self.registry, subject_of(topic, schema), schema)

    def _target(self, name: str, stage: Stage) -> Target:
        config = self.topics.config(name)
        return Target(
            topic=name,
            partitions=self.prepared[name].partitions,
            largest_bytes=self._largest_bytes(config),
            is_compacted=is_compacted(config),
            sender=sender_of(stage.full_name, self.prepared[stage.source].topic_id),
        )

    def _largest_bytes(self, config: Mapping[str, str]) -> int:
        """Of a batch for a topic of this configuration."""
        # The producer's own bound, too: what it refuses once, it refuses for ever.
        ours = int(str(producer_config(self.settings)["message.max.bytes"]))
        return min(int(config[MAX_MESSAGE_BYTES]), ours)
