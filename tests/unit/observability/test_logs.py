"""Limits on repeated warnings."""

from __future__ import annotations

import logging

from balance_service.observability.logs import BoundedWarnings
from tests.support.fakes import Clock


def record(event: str, level: int = logging.WARNING) -> logging.LogRecord:
    return logging.LogRecord("a", level, "", 0, {"event": event}, (), None)


def passed(bounded: BoundedWarnings, count: int, event: str = "failed", level: int = logging.WARNING) -> int:
    return sum(bounded.filter(record(event, level)) for _ in range(count))


def test_a_repeated_warning_is_logged_a_limited_number_of_times_per_interval() -> None:
    clock = Clock()
    bounded = BoundedWarnings(3, 60, clock)

    assert passed(bounded, 10) == 3
    clock.now += 59
    assert passed(bounded, 10, level=logging.ERROR) == 0
    clock.now += 1
    assert passed(bounded, 10) == 3


def test_the_first_record_of_the_next_interval_has_the_number_of_suppressed_ones() -> None:
    clock = Clock()
    bounded = BoundedWarnings(3, 60, clock)
    passed(bounded, 10)
    clock.now += 60
    first, second = record("failed"), record("failed")

    assert bounded.filter(first)
    assert bounded.filter(second)
    assert [first.msg, second.msg] == [{"event": "failed", "left_out": 7}, {"event": "failed"}]


def test_the_limit_applies_to_each_event_and_only_to_warnings_and_errors() -> None:
    bounded = BoundedWarnings(1, 60, Clock())

    assert (passed(bounded, 5, "one"), passed(bounded, 5, "other")) == (1, 1)
    assert passed(bounded, 5, "one", logging.INFO) == 5
