"""The tables of one instance: their partitions are followed as long as a task joins with them.

Tasks' threads hold and let go; the lock is held for no longer than it takes to look.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from balance_service.engine.table_partition import TablePartition
from balance_service.errors import PoisonRecordError, RetriableError, StoreCorruptedError
from balance_service.model.stream import Global

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from balance_service.avro.codec import AvroReader
    from balance_service.engine.state_directory import StateDirectory
    from balance_service.engine.table_partition import TableContext, TableSnapshot
    from balance_service.engine.table_store import Version
    from balance_service.kafka.topics import Topics
    from balance_service.model.stream import Join


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


ROW_UNREADABLE = "row-unreadable"
_CATCH_UP_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedTables:
    """What the tasks of a stage need of its tables. Any thread may call, of a partition that it holds."""

    joins: Sequence[Join]
    tables: Tables
    topics: Topics
    partition_of: Callable[[bytes, int], int]
    """A key and a partition count → where its row lies."""

    def hold(self, partition: int) -> None:
        """Follow what a task on a partition needs; returns at once."""
        for table in self._needed(partition):
            self.tables.hold(table)

    def let_go(self, partition: int) -> None:
        """The task needs it no longer; returns at once."""
        for table in self._needed(partition):
            self.tables.let_go(table)

    def catch_up(self, partition: int, should_stop: Callable[[], bool]) -> None:
        """Wait until every row that is committed by now can be looked up, or until told to stop.

        Raises:
            RetriableError: that takes too long; the message says of which table, and why.
        """
        needed = self._needed(partition)
        ends = {
            topic: self.topics.offsets(topic, [t.partition for t in needed if t.topic == topic], committed=True)
            for topic in dict.fromkeys(table.topic for table in needed)
        }
        deadline = time.monotonic() + _CATCH_UP_SECONDS
        for table in needed:
            followed, end = self.tables.partition(table), ends[table.topic][table.partition]
            left = max(0.0, deadline - time.monotonic())
            if not followed.wait_for(end, left, should_stop) and not should_stop():
                why = followed.problem or f"it stands at {followed.snapshot().position}, and ends at {end}"
                raise RetriableError(f"the table {followed.name} is not read to its end: {why}")

    def as_of(self, join: Join, key: bytes, timestamp_ms: int, partition: int) -> tuple[int, Version | None]:
        """A row as of an event's time, and the partition that it lies in.

        Raises:
            RetriableError: the table is not open now, or its store is damaged, and will be read anew.
        """
        topic, own = join.table.topic, partition
        if isinstance(join.table, Global):
            own = self.partition_of(key, self.tables.partitions(topic))
        followed = self.tables.partition(TableId(topic, own))
        try:
            version = followed.view.as_of(key, timestamp_ms)
        except StoreCorruptedError as error:
            followed.damaged(error)
            # Not the task's own store.
            raise RetriableError(str(error)) from error
        followed.joined(timestamp_ms)
        return own, version

    def row(self, join: Join, frame: bytes) -> Mapping[str, Any]:
        """A row's frame as a record.

        Raises:
            PoisonRecordError: it does not decode any more: its schema is gone from the registry, or ours has changed.
        """
        try:
            return self.tables.codec(join.table.topic).decode_foreign(frame)
        except PoisonRecordError as error:
            # The event is in order, so its dead letter may be tried again.
            raise PoisonRecordError(ROW_UNREADABLE, f"its row of '{join.table.topic}': {error}") from error

    def _needed(self, partition: int) -> list[TableId]:
        needed: dict[TableId, None] = {}
        for join in self.joins:
            topic = join.table.topic
            is_global = isinstance(join.table, Global)
            numbers = range(self.tables.partitions(topic)) if is_global else (partition,)
            needed |= dict.fromkeys(TableId(topic, number) for number in numbers)
        return list(needed)
