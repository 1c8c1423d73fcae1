"""Reading a topic between two sets of offsets: what was committed there, and nothing else."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Self

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from balance_service.errors import RetriableError
from balance_service.kafka.clients import by_remedy, new_client, reader_config
from balance_service.kafka.messages import offset_of, place_of, what_has_come

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from confluent_kafka import Message

    from balance_service.kafka.topics import Topic, Topics
    from balance_service.settings import Settings

_BATCH = 10_000
_WAIT_SECONDS = 0.1
_SILENCE_SECONDS = 60.0
_QUEUE_KBYTES = 32 << 10
# To read on costs less than to fetch from elsewhere.
_NEAR, _MOST_SPAN = 10_000, 50_000
_GONE = (KafkaError.OFFSET_OUT_OF_RANGE, KafkaError._AUTO_OFFSET_RESET)


class BoundedReader:
    """Committed records of a topic's partitions, from given offsets up to given ends. For one thread.

    A partition's records come in offset order, each once. A partition is in `unfinished` until the reader stands at
    its end or beyond: control records and aborted ones take offsets too, so there may be no last record to wait for.
    """

    def __init__(self, settings: Settings, topic: str, starts: Mapping[int, int], ends: Mapping[int, int]) -> None:
        self._topic = topic
        self._starts = starts
        self._next = dict(starts)
        self._ends = ends
        self._silent_since: float | None = None
        self.unfinished = {partition for partition, start in starts.items() if start < ends[partition]}
        self._grants = f"Read on topic '{topic}' and on group '{settings.application_id}'"
        self._consumer = new_client(Consumer, {**reader_config(settings), "queued.max.messages.kbytes": _QUEUE_KBYTES})

    def __enter__(self) -> Self:
        try:
            self._consumer.assign([TopicPartition(self._topic, p, self._next[p]) for p in self.unfinished])
        except KafkaException as error:
            self._consumer.close()
            raise by_remedy(error, f"reading {self._topic}", self._grants) from error
        return self

    def __exit__(self, *_: object) -> None:
        self._consumer.close()

    @property
    def offsets_in_all(self) -> int:
        """How many offsets lie between starts and ends."""
        return sum(max(0, self._ends[p] - start) for p, start in self._starts.items())

    @property
    def offsets_read(self) -> int:
        """How many offsets the reader has passed, of all partitions."""
        return sum(self._next[p] - start for p, start in self._starts.items())

    def read(self) -> list[Message]:
        """What has arrived from the partitions that are not paused; waits a moment if nothing has.

        Raises:
            RetriableError: nothing came for a minute, or the broker no longer has what was to be read.
        """
        try:
            messages = what_has_come(self._consumer, _BATCH, _WAIT_SECONDS)
            records = [message for message in messages if self._is_new(message)]
        except KafkaException as error:
            raise by_remedy(error, f"reading {self._topic}", self._grants) from error
        if records or not self.unfinished:
            self._silent_since = None
        elif self._silent_since is None:
            self._silent_since = time.monotonic()
        elif time.monotonic() - self._silent_since > _SILENCE_SECONDS:
            raise RetriableError(f"topic '{self._topic}' was not read to its end: the broker sends nothing; try again")
        return records

    def pause(self, partitions: Iterable[int]) -> None:
        """Fetch nothing from these until they are resumed; what has arrived may still come."""
        self._consumer.pause([TopicPartition(self._topic, p) for p in partitions])

    def resume(self, partition: int) -> None:
        """Go on with a paused partition, unless it is read to its end."""
        if partition in self.unfinished:
            self._consumer.resume([TopicPartition(self._topic, partition)])

    def _is_new(self, message: Message) -> bool:
        """Whether it is a record that was wanted and did not come before; notes how far the reader is."""
        error = message.error()
        if error is not None and error.code() != KafkaError._PARTITION_EOF:
            if error.code() in _GONE:
                raise RetriableError(f"records of '{self._topic}' were deleted while they were read: {error.str()}")
            if not error.retriable():
                raise KafkaException(error)
            return False
        partition, offset = place_of(message)
        end = self._ends[partition]
        is_new = error is None and self._next[partition] <= offset < end
        after = offset if error is not None else offset + 1
        self._next[partition] = max(self._next[partition], min(after, end))
        if self._next[partition] == end and partition in self.unfinished:
            self.unfinished.discard(partition)
            self.pause([partition])
        return is_new


def reader_of_all(
    settings: Settings,
    topics: Topics,
    topic: Topic,
    partitions: Collection[int] | None = None,
    *,
    waits_for_open: bool = False,
) -> BoundedReader:
    """A reader of everything that is committed now, in some partitions; None for all.

    Args:
        waits_for_open: until the transactions that are open now have ended: what is committed may lie behind them.
    """
    partitions = range(topic.partitions) if partitions is None else partitions
    starts = topics.offsets(topic.name, partitions, earliest=True)
    return BoundedReader(
        settings, topic.name, starts, topics.offsets(topic.name, partitions, committed=not waits_for_open)
    )


def records_at(
    settings: Settings,
    topic: str,
    partition: int,
    offsets: Sequence[int],
    seconds: float = math.inf,
    most_bytes: float = math.inf,
) -> tuple[list[int], dict[int, Message]]:
    """The committed records at some offsets of a partition.

    Args:
        offsets: in ascending order.
        seconds: reading ends this long after the first record has come; records far apart take long.
        most_bytes: of keys and values together, unless a single record is larger. Headers are not counted.

    Returns:
        The offsets that were looked for, the first ones of `offsets`, at least one; and the records found there.

    Raises:
        RetriableError: as `BoundedReader.read`.
    """
    records: dict[int, Message] = {}
    size, until = 0, math.inf
    for near in _near_to_each_other(offsets):
        start, end, wanted = near[0], near[-1] + 1, set(near)
        # A consumer that goes to another offset takes longer than another consumer.
        with BoundedReader(settings, topic, {partition: start}, {partition: end}) as reader:
            while reader.unfinished:
                for message in reader.read():
                    if (at := offset_of(message)) not in wanted:
                        continue
                    size += len(message.key() or b"") + len(message.value() or b"")
                    if records and size > most_bytes:
                        return _below(at, offsets), records
                    records[at] = message
                # The first record comes alone, and late: a time that began before it would leave it alone.
                if until == math.inf and reader.offsets_read:
                    until = time.monotonic() + seconds
                if time.monotonic() > until:
                    return _below(start + reader.offsets_read, offsets), records
    return list(offsets), records


def records_left_at(
    settings: Settings,
    topics: Topics,
    topic: str,
    partition: int,
    offsets: Sequence[int],
    seconds: float,
    most_bytes: int,
) -> tuple[list[int], dict[int, Message]]:
    """As `records_at`, of a topic that may have dropped some of the records: their offsets count as looked for."""
    if not offsets:
        return [], {}
    kept_from = topics.offsets(topic, [partition], earliest=True)[partition]
    kept = [offset for offset in offsets if offset >= kept_from]
    looked_for, records = records_at(settings, topic, partition, kept, seconds, most_bytes)
    return [offset for offset in offsets if offset < kept_from] + looked_for, records


def _below(end: int, offsets: Iterable[int]) -> list[int]:
    return [offset for offset in offsets if offset < end]


def _near_to_each_other(offsets: Sequence[int]) -> Iterator[list[int]]:
    """What is read in one go."""
    near: list[int] = []
    for offset in offsets:
        if near and (offset - near[-1] > _NEAR or offset - near[0] > _MOST_SPAN):
            yield near
            near = []
        near.append(offset)
    if near:
        yield near
