"""A worker: one thing again and again, on a thread of its own, until it is stopped."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from balance_service.kafka.watermarks import Watermarks
from balance_service.process.worker import Worker

if TYPE_CHECKING:
    import pytest

_PATIENCE_SECONDS = 30.0


class Work:
    """Counts how often it is done, by which thread, and lets others wait for that."""

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


def test_it_works_at_once_however_rarely_it_is_to() -> None:
    work = Work()
    worker = Worker("rare", 3_600, work)
    worker.start()
    try:
        assert work.is_done(1)
    finally:
        worker.stop(_PATIENCE_SECONDS)

    assert work.threads == ["rare"]


def test_it_works_again_and_again_and_between_it_waits() -> None:
    work = Work()
    worker = Worker("often", 0.05, work)
    began = time.monotonic()
    worker.start()
    try:
        assert work.is_done(4)
        assert time.monotonic() - began >= 3 * 0.05
    finally:
        worker.stop(_PATIENCE_SECONDS)


def test_it_is_stopped_without_waiting_for_its_next_turn_and_does_no_more() -> None:
    work = Work()
    worker = Worker("stopped", 3_600, work)
    worker.start()
    assert work.is_done(1)
    began = time.monotonic()

    worker.stop(_PATIENCE_SECONDS)

    assert time.monotonic() - began < _PATIENCE_SECONDS
    assert not is_alive("stopped")
    assert len(work.threads) == 1


def test_work_that_hangs_does_not_hold_up_the_stop() -> None:
    hangs, goes_on = threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        goes_on.wait(_PATIENCE_SECONDS)

    worker = Worker("hanging", 3_600, hang)
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


def test_one_that_was_never_started_can_be_stopped() -> None:
    work = Work()

    Worker("idle", 0.01, work).stop(_PATIENCE_SECONDS)

    assert work.threads == []


def test_what_the_work_raises_is_told_and_ends_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[threading.ExceptHookArgs] = []
    failed = threading.Event()

    def noted(failure: threading.ExceptHookArgs) -> None:
        failures.append(failure)
        failed.set()

    monkeypatch.setattr(threading, "excepthook", noted)

    def fail() -> None:
        raise ValueError("for the test")

    worker = Worker("failing", 0.01, fail)
    worker.start()
    try:
        assert failed.wait(_PATIENCE_SECONDS)
    finally:
        worker.stop(_PATIENCE_SECONDS)

    assert [str(failure.exc_value) for failure in failures] == ["for the test"]
    assert not is_alive("failing")


def test_watermarks_follow_the_source_in_the_background() -> None:
    asked = threading.Event()
    watermarks = Watermarks(lambda: {0: 100, 1: 5})

    def refresh() -> None:
        watermarks.refresh()
        asked.set()

    worker = Worker("watermarks", 1.0, refresh)
    worker.start()
    try:
        assert asked.wait(_PATIENCE_SECONDS)
    finally:
        worker.stop(_PATIENCE_SECONDS)

    assert watermarks.lag(0, 90) == 10
