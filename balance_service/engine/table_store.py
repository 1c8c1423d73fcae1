"""The store of one partition of a table: the newest version of each row, and older versions that joins may need.

    key                                              → timestamp | offset | frame     the newest version
    0xFF "version" | length of key | key | ~timestamp | ~offset → frame               each older one, newest first

Timestamps and offsets are 8 bytes, big-endian; a timestamp has its sign bit inverted, and `~` inverts all bits. A
version without a frame is a tombstone. Versions are ordered by timestamp, then by offset.

The thread that follows the table writes. Any thread may take a `TableView` and read from it.
"""

from __future__ import annotations

import struct
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from balance_service.engine.database import Database, Snapshot
from balance_service.engine.records import RESERVED_PREFIX

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from balance_service.engine.records import Record, StoreSizes


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
# Before the first record.
_NO_TIME_MS = -_SIGN_BIT


class Version(NamedTuple):
    """A row as of a time; deleted if it has no frame. A newer version is greater than an older one."""

    timestamp_ms: int
    offset: int
    frame: bytes | None


class TableView(Snapshot):
    """The rows of a partition as of one write; immutable."""

    def __init__(self, database: Database, history_ms: int) -> None:
        """Args:
        history_ms: how long before the partition's newest record versions are kept apart.
        """
        super().__init__(database)
        self._since_ms = _kept_since(self.get(_STREAM_TIME_KEY), history_ms)

    @cached_property
    def offset(self) -> int:
        """The next offset to apply."""
        stored = self.get(_OFFSET_KEY)
        return 0 if stored is None else int(_NUMBER.unpack(stored)[0])

    def newest(self, key: bytes) -> Version | None:
        """Returns the newest version of a row, None if there never was one. Raises as `as_of`."""
        stored = self.get(key)
        return None if stored is None else _unpacked(stored)

    def as_of(self, key: bytes, timestamp_ms: int) -> Version | None:
        """Returns the newest version of a row up to a time or, if all versions are later, the oldest one.

        A time before the history is taken as the history's beginning, so that the result does not depend on when the
        sweep deleted older versions.

        Raises:
            StoreCorruptedError: the stored bytes do not match their checksum.
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
    """The RocksDB store of one partition of a table.

    Invariant: it contains everything that the topic's partition has below `offset`, except versions that no join needs.
    """

    def __init__(self, path: Path, history_ms: int) -> None:
        """Raises as `Database`."""
        self._db = Database(path)
        self._history_ms = history_ms
        self._sweeps_from = _OLDER
        try:
            self._view: TableView | None = TableView(self._db, history_ms)
        except Exception:
            # Otherwise the directory stays locked as long as a reference to the exception exists.
            self._db.close()
            raise

    @property
    def identity(self) -> str | None:
        """The topic and partitioner that the store is a copy of; None if the store is new or has another format."""
        stored = self._db.get(_IDENTITY_KEY) or b""
        version, _, identity = stored.partition(b" ")
        return identity.decode() if version == _FORMAT else None

    @identity.setter
    def identity(self, identity: str) -> None:
        self._db.write([(_IDENTITY_KEY, _FORMAT + b" " + identity.encode())])

    @property
    def offset(self) -> int | None:
        """The next offset to apply; None before the first write."""
        stored = self._db.get(_OFFSET_KEY)
        return None if stored is None else int(_NUMBER.unpack(stored)[0])

    @property
    def seen_to_ms(self) -> int | None:
        """The latest known wall-clock time when the store had everything in the topic; None if it never had."""
        stored = self._db.get(_SEEN_TO_KEY)
        return None if stored is None else int(_NUMBER.unpack(stored)[0])

    @seen_to_ms.setter
    def seen_to_ms(self, seen_to_ms: int) -> None:
        self._db.write([(_SEEN_TO_KEY, _NUMBER.pack(seen_to_ms))])

    @property
    def sizes(self) -> StoreSizes:
        """The present sizes; zero after `close`."""
        return self._db.sizes

    @property
    def view(self) -> TableView | None:
        """The rows as of the last write; None after `close`."""
        return self._view

    def apply(self, records: Iterable[tuple[bytes, Version]], offset: int) -> None:
        """Writes records, in any order, and the offset after them, atomically.

        Raises:
            RetriableError: the disk rejects the write.
            StoreFullError: the disk is full.
            StoreCorruptedError: the store is damaged.
        """
        self._db.require_room()
        records = list(records)
        keys = list(dict.fromkeys(key for key, _ in records))
        newest = {
            key: _unpacked(value) for key, value in zip(keys, self._db.get_many(keys), strict=True) if value is not None
        }
        batch: list[Record] = []
        latest_ms = _time_of(self._db.get(_STREAM_TIME_KEY))
        for key, version in records:
            latest_ms = max(latest_ms, version.timestamp_ms)
            known = newest.get(key)
            if known is not None:
                batch.append(_record_of_older(key, min(known, version)))
            newest[key] = version if known is None else max(known, version)
        batch += [(key, _place(version) + (version.frame or b"")) for key, version in newest.items()]
        batch.append((_STREAM_TIME_KEY, _NUMBER.pack(latest_ms + _SIGN_BIT)))
        batch.append((_OFFSET_KEY, _NUMBER.pack(offset)))
        self._db.write(batch)
        self._view = TableView(self._db, self._history_ms)

    def sweep(self, most: int) -> None:
        """Examines up to `most` older versions, in turn, and deletes those that no join needs.

        These are the versions before the history, except the newest of each row. Raises as `apply`.
        """
        since_ms = _kept_since(self._db.get(_STREAM_TIME_KEY), self._history_ms)
        found = self._db.keys(self._sweeps_from, _OLDER_END, most)
        rows = list(dict.fromkeys(map(_row_of, found)))
        newest = dict(zip(rows, self._db.get_many(rows), strict=True))
        # Rows with a version before the history that must be kept.
        kept = {row for row, value in newest.items() if value is not None and _unpacked(value).timestamp_ms <= since_ms}
        batch: list[Record] = []
        for key in found:
            row = _row_of(key)
            if _timestamp_of(key) > since_ms:
                continue
            if row in kept:
                batch.append((key, None))
            kept.add(row)
        if batch:
            self._db.write(batch)
        # The next sweep starts at the last version: if that is kept, older ones of its row may be deleted.
        self._sweeps_from = found[-1] if len(found) == most else _OLDER

    def close(self) -> None:
        """Closes the database. The directory is unlocked once all views are garbage-collected. Idempotent."""
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


def _record_of_older(key: bytes, version: Version) -> Record:
    return _older_prefix(key) + _turned(version.timestamp_ms, version.offset), version.frame or b""


def _older(record: tuple[bytes, bytes]) -> Version:
    key, frame = record
    turned = _PLACE.unpack_from(key, len(key) - _PLACE.size)
    return Version(_ALL_BITS - turned[0] - _SIGN_BIT, _ALL_BITS - turned[1], frame or None)


def _row_of(older: bytes) -> bytes:
    return older[len(_OLDER) + _LENGTH.size : -_PLACE.size]


def _timestamp_of(older: bytes) -> int:
    return _older((older, b"")).timestamp_ms
