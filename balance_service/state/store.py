"""The state store: states, position and changelog offset of one task in one RocksDB, seen together.

The task's thread writes; any thread may take a `StoreView` and read from it.
"""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import structlog
from rocksdict import AccessType, DbClosedError, Rdict

from balance_service.errors import (
    BalanceServiceError,
    ConfigurationError,
    RetriableError,
    StoreCorruptedError,
    StoreFullError,
)
from balance_service.state.records import POSITION_KEY, RESERVED_PREFIX, Position, StoreSizes
from balance_service.state.rocksdb import rocksdb_options
from balance_service.state.store_batch import StoreBatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from balance_service.avro.codec import AvroCodec
    from balance_service.state.records import Record

log = structlog.get_logger(__name__)

FORMAT = 1
_IDENTITY_KEY = RESERVED_PREFIX + b"identity"
_CHANGELOG_OFFSET_KEY = RESERVED_PREFIX + b"changelog-offset"
_REACHES_KEY = RESERVED_PREFIX + b"reaches"

_FILES = "rocksdb.live-sst-files-size"
_MEMTABLES = "rocksdb.cur-size-all-mem-tables"
_TABLE_READERS = "rocksdb.estimate-table-readers-mem"
_KEYS = "rocksdb.estimate-num-keys"
_NOT_FOUND = "key not found"
# A file that RocksDB's own manifest names and that is gone never comes back by trying again.
_DAMAGE = ("Corruption", "No such file or directory")
_FULL = ("No space left", "Disk quota exceeded")

# A batch is in memory as a whole, and once more in the memtable.
_PART = 20_000
_ROOM_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """What a store is a copy of. Topic ids tell a topic from another that took its name later."""

    format: int
    application_id: str
    read_model: str
    partition: int
    partitions: int
    source_topic_id: str
    changelog_topic_id: str


class StoreView:
    """States and position as of one moment; immutable, so an answer is never torn from its position."""

    def __init__(self, db: Rdict, position: Position | None) -> None:
        self.position = position
        self._snapshot = db.snapshot()

    def get(self, key: bytes) -> bytes | None:
        """The state under a key, framed; None if there is none.

        Raises:
            StoreCorruptedError: the bytes read do not match their checksum.
        """
        try:
            value: bytes = self._snapshot[key]
        except Exception as error:
            if _NOT_FOUND in str(error):
                return None
            raise _translated(error) from error
        return value


