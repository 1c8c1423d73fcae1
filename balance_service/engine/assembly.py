"""Makes what a stage does with its batches, and the tables that it joins with, from a read model's declaration.

The service and the test driver call the same functions, each with its own `StageServices`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING

from balance_service.avro.schemas import fields_of, load_schema
from balance_service.engine.dead_letters import Letters
from balance_service.engine.fold import FoldProcessor
from balance_service.engine.misplaced import MisplacedKeys
from balance_service.engine.outputs import Emission, Target, sender_of
from balance_service.engine.own_steps import OwnSteps
from balance_service.engine.processor import Tolerance
from balance_service.engine.state_frames import StateFrames
from balance_service.engine.stateless import (
    EmitProcessor,
    JoinProcessor,
    RepartitionProcessor,
    RetryProcessor,
    RowsProcessor,
)
from balance_service.engine.steps import Steps
from balance_service.engine.table_partition import TableContext
from balance_service.engine.transform_failures import TransformFailures
from balance_service.errors import ConfigurationError, FatalError
from balance_service.formats.known import FORMATS
from balance_service.kafka.partitioner import Partitioning
from balance_service.kafka.topic_specs import MAX_MESSAGE_BYTES, is_compacted
from balance_service.model.events import DeclaredRecord, Each, OnFailure
from balance_service.model.keys import ColumnKey, key_type_of
from balance_service.model.record_keys import java_long
from balance_service.process.runtime import now_ms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from balance_service.avro.codec import AvroCodec
    from balance_service.avro.own_schemas import OwnSchemas
    from balance_service.avro.registry import SchemaRegistry
    from balance_service.avro.schemas import Schema
    from balance_service.engine.processor import StageProcessor
    from balance_service.engine.tables import JoinedTables
    from balance_service.formats.format import RecordCodec
    from balance_service.kafka.topics import Topic, Topics
    from balance_service.model.addition import Addition
    from balance_service.model.events import Emit, FormatName
    from balance_service.model.read_model import ReadModel
    from balance_service.model.stage import Stage
    from balance_service.model.stream import Table
    from balance_service.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class StageServices:
    """The topics, schemas, limits and clock that stages need in addition to their declarations.

    `partitions`, `topic_id` and `config` take the name of a topic, `joined` a stage that joins with tables.
    `largest_bytes` is the largest batch that the producer sends.
    """

    schemas: OwnSchemas
    partitions: Callable[[str], int]
    topic_id: Callable[[str], str]
    config: Callable[[str], Mapping[str, str]]
    joined: Callable[[Stage], JoinedTables]
    largest_bytes: int
    retry_every_ms: int
    idempotency_window_ms: int
    now_ms: Callable[[], int] = now_ms

    def codec(self, topic: str, schema: Schema) -> AvroCodec:
        return self.schemas.codec(topic, schema)

    def sent(self, topic: str, schema: Schema, name: FormatName) -> RecordCodec:
        """Returns the codec of an output, which others read."""
        return FORMATS[name].codec(self.schemas.of_producers, topic, schema)

    def largest_in(self, config: Mapping[str, str]) -> int:
        """Returns the largest batch, in bytes, that both the topic and the producer accept."""
        return min(int(config[MAX_MESSAGE_BYTES]), self.largest_bytes)

    def target(self, name: str, stage: Stage) -> Target:
        config = self.config(name)
        return Target(
            topic=name,
            partitions=self.partitions(name),
            largest_bytes=self.largest_in(config),
            is_compacted=is_compacted(config),
            sender=sender_of(stage.sender, self.topic_id(stage.source)),
        )


def processor_of(stage: Stage, read_model: ReadModel | None, services: StageServices) -> StageProcessor:
    """Returns what the tasks of a stage do with their batches. `read_model` is None for a stage of retries.

    Raises:
        ConfigurationError: the registry rejects a schema.
        RetriableError: the registry or a broker does not respond.
    """
    position_codec = services.codec(stage.changelog, load_schema("Position"))
    letters = Letters(
        codec=services.codec(stage.changelog, load_schema("Letter")),
        every_ms=services.retry_every_ms,
        keeps_order=not stage.passes_on and read_model is not None and read_model.keeps_order,
        keeps_newest=read_model is not None and read_model.keeps_newest,
        is_compacted=stage.compacted,
        now_ms=services.now_ms,
        failures=TransformFailures(
            stage.name, read_model is None or read_model.on_failure is not OnFailure.DEAD_LETTER, stage.passes_on
        ),
    )
    if read_model is None:
        (target,) = (services.target(topic, stage) for topic in stage.targets)
        return RetryProcessor(source=stage.source, target=target, position_codec=position_codec, letters=letters)
    if stage.passes_on:
        target = services.target(stage.rekeyed, stage)
        if stage.transform is not None:
            return RowsProcessor(
                source=stage.source,
                multiplies=stage.transform.analysed.multiplies,
                codec=services.codec(target.topic, stage.transform.schema),
                target=target,
                position_codec=position_codec,
                letters=letters,
            )
        if stage.makes is not None:
            return _join_processor(stage, stage.makes, target, services, position_codec, letters)
        return RepartitionProcessor(
            source=stage.source,
            target=target,
            position_codec=position_codec,
            letters=letters,
            placeholders=read_model.placeholders,
        )
    if not read_model.has_states():
        if _sends_rows(stage, read_model) and services.schemas.has_fingerprints:
            raise ConfigurationError(
                f"the read model '{read_model.name}' emits rows of its own unchanged, which name their schema in a way "
                "that only this application reads: name the record of the output, and its `fields`"
            )
        for topic, schema in read_model.sent_schemas():
            services.sent(topic, schema, "avro")
        return EmitProcessor(
            read_model=read_model.name,
            source=stage.source,
            records=tuple(stage.events),
            outputs=[
                (emit, _target(emit, stage, read_model, services), _made(emit, read_model, services))
                for emit in read_model.outputs
            ],
            position_codec=position_codec,
            letters=letters,
            tolerance=Tolerance(read_model.on_failure),
        )
    return _fold_processor(stage, read_model, services, position_codec, letters)


def _sends_rows(stage: Stage, read_model: ReadModel) -> bool:
    """Whether a model emits records unchanged that an earlier stage has made."""
    is_made = any(one.makes is not None for one in read_model.stages)
    return stage.reads_rekeyed and is_made and any(emit.record is None for emit in read_model.outputs)


def _join_processor(
    stage: Stage, makes: Schema, target: Target, services: StageServices, position_codec: AvroCodec, letters: Letters
) -> JoinProcessor:
    parts = []
    for column in stage.by or ():
        part = ColumnKey.from_column(column, fields_of(makes)[column])
        if part is None:
            raise FatalError(f"stage {stage.name} is keyed by '{column}', which cannot be a key")
        parts.append(part)
    return JoinProcessor(
        source=stage.source,
        record=stage.records[0],
        joined=services.joined(stage),
        schema=makes,
        codec=services.codec(target.topic, makes),
        key_type=key_type_of(parts),
        next_table=stage.next_table,
        target=target,
        position_codec=position_codec,
        letters=letters,
    )


def _fold_processor(
    stage: Stage, read_model: ReadModel, services: StageServices, position_codec: AvroCodec, letters: Letters
) -> FoldProcessor:
    state_codec = services.codec(stage.changelog, read_model.state_schema)
    emission, acceleration = _emission(stage, read_model, services), read_model.acceleration(state_codec)
    largest_bytes = services.largest_in(services.config(stage.changelog))
    frames = StateFrames(state_codec, largest_bytes, bool(read_model.standard_folds))
    return FoldProcessor(
        read_model=read_model,
        acceleration=acceleration,
        frames=frames,
        position_codec=position_codec,
        letters=letters,
        marker_codec=services.codec(stage.changelog, load_schema("IdempotencyMarker")),
        misplaced=MisplacedKeys(
            stage.source, Partitioning(services.partitions(stage.source), stage.partitioner, stage.key_format)
        ),
        idempotency_window_ms=services.idempotency_window_ms,
        tolerance=Tolerance(read_model.on_failure),
        emission=emission,
        steps=_steps(read_model, frames, acceleration, emission),
    )


def _steps(
    read_model: ReadModel, frames: StateFrames, acceleration: Addition | None, emission: Emission | None
) -> Steps | OwnSteps | None:
    if not read_model.standard_folds:
        is_known = emission is None or (emission.emit.each is Each.EVENT and not emission.emit.fields)
        return OwnSteps.of_model(read_model, frames) if is_known else None
    if emission is None or acceleration is None:
        return None
    parts, header = read_model.parts_of_steps(), emission.codec.header
    ((field, _),) = read_model.standard_folds.items()
    return None if parts is None or header is None else Steps(acceleration, field, header, parts)


def _emission(stage: Stage, read_model: ReadModel, services: StageServices) -> Emission | None:
    if not read_model.outputs:
        return None
    (emit,) = read_model.outputs
    return Emission(
        read_model=read_model,
        emit=emit,
        target=_target(emit, stage, read_model, services),
        codec=_made(emit, read_model, services) or services.sent(emit.topic, read_model.state_schema, emit.format),
        source=stage.source,
    )


def _target(emit: Emit, stage: Stage, read_model: ReadModel, services: StageServices) -> Target:
    """Returns the topic of an output, with the form of its keys: by default, that of the stage's."""
    target, form = services.target(emit.topic, stage), emit.key_format
    if stage.own_key is not None:
        form = stage.key_format
        return replace(target, sent_key=stage.own_key.sent, key_format="" if stage.own_key.is_text else form)
    if form is None:
        return target
    # Keys that no re-key and no state has made are sent on as they are.
    encodes = stage.key is not None or read_model.has_states()
    return replace(target, sent_key=java_long if encodes else None, key_format=form)


