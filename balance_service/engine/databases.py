"""The database below a store: RocksDB in a folder, or one in memory, which `try` and tests of a model use.

`tests/unit/engine/test_databases.py` checks that both do the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from balance_service.engine.database import Database, Snapshot
    from balance_service.engine.memory_database import MemoryDatabase, MemorySnapshot

    AnyDatabase = Database | MemoryDatabase
    AnySnapshot = Snapshot | MemorySnapshot


class View:
    """An immutable view of the records of a database. The owner takes it; any thread may read it.

    Every method raises StoreCorruptedError if the bytes that it reads do not match their checksum.
    """

    def __init__(self, snapshot: AnySnapshot) -> None:
        self._snapshot = snapshot

    def get(self, key: bytes) -> bytes | None:
        return self._snapshot.get(key)

    def scan(self, start: bytes, stop: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        """Returns at most `limit` records with keys from `start` to below `stop`, in key order."""
        return self._snapshot.scan(start, stop, limit)

    def last_at_or_before(self, key: bytes) -> tuple[bytes, bytes] | None:
        """Returns the record with the greatest key up to and including this one, or None."""
        return self._snapshot.last_at_or_before(key)


def opened(path: Path | None) -> AnyDatabase:
    """Returns the database in a folder, or a new one in memory if `path` is None. Raises as `Database`."""
    if path is None:
        from balance_service.engine.memory_database import MemoryDatabase

        return MemoryDatabase()
    # At first use: RocksDB comes with the extra `service`.
    from balance_service.engine.database import Database

    return Database(path)
