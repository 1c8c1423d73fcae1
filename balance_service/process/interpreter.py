"""The Python process that serves: how its threads share the interpreter, and how it ends at the latest."""

from __future__ import annotations

import gc
import os
import sys
import threading

import structlog

log = structlog.get_logger(__name__)

_COLLECT_AFTER = 100_000
_SWITCH_SECONDS = 0.0005


def favour_short_work() -> None:
    """Let no query wait for the interpreter for long while events are folded beside it."""
    # Everything loaded by now stays: a collector that looks at all of it again stops every thread for a long moment.
    gc.collect()
    gc.freeze()
    # Folding makes plain values by the hundred thousand and no cycles: looking for some took 7% of its time.
    gc.set_threshold(_COLLECT_AFTER, *gc.get_threshold()[1:])
    # A query gives the interpreter up several times, and each time waits this long for a thread that computes.
    sys.setswitchinterval(_SWITCH_SECONDS)


def exit_at_the_latest_in(seconds: float) -> None:
    """End the process even if a client library hangs: all that matters is in Kafka already."""

    def give_up() -> None:
        log.error("stopping took too long; leaving")
        os._exit(1)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
