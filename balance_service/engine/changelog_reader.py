"""Reads one changelog partition into a store: the replay that restores it, the tail that keeps it up to date.

Used by one thread at a time: the one that supervises the task.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from balance_service.engine.database import StoreBatch
from balance_service.engine.records import POSITION_KEY
from balance_service.errors import RetriableError, StoreCorruptedError, TaskHaltedError, TaskMigratedError
from balance_service.kafka.log_reader import LogReader, OffsetOutOfRangeError
from balance_service.kafka.messages import offset_of
from balance_service.process.failpoints import part_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from confluent_kafka import Message

    from balance_service.kafka.clients import ClientConfig


_PART = 20_000
# A compacted changelog may hold millions of states before its first position record, and a transaction may be large.
_PARTS_AT_MOST = 10
_SILENCE_SECONDS = 30.0


class Part(NamedTuple):
    """Records of a changelog partition, in their order."""

    records: StoreBatch
    changelog_offset: int
    """The one after them."""
    is_whole: bool
    """Whether they end in a position record, so that what was read is what one commit left."""


class ChangelogReader:
    """Follows a changelog partition, as committed. Each part is to be applied before the next one is asked for.

    Invariant: records are handed over in their order. To a store that answers they are handed over up to a position
    record and with it, so that what has been handed over is what one commit left; only where more than 200,000 lie
    before a position record, in parts. To one that answers nobody, in parts of some 20,000, wherever those end. Parts
    are said to be such: until the next position record nobody must be answered from them.
    """

    def __init__(self, config: ClientConfig, topic: str, partition: int, start: int) -> None:
        """Args:
        config: of a consumer that reads what is committed.
        start: the store's changelog offset, or the changelog's first where the store is new.
        """
        self._batch = StoreBatch()
        self._last: Message | None = None
        self._is_whole = True
        self._has_heard = False
        self._partition = partition
        self._log = LogReader(config, topic, {partition: start})

    def replay(
        self, end: int, should_stop: Callable[[], bool], *, answers: bool = False, fenced: bool = True
    ) -> Iterator[Part]:
        """Read until the reader stands at `end`, and what was handed over ends in a position record.

        Args:
            end: the changelog's end.
            fenced: whether that was taken once no predecessor could write any more. Otherwise what is read by then may
                end within a later transaction, of which the rest is read too.
            should_stop: asked between reads.
            answers: whether the store answers meanwhile, so that it must get what is whole.

        Raises:
            StoreCorruptedError: the changelog no longer has what comes next.
            TaskHaltedError: the changelog ends in states without a position.
            TaskMigratedError: asked to stop.
            RetriableError: the broker is silent.
        """
        yield from self._read_while(lambda: self._log.position(self._partition) < end, should_stop, answers=answers)
        if self._batch and self._last is not None and self._last.key() == POSITION_KEY:
            yield from self._handed_over()
        if self._batch and not fenced:
            self._is_whole = False
            yield from self._read_while(lambda: not self._is_whole, should_stop, answers=True)
        elif self._batch:
            raise TaskHaltedError(
                f"the changelog {self._log.name} ends in states without a position, so it was not "
                "written by this service alone; run `balance-service rebuild`"
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
        """Read what is there, or wait briefly for more.

        Raises:
            StoreCorruptedError: the changelog no longer has what comes next.
            RetriableError: the changelog cannot be read.
        """
        return self._read(answers=True)

    @property
    def met_end(self) -> bool:
        """Whether the last read came upon the end, and everything before it is handed over."""
        return self._log.met_end and not self._batch

    @property
    def is_whole(self) -> bool:
        """Whether what was handed over ends in a position record."""
        return self._is_whole

    @property
    def whole_up_to(self) -> int:
        """The offset below which everything is handed over, and ends in a position record; -1 if it does not."""
        return self._log.position(self._partition) if self._is_whole and not self._batch else -1

    def close(self) -> None:
        """Close the consumer."""
        self._log.close()

    def _read(self, *, answers: bool) -> Iterator[Part]:
        """One read."""
        try:
            messages = self._log.read()
        except OffsetOutOfRangeError as error:
            raise StoreCorruptedError(f"the store cannot be brought up to date: the changelog {error}") from error
        self._has_heard = bool(messages) or self._log.met_end
        # Only once more has come: if the changelog ends in states without a position, the last of them stay here.
        most = part_size(_PART) * (_PARTS_AT_MOST if answers else 1)
        if len(self._batch) >= most and messages:
            yield from self._handed_over()
        put, delete = self._batch.put, self._batch.delete
        for message in messages:
            key, value = message.key() or b"", message.value()
            if value is None:
                delete(key)
            else:
                put(key, value)
            self._last = message
            if answers and key == POSITION_KEY:
                yield from self._handed_over()
                put, delete = self._batch.put, self._batch.delete

    def _handed_over(self) -> Iterator[Part]:
        last = self._last
        if last is not None:
            batch, self._batch = self._batch, StoreBatch()
            self._is_whole = last.key() == POSITION_KEY
            yield Part(batch, offset_of(last) + 1, self._is_whole)
