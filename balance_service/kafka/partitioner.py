"""Assigns keys to partitions as the producers of a topic do: one function for each topic.

`murmur2` is the default of Java's client and of those that follow it, `crc32` of librdkafka, `fnv1a` of sarama. A topic
with `any` has no function; the service's own tools write to it by murmur2.

Sources: org.apache.kafka.common.utils.Utils.murmur2 and BuiltInPartitioner.partitionForKey; librdkafka,
rd_kafka_msg_partitioner_consistent; sarama, NewHashPartitioner (signed remainder, then absolute) and hash/fnv.New32a.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from balance_service.model.record_keys import RecordKey

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from balance_service.model.record_keys import KeyFormat
    from balance_service.model.stream import Partitioner

_M = 0x5BD1E995
_MASK = 0xFFFFFFFF
_SEED = 0x9747B28C
_NON_NEGATIVE = 0x7FFFFFFF
_FNV_OFFSET, _FNV_PRIME = 0x811C9DC5, 0x01000193
_CRC_POLYNOMIAL = 0xEDB88320
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


def _murmur2_of_one(key: bytes) -> int:
    return murmur2(key) & _NON_NEGATIVE


def _murmur2_of_rows(keys: NDArray[np.uint8]) -> NDArray[np.uint32]:
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
    return (h ^ h >> np.uint32(15)) & np.uint32(_NON_NEGATIVE)


def _crc_table() -> NDArray[np.uint32]:
    """Returns the CRC of each byte."""
    table = np.arange(256, dtype=np.uint32)
    one = np.uint32(1)
    for _ in range(8):
        table = table >> one ^ (table & one) * np.uint32(_CRC_POLYNOMIAL)
    return table


_CRC_TABLE = _crc_table()


def _crc32_of_rows(keys: NDArray[np.uint8]) -> NDArray[np.uint32]:
    h: NDArray[np.uint32] = np.full(len(keys), _MASK, dtype=np.uint32)
    for byte in np.ascontiguousarray(keys.T):
        h = _CRC_TABLE[h.astype(np.uint8) ^ byte] ^ h >> np.uint32(8)
    return ~h


def _fnv1a_of_one(key: bytes) -> int:
    h = _FNV_OFFSET
    for byte in key:
        h = (h ^ byte) * _FNV_PRIME & _MASK
    # The absolute value of the hash as a signed integer.
    return min(h, (1 << 32) - h)


def _fnv1a_of_rows(keys: NDArray[np.uint8]) -> NDArray[np.uint32]:
    h: NDArray[np.uint32] = np.full(len(keys), _FNV_OFFSET, dtype=np.uint32)
    for byte in np.ascontiguousarray(keys.T):
        h = (h ^ byte) * np.uint32(_FNV_PRIME)
    absolute: NDArray[np.uint32] = np.minimum(h, ~h + np.uint32(1))
    return absolute


class _Function(NamedTuple):
    """A hash, whose remainder is the partition, of one key and of rows of keys; and librdkafka's name for it.

    librdkafka's function is the one that places records without a key at random, as the other clients do too.
    """

    of_one: Callable[[bytes], int]
    of_rows: Callable[[NDArray[np.uint8]], NDArray[np.uint32]]
    librdkafka: str


_MURMUR2 = _Function(_murmur2_of_one, _murmur2_of_rows, "murmur2_random")
_FUNCTIONS: dict[Partitioner, _Function] = {
    "murmur2": _MURMUR2,
    "crc32": _Function(zlib.crc32, _crc32_of_rows, "consistent_random"),
    "fnv1a": _Function(_fnv1a_of_one, _fnv1a_of_rows, "fnv1a_random"),
    "any": _MURMUR2,
}


def partition_of(key: bytes, partitions: int, partitioner: Partitioner = "murmur2") -> int:
    """The partition of a key on a topic with this many partitions.

    By crc32, an empty key is on partition 0; librdkafka places it at random.
    """
    return _FUNCTIONS[partitioner].of_one(key) % partitions


def partitions_of(keys: NDArray[np.uint8], partitions: int, partitioner: Partitioner = "murmur2") -> NDArray[np.uint32]:
    """The partitions of keys of equal length, one row of bytes per key."""
    return _FUNCTIONS[partitioner].of_rows(keys) % np.uint32(partitions)


def partitions_of_keys(keys: Sequence[bytes], partitions: int, partitioner: Partitioner = "murmur2") -> list[int]:
    """The partitions of keys of any lengths."""
    if len(keys) < _MANY:
        return [partition_of(key, partitions, partitioner) for key in keys]
    lengths = np.fromiter(map(len, keys), dtype=np.int64, count=len(keys))
    found = np.empty(len(keys), dtype=np.int64)
    for length in np.unique(lengths).tolist():
        rows = np.flatnonzero(lengths == length)
        of_length = b"".join([keys[row] for row in rows.tolist()])
        data = np.frombuffer(of_length, dtype=np.uint8).reshape(len(rows), length)
        found[rows] = partitions_of(data, partitions, partitioner)
    same: list[int] = found.tolist()
    return same


def librdkafka_partitioner(partitioner: Partitioner) -> str:
    """The value of librdkafka's property `partitioner` that makes its producer place keys by a function."""
    return _FUNCTIONS[partitioner].librdkafka


@dataclass(frozen=True, slots=True)
class Partitioning:
    """Where the keys of one topic are: its number of partitions, and the function and the form that producers use.

    Keys are given as stores have them.
    """

    partitions: int
    partitioner: Partitioner
    key_format: KeyFormat = "string"

    def of(self, key: bytes) -> int:
        return partition_of(self._sent([key])[0], self.partitions, self.partitioner)

    def of_keys(self, keys: Sequence[bytes]) -> list[int]:
        return partitions_of_keys(self._sent(keys), self.partitions, self.partitioner)

    def _sent(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """The keys as the producers write them, of which they are hashed."""
        return keys if self.key_format == "string" else [*map(RecordKey.of_format(self.key_format).sent, keys)]

    def of_rows(self, keys: NDArray[np.uint8]) -> NDArray[np.uint32]:
        """The partitions of keys of text of equal length, one row of bytes per key."""
        return partitions_of(keys, self.partitions, self.partitioner)
