"""Marks that were used: none is used twice, in whatever order they come, and no more is kept than is bounded."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from balance_service.http.peers.trust import MAX_ASKERS, WINDOW, UsedMarks

NEAR = st.integers(0, 40)
FAR = st.integers(0, 3 * WINDOW)


@settings(max_examples=300)
@given(st.lists(NEAR | FAR | st.integers(-40, 40).map(lambda n: WINDOW + n), max_size=60))
@example([0, WINDOW + 8, 0])
@example([WINDOW, WINDOW + 7, 8 * (WINDOW // 8) + 8, 0])
def test_a_mark_is_used_once_and_each_within_the_window_can_be(numbers: list[int]) -> None:
    used, seen = UsedMarks(), set[int]()
    for number in numbers:
        is_taken = used.take("asker", number, 0.0)

        assert not (is_taken and number in seen)
        if number > max(seen, default=0) - WINDOW:
            assert is_taken == (number not in seen)
        if is_taken:
            seen.add(number)


def test_each_asker_counts_for_itself() -> None:
    used = UsedMarks()

    assert [used.take(asker, 1, 0.0) for asker in ("a", "b", "a", "b")] == [True, True, False, False]


def test_an_asker_is_forgotten_only_long_after_its_marks_are_too_old() -> None:
    used = UsedMarks()
    used.take("a", 1, 0.0)

    used.take("b", 1, 599.0)
    assert not used.take("a", 1, 599.0)
    # What comes now would be refused by its time before it came here.
    used.take("c", 1, 1300.0)
    assert used.take("a", 1, 1300.0)


def test_beyond_the_most_askers_new_ones_are_refused_and_the_others_go_on() -> None:
    used = UsedMarks()
    for n in range(MAX_ASKERS):
        assert used.take(f"asker-{n}", 1, 0.0)

    assert not used.take("one more", 1, 0.0)
    assert used.take("asker-0", 2, 0.0)
    assert used.take("one more", 1, 700.0)


@pytest.mark.parametrize("step", [1, 9, 5 * WINDOW])
def test_what_is_kept_does_not_grow_with_the_marks(step: int) -> None:
    used = UsedMarks()
    used.take("a", 0, 0.0)
    tracemalloc.start()
    for n in range(1, 50_000):
        assert used.take("a", n * step, 0.0)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert grown < 64 << 10
