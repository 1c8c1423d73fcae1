"""The store of one partition of a table: of each row the newest version, and the older ones that a join may ask for.

    key                                              → timestamp | offset | frame     the newest version
    0xFF "version" | length of key | key | ~timestamp | ~offset → frame               each older one, newest first

Timestamps and offsets take 8 bytes, big-endian, a timestamp with its sign bit turned; `~` turns all bits. A version
without a frame is a tombstone. The newest version has the greatest timestamp, and of those the greatest offset.

The thread that follows the table writes; any thread may take a `TableView` and read from it.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

from balance_service.engine.database import Database, Snapshot, StoreBatch
from balance_service.engine.records import RESERVED_PREFIX

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from balance_service.engine.records import StoreSizes


_FORMAT = b"1"
_IDENTITY_KEY = RESERVED_PREFIX + b"identity"
_OFFSET_KEY = RESERVED_PREFIX + b"table-offset"
_STREAM_TIME_KEY = RESERVED_PREFIX + b"stream-time"
_SEEN_TO_KEY = RESERVED_PREFIX + b"seen-to"
_OLDER = RESERVED_PREFIX + b"version"
_OLDER_END = RESERVED_PREFIX + b"versioo"

_PLACE = struct.Struct(">QQ")
_NUMBER = struct.Struct(">Q")
_LENGTH = struct.Struct(">I")
_SIGN_BIT = 1 << 63
_ALL_BITS = (1 << 64) - 1
_LAST = b"\xff" * _PLACE.size
_BEYOND = _LAST + b"\0"
# Before any record.
_NO_TIME_MS = -_SIGN_BIT


class Version(NamedTuple):
    """A row as of a time; without a frame it was deleted then. Versions compare as newer and older ones."""

    timestamp_ms: int
    offset: int
    frame: bytes | None


class TableView(Snapshot):
    """The rows of a partition as of one moment; immutable."""

    def __init__(self, database: Database, history_ms: int) -> None:
        """Args:
        history_ms: so long before the newest record of the partition versions are told apart.
        """
        super().__init__(database)
        self._since_ms = _kept_since(self.get(_STREAM_TIME_KEY), history_ms)

    def as_of(self, key: bytes, timestamp_ms: int) -> Version | None:
        """The newest version of a row that is not later than this; if there is none, the oldest known.

        What is earlier than the history is asked as of its beginning, so that the answer does not depend on when older
        versions were dropped.

        Raises:
            StoreCorruptedError: the bytes read do not match their checksum.
        """
        stored = self.get(key)
        if stored is None:
            return None
        newest, latest = _unpacked(stored), max(timestamp_ms, self._since_ms)
        if newest.timestamp_ms <= latest:
            return newest
        older = _older_prefix(key)
        first = self.scan(older + _turned(latest, _ALL_BITS), older + _BEYOND, 1)
        found = first[0] if first else self.last_at_or_before(older + _LAST)
        return _older(found) if found is not None and found[0].startswith(older) else newest


class TableStore:
    """RocksDB under one partition of a table.

    Invariant: it holds what the topic's partition has below `offset`, but for versions that no join asks for.
    """

    def __init__(self, path: Path, history_ms: int) -> None:
        """Raises as `Database` does."""
        self._db = Database(path)
        self._history_ms = history_ms
        self._sweeps_from = _OLDER
        try:
            self._view: TableView | None = TableView(self._db, history_ms)
        except Exception:
            # Else the directory stays locked as long as anybody holds the error.
            self._db.close()
            raise

    @property
    def topic_id(self) -> str | None:
        """The id of the topic that it is a copy of; None while it is new, or if its format is another."""
        stored = self._db.get(_IDENTITY_KEY) or b""
        version, _, topic_id = stored.partition(b" ")
        return topic_id.decode() if version == _FORMAT else None

    @topic_id.setter
    def topic_id(self, topic_id: str) -> None:
        batch = StoreBatch()
        batch.put(_IDENTITY_KEY, _FORMAT + b" " + topic_id.encode())
        self._db.write(batch)

    @property
    def offset(self) -> int | None:
        """The next offset of the topic's partition to apply; None before the first."""
        stored = self._db.get(_OFFSET_KEY)
        return None if stored is None else int(_NUMBER.unpack(stored)[0])

    @property
    def seen_to_ms(self) -> int | None:
        """A time of day: what the topic had then is in the store; None as long as that was never so."""
        stored = self._db.get(_SEEN_TO_KEY)
        return None if stored is None else int(_NUMBER.unpack(stored)[0])

    @seen_to_ms.setter
    def seen_to_ms(self, seen_to_ms: int) -> None:
        batch = StoreBatch()
        batch.put(_SEEN_TO_KEY, _NUMBER.pack(seen_to_ms))
        self._db.write(batch)

    @property
    def sizes(self) -> StoreSizes:
        """How large it is now; nothing once closed."""
        return self._db.sizes

    @property
    def view(self) -> TableView | None:
        """The rows as of the last write; None once closed."""
        return self._view

    def apply(self, records: Iterable[tuple[bytes, Version]], offset: int) -> None:
        """Write some records by key, in whatever order, and the offset after them, at once.

        Raises:
            RetriableError: the disk refuses the write.
            StoreFullError: the disk is full.
            StoreCorruptedError: the store is damaged.
        """
        self._db.require_room()
        records = list(records)
        keys = list(dict.fromkeys(key for key, _ in records))
        newest = {
            key: _unpacked(value) for key, value in zip(keys, self._db.get_many(keys), strict=True) if value is not None
        }
        batch = StoreBatch()
        latest_ms = _time_of(self._db.get(_STREAM_TIME_KEY))
        for key, version in records:
            latest_ms = max(latest_ms, version.timestamp_ms)
            known = newest.get(key)
            if known is not None:
                _put_older(batch, key, min(known, version))
            newest[key] = version if known is None else max(known, version)
        for key, version in newest.items():
            batch.put(key, _place(version) + (version.frame or b""))
        batch.put(_STREAM_TIME_KEY, _NUMBER.pack(latest_ms + _SIGN_BIT))
        batch.put(_OFFSET_KEY, _NUMBER.pack(offset))
        self._db.write(batch)
        self._view = TableView(self._db, self._history_ms)

    def sweep(self, most: int) -> None:
        """Look at some of the older versions, each in its turn, and drop those that no join asks for any more.

        That is what lies before the history, but for the last version of a row there. Raises as `apply`.
        """
        since_ms = _kept_since(self._db.get(_STREAM_TIME_KEY), self._history_ms)
        found = self._db.keys(self._sweeps_from, _OLDER_END, most)
        rows = list(dict.fromkeys(map(_row_of, found)))
        newest = dict(zip(rows, self._db.get_many(rows), strict=True))
        # The rows of which a version before the history is kept.
        kept = {row for row, value in newest.items() if value is not None and _unpacked(value).timestamp_ms <= since_ms}
        batch = StoreBatch()
        for key in found:
            row = _row_of(key)
            if _timestamp_of(key) > since_ms:
                continue
            if row in kept:
                batch.delete(key)
            kept.add(row)
        if len(batch):
            self._db.write(batch)
        # The last one is looked at again: if it is kept, those after it need not be.
        self._sweeps_from = found[-1] if len(found) == most else _OLDER

    def close(self) -> None:
        """Close the database. The directory is free once the views taken of it are gone. Idempotent."""
        self._view = None
        self._db.close()


