"""Reads a changelog partition for a store: replays it to restore the store, and tails it to keep it up to date.

For the thread that supervises the task.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from balance_service.engine.records import POSITION_KEY
from balance_service.errors import RetriableError, StoreCorruptedError, TaskHaltedError, TaskMigratedError
from balance_service.kafka.log_reader import LogReader, OffsetOutOfRangeError
from balance_service.kafka.messages import offset_of
from balance_service.process.failpoints import part_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from confluent_kafka import Message

    from balance_service.engine.records import Record
    from balance_service.kafka.clients import ClientConfig


_PART = 20_000
# A compacted changelog may hold millions of states before its first position record, and a transaction may be large.
_PARTS_AT_MOST = 10
_SILENCE_SECONDS = 30.0


class Part(NamedTuple):
    """Consecutive records of a changelog partition.

    `changelog_offset` is the offset after them. `is_whole` is whether they end in a position record, so that a store
    with these records is exactly as a commit left it.
    """

    records: Sequence[Record]
    changelog_offset: int
    is_whole: bool


class ChangelogReader:
    """Reads the committed records of a changelog partition. The caller applies each part before it asks for the next.

    Parts for a store that answers queries end in a position record, so that the store is always as a commit left it.
    Only if more than 200,000 records precede a position record are they split. Parts for a store that does not answer
    have about 20,000 records and may end anywhere. A part that does not end in a position record is marked, and the
    store must not answer until it has the rest.
    """

    def __init__(self, config: ClientConfig, topic: str, partition: int, start: int) -> None:
        """Args:
        config: of a consumer with isolation level read_committed.
        start: the store's changelog offset, or the changelog's first offset for a new store.
        """
        self._batch: list[Record] = []
        self._last: Message | None = None
        self._is_whole = True
        self._has_heard = False
        self._partition = partition
        self._log = LogReader(config, topic, {partition: start})

    def replay(
        self, end: int, should_stop: Callable[[], bool], *, answers: bool = False, fenced: bool = True
    ) -> Iterator[Part]:
        """Yields parts until the reader is at `end` and the last part ends in a position record.

        Args:
            end: the changelog's end offset.
            fenced: whether `end` was read after all predecessors were fenced. If not, records before `end` may belong
                to a later transaction, whose remaining records are read too.
            should_stop: called between reads.
            answers: whether queries are answered from the store during the replay, so that it needs whole commits.

        Raises:
            StoreCorruptedError: the changelog no longer has the records that the store needs next.
            TaskHaltedError: the changelog ends in states without a position.
            TaskMigratedError: `should_stop` returned True.
            RetriableError: the broker does not respond.
        """
        yield from self._read_while(lambda: self._log.position(self._partition) < end, should_stop, answers=answers)
        if self._batch and self._last is not None and self._last.key() == POSITION_KEY:
            yield from self._yielded()
        if self._batch and not fenced:
            self._is_whole = False
            yield from self._read_while(lambda: not self._is_whole, should_stop, answers=True)
        elif self._batch:
            raise TaskHaltedError(
                f"the changelog {self._log.name} ends in states without a position, so it was not "
                "written by this service alone; run `balance-service rebuild --offline`"
            )

    def _read_while(
        self, goes_on: Callable[[], bool], should_stop: Callable[[], bool], *, answers: bool
    ) -> Iterator[Part]:
        heard = time.monotonic()
        while goes_on():
            if should_stop():
                raise TaskMigratedError("the task was closed while its store was restored")
            yield from self._read(answers=answers)
            if self._has_heard:
                heard = time.monotonic()
            elif time.monotonic() - heard > _SILENCE_SECONDS:
                raise RetriableError(
                    f"the changelog {self._log.name} was not read to its end in time; if that goes on while the "
                    "broker answers, a transaction hangs there (docs/runbook.md)"
                )

    def tail(self) -> Iterator[Part]:
        """Yields the records that are available, after a short wait if there are none.

        Raises:
            StoreCorruptedError: the changelog no longer has the records that the store needs next.
            RetriableError: the changelog cannot be read.
        """
        return self._read(answers=True)

    @property
    def met_end(self) -> bool:
        """Whether the last read met the end of the partition, and every record before it was yielded."""
        return self._log.met_end and not self._batch

    @property
    def is_whole(self) -> bool:
        """Whether the last part that was yielded ends in a position record."""
        return self._is_whole

    @property
    def whole_up_to(self) -> int:
        """The offset below which every record was yielded, if the last one is a position record; otherwise -1."""
        return self._log.position(self._partition) if self._is_whole and not self._batch else -1

    def close(self) -> None:
        self._log.close()

    def _read(self, *, answers: bool) -> Iterator[Part]:
        try:
            messages = self._log.read()
        except OffsetOutOfRangeError as error:
            raise StoreCorruptedError(f"the store cannot be brought up to date: the changelog {error}") from error
        self._has_heard = bool(messages) or self._log.met_end
        # A full batch is yielded when more records arrive, so that `replay` finds states without a position still here.
        most = part_size(_PART) * (_PARTS_AT_MOST if answers else 1)
        if len(self._batch) >= most and messages:
            yield from self._yielded()
        for message in messages:
            key = message.key() or b""
            self._batch.append((key, message.value()))
            self._last = message
            if answers and key == POSITION_KEY:
                yield from self._yielded()

    def _yielded(self) -> Iterator[Part]:
        last = self._last
        if last is not None:
            batch, self._batch = self._batch, []
            self._is_whole = last.key() == POSITION_KEY
            yield Part(batch, offset_of(last) + 1, self._is_whole)
