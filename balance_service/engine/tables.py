"""The tables that the stages of an instance join with. A partition is followed while a task needs it."""

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

    from balance_service.engine.state_directory import StateDirectory
    from balance_service.engine.table_partition import TableContext, TableSnapshot
    from balance_service.engine.table_store import Version
    from balance_service.formats.format import RecordReader
    from balance_service.kafka.partitioner import Partitioning
    from balance_service.kafka.topics import Topics
    from balance_service.model.stream import Join


@dataclass(frozen=True, slots=True)
class TableId:
    topic: str
    partition: int


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


ROW_UNREADABLE = "row-unreadable"
_CATCH_UP_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedTables:
    """The tables that a stage joins with. Any thread may use a source partition that it has acquired."""

    joins: Sequence[Join]
    tables: Tables
    topics: Topics

    def acquire(self, partition: int) -> None:
        """Follows the table partitions that a task on a source partition needs. Returns at once."""
        for table in self._needed(partition):
            self.tables.acquire(table)

    def release(self, partition: int) -> None:
        for table in self._needed(partition):
            self.tables.release(table)

    def catch_up(self, partition: int, should_stop: Callable[[], bool]) -> None:
        """Waits until every row that is committed at the time of the call can be looked up, or `should_stop` is true.

        Raises:
            RetriableError: a table takes too long; the message names it and the reason.
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
                why = followed.problem or f"its position is {followed.snapshot().position}, its end is {end}"
                raise RetriableError(f"the table {followed.name} is not read to its end: {why}")

    def as_of(self, join: Join, key: bytes, timestamp_ms: int, partition: int) -> tuple[int, Version | None]:
        """Returns the table partition of a key, and the version of its row as of an event's time.

        Raises:
            RetriableError: the table is not open, or its store is damaged and is restored from the topic.
        """
        topic, own = join.table.topic, partition
        if isinstance(join.table, Global):
            own = self.tables.partition_of(topic, key)
        followed = self.tables.partition(TableId(topic, own))
        try:
            version = followed.view.as_of(key, timestamp_ms)
        except StoreCorruptedError as error:
            followed.report_damage(error)
            # A StoreCorruptedError would make the task wipe its own store.
            raise RetriableError(str(error)) from error
        followed.note_joined(timestamp_ms)
        return own, version

    def row(self, join: Join, frame: bytes) -> Mapping[str, Any]:
        """Decodes the frame of a row.

        Raises:
            PoisonRecordError: the row no longer decodes: its schema was deleted from the registry, or the table's
                schema has changed.
        """
        try:
            return self.tables.reader(join.table.topic).decode_foreign(frame)
        except PoisonRecordError as error:
            # A cause of its own: the event is valid, so its dead letter may be retried.
            raise PoisonRecordError(ROW_UNREADABLE, f"its row of '{join.table.topic}': {error}") from error

    def _needed(self, partition: int) -> list[TableId]:
        needed: dict[TableId, None] = {}
        for join in self.joins:
            topic = join.table.topic
            is_global = isinstance(join.table, Global)
            numbers = range(self.tables.partitions(topic)) if is_global else (partition,)
            needed |= dict.fromkeys(TableId(topic, number) for number in numbers)
        return list(needed)
