"""The tables of one instance: their partitions are followed as long as a task joins with them.

Tasks' threads hold and let go; the lock is held for no longer than it takes to look.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from balance_service.engine.tables.partition import TablePartition

if TYPE_CHECKING:
    from collections.abc import Mapping

    from balance_service.avro.codec import AvroReader
    from balance_service.engine.store.directory import StateDirectory
    from balance_service.engine.tables.partition import TableContext, TableSnapshot


@dataclass(frozen=True, slots=True)
class TableId:
    """A partition of a topic that is a table."""

    topic: str
    partition: int


class Tables:
    """What is followed here. Invariant: a partition of a table has at most one store open."""

    def __init__(self, contexts: Mapping[str, TableContext], state_directory: StateDirectory) -> None:
        """Args:
        contexts: of every table, by its topic.
        """
        self._contexts = contexts
        self._state_directory = state_directory
        self._lock = threading.Lock()
        self._followed: dict[TableId, TablePartition] = {}
        self._held: Counter[TableId] = Counter()

    def partitions(self, topic: str) -> int:
        """How many a table has."""
        return self._contexts[topic].topic.partitions

    def codec(self, topic: str) -> AvroReader:
        """Of a table's rows."""
        return self._contexts[topic].codec

    def hold(self, table: TableId) -> None:
        """Follow a partition for the caller too; returns at once."""
        with self._lock:
            self._held[table] += 1
            if table not in self._followed:
                path = self._state_directory.table_path(table.topic, table.partition)
                followed = TablePartition(self._contexts[table.topic], table.partition, path)
                self._followed[table] = followed
                followed.start()

    def let_go(self, table: TableId) -> None:
        """The caller needs it no longer; returns at once. Whoever holds it next goes on with its store."""
        with self._lock:
            self._held[table] -= 1
            # Of one that was stopped meanwhile, nothing is left to give up.
            if not self._held[table] and (followed := self._followed.pop(table, None)) is not None:
                followed.give_up()

    def partition(self, table: TableId) -> TablePartition:
        """One that the caller holds."""
        return self._followed[table]

    def snapshots(self) -> list[TableSnapshot]:
        """What each says of itself, by topic and partition."""
        followed = sorted(self._followed.copy().items(), key=lambda item: (item[0].topic, item[0].partition))
        return [partition.snapshot() for _, partition in followed]

    def stop(self, timeout_seconds: float) -> None:
        """Follow nothing any more, within the bound."""
        deadline = time.monotonic() + timeout_seconds
        with self._lock:
            leaving, self._followed = list(self._followed.values()), {}
        for partition in leaving:
            partition.give_up()
        for partition in leaving:
            partition.stop(max(0.0, deadline - time.monotonic()))
