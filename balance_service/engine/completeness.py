"""Whether a store that copies a compacted topic has seen all of it: whole transactions, and every tombstone."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from balance_service.errors import RetriableError, StoreCorruptedError
from balance_service.kafka.topic_specs import is_compacted, tombstones_kept_ms
from balance_service.process.runtime import elapsed, now_ms

if TYPE_CHECKING:
    from collections.abc import Callable

    from balance_service.kafka.topics import Topic, Topics

# Compaction leaves records alone for their first hour, so a reader this far behind still sees every transaction whole.
WHOLE_FOR_SECONDS = 600.0
# No tombstone is removed within that hour either.
_SEES_TOMBSTONES_FOR_SECONDS = 3_600.0
_LOOK_AFTER_SECONDS = 120.0
_LOOK_AGAIN_SECONDS = 30.0


class Completeness:
    """Tracks when a reader last reached the end of its topic. For one thread.

    A read meets the end only if no record is written for half a second, which may never happen under load. The tracker
    therefore asks for the end offset from time to time: when the reader has passed that offset, every record that it
    has not read is younger than the question.
    """

    def __init__(self, end: Callable[[], int], clock: Callable[[], float] = elapsed) -> None:
        """Args:
        end: asks the broker for the topic's end offset; may raise RetriableError.
        """
        self._end = end
        self._clock = clock
        self._as_of = float("-inf")
        self._asked: tuple[float, int] | None = None
        self._next_look = float("-inf")

    @property
    def holds(self) -> bool:
        """Whether the next records are whole transactions, each ending in a position record."""
        return self._clock() - self._as_of < WHOLE_FOR_SECONDS

    @property
    def was_away(self) -> bool:
        """Whether the reader reached the end so long ago that tombstones may have been removed before it read them."""
        return _SEES_TOMBSTONES_FOR_SECONDS < self._clock() - self._as_of < float("inf")

    def met_end(self) -> None:
        """Notes that the reader is at the end."""
        self._as_of, self._asked = self._clock(), None

    def passed(self, offset: int) -> None:
        """Notes that every record below an offset is applied, in whole transactions."""
        if self._asked is not None and offset >= self._asked[1]:
            self._as_of, self._asked = self._asked[0], None

    def look(self) -> None:
        """Asks for the end offset if it is time to; tries again later if the broker does not respond."""
        now = self._clock()
        if self._asked is None and now - self._as_of > _LOOK_AFTER_SECONDS and now >= self._next_look:
            self._next_look = now + _LOOK_AGAIN_SECONDS
            with suppress(RetriableError):
                self._asked = now, self._end()


def check_tombstones_since_offset(topics: Topics, changelog: Topic, partition: int, offset: int) -> None:
    """Checks that a changelog still has every tombstone from an offset on, up to which a store is a copy of it.

    Without those, the store would keep what was deleted, and a dead letter that was applied could be applied again.
    The check compares record timestamps, which the broker's clock sets, with this instance's clock. The two may differ
    by the changelog's `min.compaction.lag.ms`.

    Args:
        offset: 0 for an empty store.

    Raises:
        StoreCorruptedError: tombstones may have been removed, so the store must be restored from the topic's start.
        RetriableError: the broker does not respond.
    """
    if offset == 0:
        return
    kept_ms = tombstones_kept_ms(topics.config(changelog.name))
    # The record at the offset itself is the last transaction's end marker.
    if offset + 1 < (young := topics.first_since(changelog.name, partition, now_ms() - kept_ms)):
        raise _may_be_gone(f"{changelog.name}-{partition} from {offset} to {young}", kept_ms)


def check_tombstones_since_time(topics: Topics, table: Topic, partition: int, seen_to_ms: int | None) -> None:
    """Checks the same for a table, whose records may have any timestamps.

    Args:
        seen_to_ms: when the store had last seen all of the table, by this instance's clock; None if it never had.

    Raises: as `check_tombstones_since_offset`.
    """
    config = topics.config(table.name)
    kept_ms = tombstones_kept_ms(config)
    if is_compacted(config) and (seen_to_ms is None or seen_to_ms < now_ms() - kept_ms):
        raise _may_be_gone(f"{table.name}-{partition}", kept_ms)


def _may_be_gone(unseen: str, kept_ms: int) -> StoreCorruptedError:
    return StoreCorruptedError(
        f"the store has not seen {unseen} for longer than the {kept_ms / 3_600_000:g} h for which tombstones are kept: "
        "some may be gone"
    )
