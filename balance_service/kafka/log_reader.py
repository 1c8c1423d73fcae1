"""Reads committed records of a topic by partition and offset, without joining a consumer group."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Self

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from balance_service.errors import RetriableError
from balance_service.kafka.clients import by_remedy, most_transaction_ms, new_client, reader_config
from balance_service.kafka.messages import offset_of, place_of
from balance_service.process.failpoints import part_size

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from confluent_kafka import Message

    from balance_service.errors import BalanceServiceError
    from balance_service.kafka.clients import ClientConfig
    from balance_service.kafka.topics import Topic, Topics
    from balance_service.settings import Settings

# Small enough that the result of one read is still in the processor's cache when it is stored.
_BATCH = 2_000
_WAIT_SECONDS = 0.1
# A coordinator looks every 10 s for transactions that have timed out.
_SILENCE_SECONDS = 30.0
# librdkafka prefetches until it reaches either bound.
_PREFETCH = {"queued.min.messages": 20_000, "queued.max.messages.kbytes": 16 << 10}
END_SOON = {"fetch.wait.max.ms": 10}
"""For readers whose caller waits for the end: the broker reports it only after a fetch that has waited for so long."""
# Reading past this many offsets costs less than a new fetch from elsewhere.
_LARGEST_GAP, _LARGEST_SPAN = 10_000, 50_000


class OffsetOutOfRangeError(RetriableError):
    """The topic no longer has the next offset: records were deleted, or the topic was recreated."""


class LogReader:
    """Reads partitions of a topic from given offsets, in offset order. For one thread.

    With `ends`, the reader stops at the end offset of each partition, and `unfinished` holds the partitions that have
    not reached theirs. A partition is finished when the reader's position reaches the end: control records and aborted
    records take offsets too, so the last offset may hold no record. Without `ends`, the reader follows the log.
    """

    def __init__(
        self,
        config: ClientConfig,
        topic: str,
        starts: Mapping[int, int],
        ends: Mapping[int, int] | None = None,
        transaction_seconds: float = 0.0,
    ) -> None:
        """Args:
            config: as `reader_config` makes it.
            starts: the first offset to read, by partition.
            ends: the offset after the last one to read, by partition.
            transaction_seconds: how long a transaction that is open now, before the ends, may stay open.

        Raises:
            BalanceServiceError: as `new_client` and `by_remedy`.
        """
        self.name = f"{topic}-{next(iter(starts))}" if len(starts) == 1 else topic
        self.met_end = False
        """Whether the last read reached the end of a partition. The broker reports each end only once."""
        self.unfinished = {p for p, start in starts.items() if ends is not None and start < ends[p]}
        self._topic = topic
        self._is_bounded = ends is not None
        self._ends = ends or {}
        self._starts = self._next = dict(starts)
        self._most_silence = _SILENCE_SECONDS + transaction_seconds
        self._silent_since: float | None = None
        self._failure: BalanceServiceError | None = None
        self._grant = f"Read on topic '{topic}' and on group '{config['group.id']}'"
        self._consumer = new_client(Consumer, {**config, **_PREFETCH, **({} if ends is None else END_SOON)})
        try:
            self.assign({p: start for p, start in starts.items() if ends is None or p in self.unfinished})
        except KafkaException as error:
            self.close()
            raise self._by_remedy(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Message]:
        """Iterates over all records up to the ends. Raises as `read`."""
        while self.unfinished:
            yield from self.read()

    def assign(self, starts: Mapping[int, int]) -> None:
        """Reads partitions from these offsets, and no other partitions. Raises KafkaException."""
        self._next = {**self._starts, **starts}
        self._consumer.assign([TopicPartition(self._topic, p, start) for p, start in starts.items()])

    def close(self) -> None:
        self._consumer.close()

    def read(self) -> list[Message]:
        """Returns the records that have arrived; waits 0.1 s at most. The list may be empty.

        Raises:
            OffsetOutOfRangeError: the topic no longer has the next offset.
            NotAuthorizedError: the brokers do not allow it.
            RetriableError: the topic cannot be read, or the broker sent nothing for half a minute before the ends, and
                as long again as a transaction may stay open.
        """
        self._raise_failure()
        try:
            # `consume` waits until it has the full number of messages, so it may only wait for one.
            messages = self._consumer.consume(part_size(_BATCH), 0) or self._consumer.consume(1, _WAIT_SECONDS)
        except KafkaException as error:
            raise self._by_remedy(error) from error
        records = [message for message in messages if message.error() is None]
        has_reports = len(records) < len(messages)
        if self._is_bounded:
            records = [message for message in records if self._is_wanted(message)]
        self.met_end = False
        for message in messages if has_reports else ():
            self._handle_report(message)
        if not records:
            self._raise_failure()
        self._check_silence(is_silent=not records)
        return records

    def pause(self, partitions: Iterable[int]) -> None:
        """Stops fetching from partitions until `resume`; records that were fetched before may still be returned."""
        self._consumer.pause([TopicPartition(self._topic, p) for p in partitions])

    def resume(self, partition: int) -> None:
        if partition in self.unfinished:
            self._consumer.resume([TopicPartition(self._topic, partition)])

    def position(self, partition: int) -> int:
        """The offset below which every record was returned."""
        if self._is_bounded:
            return self._next[partition]
        # After a read to the end, the position is the end itself: control records take offsets too.
        return max(self._next[partition], self._consumer.position([TopicPartition(self._topic, partition)])[0].offset)

    def known_end(self, partition: int) -> int:
        """The high watermark that the broker sent with the last records."""
        return int(self._consumer.get_watermark_offsets(TopicPartition(self._topic, partition), cached=True)[1])

    @property
    def offsets_in_all(self) -> int:
        """The number of offsets between starts and ends."""
        return sum(max(0, self._ends[p] - start) for p, start in self._starts.items())

    @property
    def offsets_read(self) -> int:
        """The number of offsets between starts and positions."""
        return sum(self.position(p) - start for p, start in self._starts.items())

    def _is_wanted(self, message: Message) -> bool:
        """Whether a record lies before its partition's end and was not returned before; advances the position."""
        partition, offset = place_of(message)
        is_wanted = self._next[partition] <= offset < self._ends[partition]
        self._advance(partition, offset + 1)
        return is_wanted

    def _advance(self, partition: int, offset: int) -> None:
        if not self._is_bounded:
            self._next[partition] = max(self._next[partition], offset)
            return
        end = self._ends[partition]
        self._next[partition] = max(self._next[partition], min(offset, end))
        if self._next[partition] == end and partition in self.unfinished:
            self.unfinished.discard(partition)
            self.pause([partition])

    def _handle_report(self, message: Message) -> None:
        error = message.error()
        if error is None:
            return
        if error.code() == KafkaError._PARTITION_EOF:
            self.met_end = True
            self._advance(*place_of(message))
        elif error.code() in (KafkaError.OFFSET_OUT_OF_RANGE, KafkaError._AUTO_OFFSET_RESET):
            self._failure = OffsetOutOfRangeError(f"{self.name} no longer has the next offset: {error.str()}")
        elif not error.retriable():
            self._failure = self._by_remedy(KafkaException(error))

    def _raise_failure(self) -> None:
        """Raises what a broker reported, once the records that came with it are returned.

        No variable has the error: it and the frames of all callers would stay until a collection.
        """
        if self._failure is not None:
            try:
                raise self._failure
            finally:
                self._failure = None

    def _check_silence(self, *, is_silent: bool) -> None:
        if not is_silent or not self.unfinished:
            self._silent_since = None
        elif self._silent_since is None:
            self._silent_since = time.monotonic()
        elif time.monotonic() - self._silent_since > self._most_silence:
            raise RetriableError(
                f"{self.name} was not read to its end: the broker sends nothing; try again. If that goes on while the "
                "broker answers, a transaction hangs there (docs/runbook.md)"
            )

    def _by_remedy(self, error: KafkaException) -> BalanceServiceError:
        return by_remedy(error, f"reading {self.name}", self._grant)


