"""What files hold, read again when they change: certificates, tokens and keys are renewed while an instance runs.

A file that is wrong after a change is told of once, and what was read before stays in force until it is right.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Generic, TypeVar

import structlog

from balance_service.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

log = structlog.get_logger(__name__)

T = TypeVar("T")
LOOK_SECONDS = 5.0

# What tells one content of a file from the next, symbolic links followed: Kubernetes replaces the link.
_Stamp = tuple[int, int, int] | None


class Reloaded(Generic[T]):
    """A value made of some files. Read on any thread; `refresh` is called by one at a time."""

    def __init__(self, files: Sequence[Path], load: Callable[[], T]) -> None:
        """Load it.

        Raises:
            ConfigurationError: of `load`.
        """
        self._files = files
        self._load = load
        # Before they are read: what changes meanwhile is read again.
        self._stamps = self._look()
        self._complaint = ""
        self.is_stale = False
        """Whether a file is not usable now, so that what was read before stays in force."""
        self.value = load()

    def refresh(self) -> bool:
        """Load it again if a file has changed; whether it is new."""
        stamps = self._look()
        if stamps == self._stamps:
            # A file that was missing may be back.
            self._complaint, self.is_stale = "", False
            return False
        try:
            value = self._load()
        except Exception as error:  # whatever is wrong with a file, it must not end the watch
            self.is_stale = True
            if str(error) != self._complaint:
                self._complaint = str(error)
                log.error("a changed file is not usable; what was read before stays in force", reason=str(error))
            return False
        self._stamps, self._complaint, self.is_stale, self.value = stamps, "", False, value
        log.info("read again", files=[str(file) for file in self._files])
        return True

    def _look(self) -> list[_Stamp]:
        return [_stamp(file) for file in self._files]


async def follow(
    source: Reloaded[T], on_new: Callable[[T], Awaitable[None]] | None = None, seconds: float = LOOK_SECONDS
) -> None:
    """Look after the files for ever, and tell of each new value until it is taken; cancel it to end it."""
    taken = source.value
    while True:
        await asyncio.sleep(seconds)
        await asyncio.to_thread(source.refresh)
        value = source.value
        if value is taken:
            continue
        try:
            if on_new is not None:
                await on_new(value)
            taken = value
        except OSError as error:
            log.error("what was read again cannot be put to use yet; trying again", reason=str(error))


def read(file: Path, setting: str) -> bytes:
    """What a file holds.

    Raises:
        ConfigurationError: it cannot be read; with the setting that names it.
    """
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigurationError(
            f"{setting}: {file} cannot be read ({error.strerror}); name a file that the service may read"
        ) from None


def _stamp(file: Path) -> _Stamp:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
