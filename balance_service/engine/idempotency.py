"""Idempotency keys: of several events with the same idempotency key and state key, the first counts.

Markers record the events that were applied. The store and the changelog keep them next to the states and write them
together. A marker is two records: one by name, to look it up, and one by time, to find it when it has expired. Time is
the partition's stream time: the greatest timestamp so far of an event with an idempotency key, without timestamps after
the year 9999. A marker is from the stream time at which its event was applied, never before the event's own timestamp,
so an event that is late by more than the window is remembered as long as any other. The result depends only on the
order of the records, not on the clock, on where batches begin or when expired markers are removed.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from balance_service.engine.records import RESERVED_PREFIX
from balance_service.errors import PoisonRecordError
from balance_service.process.failpoints import part_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from numpy.typing import NDArray

    from balance_service.avro.codec import AvroCodec
    from balance_service.engine.batch import KeyedUpdate
    from balance_service.engine.records import Record
    from balance_service.engine.store import StateStore

REUSED = "idempotency-key-reused"
_BY_NAME = RESERVED_PREFIX + b"once-by-name"
_BY_TIME = RESERVED_PREFIX + b"once-by-time"
MARKERS = _BY_NAME, _BY_TIME + b"\xff"
"""The first key of markers, and the end of their keys."""
_NAME_BYTES = 16
_FINGERPRINT_BYTES = 16
# The end of the year 9999. A later timestamp is in another unit; as stream time, it would make every key expire.
_LATEST_MS = 253_402_300_799_999
# A commit removes more markers than its batch adds, so that expired ones do not accumulate, but not all at once.
_REMOVED_AT_LEAST = 1_000


@dataclass(frozen=True, slots=True)
class Marker:
    """An event that was applied: the stream time in ms at which it was, and a digest of its changes."""

    since_ms: int
    fingerprint: bytes


@dataclass(slots=True)
class IdempotencyKeys:
    """The idempotency keys of one batch while it is folded.

    `known` are stored markers and `fresh` new ones, by name. `times` is the stream time at each offset.
    """

    window_ms: int
    codec: AvroCodec
    repeated: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    known: Mapping[bytes, Marker]
    times: Mapping[int, int]
    stream_time_ms: int
    fresh: dict[bytes, Marker] = field(default_factory=dict)

    @staticmethod
    def of(
        updates: Iterable[KeyedUpdate],
        store: StateStore,
        codec: AvroCodec,
        window_ms: int,
        repeated: Callable[[Mapping[str, Any]], Mapping[str, Any]],
        stream_time_ms: int,
    ) -> IdempotencyKeys:
        """Looks up the markers of all updates that have an idempotency key.

        Args:
            codec: the codec of markers.
            window_ms: how long a key is remembered.
            repeated: returns the fields of an update that a retry repeats.
            stream_time_ms: the stream time before the batch; -1 for none.
        """
        once = sorted((u.record.offset, u.record.timestamp_ms, _name(u)) for u in updates if u.record and _is_once(u))
        times: dict[int, int] = {}
        now = _in_ms(stream_time_ms, -1)
        for offset, timestamp_ms, _ in once:
            times[offset] = now = max(now, _in_ms(timestamp_ms, now))
        names = list({name for _, _, name in once})
        frames = zip(names, store.get_many([_BY_NAME + name for name in names]) if names else (), strict=True)
        known = {name: _marker(codec.decode(frame)) for name, frame in frames if frame is not None}
        return IdempotencyKeys(window_ms, codec, repeated, known, times, now)

    def is_repeated(self, update: KeyedUpdate) -> bool:
        """Whether an event with the same idempotency key was applied to the same state within the window.

        Raises:
            PoisonRecordError: such an event was applied, but it made a different change.
        """
        if update.record is None or not _is_once(update):
            return False
        name = _name(update)
        marker = self.fresh.get(name) or self.known.get(name)
        if marker is None or marker.since_ms + self.window_ms <= self.times[update.record.offset]:
            return False
        if marker.fingerprint != self._fingerprint(update):
            raise PoisonRecordError(REUSED, "an earlier event with this idempotency key made a different change")
        return True

    def remember(self, update: KeyedUpdate) -> None:
        """Notes that an event was applied, if it has an idempotency key."""
        if update.record is not None and _is_once(update):
            self.fresh[_name(update)] = Marker(self.times[update.record.offset], self._fingerprint(update))

    def forget(self, updates: Iterable[KeyedUpdate]) -> None:
        """Takes back `remember` for events that will be folded again."""
        for update in updates:
            if _is_once(update):
                self.fresh.pop(_name(update), None)

    def _fingerprint(self, update: KeyedUpdate) -> bytes:
        changed = repr(sorted((name, str(value)) for name, value in self.repeated(update.update).items()))
        return hashlib.sha256(changed.encode()).digest()[:_FINGERPRINT_BYTES]

    def records(self, store: StateStore) -> list[Record]:
        """Returns the records of new markers and the deletions of expired ones, for the changelog and the store."""
        records: list[Record] = []
        for name, marker in self.fresh.items():
            frame = self.codec.encode({"timestamp": marker.since_ms, "fingerprint": marker.fingerprint})
            records += [(_BY_NAME + name, frame), (_by_time(marker.since_ms) + name, b"")]
        removed = self._expired(store)
        # A batch that spans more than the window adds markers that have expired at its end.
        store.look_for(_BY_TIME, records)
        return [*removed, *records]

    def _expired(self, store: StateStore) -> list[Record]:
        horizon = self.stream_time_ms - self.window_ms
        if horizon < 0:
            return []
        keys = store.first_keys(_BY_TIME, _by_time(horizon + 1), part_size(_REMOVED_AT_LEAST) + 2 * len(self.fresh))
        names = [key[-_NAME_BYTES:] for key in keys]
        frames = store.get_many([_BY_NAME + name for name in names]) if names else []
        removed: list[Record] = [(key, None) for key in keys]
        for key, name, frame in zip(keys, names, frames, strict=True):
            # A marker that was written again since is kept under its later time.
            is_current = frame is not None and _by_time(_marker(self.codec.decode(frame)).since_ms) + name == key
            if is_current and name not in self.fresh:
                removed.append((_BY_NAME + name, None))
        return removed


def running_times(timestamps_ms: NDArray[np.int64], before: int = -1) -> NDArray[np.int64]:
    """Returns the stream time at each of some events with idempotency keys, in offset order.

    Args:
        before: the stream time before the first one; -1 for none.
    """
    in_ms = np.where(timestamps_ms <= _LATEST_MS, timestamps_ms, before)
    return np.maximum(np.maximum.accumulate(in_ms), before)


def _in_ms(timestamp: int, otherwise: int) -> int:
    """Returns a timestamp in ms, or the other value if the timestamp is in another unit."""
    return timestamp if timestamp <= _LATEST_MS else otherwise


def _is_once(update: KeyedUpdate) -> bool:
    return update.idempotency_key is not None


def _name(update: KeyedUpdate) -> bytes:
    framed = struct.pack(">I", len(update.key)) + update.key + (update.idempotency_key or b"")
    return hashlib.sha256(framed).digest()[:_NAME_BYTES]


def _by_time(timestamp_ms: int) -> bytes:
    return _BY_TIME + max(timestamp_ms, 0).to_bytes(8, "big")


def _marker(record: Mapping[str, Any]) -> Marker:
    return Marker(record["timestamp"], record["fingerprint"])
