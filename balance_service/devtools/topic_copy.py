"""Copies the committed records of a topic to another topic with any number of partitions, each exactly once.

Use a copy after the partition count of a topic was changed, or to move a topic to another partitioner: in the copy, all
records of a key are on one partition.

Each transaction writes some thousands of records, and the offsets up to which each source partition is copied, which it
commits for a consumer group of this copy. The metadata of each offset names the ids of both topics and the number of
records. After a failure, the next run initialises the same transactional id, which aborts an open transaction and
fences a run that is still alive. It then continues from the committed offsets.

Order: records of one source partition keep their order. If a key has older records on one partition and newer records
on another, their timestamps decide, so the order is as exact as the clocks of their producers.
"""

from __future__ import annotations

import heapq
import re
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from balance_service.errors import ConfigurationError, RetriableError, TaskMigratedError
from balance_service.kafka.clients import (
    by_remedy,
    new_client,
    not_authorized,
    reader_config,
    transaction_error,
    transactional_config,
)
from balance_service.kafka.log_reader import LogReader, reader_to_end
from balance_service.kafka.messages import headers_of, place_of
from balance_service.kafka.partitioner import librdkafka_partitioner
from balance_service.kafka.topic_specs import prepare_copy
from balance_service.kafka.topics import Topics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from confluent_kafka import Message

    from balance_service.errors import BalanceServiceError
    from balance_service.kafka.topics import Topic
    from balance_service.model.stream import Partitioner
    from balance_service.settings import Settings

_TOPIC_NAME = re.compile(r"(?!\.{1,2}$)[a-zA-Z0-9._-]{1,249}")
_BATCH_RECORDS = 10_000
_BATCH_BYTES = 16 << 20
_LEADERS_WITHIN_SECONDS = 20.0
_POLL_SECONDS = 0.1

# Producers check the size before compression, so a record can be larger here than on the source.
_LARGEST_RECORD_BYTES = 100 << 20
_TIMEOUT_SECONDS = 60.0
_ATTEMPT_SECONDS = 5.0
_COORDINATOR_SOON = {
    KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError._TIMED_OUT,
}
_BY_KEY = -1
_EARLIEST_WRITABLE_MS = 1

# The bounds on the records in memory, of all partitions and at least of each partition.
_BUFFERED_RECORDS, _LEAST_BUFFERED_RECORDS = 100_000, 100
_BUFFERED_BYTES, _LEAST_BUFFERED_BYTES = 64 << 20, 256 << 10


@dataclass(frozen=True, slots=True)
class Copied:
    """The result of a run."""

    source: Topic
    target: Topic
    ends: dict[int, int]
    """The end offset of each source partition when the run started."""
    records: int
    seconds: float


def copy_topic(
    settings: Settings,
    source_name: str,
    target_name: str,
    partitions: int | None,
    progress: Callable[[int, int], None],
    partitioner: Partitioner = "murmur2",
) -> Copied:
    """Copy the records that are not copied yet, up to the present end of the source.

    Key, value, headers and timestamp are unchanged. A record without key keeps its partition, modulo the number of
    partitions of the target.

    Args:
        target_name: the topic is created, with unlimited retention, if it does not exist.
        partitions: of the target; None for as many as it has, or as the source has if it does not exist.
        progress: called with the number of source offsets that are done, and of all.
        partitioner: the function that assigns the keys to partitions of the target.

    Raises:
        ConfigurationError: the topics cannot be used, or the target has other records.
        TaskMigratedError: another run of this copy took over.
        RetriableError: a broker does not answer.
    """
    topics = Topics(settings)
    source, target = _prepared(topics, settings, source_name, target_name, partitions)
    with Copier(settings, source, target, partitioner) as copier:
        done = copier.progress()
        _check_target(settings, topics, target, _records(done))
        starts = _starts(topics, source, done)
        ends = topics.offsets(source.name, range(source.partitions), committed=True)
        total = sum(ends.values())
        ahead = total - sum(max(0, ends[p] - starts[p]) for p in ends)
        before, began = _records(done), time.monotonic()
        with LogReader(reader_config(settings), source.name, starts, ends) as reader:
            for batch in _batches(by_timestamp(reader)):
                copier.write(batch, done)
                progress(ahead + reader.offsets_read, total)
        progress(total, total)
    return Copied(source, target, ends, _records(done) - before, time.monotonic() - began)


