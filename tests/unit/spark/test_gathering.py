"""When arrived events are committed, and how many at once, with a clock that the test controls."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balance_service.spark.combine import EventsNotKeptError
from tests.unit.spark.fed_partition import IDLE_SECONDS, Partition

if TYPE_CHECKING:
    import pyarrow as pa

    from balance_service.engine.batch import PartitionUpdates


@pytest.mark.parametrize("known_end", [None, 0, 1], ids=["unknown", "an older end", "the current end"])
def test_an_event_on_an_idle_partition_is_committed_at_once(known_end: int | None) -> None:
    partition = Partition()
    partition.arrivals.add(1, after=0.125)

    assert partition.gather(known_end) == [0]
    assert partition.time.now == 1000.125


def test_without_events_in_time_there_is_nothing_to_commit() -> None:
    partition = Partition()
    partition.arrivals.add(1, after=IDLE_SECONDS + 0.5)

    assert partition.gather(known_end=1) == []
    assert partition.time.now == 1000 + IDLE_SECONDS


@pytest.mark.parametrize(
    ("took", "least", "most"),
    [(0.001, 0.010, 0.010), (0.018, 0.018, 0.025), (0.5, 0.5, 0.5)],
    ids=["a fast commit", "one as long as the pace", "one longer than any pace"],
)
def test_under_load_commits_begin_10_to_25_ms_apart_depending_on_their_duration(
    took: float, least: float, most: float
) -> None:
    partition = Partition()
    partition.arrivals.add(1)
    partition.arrivals.add(1)
    partition.gather()
    began = partition.time.now
    partition.commit(took)
    partition.arrivals.add(1)
    partition.gather()

    assert least - 1e-9 <= partition.time.now - began <= most + 1e-9


@pytest.mark.parametrize(
    ("rows_a_second", "apart"),
    [(4_000, 0.025), (7_000, 0.025), (9_000, 0.060), (100_000, 0.060)],
    ids=["few", "nearly many", "many", "very many"],
)
def test_commits_of_hundreds_of_events_begin_60_ms_apart(rows_a_second: int, apart: float) -> None:
    partition = Partition()
    for _ in range(3_000):
        partition.arrivals.add(rows_a_second // 1_000, after=0.001)
    paces = []
    for _ in range(40):
        partition.gather()
        paces.append(partition.time.now)
        partition.commit(0.018)

    assert paces[-1] - paces[-2] == pytest.approx(apart, abs=0.0015)


def test_events_within_the_pace_are_committed_together() -> None:
    partition = Partition()
    partition.arrivals.add(1)
    partition.gather()
    partition.commit(0.001)
    for _ in range(3):
        partition.arrivals.add(1, after=0.002)

    assert partition.gather() == [1, 2, 3]


def test_a_pause_resets_the_pace() -> None:
    partition = Partition()
    partition.arrivals.add(1)
    partition.gather()
    partition.commit(0.001)
    partition.time.sleep(5)
    partition.arrivals.add(1)
    before = partition.time.now

    assert partition.gather() == [1]
    assert partition.time.now == before


def test_a_partition_that_is_behind_gathers_up_to_the_known_end() -> None:
    partition = Partition()
    for _ in range(4):
        end = partition.arrivals.add(10, after=0.03)
    partition.arrivals.add(10, after=0.03)

    assert partition.gather(end) == list(range(end))


def test_gathering_stops_at_the_bound_in_rows() -> None:
    partition = Partition(most_rows=25)
    for _ in range(9):
        end = partition.arrivals.add(10, after=0.03)

    assert len(partition.gather(end)) == 30
    assert len(partition.gather(end)) == 30


def test_pulled_events_wait_ten_seconds_at_most() -> None:
    partition = Partition()
    partition.time.sleep(0.5)
    for _ in range(2000):
        end = partition.arrivals.add(1, after=0.01)
    partition.gather(end)

    first, *_, last = partition.arrivals.pulls
    assert 9.9 < last - first < 10.1


def test_an_interrupt_stops_pulling() -> None:
    partition = Partition()
    for _ in range(100):
        end = partition.arrivals.add(10, after=0.03)
    partition.interrupted.set()

    assert partition.gather(end) == list(range(10))


def test_pulls_of_one_gathering_are_some_time_apart() -> None:
    partition = Partition()
    for _ in range(100):
        end = partition.arrivals.add(1, after=0.001)
    partition.gather(end)

    assert len(partition.arrivals.pulls) > 2
    assert min(later - one for one, later in pairwise(partition.arrivals.pulls)) >= 0.02 - 1e-9


def test_gathering_stops_if_nothing_arrives() -> None:
    partition = Partition()
    partition.arrivals.add(10)
    partition.arrivals.add(10, after=1.0)

    # The offsets in between, without rows, may belong to an aborted transaction.
    assert partition.gather(known_end=1000) == list(range(10))
    assert partition.time.now < 1000.1


@pytest.mark.parametrize(("known_end", "gathered"), [(10_000, 10), (10_100, 20)], ids=["near", "far"])
def test_far_from_the_end_gathering_waits_through_a_pause(known_end: int, gathered: int) -> None:
    partition = Partition()
    partition.arrivals.add(10)
    partition.arrivals.add(10, after=0.4)

    assert len(partition.gather(known_end)) == gathered


def test_after_a_failed_commit_events_are_committed_part_by_part_up_to_the_known_end() -> None:
    partition = Partition(most_rows=320_000)
    for _ in range(20):
        end = partition.arrivals.add(20_000, after=0.03)
    assert len(partition.gather(end)) == 320_000
    partition.gathering.failed()
    partition.begin_again()
    for _ in range(20):
        end = partition.arrivals.add(20_000, after=0.03)

    assert [len(partition.gather(end)) for _ in range(5)] == [80_000] * 5
    for _ in range(20):
        end = partition.arrivals.add(20_000, after=0.03)
    assert len(partition.gather(end)) == 320_000


def test_parts_after_a_failed_commit_keep_their_events() -> None:
    partition = Partition()
    partition.gathering.failed()
    for _ in range(6):
        end = partition.arrivals.add(20_000, after=0.03)

    for rows in (80_000, 40_000):
        (gathered,) = partition.gathered(end)
        assert [event.key for event in gathered.singles([b"1"])] == [b"1"]
        assert gathered.applied == rows


def test_many_events_are_combined_part_by_part() -> None:
    partition = Partition()
    for _ in range(10):
        end = partition.arrivals.add(20_000, after=0.03)
    (gathered,) = partition.gathered(end)

    assert [len(part) for part in partition.parts] == [80_000, 80_000, 40_000]
    assert (gathered.applied, gathered.end, gathered.traces) == (200_000, end, ["0"])
    with pytest.raises(EventsNotKeptError):
        gathered.singles([b"1"])


def test_a_part_is_as_large_as_the_one_it_is_merged_with() -> None:
    partition = Partition(each_its_key=True)
    for _ in range(32):
        end = partition.arrivals.add(20_000, after=0.03)
    (gathered,) = partition.gathered(end)

    assert [len(part) for part in partition.parts] == [80_000, 80_000, 160_000, 320_000]
    assert (gathered.keys, gathered.end) == (640_000, end)


def test_a_part_is_bounded_in_bytes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("balance_service.spark.gathering._PART_BYTES", 160)
    partition = Partition()
    for _ in range(4):
        end = partition.arrivals.add(10, after=0.03)
    partition.gather(end)

    assert [len(part) for part in partition.parts] == [20, 20]


def test_parts_that_cannot_be_merged_are_committed_separately_and_end_the_gathering() -> None:
    partition = Partition(singly=True)
    for _ in range(20):
        end = partition.arrivals.add(20_000, after=0.03)
    found = partition.gathered(end)

    assert [one.end for one in found] == [80_000, 160_000]
    assert partition.gathered(end)[0].end == 240_000


def test_events_that_never_combine_are_committed_some_thousands_at_a_time() -> None:
    partition = Partition(combine=None)
    for _ in range(20):
        end = partition.arrivals.add(5_000, after=0.03)

    assert [one.end for _ in range(3) for one in partition.gathered(end)] == [10_000, 20_000, 30_000]


def test_many_dead_letters_end_the_gathering() -> None:
    partition = Partition(letters_of=5 << 20)
    for _ in range(20):
        end = partition.arrivals.add(20_000, after=0.03)

    assert len(partition.gathered(end)) == 2


def test_parts_with_too_many_keys_for_a_transaction_are_not_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("balance_service.spark.gathering._MOST_KEYS", 150_000)
    partition = Partition(each_its_key=True)
    for _ in range(32):
        end = partition.arrivals.add(20_000, after=0.03)

    assert [one.keys for one in partition.gathered(end)] == [80_000, 80_000]


def test_an_error_in_a_part_ends_the_gathering() -> None:
    partition = Partition()
    partition.arrivals.add(1)

    def part(_table: pa.Table) -> PartitionUpdates:
        raise LookupError("a schema")

    with pytest.raises(LookupError, match="a schema"):
        partition.gathering.gather(partition.arrivals.pull, IDLE_SECONDS, None, part, partition.interrupted)


@given(
    st.lists(st.tuples(st.integers(1, 50), st.sampled_from([0.0, 0.001, 0.03, 0.5])), min_size=1, max_size=20),
    st.lists(st.one_of(st.none(), st.integers(0, 1200)), min_size=1),
    st.lists(st.sampled_from([0.001, 0.02, 0.7]), min_size=1),
)
def test_every_row_is_gathered_once_and_in_order(
    arrivals: list[tuple[int, float]], known_ends: list[int | None], took: list[float]
) -> None:
    partition, gathered = Partition(most_rows=60), []
    for rows, after in arrivals:
        end = partition.arrivals.add(rows, after)
    for turn in range(200):
        gathered += partition.gather(known_ends[turn % len(known_ends)])
        partition.commit(took[turn % len(took)])

    assert gathered == list(range(end))
