"""The records of several partitions in one order: by timestamp across partitions, by offset within each."""

from __future__ import annotations

import heapq
from collections import deque
from typing import TYPE_CHECKING

from balance_service.kafka.messages import place_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from confluent_kafka import Message

    from balance_service.kafka.log_reader import LogReader

# Of all partitions together: the memory this takes while one of them holds back the others.
_HELD_RECORDS = 100_000
_HELD_BYTES = 64 << 20
_LEAST_RECORDS = 100
_LEAST_BYTES = 256 << 10


class _Queue:
    """What was read of a partition and not handed on yet."""

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
        """When its first record was written."""
        return int(self.messages[0].timestamp()[1])


def by_timestamp(reader: LogReader) -> Iterator[Message]:
    """Every record that the reader reads: always the earliest of the partitions' next ones, so memory is bounded.

    Two records of one partition never change places, whatever their timestamps. Two of different partitions come in
    the order of their timestamps as far as each partition's own are in order; with equal ones, the lower partition
    goes first.

    Raises:
        RetriableError: the broker does not answer, or no longer has the records.
    """
    queues = {partition: _Queue() for partition in reader.unfinished}
    most_records = max(_LEAST_RECORDS, _HELD_RECORDS // max(1, len(queues)))
    most_bytes = max(_LEAST_BYTES, _HELD_BYTES // max(1, len(queues)))
    heads: list[tuple[int, int]] = []
    # Partitions whose next record is not here yet: until it is, nobody knows which record is the earliest.
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
