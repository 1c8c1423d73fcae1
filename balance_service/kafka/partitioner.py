"""Assigns keys to partitions as Kafka's Java client does.

Source: org.apache.kafka.common.utils.Utils.murmur2 and BuiltInPartitioner.partitionForKey.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_M = 0x5BD1E995
_MASK = 0xFFFFFFFF
_SEED = 0x9747B28C
# Setting up arrays costs as much as computing this many keys one by one.
_MANY = 16


def murmur2(data: bytes) -> int:
    """Kafka's 32-bit murmur2 hash, as an unsigned integer."""
    length = len(data)
    h = _SEED ^ length
    whole = length & ~3
    for i in range(0, whole, 4):
        k = int.from_bytes(data[i : i + 4], "little") * _M & _MASK
        h = h * _M & _MASK ^ (k ^ k >> 24) * _M & _MASK
    if tail := data[whole:]:
        h = (h ^ int.from_bytes(tail, "little")) * _M & _MASK
    h = (h ^ h >> 13) * _M & _MASK
    return h ^ h >> 15


def partition_of(key: bytes, partitions: int) -> int:
    """The partition of a key on a topic with this many partitions."""
    return (murmur2(key) & 0x7FFFFFFF) % partitions


def partitions_of(keys: NDArray[np.uint8], partitions: int) -> NDArray[np.uint32]:
    """The partitions of keys of equal length, one row of bytes per key."""
    count, length = keys.shape
    whole, m = length & ~3, np.uint32(_M)
    h: NDArray[np.uint32] = np.full(count, _SEED ^ length, dtype=np.uint32)
    for k in np.ascontiguousarray(keys[:, :whole].T.reshape(whole // 4, 4, count).transpose(0, 2, 1)).view("<u4"):
        mixed = k.ravel() * m
        h = h * m ^ (mixed ^ mixed >> np.uint32(24)) * m
    if whole < length:
        tail = np.zeros((count, 4), dtype=np.uint8)
        tail[:, : length - whole] = keys[:, whole:]
        h = (h ^ tail.view("<u4").ravel()) * m
    h = (h ^ h >> np.uint32(13)) * m
    return ((h ^ h >> np.uint32(15)) & np.uint32(0x7FFFFFFF)) % np.uint32(partitions)


def partitions_of_keys(keys: Sequence[bytes], partitions: int) -> list[int]:
    """The partitions of keys of any lengths."""
    if len(keys) < _MANY:
        return [partition_of(key, partitions) for key in keys]
    lengths = np.fromiter(map(len, keys), dtype=np.int64, count=len(keys))
    found = np.empty(len(keys), dtype=np.int64)
    for length in np.unique(lengths).tolist():
        rows = np.flatnonzero(lengths == length)
        of_length = b"".join([keys[row] for row in rows.tolist()])
        data = np.frombuffer(of_length, dtype=np.uint8).reshape(len(rows), length)
        found[rows] = partitions_of(data, partitions)
    same: list[int] = found.tolist()
    return same
