"""The tables that one stage joins with: held by its tasks, read to their ends before each batch, and looked up in."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from balance_service.engine.tables.tables import TableId
from balance_service.errors import PoisonRecordError, RetriableError, StoreCorruptedError
from balance_service.model.joins import Global

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from balance_service.engine.tables.store import Version
    from balance_service.engine.tables.tables import Tables
    from balance_service.kafka.topics import Topics
    from balance_service.model.joins import Join

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
