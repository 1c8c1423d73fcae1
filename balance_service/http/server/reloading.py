"""Reloads files that change while an instance runs: certificates, tokens and keys.

A file that becomes unusable is logged once; its previous content stays in force until the file is usable again.
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

# Changes with the content, symbolic links followed: Kubernetes replaces the link.
_Stamp = tuple[int, int, int] | None


class Reloaded(Generic[T]):
    """A value made from some files. Any thread may read it; one thread at a time calls `refresh`."""

    def __init__(self, files: Sequence[Path], load: Callable[[], T]) -> None:
        """Raises ConfigurationError, as `load`."""
        self._files = files
        self._load = load
        # Taken before `load`, so that a change during it is detected.
        self._stamps = self._look()
        self._complaint = ""
        self.is_stale = False
        """Whether a file is unusable, so that its previous content is in force."""
        self.value = load()

    def refresh(self) -> bool:
        """Loads the value again if a file has changed; returns whether it did."""
        stamps = self._look()
        if stamps == self._stamps:
            # A file that was missing may be back.
            self._complaint, self.is_stale = "", False
            return False
        try:
            value = self._load()
        except Exception as error:  # no content of a file may end the watch
            self.is_stale = True
            if str(error) != self._complaint:
                self._complaint = str(error)
                log.error("a changed file is not usable; its previous content stays in force", reason=str(error))
            return False
        self._stamps, self._complaint, self.is_stale, self.value = stamps, "", False, value
        log.info("files reloaded", files=[str(file) for file in self._files])
        return True

    def _look(self) -> list[_Stamp]:
        return [_stamp(file) for file in self._files]


async def follow(
    source: Reloaded[T], on_new: Callable[[T], Awaitable[None]] | None = None, seconds: float = LOOK_SECONDS
) -> None:
    """Polls the files; calls `on_new` with every new value, again after an OSError. Runs until it is cancelled."""
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
            log.error("reloaded files cannot be applied yet; retrying", reason=str(error))


def read(file: Path, setting: str) -> bytes:
    """Returns the content of a file.

    Raises:
        ConfigurationError: it cannot be read. The message names `setting`.
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
