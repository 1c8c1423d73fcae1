"""What an instance's tables need to be followed, put together of what its stages join with."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from balance_service.avro.codec import AvroReader
from balance_service.engine.tables.partition import TableContext
from balance_service.errors import ConfigurationError
from balance_service.kafka.partitioner import partition_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from balance_service.avro.registry import SchemaRegistry
    from balance_service.avro.schemas import Schema
    from balance_service.kafka.topics import Topic, Topics
    from balance_service.model.joins import Table
    from balance_service.model.stage import Stage
    from balance_service.settings import Settings


def table_contexts(
    settings: Settings,
    topics: Topics,
    registry: SchemaRegistry,
    prepared: Mapping[str, Topic],
    stages: Iterable[Stage],
) -> dict[str, TableContext]:
    """Of every table, by its topic. Where several stages join with one, it has the longest history of theirs.

    Raises:
        ConfigurationError: a topic is said to hold rows of two types, or the registry refuses a schema.
        RetriableError: the registry does not answer.
    """
    contexts: dict[str, TableContext] = {}
    for topic, joined in _by_topic(stages).items():
        tables = [table for table, _ in joined]
        records = sorted({table.record for table in tables})
        if len(records) > 1:
            raise ConfigurationError(f"BALANCE_MODELS: the table '{topic}' is said to hold {' and '.join(records)}")
        schema, history = joined[0][1], max(table.history for table in tables)
        contexts[topic] = TableContext(
            settings=settings,
            topics=topics,
            topic=prepared[topic],
            codec=AvroReader(registry, schema),
            history_ms=history // timedelta(milliseconds=1),
            partition_of=partial(partition_of, partitions=prepared[topic].partitions),
        )
    return contexts


def _by_topic(stages: Iterable[Stage]) -> dict[str, list[tuple[Table, Schema]]]:
    """The tables of each topic, with the schemas of their rows."""
    tables: dict[str, list[tuple[Table, Schema]]] = {}
    for stage in stages:
        for join in stage.joins:
            tables.setdefault(join.table.topic, []).append((join.table, stage.rows[join.table.record]))
    return tables
