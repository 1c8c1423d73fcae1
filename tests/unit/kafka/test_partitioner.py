"""Key → partition, byte for byte as Kafka's own clients compute it."""

from __future__ import annotations

import csv
import ctypes
import random
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balance_service.kafka.partitioner import Partitioning, partition_of
from balance_service.model.stream import PARTITIONERS
from tests.support.kafka import librdkafka

if TYPE_CHECKING:
    from balance_service.model.stream import Partitioner

# Source: org.apache.kafka.common.utils.UtilsTest.testMurmur2.
VECTORS = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}
CLIENTS = {
    "murmur2": [
        "Java",
        "kafkajs",
        "franz-go",
        "sarama murmur2",
        "kafka-go Murmur2Balancer",
        "kafka-python",
        "aiokafka",
    ],
    "crc32": ["sarama crc32", "kafka-go CRC32Balancer"],
    "fnv1a": ["sarama", "kafka-go Hash"],
}
LIBRDKAFKAS = {"murmur2": "murmur2", "crc32": "consistent", "fnv1a": "fnv1a"}
FUNCTIONS = st.sampled_from(PARTITIONERS)


@pytest.mark.parametrize(("key", "hashed"), VECTORS.items())
def test_murmur2_agrees_with_kafkas_own_vectors(key: bytes, hashed: int) -> None:
    # The sign bit is masked, not negated.
    assert partition_of(key, 2**31 - 1) == (hashed & 0x7FFFFFFF) % (2**31 - 1)
    assert partition_of(key, 7) == (hashed & 0x7FFFFFFF) % 7


@pytest.mark.parametrize("partitions", [3, 7, 997])
def test_the_hash_of_fnv1a_that_has_no_absolute_value_of_32_bits_has_a_partition(partitions: int) -> None:
    key = b"GiFra\xb8"  # its hash is -2**31

    assert partition_of(key, partitions, "fnv1a") == 2**31 % partitions


@pytest.mark.parametrize("partitioner", CLIENTS)
def test_each_client_sends_a_key_to_the_partition_we_look_it_up_in(partitioner: Partitioner) -> None:
    with (Path(__file__).parent / "vectors" / "partitions.csv").open(encoding="ascii") as file:
        rows = [*csv.DictReader(file)]
    ours = Partitioning(997, partitioner).of_keys([bytes.fromhex(row["key"]) for row in rows])

    theirs = {client: [int(row[client]) for row in rows] for client in CLIENTS[partitioner]}

    assert theirs == dict.fromkeys(theirs, ours)


@pytest.mark.parametrize("partitioner", LIBRDKAFKAS)
@given(st.lists(st.tuples(st.binary(min_size=1, max_size=300), st.integers(1, 10_000)), min_size=1))
def test_librdkafka_sends_a_key_to_the_partition_we_look_it_up_in(
    partitioner: Partitioner, keys: list[tuple[bytes, int]]
) -> None:
    theirs = getattr(librdkafka(), f"rd_kafka_msg_partitioner_{LIBRDKAFKAS[partitioner]}")
    theirs.restype = ctypes.c_int32

    for key, partitions in keys:
        assert partition_of(key, partitions, partitioner) == theirs(
            None, key, ctypes.c_size_t(len(key)), ctypes.c_int32(partitions), None, None
        )


@given(st.binary(max_size=300), st.integers(1, 10_000), FUNCTIONS)
def test_a_partition_is_one_of_the_topics(key: bytes, partitions: int, partitioner: Partitioner) -> None:
    assert 0 <= partition_of(key, partitions, partitioner) < partitions


@given(st.binary(max_size=300), FUNCTIONS)
def test_a_topic_of_one_partition_holds_every_key(key: bytes, partitioner: Partitioner) -> None:
    assert partition_of(key, 1, partitioner) == 0


@given(
    st.integers(0, 40).flatmap(lambda n: st.lists(st.binary(min_size=n, max_size=n), min_size=1)),
    st.integers(1, 99),
    FUNCTIONS,
)
def test_the_partitions_of_many_keys_are_those_of_each(
    keys: list[bytes], partitions: int, partitioner: Partitioner
) -> None:
    rows = np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(len(keys), -1)
    topic = Partitioning(partitions, partitioner)

    assert topic.of_rows(rows).tolist() == topic.of_keys(keys) == [topic.of(key) for key in keys]


@pytest.mark.parametrize("partitioner", PARTITIONERS)
def test_librdkafkas_form_of_one_key_and_our_form_of_rows_agree_on_20000_keys(partitioner: Partitioner) -> None:
    chance = random.Random(partitioner)
    of_length: dict[int, list[bytes]] = defaultdict(list)
    for text in [chance.randbytes(chance.randrange(64)) for _ in range(10_000)]:
        # Text beyond ASCII as well, and null bytes at both ends.
        for key in (text, b"\0" + text.decode("latin-1").encode()[:40] + b"\0"):
            of_length[len(key)].append(key)
    assert {0, 2} < set(of_length)

    for length, keys in of_length.items():
        rows = np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(len(keys), length)
        topic = Partitioning(chance.randrange(1, 2**31), partitioner)

        assert topic.of_rows(rows).tolist() == topic.of_keys(keys)
