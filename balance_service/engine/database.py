"""RocksDB for the stores of tasks and tables, with errors grouped by remedy.

The thread that owns a database writes. Any thread may take a snapshot and read it.
"""

from __future__ import annotations

import shutil
import threading
from bisect import bisect_left
from operator import itemgetter
from typing import TYPE_CHECKING

import structlog
from rocksdict import (
    AccessType,
    BlockBasedOptions,
    Cache,
    DbClosedError,
    DBCompressionType,
    IngestExternalFileOptions,
    Options,
    Rdict,
    ReadOptions,
    SstFileWriter,
    WriteBatch,
    WriteBufferManager,
)

from balance_service.engine.records import RESERVED_PREFIX, StoreSizes
from balance_service.errors import BalanceServiceError, RetriableError, StoreCorruptedError, StoreFullError
from balance_service.process.runtime import collect_garbage

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from pathlib import Path

    from rocksdict import RdictIter

    from balance_service.engine.records import Record


log = structlog.get_logger(__name__)

_FILES = "rocksdb.live-sst-files-size"
_MEMTABLES = "rocksdb.cur-size-all-mem-tables"
_TABLE_READERS = "rocksdb.estimate-table-readers-mem"
_KEYS = "rocksdb.estimate-num-keys"
_NOT_FOUND = "key not found"
_LOCKED_HERE = "lock hold by current process"
# If a file that RocksDB's manifest names is missing, a retry does not help.
_DAMAGE = ("Corruption", "No such file or directory")
_FULL = ("No space left", "Disk quota exceeded")
_ROOM_BYTES = 32 << 20
# A sort of fewer records costs what it saves.
_WORTH_SORTING = 2_000
_KEY_OF = itemgetter(0)
# A store that does not serve stops long before: one that serves also needs room while it compacts its tables.
_ROOM_BYTES_NOT_SERVING = 256 << 20


