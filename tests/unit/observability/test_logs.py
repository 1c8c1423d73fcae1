"""Limits on repeated warnings, and the warnings that are kept for operators."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import sys
from typing import TYPE_CHECKING

import pytest
import structlog

from balance_service.observability.logs import BoundedWarnings, configure_logging, last_warnings
from tests.support.fakes import Clock

if TYPE_CHECKING:
    from collections.abc import Iterator


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


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """What goes to stderr."""
    with contextlib.redirect_stderr(io.StringIO()) as text:
        yield text


@pytest.fixture
def logger(written: io.StringIO) -> Iterator[structlog.stdlib.BoundLogger]:
    """A logger of the service, as an instance configures it."""
    assert sys.stderr is written
    root, before = logging.getLogger(), structlog.get_config()
    handlers, level = root.handlers, root.level
    configure_logging("INFO")
    yield structlog.get_logger("kept")
    root.handlers = handlers
    root.setLevel(level)
    structlog.configure(**before)


def test_the_last_warnings_and_errors_are_kept_as_they_are_logged(
    logger: structlog.stdlib.BoundLogger, written: io.StringIO
) -> None:
    logger.info("started")
    logger.warning("task waiting", reason="make room")
    logging.getLogger("of-a-library").error("it failed")

    error, warning = last_warnings()[:2]
    assert (error.level, warning.level) == ("error", "warning")
    assert json.loads(error.line)["event"] == "it failed"
    assert json.loads(warning.line)["reason"] == "make room"
    assert warning.at <= error.at
    assert "started" not in "".join(kept.line for kept in last_warnings())
    assert warning.line in written.getvalue()


def test_lines_that_differ_in_numbers_only_are_kept_once_with_their_count_and_the_last_time(
    logger: structlog.stdlib.BoundLogger,
) -> None:
    for attempt in range(40):
        logger.warning("publishing fails", error=f"timed out after {attempt} ms")
        logger.warning("task halted", task="m_0", reason="no schema")
        logger.error("it broke")

    kept = last_warnings()[:3]

    assert [(one.level, json.loads(one.line)["event"], one.times) for one in kept] == [
        ("error", "it broke", 40),
        ("warning", "task halted", 40),
        ("warning", "publishing fails", 40),
    ]
    assert json.loads(kept[2].line)["error"] == "timed out after 39 ms"
    assert kept[0].at >= kept[1].at >= kept[2].at


def test_lines_that_say_something_else_are_kept_apart(logger: structlog.stdlib.BoundLogger) -> None:
    logger.warning("task halted", task="orders_0", reason="no schema")
    logger.warning("task halted", task="orders_0", reason="no source")

    assert [json.loads(one.line)["reason"] for one in last_warnings()[:2]] == ["no source", "no schema"]


def test_an_event_of_many_lines_pushes_no_other_event_out(logger: structlog.stdlib.BoundLogger) -> None:
    logger.warning("the disk is full")
    for number in range(90):
        logger.warning("a request failed", path="/" + chr(ord("a") + number % 26) * (1 + number // 26))

    events = [json.loads(one.line)["event"] for one in last_warnings()]

    assert len(events) == 50
    assert "the disk is full" in events
    assert json.loads(last_warnings()[0].line)["path"] == "/llll"


def test_a_line_is_the_same_with_the_number_of_those_that_were_left_out(logger: structlog.stdlib.BoundLogger) -> None:
    logger.warning("left out", task="m_0")
    # They may have said something else.
    logger.warning("left out", task="m_0", left_out=7)

    assert last_warnings()[0].times == 2


def test_no_more_than_fifty_lines_are_kept_and_none_is_longer_than_2000_characters(
    logger: structlog.stdlib.BoundLogger,
) -> None:
    for number in range(60):
        logger.warning(chr(ord("A") + number) * 3, much="x" * 5000)

    lines = [kept.line for kept in last_warnings()]

    assert len(lines) == 50
    assert {len(line) for line in lines} == {2000}


def test_a_warning_that_is_left_out_of_the_log_is_not_kept(logger: structlog.stdlib.BoundLogger) -> None:
    for _ in range(100):
        logger.warning("again and again")
    logger.warning("once")
    logger.warning("again and again")

    assert json.loads(last_warnings()[0].line)["event"] == "once"
