"""The sentences about keys that are on other partitions than the declared partitioner says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from balance_service.engine.placement import Placement
from balance_service.kafka.partitioner import Partitioning
from tests.support.fakes import Clock

if TYPE_CHECKING:
    from collections.abc import Iterable

    from balance_service.model.stream import Partitioner

HERE, PARTITIONS = 1, 4
MURMUR2 = Partitioning(PARTITIONS, "murmur2")


def keys(partitioner: Partitioner | None, count: int, start: int = 0) -> list[bytes]:
    """Returns keys of partition 1 by a function; by None, keys that no function puts there."""
    functions = [Partitioning(PARTITIONS, name) for name in ("murmur2", "crc32", "fnv1a")]
    named = (f"customer-{n}".encode() for n in range(start, start + 1_000_000))
    if partitioner is None:
        found = (key for key in named if all(f.of(key) != HERE for f in functions))
    else:
        found = (key for key in named if Partitioning(PARTITIONS, partitioner).of(key) == HERE)
    return [next(found) for _ in range(count)]


def examined(*batches: Iterable[bytes], declared: Partitioner = "murmur2") -> Placement:
    placement = Placement("orders", Partitioning(PARTITIONS, declared))
    for batch in batches:
        some = [*batch]
        is_misplaced = any(placement.partitioning.of(key) != HERE for key in some)
        placement.examine(some, HERE, is_misplaced=is_misplaced)
    return placement


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
    placement = examined(keys(used, 9_950) + keys(None, 50), declared=declared)

    assert f'9,950 of the last 10,000 keys lie where {producers} puts them: declare partitioner="{used}"' in (
        placement.problem
    )
    assert placement.problem.startswith("events of 'orders' become dead letters, because their keys are misplaced: ")


def test_keys_of_many_small_batches_are_counted_together_and_each_once() -> None:
    by_crc = keys("crc32", 100)

    placement = examined(*([key] for key in by_crc), *([key] for key in by_crc[:50]))

    assert "100 of the last 100 keys lie where librdkafka's default puts them" in placement.problem


def test_two_kinds_of_producers_are_no_wrong_declaration() -> None:
    placement = examined(keys("murmur2", 900) + [key for key in keys("crc32", 300) if MURMUR2.of(key) != HERE][:100])

    said = placement.problem
    assert "900 of the last 1,000 keys lie where Java's default puts them, and 100 of the others where" in said
    assert "the topic has two kinds of producers: configure all to use murmur2" in said


def test_a_partitioner_that_is_not_known_is_said_to_need_a_rekey() -> None:
    said = examined(keys("murmur2", 50) + keys(None, 50)).problem

    assert 'declare partitioner="any", and re-key the events' in said


def test_few_misplaced_keys_prove_nothing() -> None:
    misplaced = [key for key in keys("crc32", 30) if MURMUR2.of(key) != HERE]

    assert "4 of the last 4 keys are misplaced: too few to name the function" in examined(misplaced[:4]).problem
    assert "5 of the last 5 keys lie where librdkafka" in examined(misplaced[:5]).problem


def test_a_detail_names_the_partition_of_the_key_and_not_the_key() -> None:
    (key,) = keys(None, 1)

    detail = examined([key]).detail(key)

    assert detail.startswith(f"by murmur2, the key belongs to partition {MURMUR2.of(key)}; 1 of the last 1 keys")
    assert key.decode() not in detail


def test_the_problem_ends_an_hour_after_the_last_misplaced_key_and_may_return() -> None:
    clock = Clock()
    placement = Placement("orders", MURMUR2, clock)
    assert not placement.is_doubtful

    placement.examine(keys("crc32", 100), HERE, is_misplaced=True)
    clock.now += 3_599
    placement.examine(keys("murmur2", 100), HERE, is_misplaced=False)
    assert placement.problem

    clock.now += 1
    assert (placement.problem, placement.is_doubtful) == ("", False)
    placement.examine(keys("crc32", 50, 10_000), HERE, is_misplaced=True)
    assert "50 of the last 50 keys" in placement.problem


def test_misplaced_keys_are_logged_once_a_minute() -> None:
    clock = Clock()
    placement = Placement("orders", MURMUR2, clock)
    with capture_logs() as logs:
        for _ in range(100):
            placement.examine(keys("crc32", 20), HERE, is_misplaced=True)
            clock.now += 1

    assert [(line["topic"], line["partition"]) for line in logs] == [("orders", HERE)] * 2
    assert all("librdkafka's default puts them" in line["problem"] for line in logs)


def test_only_the_last_ten_thousand_keys_count() -> None:
    placement = examined(keys("murmur2", 5_000) + keys(None, 10), keys("crc32", 9_990, 500_000))

    assert "of the last 10,000 keys" in placement.problem