def reader_to_end(
    settings: Settings,
    topics: Topics,
    topic: Topic,
    partitions: Collection[int] | None = None,
    *,
    waits_for_open: bool = False,
) -> LogReader:
    """A reader of all records that are committed now.

    Args:
        partitions: None for all.
        waits_for_open: reads to the high watermark, so that it waits until the transactions that are open now end.
            Committed records may lie behind them.
    """
    partitions = range(topic.partitions) if partitions is None else partitions
    starts = topics.offsets(topic.name, partitions, earliest=True)
    ends = topics.offsets(topic.name, partitions, committed=not waits_for_open)
    most_seconds = most_transaction_ms(settings) / 1000 if waits_for_open else 0.0
    return LogReader(reader_config(settings), topic.name, starts, ends, most_seconds)


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
        seconds: reading stops this long after the first record arrived. Records far apart take long.
        most_bytes: of keys and values together, unless a single record is larger. Headers are not counted.

    Returns:
        The offsets that were looked up, which are the first ones of `offsets` and at least one; and the records found.

    Raises:
        RetriableError: as `LogReader.read`.
    """
    records: dict[int, Message] = {}
    size, until = 0, math.inf
    for near in _near_to_each_other(offsets):
        start, end, wanted = near[0], near[-1] + 1, set(near)
        # A consumer that seeks takes longer than a new consumer.
        with LogReader(reader_config(settings), topic, {partition: start}, {partition: end}) as reader:
            while reader.unfinished:
                for message in reader.read():
                    if (at := offset_of(message)) not in wanted:
                        continue
                    size += len(message.key() or b"") + len(message.value() or b"")
                    if records and size > most_bytes:
                        return _below(at, offsets), records
                    records[at] = message
                # The first record comes alone, and late: time that began earlier would be over by then.
                if until == math.inf and reader.offsets_read:
                    until = time.monotonic() + seconds
                if time.monotonic() > until:
                    return _below(reader.position(partition), offsets), records
    return list(offsets), records


def first_record(
    settings: Settings, topics: Topics, topic: str, partition: int, start: int, seconds: float
) -> Message | None:
    """Returns the first committed record of a partition at or after an offset; None if there is none.

    Raises:
        RetriableError: as `LogReader.read`, or it was not read within these seconds.
    """
    end = topics.offsets(topic, [partition], committed=True)[partition]
    until = time.monotonic() + seconds
    with LogReader(reader_config(settings), topic, {partition: start}, {partition: end}) as reader:
        while reader.unfinished:
            if records := reader.read():
                return records[0]
            if time.monotonic() > until:
                raise RetriableError(f"{reader.name} was not read within {seconds:.0f} s: the broker sends nothing")
    return None


def records_left_at(
    settings: Settings,
    topics: Topics,
    topic: str,
    partition: int,
    offsets: Sequence[int],
    seconds: float,
    most_bytes: int,
) -> tuple[list[int], dict[int, Message]]:
    """As `records_at`. The topic may have deleted some of the records: their offsets count as looked up."""
    if not offsets:
        return [], {}
    kept_from = topics.offsets(topic, [partition], earliest=True)[partition]
    kept = [offset for offset in offsets if offset >= kept_from]
    looked_up, records = records_at(settings, topic, partition, kept, seconds, most_bytes)
    return _below(kept_from, offsets) + looked_up, records


def records_from(
    settings: Settings, topic: str, partition: int, start: int, end: int, most: int, most_bytes: int
) -> list[Message]:
    """The first committed records of `[start, end)`.

    Args:
        most: how many at most.
        most_bytes: as for `records_at`.

    Raises:
        RetriableError: as `LogReader.read`.
    """
    records: list[Message] = []
    size = 0
    with LogReader(reader_config(settings), topic, {partition: start}, {partition: end}) as reader:
        while reader.unfinished and len(records) < most and size <= most_bytes:
            for message in reader.read():
                size += len(message.key() or b"") + len(message.value() or b"")
                if len(records) == most or (records and size > most_bytes):
                    break
                records.append(message)
    return records


def _below(end: int, offsets: Iterable[int]) -> list[int]:
    return [offset for offset in offsets if offset < end]


def _near_to_each_other(offsets: Sequence[int]) -> Iterator[list[int]]:
    """Splits offsets into groups that are read with one fetch position each."""
    near: list[int] = []
    for offset in offsets:
        if near and (offset - near[-1] > _LARGEST_GAP or offset - near[0] > _LARGEST_SPAN):
            yield near
            near = []
        near.append(offset)
    if near:
        yield near
