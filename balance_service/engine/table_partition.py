"""Follows one partition of a table: reads the topic into a store, for as long as a task joins with it.

The thread `table-<topic>_<partition>` reads the topic and writes the store. Any thread may wait for it, take a view or
a snapshot. The thread logs errors and retries.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from balance_service.engine.completeness import WHOLE_FOR_SECONDS, Completeness, check_tombstones_since_time
from balance_service.engine.database import Database
from balance_service.engine.outputs import is_in_our_form
from balance_service.engine.records import MISPLACED, RESERVED_PREFIX, StoreSizes
from balance_service.engine.table_store import TableStore, Version
from balance_service.errors import (
    BalanceServiceError,
    InvalidInputError,
    PoisonRecordError,
    RetriableError,
    StoreCorruptedError,
)
from balance_service.kafka.clients import reader_config
from balance_service.kafka.log_reader import LogReader, OffsetOutOfRangeError
from balance_service.kafka.messages import offset_of, readable_headers
from balance_service.model.record_keys import RecordKey
from balance_service.process.runtime import now_ms

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from confluent_kafka import Message
    from structlog.typing import FilteringBoundLogger

    from balance_service.engine.misplaced import MisplacedKeys
    from balance_service.engine.table_store import TableView
    from balance_service.formats.format import RecordReader
    from balance_service.kafka.messages import Headers
    from balance_service.kafka.topics import Topic, Topics
    from balance_service.model.events import FormatName
    from balance_service.settings import Settings


log = structlog.get_logger(__name__)

_BACK_OFF_SECONDS = (0.2, 0.5, 1.0, 2.0, 5.0)
_LOOK_EVERY_SECONDS = 5.0
_SWEEP_EVERY_SECONDS = 1.0
_SWEPT_AT_ONCE = 1_000
# How often a waiting thread checks whether it should stop.
_LISTEN_SECONDS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class TableContext:
    """What the partitions of a table share.

    `topic` is the topic at the start of the instance, and `misplaced` says where its producers write keys.
    """

    settings: Settings
    topics: Topics
    topic: Topic
    reader: RecordReader
    format: FormatName = "avro"
    history_ms: int
    misplaced: MisplacedKeys


@dataclass(frozen=True, slots=True)
class TableSnapshot:
    """The status of a partition of a table, for operators."""

    topic: str
    partition: int
    position: int
    """The next offset to apply; -1 while it is unknown."""
    is_whole: bool
    """Whether the reader has reached the end of the topic since the store was opened."""
    reason: str
    skipped: Mapping[str, int]
    """The number of records that are not rows, by cause."""
    late: int
    """The number of records with a timestamp before that of an event that was already joined."""
    sizes: StoreSizes


class TablePartition:
    """A partition of a table in this instance, followed from `start` to `stop`."""

    def __init__(self, context: TableContext, partition: int, path: Path) -> None:
        self._context = context
        self._partition = partition
        self._path = path
        self._store: TableStore | None = None
        self._moved = threading.Condition()
        self._reached = -1
        self._waited_for = -1
        self._topic_id = ""
        self._is_whole = False
        self._reason = ""
        self._damage = ""
        self._stopping = threading.Event()
        self.name = f"{context.topic.name}_{partition}"
        """`<topic>_<partition>`."""
        self._log = log.bind(table=self.name)
        self._rows = TableRows(context.reader, context.misplaced, partition, self._log)
        self._thread = threading.Thread(target=self._run, name=f"table-{self.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def request_stop(self) -> None:
        """Stops following, without waiting for the thread."""
        self._stopping.set()

    def stop(self, timeout_seconds: float) -> bool:
        """Stops following. Returns whether the thread ended and released the store within the timeout."""
        self.request_stop()
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def wait_for(self, offset: int, timeout_seconds: float, should_stop: Callable[[], bool]) -> bool:
        """Waits until everything below an offset is in the store. Returns whether it is, within the timeout."""
        deadline = time.monotonic() + timeout_seconds
        with self._moved:
            while self._reached < offset and not should_stop():
                if (left := deadline - time.monotonic()) <= 0:
                    break
                self._moved.wait(min(left, _LISTEN_SECONDS))
            if self._reached < offset:
                return False
            self._waited_for = max(self._waited_for, offset)
            return True

    @property
    def problem(self) -> str:
        """Why the partition is not being followed; empty if it is."""
        return self._reason

    @property
    def view(self) -> TableView:
        """The rows as of the last write.

        Raises:
            RetriableError: no store is open, or it is being restored and is still below an offset that `wait_for` has
                confirmed.
        """
        store = self._store
        view = None if store is None else store.view
        if view is None or self._reached < self._waited_for:
            why = f": {self._reason}" if self._reason else ""
            raise RetriableError(f"the table {self.name} is not open, or not read up to its earlier position{why}")
        return view

    @property
    def is_whole(self) -> bool:
        """As `TableSnapshot.is_whole`."""
        return self._is_whole

    def note_joined(self, timestamp_ms: int) -> None:
        """Notes the timestamp of a joined event. Later records with an earlier timestamp count as late."""
        self._rows.joined_up_to_ms = max(self._rows.joined_up_to_ms, timestamp_ms)

    def report_damage(self, error: StoreCorruptedError) -> None:
        """Makes the thread wipe the store, which a reader found damaged, and restore it. Returns at once."""
        self._damage = str(error)

    def snapshot(self) -> TableSnapshot:
        store = self._store
        return TableSnapshot(
            self._context.topic.name,
            self._partition,
            self._reached,
            self._is_whole,
            self._reason,
            dict(self._rows.skipped),
            self._rows.late,
            StoreSizes() if store is None else store.sizes,
        )

    def _run(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                self._follow()
            except BalanceServiceError as error:
                self._fail(str(error))
                if isinstance(error, StoreCorruptedError):
                    Database.wipe(self._path)
            except Exception as error:
                self._log.exception("the table cannot be followed")
                self._fail(str(error))
            failures = 0 if time.monotonic() - began > max(_BACK_OFF_SECONDS) else failures
            self._stopping.wait(_BACK_OFF_SECONDS[min(failures, len(_BACK_OFF_SECONDS) - 1)])
            failures += 1

    def _fail(self, reason: str) -> None:
        self._log.warning("table not followed for now", reason=reason)
        self._reason = reason
        self._set_reached(-1)

    def _follow(self) -> None:
        """Reads the topic until `request_stop`, or until an error."""
        context, name = self._context, self._context.topic.name
        topic_id = self._present_topic_id()
        if topic_id != self._topic_id:
            self._topic_id, self._waited_for = topic_id, -1
        self._is_whole = False
        with closing(self._open(topic_id)) as store:
            start = store.offset
            if start is not None:
                check_tombstones_since_time(context.topics, context.topic, self._partition, store.seen_to_ms)
            else:
                start = context.topics.offsets(name, [self._partition], earliest=True)[self._partition]
            config = reader_config(context.settings)
            with LogReader(config, name, {self._partition: start}) as reader:
                try:
                    self._store = store
                    self._tail(reader, store, topic_id)
                finally:
                    self._set_reached(-1)
                    self._store = None

    def _tail(self, reader: LogReader, store: TableStore, topic_id: str) -> None:
        looked = swept = time.monotonic()
        written = store.offset
        completeness = Completeness(self._end)
        while not self._stopping.is_set():
            if self._damage:
                damage, self._damage = self._damage, ""
                raise StoreCorruptedError(damage)
            try:
                messages = reader.read()
            except OffsetOutOfRangeError as error:
                raise StoreCorruptedError(f"the table's topic {error}") from error
            position = reader.position(self._partition)
            if messages:
                if completeness.was_away:
                    raise RetriableError("the topic was not read for an hour; tombstones may have been removed")
                store.apply(
                    [row for message in messages if (row := self._rows.of(message)) is not None],
                    written := offset_of(messages[-1]) + 1,
                )
            elif written != position and reader.met_end:
                # Transactions leave offsets without records. Queries wait for positions.
                store.apply([], written := position)
            if reader.met_end:
                completeness.met_end()
                if not self._is_whole:
                    self._is_whole = True
                    self._log.info("table read to its end", position=position)
            completeness.passed(position)
            completeness.look()
            self._reason = ""
            self._set_reached(position)
            now = time.monotonic()
            if now - swept > _SWEEP_EVERY_SECONDS:
                swept = now
                store.sweep(_SWEPT_AT_ONCE)
            if now - looked > _LOOK_EVERY_SECONDS:
                looked = now
                if self._present_topic_id() != topic_id:
                    raise StoreCorruptedError("the topic was recreated; the table is read from its start")
                _note_seen(store, completeness)
        _note_seen(store, completeness)

    def _present_topic_id(self) -> str:
        """Returns the topic's present id. Raises RetriableError if it is gone or its partition count has changed."""
        ours = self._context.topic
        found = self._context.topics.find_patiently(ours.name)
        if found is None:
            raise RetriableError(f"the topic '{ours.name}' is gone")
        if found.partitions != ours.partitions:
            raise RetriableError(
                f"the topic '{ours.name}' had {ours.partitions} partitions and has {found.partitions}; "
                "restart the instances, once all topics that it is joined with have as many"
            )
        return found.topic_id

    def _open(self, topic_id: str) -> TableStore:
        store = TableStore(self._path, self._context.history_ms)
        # By another partitioner, or in another format, other records are rows; by another form, they have other keys.
        partitioning = self._context.misplaced.partitioning
        identity = f"{topic_id} {partitioning.partitioner}"
        if partitioning.key_format != "string":
            identity += f" {partitioning.key_format}"
        if self._context.format != "avro":
            identity += f" {self._context.format}"
        if store.identity == identity:
            return store
        if store.identity is not None or store.offset is not None:
            store.close()
            self._log.warning("the store is of another topic, partitioner or format: it is read from its start")
            Database.wipe(self._path)
            store = TableStore(self._path, self._context.history_ms)
        store.identity = identity
        return store

    def _end(self) -> int:
        topic, partition = self._context.topic.name, self._partition
        return self._context.topics.offsets(topic, [partition], committed=True)[partition]

    def _set_reached(self, offset: int) -> None:
        with self._moved:
            if offset != self._reached:
                self._reached = offset
                self._moved.notify_all()