def _prepared(
    topics: Topics, settings: Settings, source_name: str, target_name: str, partitions: int | None
) -> tuple[Topic, Topic]:
    for name in (source_name, target_name):
        if not _TOPIC_NAME.fullmatch(name):
            raise ConfigurationError(f"'{name}' cannot be the name of a topic; letters, digits, '.', '_' and '-' can")
    if source_name == target_name:
        raise ConfigurationError(f"'{source_name}' cannot be copied to itself; name a topic that does not exist yet")
    source = topics.find(source_name)
    if source is None:
        raise ConfigurationError(
            f"topic '{source_name}' does not exist; correct its name, or BALANCE_BOOTSTRAP_SERVERS"
        )
    target = prepare_copy(topics, settings, source, target_name, partitions)
    for topic in (source, target):
        _await_leaders(topics, topic)
    return source, target


def _await_leaders(topics: Topics, topic: Topic) -> None:
    """Wait until each partition has a leader that answers; metadata of a new topic are available earlier."""
    deadline = time.monotonic() + _LEADERS_WITHIN_SECONDS
    while True:
        try:
            topics.offsets(topic.name, range(topic.partitions))
        except RetriableError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_SECONDS)
        else:
            return


def _starts(topics: Topics, source: Topic, done: dict[int, Progress]) -> dict[int, int]:
    """The next offset of each partition: the committed one, or the first if nothing is copied."""
    first = topics.offsets(source.name, range(source.partitions), earliest=True)
    for partition, d in done.items():
        if d.offset < first[partition]:
            raise ConfigurationError(
                f"events {d.offset} to {first[partition] - 1} of {source.name}-{partition} are deleted and were "
                "not copied; to copy the records that are left, copy to another topic"
            )
    return {p: done[p].offset if p in done else first[p] for p in first}


def _check_target(settings: Settings, topics: Topics, target: Topic, copied: int) -> None:
    """Raises ConfigurationError if the target does not have exactly the number of records that the copy wrote."""
    with reader_to_end(settings, topics, target) as reader:
        count = sum(1 for _ in reader)
    if count > copied:
        raise ConfigurationError(
            f"topic '{target.name}' holds {count - copied} records that this copy did not write; "
            f"{_new_target(target.name)}"
        )
    if count < copied:
        raise ConfigurationError(
            f"topic '{target.name}' lacks {copied - count} records that this copy wrote; {_new_target(target.name)}"
        )


def _batches(messages: Iterator[Message]) -> Iterator[list[Message]]:
    batch: list[Message] = []
    size = 0
    for message in messages:
        batch.append(message)
        size += len(message)
        if len(batch) >= _BATCH_RECORDS or size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _records(done: dict[int, Progress]) -> int:
    return sum(d.records for d in done.values())


@dataclass(frozen=True, slots=True)
class Progress:
    """The next offset to copy of a source partition, and the number of records before it."""

    offset: int
    records: int


