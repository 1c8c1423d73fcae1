"""A standby knows whether compaction may have taken part of what it reads next, be there ever so much to read."""

from __future__ import annotations

import pytest

from balance_service.engine.completeness import Completeness
from balance_service.errors import RetriableError
from tests.support.fakes import Clock


class Changelog:
    """Its end, as it answers each question."""

    def __init__(self) -> None:
        self.end: int | None = 0
        self.asked = 0

    def __call__(self) -> int:
        self.asked += 1
        if self.end is None:
            raise RetriableError("the broker is silent")
        return self.end


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def changelog() -> Changelog:
    return Changelog()


@pytest.fixture
def completeness(changelog: Changelog, clock: Clock) -> Completeness:
    return Completeness(changelog, clock)


def test_a_copy_is_not_complete_before_the_end_was_reached(completeness: Completeness) -> None:
    assert not completeness.holds


def test_a_copy_is_complete_for_ten_minutes_after_the_end_was_reached(completeness: Completeness, clock: Clock) -> None:
    completeness.met_end()

    clock.now += 599.9
    assert completeness.holds
    clock.now += 0.1
    assert not completeness.holds


def test_a_reader_that_often_reaches_the_end_does_not_ask_for_it(
    completeness: Completeness, clock: Clock, changelog: Changelog
) -> None:
    for _ in range(100):
        completeness.met_end()
        clock.now += 60
        completeness.look()

    assert changelog.asked == 0


def test_a_reader_past_a_former_end_does_not_have_to_reach_the_present_one(
    completeness: Completeness, clock: Clock, changelog: Changelog
) -> None:
    completeness.met_end()
    for _ in range(3_600):
        clock.now += 1
        changelog.end = int(clock.now)
        completeness.passed(int(clock.now) - 1)
        completeness.look()
        assert completeness.holds

    assert changelog.asked < 3_600 / 100


def test_passing_an_end_counts_as_of_the_time_of_the_question(
    completeness: Completeness, clock: Clock, changelog: Changelog
) -> None:
    def holds_past(offset: int, seconds: float) -> bool:
        clock.now += seconds
        completeness.passed(offset)
        return completeness.holds

    changelog.end = 10
    completeness.look()
    assert [holds_past(9, 0), holds_past(10, 599), holds_past(11, 1)] == [False, True, False]


def test_an_older_question_is_dropped_when_the_end_is_reached(
    completeness: Completeness, clock: Clock, changelog: Changelog
) -> None:
    changelog.end = 10
    completeness.look()
    clock.now += 60
    completeness.met_end()
    completeness.passed(10)

    clock.now += 599
    assert completeness.holds


def test_a_broker_that_does_not_respond_is_asked_again_half_a_minute_later(
    completeness: Completeness, clock: Clock, changelog: Changelog
) -> None:
    changelog.end = None
    for _ in range(60):
        completeness.look()
        clock.now += 1
    assert changelog.asked == 2

    changelog.end = 5
    completeness.look()
    completeness.passed(5)
    assert completeness.holds


def test_a_reader_that_was_away_for_an_hour_may_have_missed_tombstones(
    completeness: Completeness, clock: Clock, changelog: Changelog
) -> None:
    clock.now += 4_000
    assert not completeness.was_away, "it has never been at the end, and reads all from the start"

    completeness.met_end()
    clock.now += 3_600
    assert not completeness.was_away
    clock.now += 1
    assert completeness.was_away
