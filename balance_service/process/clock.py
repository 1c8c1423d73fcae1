"""The clocks: how long something has been, whatever this machine did meanwhile, and what time it is elsewhere too."""

from __future__ import annotations

import time

# The clock of `time.monotonic` stands still on Linux while the machine sleeps; the rest of the cluster does not.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def elapsed() -> float:
    """Seconds since some moment of the past, never fewer than before; those of a suspended machine count too."""
    return time.clock_gettime(_CLOCK)


def now_ms() -> int:
    """The time of day as Kafka's records tell it: milliseconds since 1970, UTC."""
    return int(time.time() * 1000)
