"""Clocks, threads that fail, periodic threads, and the allocator."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import threading
import time

import pytest
import structlog
from structlog.testing import capture_logs

from balance_service.cluster.directory import ServerTable
from balance_service.cluster.standbys import StandbyChooser
from balance_service.kafka.lease import Lease
from balance_service.kafka.topics import Watermarks
from balance_service.process.runtime import Attempts, Awake, PeriodicThread, TimesOfDay, elapsed, thread_failures
from tests.support.fakes import Clock

_PATIENCE_SECONDS = 30.0
# `serve` has imported this much when it calls the function.
_ALLOCATOR = """
import balance_service.cli.main
import balance_service.engine.state_directory
import balance_service.spark.jvm
from balance_service.process.runtime import share_one_allocator
share_one_allocator()
import pyarrow
print(pyarrow.default_memory_pool().backend_name)
"""


class Work:
    """Records the thread of each call, and waits for a number of calls."""

    def __init__(self) -> None:
        self.threads: list[str] = []
        self._done = threading.Condition()

    def __call__(self) -> None:
        with self._done:
            self.threads.append(threading.current_thread().name)
            self._done.notify_all()

    def is_done(self, times: int) -> bool:
        with self._done:
            return self._done.wait_for(lambda: len(self.threads) >= times, _PATIENCE_SECONDS)


def is_alive(name: str) -> bool:
    return name in {thread.name for thread in threading.enumerate()}


def test_elapsed_time_increases() -> None:
    before = elapsed()
    time.sleep(0.01)

    assert 0.01 <= elapsed() - before < 5


@pytest.mark.parametrize("user", [Lease, ServerTable, StandbyChooser, Watermarks])
def test_leases_and_silence_are_measured_by_a_clock_that_runs_while_the_machine_is_suspended(user: type) -> None:
    assert inspect.signature(user).parameters["clock"].default is elapsed


def test_a_process_that_was_suspended_runs_since_it_goes_on() -> None:
    clock = Clock(100.0)
    awake = Awake(clock)
    clock.now += 1
    awake.beat()
    assert awake.since == 100.0

    clock.now += 70
    # Nothing has beaten since.
    assert awake.since == 171.0
    awake.beat()
    clock.now += 1
    awake.beat()
    assert awake.since == 171.0


def test_a_reading_of_the_clock_is_one_time_of_day_until_the_clock_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    times, reading = TimesOfDay(), elapsed()
    before = times.of(reading)
    assert {times.of(reading) for _ in range(1000)} == {before}

    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 3600)

    assert abs(times.of(reading) - before - 3_600_000) < 500


def test_the_first_call_is_immediate_even_if_the_interval_is_long() -> None:
    work = Work()
    worker = PeriodicThread("rare", 3_600, work)
    worker.start()
    try:
        assert work.is_done(1)
    finally:
        worker.stop(_PATIENCE_SECONDS)

    assert work.threads == ["rare"]


def test_calls_are_repeated_with_the_interval_between_them() -> None:
    work = Work()
    worker = PeriodicThread("often", 0.05, work)
    began = time.monotonic()
    worker.start()
    try:
        assert work.is_done(4)
        assert time.monotonic() - began >= 3 * 0.05
    finally:
        worker.stop(_PATIENCE_SECONDS)


def test_stop_does_not_wait_for_the_next_call_and_no_call_follows() -> None:
    work = Work()
    worker = PeriodicThread("stopped", 3_600, work)
    worker.start()
    assert work.is_done(1)
    began = time.monotonic()

    worker.stop(_PATIENCE_SECONDS)

    assert time.monotonic() - began < _PATIENCE_SECONDS
    assert not is_alive("stopped")
    assert len(work.threads) == 1


def test_stop_returns_in_time_although_the_work_hangs() -> None:
    hangs, goes_on = threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        goes_on.wait(_PATIENCE_SECONDS)

    worker = PeriodicThread("hanging", 3_600, hang)
    worker.start()
    try:
        assert hangs.wait(_PATIENCE_SECONDS)
        began = time.monotonic()
        worker.stop(0.05)
        assert time.monotonic() - began < _PATIENCE_SECONDS / 2
        assert is_alive("hanging")
    finally:
        goes_on.set()
        worker.stop(_PATIENCE_SECONDS)

    assert not is_alive("hanging")


def test_a_thread_that_was_never_started_can_be_stopped() -> None:
    work = Work()

    PeriodicThread("idle", 0.01, work).stop(_PATIENCE_SECONDS)

    assert work.threads == []


def test_an_exception_of_the_work_is_recorded_and_ends_the_thread() -> None:
    failed = threading.Event()

    def fail() -> None:
        raise ValueError("for the test")

    worker = PeriodicThread("failing", 0.01, fail)
    with thread_failures(failed.set) as failures:
        worker.start()
        try:
            assert failed.wait(_PATIENCE_SECONDS)
        finally:
            worker.stop(_PATIENCE_SECONDS)

    assert [str(failure) for failure in failures] == ["for the test"]
    assert not is_alive("failing")


def test_watermarks_are_refreshed_in_the_background() -> None:
    asked = threading.Event()
    watermarks = Watermarks("t", lambda: {0: 100, 1: 5})

    def refresh() -> None:
        watermarks.refresh()
        asked.set()

    worker = PeriodicThread("watermarks", 1.0, refresh)
    worker.start()
    try:
        assert asked.wait(_PATIENCE_SECONDS)
    finally:
        worker.stop(_PATIENCE_SECONDS)

    assert watermarks.lag(0, 90) == 10


def test_what_is_tried_again_and_again_is_logged_when_it_begins_to_fail_and_when_it_works_again() -> None:
    attempts = Attempts(structlog.get_logger(), "reading failed", "reading works again")

    with capture_logs() as logs:
        attempts.succeeded()
        for seconds in range(5):
            attempts.failed(f"no answer within {seconds} s", topic="orders")
            attempts.failed("not authorized", topic="orders")
        attempts.succeeded()
        attempts.succeeded()
        attempts.failed("no answer within 9 s", topic="orders")

    assert [(line["log_level"], line["event"], line.get("error")) for line in logs] == [
        ("warning", "reading failed", "no answer within 0 s"),
        ("warning", "reading failed", "not authorized"),
        ("info", "reading works again", None),
        ("warning", "reading failed", "no answer within 9 s"),
    ]
    assert logs[0]["topic"] == "orders"
    assert (logs[2]["topic"], logs[2]["after"]) == ("orders", "not authorized")


@pytest.mark.parametrize(("chosen", "used"), [(None, "system"), ("mimalloc", "mimalloc")])
def test_arrow_allocates_with_malloc_unless_the_environment_says_otherwise(chosen: str | None, used: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "ARROW_DEFAULT_MEMORY_POOL"}
    environment |= {"ARROW_DEFAULT_MEMORY_POOL": chosen} if chosen else {}
    command = [sys.executable, "-c", _ALLOCATOR]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.strip() == used