class StateStore:
    """RocksDB under one task.

    Invariant: it holds the changelog's content below `changelog_offset`, and nothing from `reaches` on.
    """

    def __init__(self, path: Path, position_codec: AvroCodec) -> None:
        self.path = path
        self._position_codec = position_codec
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._db = Rdict(str(path), options=rocksdb_options(), access_type=AccessType.read_write())
        except Exception as error:
            raise _translated(error) from error
        self._view: StoreView | None = None
        try:
            self._view = self._take_view()
        except Exception:
            # Else the directory stays locked as long as anybody holds the error.
            self._db.close()
            raise

    @staticmethod
    def wipe(path: Path) -> None:
        """Remove a closed store; the changelog has all of it."""
        shutil.rmtree(path, ignore_errors=True)

    @property
    def identity(self) -> StoreIdentity | None:
        """What this store is a copy of; None while it is new.

        Raises:
            ConfigurationError: it was written by a newer version.
        """
        stored = self._get(_IDENTITY_KEY)
        if stored is None:
            return None
        fields: dict[str, Any] = json.loads(stored)
        if fields["format"] != FORMAT:
            raise ConfigurationError(
                f"the store at {self.path} has format {fields['format']}, this version knows {FORMAT}; "
                "run the version that wrote it, or remove the directory to restore from the changelog"
            )
        return StoreIdentity(**fields)

    @identity.setter
    def identity(self, identity: StoreIdentity) -> None:
        batch = StoreBatch()
        batch.put(_IDENTITY_KEY, json.dumps(asdict(identity)).encode())
        self._write(batch)

    @property
    def changelog_offset(self) -> int:
        """Next changelog offset to apply; 0 while the store is new."""
        stored = self._get(_CHANGELOG_OFFSET_KEY)
        return 0 if stored is None else int.from_bytes(stored, "big")

    @property
    def reaches(self) -> int:
        """The changelog offset below which all that it holds lies: beyond `changelog_offset` if a write was cut off."""
        stored = self._get(_REACHES_KEY)
        return max(self.changelog_offset, 0 if stored is None else int.from_bytes(stored, "big"))

    @property
    def position(self) -> Position | None:
        """Next source offset to apply, and the epoch; None before the first."""
        view = self._view
        return None if view is None else view.position

    @property
    def view(self) -> StoreView | None:
        """States and position as of the last write; None once closed."""
        return self._view

    @property
    def sizes(self) -> StoreSizes:
        """How large it is now; nothing once closed."""
        names = (_FILES, _MEMTABLES, _TABLE_READERS, _KEYS)
        try:
            return StoreSizes(*(int(self._db.property_int_value(name) or 0) for name in names))
        except Exception as error:
            if self._view is None:
                return StoreSizes()
            raise _translated(error) from error

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The states under some keys, in their order; None where there is none."""
        try:
            values: list[bytes | None] = self._db.get(list(keys)) or []
        except Exception as error:
            raise _translated(error) from error
        return values

    def keys(self, start: bytes, stop: bytes, limit: int) -> list[bytes]:
        """At most `limit` of the keys from `start` on and below `stop`, in their order."""
        try:
            iterator = self._db.iter()
            iterator.seek(start)
            found: list[bytes] = []
            while len(found) < limit and iterator.valid() and (key := iterator.key()) < stop:
                found.append(key)
                iterator.next()
            iterator.status()
        except Exception as error:
            raise _translated(error) from error
        return found

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

    def write(self, records: Iterable[Record], changelog_offset: int) -> None:
        """Apply changelog records and their end, for queries at once. Raises as `apply`.

        Many go to the disk in parts, the end with the last: a crash in between leaves a store that has more than it
        says, of which the changelog has all. Whatever opens it reads that first.
        """
        batch, rest = StoreBatch(), iter(records)
        while part := list(itertools.islice(rest, _PART)):
            if len(batch):
                batch.put(_REACHES_KEY, changelog_offset.to_bytes(8, "big"))
                self._put(batch)
                batch = StoreBatch()
            batch.extend(part)
        self.apply(batch, changelog_offset)

    def apply(self, batch: StoreBatch, changelog_offset: int) -> None:
        """Apply changelog records (a position record among them, or not) and their end, at once.

        Raises:
            RetriableError: the disk refuses the write.
            StoreFullError: the disk is full.
            StoreCorruptedError: the store is damaged.
        """
        batch.put(_CHANGELOG_OFFSET_KEY, changelog_offset.to_bytes(8, "big"))
        self._write(batch)

    def close(self) -> None:
        """Close the database. The directory is free once the views taken of it are gone. Idempotent."""
        self._view = None
        try:
            self._db.close()
        except DbClosedError:
            pass
        except Exception as error:
            # What it could not write is in the changelog, and so in the next store.
            log.warning("the store could not be closed in good order", store=str(self.path), error=str(error))

    def _take_view(self) -> StoreView:
        stored = self._get(POSITION_KEY)
        if stored is None:
            return StoreView(self._db, None)
        return StoreView(self._db, Position.of(self._position_codec.decode(stored)))

    def _get(self, key: bytes) -> bytes | None:
        try:
            value: bytes | None = self._db.get(key)
        except Exception as error:
            raise _translated(error) from error
        return value

    def _write(self, batch: StoreBatch) -> None:
        self._put(batch)
        self._view = self._take_view()

    def _put(self, batch: StoreBatch) -> None:
        """Write it; what queries see stays as it was."""
        try:
            self._db.write(batch.writes)
        except Exception as error:
            raise _translated(error) from error


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


def _translated(error: Exception) -> BalanceServiceError:
    # rocksdict raises bare exceptions; RocksDB's status code leads the message.
    message = str(error)
    if any(sign in message for sign in _FULL):
        return StoreFullError(f"the disk of the local store is full: {message}")
    if any(sign in message for sign in _DAMAGE):
        return StoreCorruptedError(f"the local store is damaged: {message}")
    return RetriableError(f"the local store cannot be used: {message}")
