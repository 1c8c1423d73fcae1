"""Whether a reader of a compacted topic still sees all of it: every transaction whole, and every tombstone."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from balance_service.errors import RetriableError
from balance_service.process.runtime import elapsed

if TYPE_CHECKING:
    from collections.abc import Callable

# Compaction leaves what is younger than an hour, so a reader this far behind still sees every transaction whole.
WHOLE_FOR_SECONDS = 600.0
# Nor is a tombstone dropped within that hour.
_SEES_TOMBSTONES_FOR_SECONDS = 3_600.0
_LOOK_AFTER_SECONDS = 120.0
_LOOK_AGAIN_SECONDS = 30.0


class Wholeness:
    """Knows since when the reader has been past what was the changelog's end. Used by one thread.

    A read comes upon the end only if nothing was written for half a second, which under load may never be. So from time
    to time the end is asked for: once the reader is past it, all that is left is younger than the question.
    """

    def __init__(self, end: Callable[[], int], clock: Callable[[], float] = elapsed) -> None:
        """Args:
        end: asks for the changelog's end; may raise RetriableError.
        """
        self._end = end
        self._clock = clock
        self._as_of = float("-inf")
        self._asked: tuple[float, int] | None = None
        self._next_look = float("-inf")

    @property
    def holds(self) -> bool:
        """Whether what comes next is whole, up to each position record."""
        return self._clock() - self._as_of < WHOLE_FOR_SECONDS

    @property
    def was_away(self) -> bool:
        """Whether it was past the end, and so long ago that tombstones may be gone before they were read."""
        return _SEES_TOMBSTONES_FOR_SECONDS < self._clock() - self._as_of < float("inf")

    def met_end(self) -> None:
        """The reader stands at the end."""
        self._as_of, self._asked = self._clock(), None

    def passed(self, offset: int) -> None:
        """Everything below this offset of the changelog is applied, in whole transactions."""
        if self._asked is not None and offset >= self._asked[1]:
            self._as_of, self._asked = self._asked[0], None

    def look(self) -> None:
        """Ask for the end, if it is time to. Where it is not answered, later."""
        now = self._clock()
        if self._asked is None and now - self._as_of > _LOOK_AFTER_SECONDS and now >= self._next_look:
            self._next_look = now + _LOOK_AGAIN_SECONDS
            with suppress(RetriableError):
                self._asked = now, self._end()
