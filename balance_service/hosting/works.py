"""What the tasks of a stage do with their batches, put together of the read model's declaration.

One function does so for the service and for the test driver, each with surroundings of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from balance_service.avro.codec import AvroCodec
from balance_service.avro.schemas import load_schema, subject_of
from balance_service.avro.types import fields_of
from balance_service.engine.emission import Emission
from balance_service.engine.fold import Folding
from balance_service.engine.joining import Joining
from balance_service.engine.letters.letters import Letters
from balance_service.engine.outputs import Target, sender_of
from balance_service.engine.passing import Emitting, Rekeying
from balance_service.engine.retrying import Retrying
from balance_service.errors import FatalError
from balance_service.kafka.partitioner import partitions_of, partitions_of_keys
from balance_service.kafka.topic_policies import MAX_MESSAGE_BYTES, is_compacted
from balance_service.model.keys import KeyType
from balance_service.process.runtime import now_ms

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from balance_service.avro.registry import SchemaRegistry
    from balance_service.avro.schemas import Schema
    from balance_service.engine.tables.joined import JoinedTables
    from balance_service.engine.work import Work
    from balance_service.model.outputs import Emit
    from balance_service.model.read_model import ReadModel
    from balance_service.model.stage import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What work rests on besides its stage: topics as they are, the registry, the clock."""

    registry: SchemaRegistry
    partitions: Callable[[str], int]
    """Of a topic that the stages read or send to."""
    topic_id: Callable[[str], str]
    """Of the same."""
    config: Callable[[str], Mapping[str, str]]
    """The configuration of a topic."""
    joined: Callable[[Stage], JoinedTables]
    """The tables that a stage joins with."""
    largest_bytes: int
    """Of a batch that the producer sends."""
    retry_every_ms: int
    idempotency_window_ms: int
    now_ms: Callable[[], int] = now_ms

    def codec(self, topic: str, schema: Schema) -> AvroCodec:
        """Of records on a topic."""
        return AvroCodec(self.registry, subject_of(topic, schema), schema)

    def largest_in(self, config: Mapping[str, str]) -> int:
        """The bytes of a batch for a topic of this configuration."""
        # The producer's own bound, too: what it refuses once, it refuses for ever.
        return min(int(config[MAX_MESSAGE_BYTES]), self.largest_bytes)

    def target(self, name: str, stage: Stage) -> Target:
        """A topic that a stage sends to."""
        config = self.config(name)
        return Target(
            topic=name,
            partitions=self.partitions(name),
            largest_bytes=self.largest_in(config),
            is_compacted=is_compacted(config),
            sender=sender_of(stage.full_name, self.topic_id(stage.source)),
        )


def work_of(stage: Stage, read_model: ReadModel | None, around: Surroundings) -> Work:
    """What the tasks of a stage do.

    Args:
        read_model: None of a stage of retries.

    Raises:
        ConfigurationError: the registry refuses a schema.
        RetriableError: the registry or a broker does not answer.
    """
    position_codec = around.codec(stage.changelog, load_schema("Position"))
    letters = Letters(
        codec=around.codec(stage.changelog, load_schema("Letter")),
        every_ms=around.retry_every_ms,
        keeps_order=not stage.passes_on and read_model is not None and read_model.keeps_order,
        now_ms=around.now_ms,
    )
    if read_model is None:
        (target,) = (around.target(topic, stage) for topic in stage.targets)
        return Retrying(source=stage.source, target=target, position_codec=position_codec, letters=letters)
    if stage.passes_on:
        target = around.target(stage.rekeyed, stage)
        if stage.makes is not None:
            return _joining(stage, stage.makes, target, around, position_codec, letters)
        return Rekeying(source=stage.source, target=target, position_codec=position_codec, letters=letters)
    if not read_model.has_states():
        for topic, schema in read_model.sent_schemas():
            around.codec(topic, schema)
        return Emitting(
            read_model=read_model.name,
            source=stage.source,
            records=stage.records,
            outputs=[
                (emit, around.target(emit.topic, stage), _made(emit, read_model, around)) for emit in read_model.outputs
            ],
            position_codec=position_codec,
            letters=letters,
        )
    return _folding(stage, read_model, around, position_codec, letters)


def _joining(
    stage: Stage, makes: Schema, target: Target, around: Surroundings, position_codec: AvroCodec, letters: Letters
) -> Joining:
    by = str(stage.by)
    key_type = KeyType.of(by, fields_of(makes)[by])
    if key_type is None:
        raise FatalError(f"stage {stage.name} goes on by '{by}', which is no key")
    if stage.next_table is not None:
        # A table has its keys as text, whatever they are of.
        key_type = KeyType(by, is_number=False)
    return Joining(
        source=stage.source,
        record=stage.records[0],
        joined=around.joined(stage),
        schema=makes,
        codec=around.codec(target.topic, makes),
        key_type=key_type,
        target=target,
        position_codec=position_codec,
        letters=letters,
    )


def _folding(
    stage: Stage, read_model: ReadModel, around: Surroundings, position_codec: AvroCodec, letters: Letters
) -> Folding:
    state_codec = around.codec(stage.changelog, read_model.state_schema)
    partitions = around.partitions(stage.source)
    return Folding(
        read_model=read_model,
        acceleration=read_model.acceleration(state_codec),
        state_codec=state_codec,
        largest_bytes=around.largest_in(around.config(stage.changelog)),
        position_codec=position_codec,
        letters=letters,
        marker_codec=around.codec(stage.changelog, load_schema("IdempotencyMarker")),
        partitions_of=partial(partitions_of, partitions=partitions),
        partitions_of_keys=partial(partitions_of_keys, partitions=partitions),
        idempotency_window_ms=around.idempotency_window_ms,
        emission=_emission(stage, read_model, around),
    )


def _emission(stage: Stage, read_model: ReadModel, around: Surroundings) -> Emission | None:
    if not read_model.outputs:
        return None
    (emit,) = read_model.outputs
    return Emission(
        read_model=read_model,
        emit=emit,
        target=around.target(emit.topic, stage),
        codec=_made(emit, read_model, around) or around.codec(emit.topic, read_model.state_schema),
        source=stage.source,
    )


def _made(emit: Emit, read_model: ReadModel, around: Surroundings) -> AvroCodec | None:
    return None if emit.record is None else around.codec(emit.topic, read_model.made_schemas[emit.record])
