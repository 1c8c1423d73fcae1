"""What ends a thread. None of ours ends by itself: what goes on without one of them would be half alive."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

log = structlog.get_logger(__name__)


@contextmanager
def noting_failures(on_failure: Callable[[], object]) -> Iterator[list[BaseException]]:
    """The failures of any thread of the process, as they come.

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