def _note_seen(store: TableStore, completeness: Completeness) -> None:
    if completeness.holds:
        store.seen_to_ms = now_ms() - int(1_000 * WHOLE_FOR_SECONDS)


# A topic full of invalid records must not fill the log.
_MAX_LOGGED = 10


class TableRows:
    """Checks records, and converts them to rows.

    `skipped` counts records that are not rows, by cause. `late` counts rows with a timestamp below `joined_up_to_ms`,
    the latest timestamp of a joined event. Any thread may read the counters.
    """

    def __init__(
        self, reader: RecordReader, misplaced: MisplacedKeys, partition: int, log: FilteringBoundLogger
    ) -> None:
        self.skipped: Counter[str] = Counter()
        self.late = 0
        self.joined_up_to_ms = -(1 << 63)
        self._reader = reader
        self._misplaced = misplaced
        self._key_type = RecordKey.of_format(misplaced.partitioning.key_format)
        self._partition = partition
        self._log = log

    def of(self, message: Message) -> tuple[bytes, Version] | None:
        """Returns the key and the new version of its row, or None for a record that is not a row."""
        key, frame, headers = message.key(), message.value(), readable_headers(message) or ()
        try:
            if key is None:
                raise PoisonRecordError("key-null", "a record has no key")
            key = self._stored(key, headers)
            if key.startswith(RESERVED_PREFIX):
                raise PoisonRecordError("key-reserved", "a record's key begins with 0xFF")
            # Joins look up the row of a key in one partition.
            if self._misplaced.partitioning.of(key) != self._partition:
                self._misplaced.found([key], self._partition)
                raise PoisonRecordError(MISPLACED, self._misplaced.detail(key))
            if frame is not None:
                frame = self._reader.framed(frame, headers)
                self._reader.decode_foreign(frame)
        except PoisonRecordError as error:
            self.skipped[error.cause] += 1
            if self.skipped.total() <= _MAX_LOGGED:
                self._log.warning("not a row", offset=message.offset(), cause=error.cause, problem=str(error))
            return None
        timestamp_ms = message.timestamp()[1]
        self.late += timestamp_ms < self.joined_up_to_ms
        return key, Version(timestamp_ms, offset_of(message), frame)

    def _stored(self, key: bytes, headers: Headers) -> bytes:
        """Returns the key of a row in our form. Raises PoisonRecordError: the record's key has another form."""
        if self._key_type.key_format == "long" and is_in_our_form(headers):
            raise PoisonRecordError(self._key_type.cause, self._key_type.problem)
        try:
            return self._key_type.stored(key)
        except InvalidInputError as error:
            raise PoisonRecordError(self._key_type.cause, str(error)) from None
