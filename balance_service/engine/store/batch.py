"""What is gathered for one write of a store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rocksdict import WriteBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from balance_service.engine.records import Record


class StoreBatch:
    """Records for one atomic write, in their order: of several under one key the last counts.

    As compact as what is written: a record has left Python's memory once it is in here.
    """

    def __init__(self) -> None:
        self.writes = WriteBatch(raw_mode=True)
        """RocksDB's own; the store adds to it and writes it, once."""
        # Bound once: a replay calls them for millions of records.
        self.put: Callable[[bytes, bytes], None] = self.writes.put
        """Set a key's value."""
        self.delete: Callable[[bytes], None] = self.writes.delete
        """Remove a key."""

    def __len__(self) -> int:
        return len(self.writes)

    def extend(self, records: Iterable[Record]) -> None:
        """Add some records; one without a value removes its key."""
        for key, value in records:
            if value is None:
                self.delete(key)
            else:
                self.put(key, value)
