"""The scratch of Spark's JVM, the one that a process has: whichever engine is first, it outlives that one."""

from __future__ import annotations

import atexit
import functools
from contextlib import ExitStack
from typing import TYPE_CHECKING

from balance_service.process.scratch import temporary_scratch

if TYPE_CHECKING:
    from balance_service.process.scratch import Scratch


@functools.cache
def jvm_scratch() -> Scratch:
    """Removed when this process ends."""
    cleanup = ExitStack()
    atexit.register(cleanup.close)
    return cleanup.enter_context(temporary_scratch())
