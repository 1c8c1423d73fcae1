"""RocksDB, with errors by their remedy: what every store here is made of.

The thread that owns a database writes; any thread may take a snapshot and read from it.
"""

from __future__ import annotations

import shutil
import threading
from typing import TYPE_CHECKING

import structlog
from rocksdict import (
    AccessType,
    BlockBasedOptions,
    Cache,
    DbClosedError,
    DBCompressionType,
    Options,
    Rdict,
    ReadOptions,
    WriteBatch,
    WriteBufferManager,
)

from balance_service.engine.records import StoreSizes
from balance_service.errors import BalanceServiceError, RetriableError, StoreCorruptedError, StoreFullError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from rocksdict import RdictIter

    from balance_service.engine.records import Record


log = structlog.get_logger(__name__)

_FILES = "rocksdb.live-sst-files-size"
_MEMTABLES = "rocksdb.cur-size-all-mem-tables"
_TABLE_READERS = "rocksdb.estimate-table-readers-mem"
_KEYS = "rocksdb.estimate-num-keys"
_NOT_FOUND = "key not found"
# A file that RocksDB's own manifest names and that is gone never comes back by trying again.
_DAMAGE = ("Corruption", "No such file or directory")
_FULL = ("No space left", "Disk quota exceeded")
_ROOM_BYTES = 32 << 20


