"""The tables that the stages of an instance join with. A partition is followed while a task needs it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING

from balance_service.engine.misplaced import MisplacedKeys
from balance_service.engine.table_partition import TableContext, TablePartition
from balance_service.errors import ConfigurationError
from balance_service.formats.known import FORMATS
from balance_service.kafka.partitioner import Partitioning
from balance_service.model.events import DeclaredRecord

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from balance_service.avro.registry import SchemaRegistry
    from balance_service.avro.schemas import Schema
    from balance_service.engine.records import TableId
    from balance_service.engine.state_directory import StateDirectory
    from balance_service.engine.table_partition import TableSnapshot
    from balance_service.formats.format import RecordReader
    from balance_service.kafka.topics import Topic, Topics
    from balance_service.model.stage import Stage
    from balance_service.model.stream import Table
    from balance_service.settings import Settings


class Tables:
    """The followed partitions of all tables. Tasks' threads acquire and release them.

    Invariant: a partition has at most one open store in the instance.
    """

    def __init__(self, contexts: Mapping[str, TableContext], state_directory: StateDirectory) -> None:
        """Args:
        contexts: the contexts of all tables by topic.
        """
        self._contexts = contexts
        self._state_directory = state_directory
        self._lock = threading.Lock()
        self._followed: dict[TableId, TablePartition] = {}
        self._users: Counter[TableId] = Counter()

    def partitions(self, topic: str) -> int:
        return self._contexts[topic].topic.partitions

    def partition_of(self, topic: str, key: bytes) -> int:
        """Returns the partition of a table where its producers write a key."""
        return self.partitioning(topic).of(key)

    def partitioning(self, topic: str) -> Partitioning:
        """Returns where the producers of a table write keys."""
        return self._contexts[topic].misplaced.partitioning

    def reader(self, topic: str) -> RecordReader:
        """Returns the reader of a table's rows."""
        return self._contexts[topic].reader

    def acquire(self, table: TableId) -> None:
        """Follows a partition until the caller releases it. Returns at once."""
        with self._lock:
            self._users[table] += 1
            if table not in self._followed:
                path = self._state_directory.table_path(table.topic, table.partition)
                followed = TablePartition(self._contexts[table.topic], table.partition, path)
                self._followed[table] = followed
                followed.start()

    def release(self, table: TableId) -> None:
        """Stops following a partition if no other task needs it. Returns at once. The store stays on disk."""
        with self._lock:
            self._users[table] -= 1
            # After `stop`, the partition is no longer there.
            if not self._users[table] and (followed := self._followed.pop(table, None)) is not None:
                followed.request_stop()

    def partition(self, table: TableId) -> TablePartition:
        """Returns a partition that the caller has acquired."""
        return self._followed[table]

    def find(self, table: TableId) -> TablePartition | None:
        """Returns a partition if a task here needs it. Any thread may call."""
        return self._followed.get(table)

    def snapshots(self) -> list[TableSnapshot]:
        """Returns the snapshots in the order of topics and partitions."""
        followed = sorted(self._followed.copy().items(), key=lambda item: (item[0].topic, item[0].partition))
        return [partition.snapshot() for _, partition in followed]

    def stop(self, timeout_seconds: float) -> None:
        """Stops following all partitions, and waits for their threads up to the timeout."""
        deadline = time.monotonic() + timeout_seconds
        with self._lock:
            leaving, self._followed = list(self._followed.values()), {}
        for partition in leaving:
            partition.request_stop()
        for partition in leaving:
            partition.stop(max(0.0, deadline - time.monotonic()))


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
