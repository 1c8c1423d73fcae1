"""The sentences about keys that are on other partitions than the declared partitioner says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from balance_service.engine.misplaced import MisplacedKeys
from balance_service.kafka.partitioner import Partitioning
from tests.support.fakes import Clock

if TYPE_CHECKING:
    from collections.abc import Iterable

    from balance_service.model.stream import Partitioner

HERE, PARTITIONS = 1, 4
MURMUR2 = Partitioning(PARTITIONS, "murmur2")


def keys(partitioner: Partitioner | None, count: int, but_not: Partitioner = "murmur2") -> list[bytes]:
    """Returns keys of partition 1 by one function, and not by another; by None, keys that no function puts there."""
    functions = {name: Partitioning(PARTITIONS, name) for name in ("murmur2", "crc32", "fnv1a")}
    named = (f"customer-{n}".encode() for n in range(1_000_000))
    if partitioner is None:
        found = (key for key in named if all(f.of(key) != HERE for f in functions.values()))
    else:
        by, declared = functions[partitioner], functions[but_not]
        found = (key for key in named if by.of(key) == HERE and declared.of(key) != HERE)
    return [next(found) for _ in range(count)]


def told(found: Iterable[bytes], declared: Partitioner = "murmur2") -> str:
    misplaced = MisplacedKeys("orders", Partitioning(PARTITIONS, declared))
    for key in found:
        misplaced.found([key], HERE)
    return misplaced.problem


@pytest.mark.parametrize(
    ("declared", "used", "producers"),
    [
        ("murmur2", "crc32", "librdkafka's default"),
        ("murmur2", "fnv1a", "sarama's default"),
        ("crc32", "murmur2", "Java's default"),
        ("fnv1a", "crc32", "librdkafka's default"),
    ],
)
def test_the_function_that_explains_the_keys_is_named(declared: Partitioner, used: Partitioner, producers: str) -> None:
    by_other = keys(used, 97, declared)
    said = told([*by_other, *keys(None, 3)], declared)

    assert said.startswith("events of 'orders' become dead letters, because their keys are misplaced: 97 of 100 ")
    assert f"keys lie where {producers} puts them: configure their producers to use {declared};" in said
    assert f'only if all producers use {used}, declare partitioner="{used}"' in said


def test_the_last_keys_decide_which_function_is_named() -> None:
    said = told([*keys(None, 1_000), *keys("crc32", 1_000)])

    assert "1,000 of 1,000 misplaced keys lie where librdkafka's default puts them" in said


def test_a_partitioner_that_is_not_known_is_said_to_need_a_rekey() -> None:
    said = told([*keys("crc32", 45), *keys(None, 50)])

    assert "explains 50 of 95 misplaced keys" in said
    assert 'declare partitioner="any", and re-key the events' in said


def test_few_misplaced_keys_prove_nothing() -> None:
    misplaced = keys("crc32", 5)

    assert "too few keys are misplaced to name the function: 4" in told(misplaced[:4])
    assert "5 of 5 misplaced keys lie where librdkafka" in told(misplaced)
    assert "to name the function: 1" in told(misplaced[:1] * 1_000)


def test_a_detail_names_the_partition_of_the_key_and_not_the_key() -> None:
    (key,) = keys(None, 1)

    misplaced = MisplacedKeys("orders", MURMUR2)
    misplaced.found([key], HERE)
    detail = misplaced.detail(key)

    assert detail.startswith(f"by murmur2, the key belongs to partition {MURMUR2.of(key)}; too few keys")
    assert key.decode() not in detail


def test_the_problem_ends_an_hour_after_the_last_misplaced_key_and_may_return() -> None:
    clock = Clock()
    misplaced = MisplacedKeys("orders", MURMUR2, clock)
    assert misplaced.problem == ""

    misplaced.found(keys("crc32", 100), HERE)
    clock.now += 3_599
    assert "100 of 100" in misplaced.problem

    clock.now += 1
    assert misplaced.problem == ""
    misplaced.found(keys("crc32", 50), HERE)
    assert "50 of 50 misplaced keys" in misplaced.problem


def test_so_many_keys_are_kept_at_most() -> None:
    assert "1,000 of 1,000 misplaced keys" in told(keys("crc32", 1_200))