class Copier:
    """Writes the records of a copy, and its progress, in transactions. For one thread.

    The transactional id permits one writer per copy. After an error the object cannot be used again; the next run
    continues from the committed offsets.
    """

    def __init__(self, settings: Settings, source: Topic, target: Topic, partitioner: Partitioner) -> None:
        """Raises ConfigurationError if a client refuses a property."""
        # Topic names contain no colon, so the name is unique.
        name = f"copy:{source.name}:{target.name}"
        self._source = source
        self._target = target
        self._partitioner = partitioner
        self._of_copy = f"{source.topic_id} {target.topic_id} {partitioner} "
        self._delivery_error: KafkaError | None = None
        self._grants = (
            f"Write on topic '{target.name}' and on transactional id '{name}', "
            f"Read on group '{name}' and on topic '{source.name}'"
        )
        self._group = new_client(Consumer, {**reader_config(settings), "group.id": name})
        self._producer = new_client(
            Producer,
            {
                "compression.type": "lz4",
                **transactional_config(settings, name),
                "partitioner": librdkafka_partitioner(partitioner),
                "message.max.bytes": _LARGEST_RECORD_BYTES,
                "delivery.report.only.error": True,
            },
        )

    def __enter__(self) -> Self:
        try:
            self._producer.init_transactions(_TIMEOUT_SECONDS)
        except KafkaException as error:
            self._group.close()
            raise by_remedy(error, "aborting the open transaction of an earlier run", self._grants) from error
        return self

    def __exit__(self, *_: object) -> None:
        # The next run aborts an open transaction; an abort here would only delay the error.
        self._producer.purge()
        self._group.close()

    def progress(self) -> dict[int, Progress]:
        """The progress of each source partition that is not at its start.

        Raises:
            ConfigurationError: the source was recreated since it was copied, or copied by another partitioner.
            RetriableError: the group coordinator does not answer.
        """
        done = {}
        for tp in self._committed():
            if tp.offset < 0 or not tp.metadata:
                continue
            source_id, target_id, partitioner, records = tp.metadata.split(" ")
            # The target was deleted since.
            if target_id != self._target.topic_id:
                continue
            if source_id != self._source.topic_id:
                raise ConfigurationError(
                    f"topic '{self._source.name}' was deleted and recreated since it was copied to "
                    f"'{self._target.name}'; {_new_target(self._target.name)}"
                )
            if partitioner != self._partitioner:
                raise ConfigurationError(
                    f"topic '{self._source.name}' was copied to '{self._target.name}' by {partitioner} so far; "
                    f"continue with --partitioner {partitioner}, or {_new_target(self._target.name)}"
                )
            done[tp.partition] = Progress(tp.offset, int(records))
        return done

    def write(self, batch: Sequence[Message], done: dict[int, Progress]) -> None:
        """Write records and progress in one transaction, and update `done`.

        Raises:
            TaskMigratedError: another run of this copy took over.
            RetriableError: the transaction failed, or its outcome is unknown.
        """
        after: dict[int, Progress] = {}
        try:
            self._producer.begin_transaction()
            for message in batch:
                partition, offset = place_of(message)
                before = after.get(partition) or done.get(partition) or Progress(0, 0)
                after[partition] = Progress(offset + 1, before.records + 1)
                self._produce(message, partition)
            offsets = [
                TopicPartition(self._source.name, p, d.offset, f"{self._of_copy}{d.records}") for p, d in after.items()
            ]
            self._producer.send_offsets_to_transaction(offsets, self._group.consumer_group_metadata(), _TIMEOUT_SECONDS)
            self._producer.commit_transaction(_TIMEOUT_SECONDS)
        except KafkaException as error:
            raise self._failure(error) from error
        except BufferError as error:
            raise RetriableError("the producer's queue is full; run it again") from error
        done |= after

    def _committed(self) -> list[TopicPartition]:
        wanted = [TopicPartition(self._source.name, p) for p in range(self._source.partitions)]
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        while True:
            try:
                # With isolation.level=read_committed, the coordinator waits for transactions that hold offsets.
                return self._group.committed(wanted, timeout=_ATTEMPT_SECONDS)
            except KafkaException as error:
                # An authorization error is reported by `poll`; the request itself times out.
                report = self._group.poll(0)
                report_error = None if report is None else report.error()
                forbidden = report_error and not_authorized(report_error, "reading the progress", self._grants)
                if forbidden:
                    raise forbidden from error
                # The coordinator of a new group takes a moment to be found.
                if error.args[0].code() not in _COORDINATOR_SOON or time.monotonic() > deadline:
                    raise by_remedy(error, "reading the progress", self._grants) from error
            time.sleep(_POLL_SECONDS)

    def _produce(self, message: Message, partition: int) -> None:
        key = message.key()
        self._producer.produce(
            self._target.name,
            message.value(),
            key,
            partition % self._target.partitions if key is None else _BY_KEY,
            headers=[*headers_of(message)],
            timestamp=writable_timestamp(message),
            on_delivery=self._on_failure,
        )

    def _on_failure(self, error: KafkaError | None, _message: Message) -> None:
        self._delivery_error = self._delivery_error or error

    def _failure(self, error: KafkaException) -> BalanceServiceError:
        """The error to raise for a failed transaction."""
        if isinstance(by_remedy(error, "copying"), TaskMigratedError):
            return TaskMigratedError(
                f"another run that copies '{self._source.name}' to '{self._target.name}' took over from this one"
            )
        # Delivery reports can be more specific than the error of the transaction.
        self._producer.poll(0)
        reports = (self._delivery_error, error.args[0], transaction_error(self._producer))
        causes = [report for report in reports if report is not None]
        forbidden = next(filter(None, (not_authorized(cause, "the copy", self._grants) for cause in causes)), None)
        return forbidden or RetriableError(
            f"records could not be written to '{self._target.name}': {causes[0].str()}; remove the cause and run this "
            "again, which continues the copy"
        )


