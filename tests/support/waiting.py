"""Waits for conditions with a timeout that suits a busy machine."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE_SECONDS = 60.0
SHARED = 2.0 if os.environ.get("CI") else 1.0
"""Factor of bounds of time: CI shares its processors with other jobs."""


def eventually(condition: Callable[[], bool], what: str | Callable[[], str], seconds: float = PATIENCE_SECONDS) -> None:
    """Waits until `condition` is true; raises AssertionError with `what` after `seconds`.

    A function as `what` is called on failure only.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {seconds} s: {what if isinstance(what, str) else what()}")
        time.sleep(0.05)


async def until(condition: Callable[[], object], what: str) -> None:
    """Like `eventually`, without blocking the event loop."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {PATIENCE_SECONDS} s: {what}")
        await asyncio.sleep(0.005)
