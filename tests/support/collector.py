"""Python without its collector of cycles, so that only references that end free an object."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def no_collector() -> Iterator[None]:
    """No cycle is collected while the context is open, unless `gc.collect` is called."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
