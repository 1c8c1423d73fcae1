"""What an instance's tables need to be followed, put together of what its stages join with."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from balance_service.avro.codec import AvroCodec
from balance_service.avro.schemas import subject_of
from balance_service.cluster.partitioner import partition_of
from balance_service.errors import ConfigurationError
from balance_service.state.tables.partition import TableContext

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from balance_service.avro.registry import SchemaRegistry
    from balance_service.kafka.topics import Topic, Topics
    from balance_service.model.catalogue import StageOf
    from balance_service.model.joins import Table
    from balance_service.settings import Settings


def table_contexts(
    settings: Settings,
    topics: Topics,
    registry: SchemaRegistry,
    prepared: Mapping[str, Topic],
    stages: Iterable[StageOf],
) -> dict[str, TableContext]:
    """Of every table, by its topic. Where several stages join with one, it has the longest history of theirs.

    Raises:
        ConfigurationError: a topic is said to hold rows of two types, or the registry refuses a schema.
        RetriableError: the registry does not answer.
    """
    contexts: dict[str, TableContext] = {}
    for topic, tables in _by_topic(stages).items():
        records = sorted({table.record for table in tables})
        if len(records) > 1:
            raise ConfigurationError(f"BALANCE_MODELS: the table '{topic}' is said to hold {' and '.join(records)}")
        schema, history = tables[0].schema, max(table.history for table in tables)
        contexts[topic] = TableContext(
            settings=settings,
            topics=topics,
            topic=prepared[topic],
            codec=AvroCodec(registry, subject_of(topic, schema), schema),
            history_ms=history // timedelta(milliseconds=1),
            partition_of=partial(partition_of, partitions=prepared[topic].partitions),
        )
    return contexts


def _by_topic(stages: Iterable[StageOf]) -> dict[str, list[Table]]:
    tables: dict[str, list[Table]] = {}
    for stage in stages:
        for join in stage.leg.joins:
            tables.setdefault(join.table.topic, []).append(join.table)
    return tables
