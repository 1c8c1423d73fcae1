"""Which records of a table's topic are rows, and what of the others is told. Used by the thread that reads it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from balance_service.engine.records import MISPLACED, RESERVED_PREFIX
from balance_service.engine.tables.store import Version
from balance_service.errors import PoisonRecordError
from balance_service.kafka.messages import offset_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from confluent_kafka import Message
    from structlog.typing import FilteringBoundLogger

    from balance_service.avro.codec import AvroReader

# A topic of rubbish must not fill the log.
_MOST_TOLD = 10


class TableRows:
    """Makes rows of records.

    `skipped` counts records that are no rows, by cause; `late` those with a timestamp below `joined_up_to_ms`, which is
    that of the latest event that was joined. Any thread may read these.
    """

    def __init__(self, codec: AvroReader, is_here: Callable[[bytes], bool], log: FilteringBoundLogger) -> None:
        """Args:
        is_here: whether the row of a key is looked for in this partition.
        """
        self.skipped: Counter[str] = Counter()
        self.late = 0
        self.joined_up_to_ms = -(1 << 63)
        self._codec = codec
        self._is_here = is_here
        self._log = log

    def of(self, message: Message) -> tuple[bytes, Version] | None:
        """The record's key and what its row is from then on; None if it is no row, which is counted."""
        key, frame = message.key(), message.value()
        try:
            if key is None:
                raise PoisonRecordError("key-null", "a record has no key")
            if key.startswith(RESERVED_PREFIX):
                raise PoisonRecordError("key-reserved", "a record's key begins with 0xFF")
            if not self._is_here(key):
                raise PoisonRecordError(MISPLACED, "a record's key belongs to another partition, by murmur2")
            if frame is not None:
                self._codec.decode_foreign(frame)
        except PoisonRecordError as error:
            self.skipped[error.cause] += 1
            if self.skipped.total() <= _MOST_TOLD:
                self._log.warning("not a row", offset=message.offset(), cause=error.cause, problem=str(error))
            return None
        timestamp_ms = message.timestamp()[1]
        self.late += timestamp_ms < self.joined_up_to_ms
        return key, Version(timestamp_ms, offset_of(message), frame)