class Snapshot:
    """A database as of one moment; immutable. No other thread may write to it at the moment when it is taken.

    Every method raises StoreCorruptedError if the bytes read do not match their checksum.
    """

    def __init__(self, database: Database) -> None:
        self._snapshot = database._db.snapshot()
        # An iterator that rocksdict makes of a snapshot reads what is written later; one is of the moment it is made.
        self._iterator = database._db.iter()
        self._iterating = threading.Lock()

    def get(self, key: bytes) -> bytes | None:
        """The value of a key; None if there is none."""
        try:
            value: bytes = self._snapshot[key]
        except Exception as error:
            if _NOT_FOUND in str(error):
                return None
            raise _translated(error) from error
        return value

    def scan(self, start: bytes, stop: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        """At most `limit` of the records from `start` on and below `stop`, in the order of their keys."""
        try:
            with self._iterating:
                return [(key, self._iterator.value()) for key in _keys_from(self._iterator, start, stop, limit)]
        except Exception as error:
            raise _translated(error) from error

    def last_at_or_before(self, key: bytes) -> tuple[bytes, bytes] | None:
        """The record of the greatest key that is not above this one; None if there is none."""
        try:
            with self._iterating:
                self._iterator.seek_for_prev(key)
                found = (self._iterator.key(), self._iterator.value()) if self._iterator.valid() else None
                self._iterator.status()
        except Exception as error:
            raise _translated(error) from error
        return found


class Database:
    """RocksDB in one folder, which this process has for itself.

    Every method that reads or writes raises:
        RetriableError: the disk refuses it.
        StoreFullError: the disk is full.
        StoreCorruptedError: what is stored is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_open = True
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._db = Rdict(str(path), options=rocksdb_options(), access_type=AccessType.read_write())
        except Exception as error:
            raise _translated(error) from error

    @property
    def sizes(self) -> StoreSizes:
        """How large it is now; nothing once closed."""
        names = (_FILES, _MEMTABLES, _TABLE_READERS, _KEYS)
        try:
            return StoreSizes(*(int(self._db.property_int_value(name) or 0) for name in names))
        except Exception as error:
            if not self._is_open:
                return StoreSizes()
            raise _translated(error) from error

    def get(self, key: bytes) -> bytes | None:
        """The value of a key; None if there is none."""
        try:
            value: bytes | None = self._db.get(key)
        except Exception as error:
            raise _translated(error) from error
        return value

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values of some keys, in their order; None where there is none."""
        try:
            values: list[bytes | None] = self._db.get(list(keys)) or []
        except Exception as error:
            raise _translated(error) from error
        return values

    def keys(self, start: bytes, stop: bytes, limit: int) -> list[bytes]:
        """At most `limit` of the keys from `start` on and below `stop`, in their order."""
        # Without the bound, RocksDB looks beyond it for a key that there is, past all that were deleted.
        within = ReadOptions()
        within.set_iterate_upper_bound(stop)
        try:
            return list(_keys_from(self._db.iter(within), start, stop, limit))
        except Exception as error:
            raise _translated(error) from error

    def write(self, batch: StoreBatch) -> None:
        """Write a batch, all of it or nothing."""
        try:
            self._db.write(batch.writes)
        except Exception as error:
            raise _translated(error) from error

    def require_room(self) -> None:
        """Raises StoreFullError if the disk has less room than the next writes may need."""
        try:
            room = room_bytes(self.path)
        except OSError as error:
            raise StoreCorruptedError(f"the local store is gone: {error}") from error
        if room < _ROOM_BYTES:
            raise StoreFullError(
                f"the disk of {self.path} has {room >> 20} MiB left and needs {_ROOM_BYTES >> 20}; make room"
            )

    def close(self) -> None:
        """Close it. The directory is free once the snapshots taken of it are gone. Idempotent."""
        self._is_open = False
        try:
            self._db.close()
        except DbClosedError:
            pass
        except Exception as error:
            # What it could not write is in Kafka, and so in the next store.
            log.warning("the store could not be closed in good order", store=str(self.path), error=str(error))

    @staticmethod
    def wipe(path: Path) -> None:
        """Remove a closed database; Kafka has all of it."""
        shutil.rmtree(path, ignore_errors=True)


def room_bytes(path: Path) -> int:
    """What is left on the disk that holds a path, for this user."""
    return shutil.disk_usage(path).free


def has_room(path: Path) -> bool:
    """Whether a disk that was full has room again: twice what is needed, so that it does not fill at once.

    A disk that cannot be asked is said to have room: whoever opens the store will say what is wrong.
    """
    try:
        return room_bytes(path) >= 2 * _ROOM_BYTES
    except OSError:
        return True


def _keys_from(iterator: RdictIter, start: bytes, stop: bytes, limit: int) -> Iterator[bytes]:
    iterator.seek(start)
    found = 0
    while found < limit and iterator.valid() and (key := iterator.key()) < stop:
        yield key
        found += 1
        iterator.next()
    iterator.status()


def _translated(error: Exception) -> BalanceServiceError:
    # rocksdict raises bare exceptions; RocksDB's status code leads the message.
    message = str(error)
    if any(sign in message for sign in _FULL):
        return StoreFullError(f"the disk of the local store is full: {message}")
    if any(sign in message for sign in _DAMAGE):
        return StoreCorruptedError(f"the local store is damaged: {message}")
    return RetriableError(f"the local store cannot be used: {message}")


_CACHE_BYTES = 64 << 20
_WRITE_BUFFERS_BYTES = 64 << 20
_BLOOM_BITS_PER_KEY = 10
# One cache and one budget for all stores of the process, so that memory does not grow with partitions.
_CACHE = Cache(_CACHE_BYTES)
_WRITE_BUFFERS = WriteBufferManager(_WRITE_BUFFERS_BYTES, allow_stall=False)
_open_files = 512


def limit_open_files(most: int) -> None:
    """How many files each store that is opened from now on may keep open."""
    global _open_files  # of the process, as the cache is
    _open_files = most


def rocksdb_options() -> Options:
    """Of a store."""
    table = BlockBasedOptions()
    table.set_block_cache(_CACHE)
    table.set_bloom_filter(_BLOOM_BITS_PER_KEY, block_based=False)
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_block_based_table_factory(table)
    options.set_write_buffer_manager(_WRITE_BUFFERS)
    options.set_compression_type(DBCompressionType.lz4())
    options.set_max_open_files(_open_files)
    options.set_keep_log_file_num(2)
    return options


def block_cache_bytes() -> int:
    """What the block cache of all stores of this process holds now."""
    return int(_CACHE.get_usage())


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