def _kept_since(stream_time: bytes | None, history_ms: int) -> int:
    return max(_NO_TIME_MS, _time_of(stream_time) - history_ms)


def _time_of(stored: bytes | None) -> int:
    return _NO_TIME_MS if stored is None else int(_NUMBER.unpack(stored)[0]) - _SIGN_BIT


def _place(version: Version) -> bytes:
    return _PLACE.pack(version.timestamp_ms + _SIGN_BIT, version.offset)


def _turned(timestamp_ms: int, offset: int) -> bytes:
    return _PLACE.pack(_ALL_BITS - (timestamp_ms + _SIGN_BIT), _ALL_BITS - offset)


def _unpacked(stored: bytes) -> Version:
    timestamp, offset = _PLACE.unpack_from(stored)
    return Version(timestamp - _SIGN_BIT, offset, stored[_PLACE.size :] or None)


def _older_prefix(key: bytes) -> bytes:
    return _OLDER + _LENGTH.pack(len(key)) + key


def _put_older(batch: StoreBatch, key: bytes, version: Version) -> None:
    batch.put(_older_prefix(key) + _turned(version.timestamp_ms, version.offset), version.frame or b"")


def _older(record: tuple[bytes, bytes]) -> Version:
    key, frame = record
    turned = _PLACE.unpack_from(key, len(key) - _PLACE.size)
    return Version(_ALL_BITS - turned[0] - _SIGN_BIT, _ALL_BITS - turned[1], frame or None)


def _row_of(older: bytes) -> bytes:
    return older[len(_OLDER) + _LENGTH.size : -_PLACE.size]


def _timestamp_of(older: bytes) -> int:
    return _older((older, b"")).timestamp_ms
