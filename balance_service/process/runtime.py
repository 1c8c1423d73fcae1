"""Clocks, threads, the interpreter and the memory of this process."""

from __future__ import annotations

import gc
import os
import re
import sys
import threading
import time
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from structlog.stdlib import BoundLogger

log = structlog.get_logger(__name__)

# On Linux, `time.monotonic` stops while the machine is suspended; the other machines of the cluster go on.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_COLLECT_AFTER_ALLOCATIONS = 100_000
_SWITCH_INTERVAL_SECONDS = 0.0005
# A smaller difference between two clocks is that between their readings.
_CLOCK_SET_MS = 500
# A busy machine may stall a thread for seconds.
_LONG_PAUSE_SECONDS = 8.0
_NUMBERS = re.compile("[0-9]+")
_TELL_AGAIN_SECONDS, _MOST_TOLD = 3600.0, 100


def elapsed() -> float:
    """Seconds since an arbitrary start; never decreases, and includes the time while the machine is suspended."""
    return time.clock_gettime(_CLOCK)


def now_ms() -> int:
    """The time of day as in Kafka's record timestamps: milliseconds since 1970, UTC."""
    return int(time.time() * 1000)


class TimesOfDay:
    """Tells readings of `elapsed` as times of day: one reading is always the same time, unless the clock is set."""

    def __init__(self) -> None:
        self._start_ms = self._start_now()

    def of(self, reading: float) -> int:
        """Returns ms since 1970."""
        start_ms = self._start_now()
        if abs(start_ms - self._start_ms) > _CLOCK_SET_MS:
            self._start_ms = start_ms
        return int(self._start_ms + 1000 * reading)

    @staticmethod
    def _start_now() -> float:
        return 1000 * (time.time() - elapsed())


class Awake:
    """Since when this process runs without a long pause, such as a suspension. One thread beats, any thread reads."""

    def __init__(self, clock: Callable[[], float] = elapsed) -> None:
        self._clock = clock
        self._beat_at = self._since = clock()

    def beat(self) -> None:
        """To be called every second."""
        self._since, self._beat_at = self.since, self._clock()

    @property
    def since(self) -> float:
        """A reading of the clock."""
        now = self._clock()
        return now if now - self._beat_at > _LONG_PAUSE_SECONDS else self._since


def iso_time(ms: int) -> str | None:
    """Returns a time in ms since 1970 as text, in UTC; None if it is beyond the years 1 to 9999."""
    try:
        return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except (OSError, OverflowError, ValueError):
        return None


def favour_short_work() -> None:
    """Tune garbage collection and thread switching, so that queries wait less while other threads fold events."""
    # A full collection stops every thread; objects that exist now are excluded from it.
    gc.collect()
    gc.freeze()
    # Folding allocates many objects and no cycles; the default threshold cost 7% of its time.
    gc.set_threshold(_COLLECT_AFTER_ALLOCATIONS, *gc.get_threshold()[1:])
    # A query releases the interpreter several times, and waits this long each time if another thread computes.
    sys.setswitchinterval(_SWITCH_INTERVAL_SECONDS)


def collect_garbage() -> None:
    """Free objects that refer to each other, to be called at intervals: after `favour_short_work`, that happens seldom.

    Spark's queries, their members and py4j's handles of the JVM's objects do, and keep plans and sessions in the JVM.
    """
    gc.collect()


def share_one_allocator() -> None:
    """Let Arrow allocate with malloc, as RocksDB does. To be called before Arrow is imported.

    Its default, mimalloc, keeps the free memory of each thread that has ended: some MiB for each rebuild of a model.
    """
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")


def keep_files_private() -> None:
    """Hide the files that this process and its JVM write from now on, such as states, from other users."""
    os.umask(0o077)


def exit_within(seconds: float) -> None:
    """Exit with code 1 after this time, even if a client library hangs: Kafka already has all that is committed."""

    def exit_now() -> None:
        log.error("stopping took too long; leaving")
        os._exit(1)

    timer = threading.Timer(seconds, exit_now)
    timer.daemon = True
    timer.start()


@contextmanager
def thread_failures(on_failure: Callable[[], object]) -> Iterator[list[BaseException]]:
    """Record the exceptions that end threads of this process. No thread of the service ends with one in normal use.

    Args:
        on_failure: called after each, on the thread that ends.
    """
    failures: list[BaseException] = []

    def failed(failure: threading.ExceptHookArgs) -> None:
        log.critical(
            "a thread failed; stopping", thread=getattr(failure.thread, "name", ""), exc_info=failure.exc_value
        )
        failures.append(failure.exc_value or failure.exc_type())
        on_failure()

    before, threading.excepthook = threading.excepthook, failed
    try:
        yield failures
    finally:
        threading.excepthook = before


def without_numbers(sentence: str) -> str:
    """Returns a sentence with a mark for each number: two that differ in numbers only are one then."""
    return _NUMBERS.sub("#", sentence)


class Attempts:
    """Logs what is tried again and again: that it fails, once an hour for each reason, and that it works again.

    Reasons that differ in numbers only are one. For one thread.
    """

    def __init__(self, log: BoundLogger, failed: str, works: str) -> None:
        """Args:
        failed, works: the events.
        """
        self._log = log
        self._failed = failed
        self._works = works
        self._told: set[str] = set()
        self._told_since = 0.0
        self._last: dict[str, object] = {}
        """The subject and the reason of the last failure, for the log."""

    def failed(self, error: object, **about: object) -> None:
        """Args:
        error: why, as a text or an exception.
        about: the subject of the attempt, for the log.
        """
        self._last = {**about, "after": str(error)}
        reason, now = without_numbers(str(error)), time.monotonic()
        if not self._told or now - self._told_since > _TELL_AGAIN_SECONDS or len(self._told) > _MOST_TOLD:
            self._told, self._told_since = set(), now
        if reason not in self._told:
            self._told.add(reason)
            self._log.warning(self._failed, error=str(error), **about)

    def succeeded(self) -> None:
        """Logs, if there was a failure, what works again, and `after` which failure."""
        if self._told:
            self._told.clear()
            self._log.info(self._works, **self._last)


class PeriodicThread:
    """A daemon thread that calls `work` at once and then at each interval, until it is stopped.

    With `begins_at_once` false, the first call comes after the first interval.

    An exception in `work` ends the thread; see `thread_failures`.
    """

    def __init__(
        self, name: str, every_seconds: float, work: Callable[[], None], *, begins_at_once: bool = True
    ) -> None:
        self._every_seconds = every_seconds
        self._begins_at_once = begins_at_once
        self._work = work
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_seconds: float) -> bool:
        """Stop the thread, waiting at most this long for it; returns whether it does not run any more."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        if not self._begins_at_once:
            self._stopping.wait(self._every_seconds)
        while not self._stopping.is_set():
            self._work()
            self._stopping.wait(self._every_seconds)
