"""Logs while one failure repeats itself."""

from __future__ import annotations

import logging

from balance_service.observability.logs import BoundedWarnings
from tests.support.fakes import Clock


def record(event: str, level: int = logging.WARNING) -> logging.LogRecord:
    return logging.LogRecord("a", level, "", 0, {"event": event}, (), None)


def passed(bounded: BoundedWarnings, count: int, event: str = "failed", level: int = logging.WARNING) -> int:
    return sum(bounded.filter(record(event, level)) for _ in range(count))


def test_a_warning_that_comes_again_and_again_is_logged_so_often_in_an_interval_and_no_more() -> None:
    clock = Clock()
    bounded = BoundedWarnings(3, 60, clock)

    assert passed(bounded, 10) == 3
    clock.now += 59
    assert passed(bounded, 10, level=logging.ERROR) == 0
    clock.now += 1
    assert passed(bounded, 10) == 3


def test_the_next_interval_says_how_many_were_left_out() -> None:
    clock = Clock()
    bounded = BoundedWarnings(3, 60, clock)
    passed(bounded, 10)
    clock.now += 60
    first, second = record("failed"), record("failed")

    assert bounded.filter(first)
    assert bounded.filter(second)
    assert [first.msg, second.msg] == [{"event": "failed", "left_out": 7}, {"event": "failed"}]


def test_one_event_that_is_repeated_keeps_no_other_out_nor_what_is_no_warning() -> None:
    bounded = BoundedWarnings(1, 60, Clock())

    assert (passed(bounded, 5, "one"), passed(bounded, 5, "other")) == (1, 1)
    assert passed(bounded, 5, "one", logging.INFO) == 5