def _new_target(target: str) -> str:
    return f"copy to a topic that does not exist yet, or delete '{target}' first"


def writable_timestamp(message: Message) -> int:
    """A record's timestamp, in milliseconds. 0 becomes 1, because producers replace 0 by the current time."""
    return int(message.timestamp()[1]) or _EARLIEST_WRITABLE_MS


class _Queue:
    """The buffered records of a partition."""

    def __init__(self) -> None:
        self.messages: deque[Message] = deque()
        self.bytes = 0
        self.paused = False

    def append(self, message: Message) -> None:
        self.messages.append(message)
        self.bytes += len(message)

    def popleft(self) -> Message:
        message = self.messages.popleft()
        self.bytes -= len(message)
        return message

    @property
    def timestamp(self) -> int:
        return int(self.messages[0].timestamp()[1])


def by_timestamp(
    reader: LogReader,
    buffered_records: int = _BUFFERED_RECORDS,
    least_buffered_records: int = _LEAST_BUFFERED_RECORDS,
) -> Iterator[Message]:
    """Merge the records of all partitions: always the one with the earliest timestamp among the partitions' next ones.

    The records of a partition keep their order, even if their timestamps are not in order. Of equal timestamps, the
    lower partition goes first. Memory is bounded: partitions that are far ahead are paused.

    Raises:
        RetriableError: the broker does not answer, or no longer has the records.
    """
    queues = {partition: _Queue() for partition in reader.unfinished}
    most_records = max(least_buffered_records, buffered_records // max(1, len(queues)))
    most_bytes = max(_LEAST_BUFFERED_BYTES, _BUFFERED_BYTES // max(1, len(queues)))
    heads: list[tuple[int, int]] = []
    # Partitions whose next record has not arrived; until then, the earliest record is unknown.
    awaited = set(queues)
    while heads or awaited:
        while awaited:
            _fill(reader, queues, most_records, most_bytes)
            for partition in [p for p in awaited if queues[p].messages]:
                heapq.heappush(heads, (queues[partition].timestamp, partition))
                awaited.discard(partition)
            awaited &= reader.unfinished
        while heads and not awaited:
            partition = heads[0][1]
            queue = queues[partition]
            yield queue.popleft()
            if queue.paused and len(queue.messages) <= most_records // 4 and queue.bytes <= most_bytes // 4:
                queue.paused = False
                reader.resume(partition)
            if queue.messages:
                heapq.heapreplace(heads, (queue.timestamp, partition))
            else:
                heapq.heappop(heads)
                awaited |= {partition} & reader.unfinished


def _fill(reader: LogReader, queues: dict[int, _Queue], most_records: int, most_bytes: int) -> None:
    for message in reader.read():
        queues[place_of(message)[0]].append(message)
    full = [
        partition
        for partition in reader.unfinished
        if not queues[partition].paused
        and (len(queues[partition].messages) >= most_records or queues[partition].bytes >= most_bytes)
    ]
    if full:
        reader.pause(full)
        for partition in full:
            queues[partition].paused = True
