"""Assigns keys to partitions as the producers of a topic do: one function for each topic.

`murmur2` is the default of Java's client and of those that follow it, `crc32` of librdkafka, `fnv1a` of sarama. A topic
with `any` has no function; the service's own tools write to it by murmur2. librdkafka has the functions of one key; the
functions of rows of keys, which Arrow has in one buffer, are here.

Sources: org.apache.kafka.common.utils.Utils.murmur2 and BuiltInPartitioner.partitionForKey; librdkafka,
rd_kafka_msg_partitioner_consistent; sarama, NewHashPartitioner (signed remainder, then absolute) and hash/fnv.New32a.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import confluent_kafka
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


def _fnv1a_of_rows(keys: NDArray[np.uint8]) -> NDArray[np.uint32]:
    h: NDArray[np.uint32] = np.full(len(keys), _FNV_OFFSET, dtype=np.uint32)
    for byte in np.ascontiguousarray(keys.T):
        h = (h ^ byte) * np.uint32(_FNV_PRIME)
    # The absolute value of the hash as a signed integer.
    absolute: NDArray[np.uint32] = np.minimum(h, ~h + np.uint32(1))
    return absolute


class _Function(NamedTuple):
    """A function in two forms, and librdkafka's name for it.

    `of_one` takes a key and the number of partitions, and returns its partition. `of_rows` takes keys of equal length,
    one row of bytes per key, and returns hashes, whose remainders are the partitions. By the name, a producer places
    records without a key at random, as the other clients do too.
    """

    of_one: Callable[[bytes, int], int]
    of_rows: Callable[[NDArray[np.uint8]], NDArray[np.uint32]]
    librdkafka: str


_MURMUR2 = _Function(confluent_kafka.murmur2, _murmur2_of_rows, "murmur2_random")
_FUNCTIONS: dict[Partitioner, _Function] = {
    "murmur2": _MURMUR2,
    "crc32": _Function(confluent_kafka.consistent, _crc32_of_rows, "consistent_random"),
    "fnv1a": _Function(confluent_kafka.fnv1a, _fnv1a_of_rows, "fnv1a_random"),
    "any": _MURMUR2,
}


def partition_of(key: bytes, partitions: int, partitioner: Partitioner = "murmur2") -> int:
    """The partition of a key on a topic with this many partitions.

    By crc32, an empty key is on partition 0; a producer of librdkafka places it at random.
    """
    return _FUNCTIONS[partitioner].of_one(key, partitions)


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
        of_one, partitions = _FUNCTIONS[self.partitioner].of_one, self.partitions
        return [of_one(key, partitions) for key in self._sent(keys)]

    def of_rows(self, keys: NDArray[np.uint8]) -> NDArray[np.uint32]:
        """The partitions of keys of equal length, one row of bytes per key."""
        if self.key_format not in ("string", "uuid"):
            # As `RecordKey.sent`: without the zero, and a number with its own sign bit.
            keys = keys[:, 1:].copy()
            if self.key_format != "bytes":
                keys[:, 0] ^= 0x80
        return _FUNCTIONS[self.partitioner].of_rows(keys) % np.uint32(self.partitions)

    def _sent(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """The keys as the producers write them, of which they are hashed."""
        return keys if self.key_format == "string" else [*map(RecordKey.of_format(self.key_format).sent, keys)]