def _made(emit: Emit, read_model: ReadModel, services: StageServices) -> RecordCodec | None:
    return None if emit.record is None else services.sent(emit.topic, read_model.made_schemas[emit.record], emit.format)


def table_contexts(
    settings: Settings,
    topics: Topics,
    registry: SchemaRegistry,
    prepared: Mapping[str, Topic],
    stages: Iterable[Stage],
) -> dict[str, TableContext]:
    """Returns the context of each table by its topic. A table keeps the longest history that a stage declares.

    Raises:
        ConfigurationError: two declarations give a topic different record types or classes, or the registry rejects a
            schema.
        RetriableError: the registry does not respond.
    """
    contexts: dict[str, TableContext] = {}
    for topic, joined in _by_topic(stages).items():
        tables = [table for table, _ in joined]
        records = sorted({table.record for table in tables})
        if len(records) > 1:
            raise ConfigurationError(f"BALANCE_MODELS: the table '{topic}' is declared to hold {' and '.join(records)}")
        if len({table.format for table in tables}) > 1:
            raise ConfigurationError(
                f"BALANCE_MODELS: the table '{topic}' is declared in two formats; write one of them"
            )
        schema, history = joined[0][1], max(table.history for table in tables)
        if any(isinstance(table.record, DeclaredRecord) and one != schema for table, one in joined):
            raise ConfigurationError(
                f"BALANCE_MODELS: the table '{topic}' is declared to hold {records[0]} by classes that differ; import "
                "one class in all read models"
            )
        form = tables[0].key_format
        if any(table.key_format != form for table in tables):
            raise ConfigurationError(
                f"BALANCE_MODELS: the table '{topic}' is declared to have keys of several forms: name one `key_format`"
            )
        contexts[topic] = TableContext(
            settings=settings,
            topics=topics,
            topic=prepared[topic],
            reader=FORMATS[tables[0].format].reader(registry, schema),
            format=tables[0].format,
            history_ms=history // timedelta(milliseconds=1),
            misplaced=MisplacedKeys(topic, Partitioning(prepared[topic].partitions, tables[0].partitioner, form)),
        )
    return contexts


def _by_topic(stages: Iterable[Stage]) -> dict[str, list[tuple[Table, Schema]]]:
    tables: dict[str, list[tuple[Table, Schema]]] = {}
    for stage in stages:
        for join in stage.joins:
            tables.setdefault(join.table.topic, []).append((join.table, stage.rows[join.table.record]))
    return tables