class Snapshot:
    """What a `View` reads. The owner of the database takes it, because no thread may write at that moment."""

    def __init__(self, database: Database) -> None:
        self._snapshot = database._db.snapshot()
        # An iterator of rocksdict's snapshot sees later writes; an iterator of the database sees the present content.
        self._iterator = database._db.iter()
        self._iterating = threading.Lock()

    def get(self, key: bytes) -> bytes | None:
        try:
            value: bytes = self._snapshot[key]
        except Exception as error:
            if _NOT_FOUND in str(error):
                return None
            raise _translated(error) from error
        return value

    def scan(self, start: bytes, stop: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        """As `View.scan`."""
        try:
            with self._iterating:
                return [(key, self._iterator.value()) for key in _keys_from(self._iterator, start, stop, limit)]
        except Exception as error:
            raise _translated(error) from error

    def last_at_or_before(self, key: bytes) -> tuple[bytes, bytes] | None:
        """As `View.last_at_or_before`."""
        try:
            with self._iterating:
                self._iterator.seek_for_prev(key)
                found = (self._iterator.key(), self._iterator.value()) if self._iterator.valid() else None
                self._iterator.status()
        except Exception as error:
            raise _translated(error) from error
        return found


class Database:
    """RocksDB in a folder that this process uses exclusively.

    Every method that reads or writes raises:
        RetriableError: the read or write failed.
        StoreFullError: the disk is full.
        StoreCorruptedError: the stored data is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_open = True
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._db = Rdict(str(path), options=rocksdb_options(), access_type=AccessType.read_write())
        except Exception as error:
            if _LOCKED_HERE in str(error):
                # An error whose frames refer to it may keep a snapshot of the former task, and with that the lock.
                collect_garbage()
            raise _translated(error) from error

    def snapshot(self) -> Snapshot:
        return Snapshot(self)

    @property
    def sizes(self) -> StoreSizes:
        """The present sizes; all 0 after `close`."""
        names = (_FILES, _MEMTABLES, _TABLE_READERS, _KEYS)
        try:
            return StoreSizes(*(int(self._db.property_int_value(name) or 0) for name in names))
        except Exception as error:
            if not self._is_open:
                return StoreSizes()
            raise _translated(error) from error

    def get(self, key: bytes) -> bytes | None:
        try:
            value: bytes | None = self._db.get(key)
        except Exception as error:
            raise _translated(error) from error
        return value

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Returns the values of keys, in their order; None for a key that does not exist."""
        try:
            values: list[bytes | None] = self._db.get(list(keys)) or []
        except Exception as error:
            raise _translated(error) from error
        return values

    def keys(self, start: bytes, stop: bytes, limit: int) -> list[bytes]:
        """Returns at most `limit` keys from `start` to below `stop`, in order."""
        # Without the bound, RocksDB continues behind it, past all deleted keys, to the next existing one.
        within = ReadOptions()
        within.set_iterate_upper_bound(stop)
        try:
            return list(_keys_from(self._db.iter(within), start, stop, limit))
        except Exception as error:
            raise _translated(error) from error

    def write(self, records: Collection[Record]) -> None:
        """Writes records atomically. The last one of a key wins; one without a value deletes its key."""
        batch = WriteBatch(raw_mode=True)
        put, delete = batch.put, batch.delete
        # Next to the place of the last key, RocksDB finds that of the next one faster; the sort is stable.
        for key, value in records if len(records) < _WORTH_SORTING else sorted(records, key=_KEY_OF):
            if value is None:
                delete(key)
            else:
                put(key, value)
        try:
            self._db.write(batch)
        except Exception as error:
            raise _translated(error) from error

    def ingest(self, records: Sequence[Record]) -> None:
        """Writes records that are sorted by key and have values, as tables of their own instead of through memtables.

        A crash leaves either all of them or none.
        """
        # The store's own records lie between those of states and those with reserved keys. A table whose range has a
        # key of the memtable would have RocksDB write that one first.
        reserved = bisect_left(records, RESERVED_PREFIX, key=_KEY_OF)
        paths = []
        try:
            for number, part in enumerate(filter(None, (records[:reserved], records[reserved:]))):
                # RocksDB leaves a file with such a name alone, and `wipe` removes it.
                paths.append(str(self.path / f"ingested-{number}.sst"))
                writer = SstFileWriter(rocksdb_options())
                writer.open(paths[-1])
                for key, value in part:
                    writer[key] = value
                writer.finish()
            self._db.ingest_external_file(paths, _moved())
        except Exception as error:
            raise _translated(error) from error

    def require_room(self, *, serves: bool = True) -> None:
        """Raises StoreFullError if the disk has less free space than the next writes may need.

        Args:
            serves: False for a store of a generation that does not serve, which leaves the last room to those that do.
        """
        least = _least(serves=serves)
        try:
            room = room_bytes(self.path)
        except OSError as error:
            raise StoreCorruptedError(f"the local store is gone: {error}") from error
        if room < least:
            left, wanted = (
                f"the disk of {self.path} has {room >> 20} MiB left",
                f"make room, {least >> 19} MiB at least",
            )
            if serves:
                raise StoreFullError(f"{left}; {wanted}")
            kept = f"the last {least >> 20} are for the generation that serves"
            raise StoreFullError(f"{left}, and {kept}; {wanted}, or drop this generation")

    def close(self) -> None:
        """Closes the database. The folder is unlocked when its snapshots are gone too. Idempotent."""
        self._is_open = False
        try:
            self._db.close()
        except DbClosedError:
            pass
        except Exception as error:
            # Data that it could not write is in Kafka, so the next store gets it from there.
            log.warning("the store could not be closed in good order", store=str(self.path), error=str(error))

    @staticmethod
    def wipe(path: Path) -> None:
        """Removes a closed database, whose content is in Kafka."""
        shutil.rmtree(path, ignore_errors=True)


def _moved() -> IngestExternalFileOptions:
    options = IngestExternalFileOptions()
    options.set_move_files(True)
    return options


def room_bytes(path: Path) -> int:
    """Returns the free space, for this user, of the disk that holds a path."""
    return shutil.disk_usage(path).free


def _least(*, serves: bool) -> int:
    return _ROOM_BYTES if serves else _ROOM_BYTES_NOT_SERVING


def has_room_for(path: Path, more: int) -> bool:
    """Returns whether a disk has room for some more bytes of a generation that does not serve."""
    return room_bytes(path) >= more + 2 * _ROOM_BYTES_NOT_SERVING


def has_room(path: Path, *, serves: bool = True) -> bool:
    """Returns whether a disk that was full has room again: twice the required space, so that it lasts for a while.

    Returns True if the disk cannot be read: opening the store then reports the error.
    """
    try:
        return room_bytes(path) >= 2 * _least(serves=serves)
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
    # rocksdict raises plain exceptions whose message begins with RocksDB's status code.
    message = str(error)
    if any(sign in message for sign in _FULL):
        return StoreFullError(f"the disk of the local store is full; make room: {message}")
    if any(sign in message for sign in _DAMAGE):
        return StoreCorruptedError(f"the local store is damaged: {message}")
    return RetriableError(f"the local store cannot be used: {message}")


_CACHE_BYTES = 64 << 20
_WRITE_BUFFERS_BYTES = 64 << 20
_BLOOM_BITS_PER_KEY = 10
# All stores of the process share one cache and one memory budget, so that memory does not grow with partitions.
_CACHE = Cache(_CACHE_BYTES)
_WRITE_BUFFERS = WriteBufferManager(_WRITE_BUFFERS_BYTES, allow_stall=False)
_open_files = 512


def limit_open_files(most: int) -> None:
    """Limits the files that each store keeps open, for stores that are opened from now on."""
    global _open_files  # belongs to the process, like the cache
    _open_files = most


def rocksdb_options() -> Options:
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
    return int(_CACHE.get_usage())


def memtables_bytes() -> int:
    return int(_WRITE_BUFFERS.get_usage())
