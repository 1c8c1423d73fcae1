"""Whether a task reads the deletions of a compacted source before the topic drops them.

A compacted topic drops a tombstone some time after it was written: `delete.retention.ms`. States that had everything in
the topic at a time have seen every tombstone from before, and the later ones are kept that long. The position has that
time. If it is too long ago, the states may have keys whose deletion is gone. The task then begins again at the first
record of its source, without states.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from balance_service.engine.idempotency import MARKERS
from balance_service.engine.records import NEVER, RESERVED_PREFIX
from balance_service.errors import RetriableError
from balance_service.kafka.topic_specs import is_compacted, tombstones_kept_ms
from balance_service.process.runtime import now_ms

if TYPE_CHECKING:
    from collections.abc import Iterator

    from balance_service.engine.hosted_stage import HostedStage
    from balance_service.engine.records import Position, Record
    from balance_service.engine.store import StateStore
    from balance_service.model.stage import Stage

# The clocks of instances and brokers may differ by that.
_MOST_MARGIN_MS = 60 * 60 * 1000
_NOTED_EVERY_MS = 10 * 60 * 1000
# An operator may change the configuration while the task runs. One that is at the end of its source need not know.
_AT_END_MS = 5_000
_KNOWN_FOR_MS = 60_000
_SCANNED = 1_000


class Deletions:
    """What a task knows of the deletions in its source. One that is not compacted has them all.

    For the task's thread.
    """

    def __init__(self, hosted: HostedStage, partition: int) -> None:
        self._hosted = hosted
        self._partition = partition
        self._asked_ms = 0
        self._kept_ms: int | None = None

    def seen_at(self, offset: int) -> int:
        """Returns when everything in the source was known to be below an offset, in ms since 1970; -1 if never."""
        age = self._hosted.watermarks.age(self._partition, offset) if self._hosted.stage.compacted else None
        return NEVER if age is None else now_ms() - int(1000 * age)

    def gone(self, position: Position) -> str:
        """Returns why the states of a position may lack deletions; empty if they have all of them.

        Raises:
            RetriableError: the broker does not respond.
        """
        # Without states, there is none that should be deleted.
        if not self._hosted.stage.compacted or not position.keys:
            return ""
        seen_to_ms = max(position.seen_to_ms, self.seen_at(position.offset))
        away_ms = now_ms() - seen_to_ms
        kept_ms = self._kept(away_ms)
        if kept_ms is None or (seen_to_ms > NEVER and away_ms < kept_ms - _margin_ms(kept_ms)):
            return ""
        since = f"for {away_ms / 3_600_000:.3g} h" if seen_to_ms > NEVER else "since a time that is not known"
        return (
            f"{position.source} was not read to its end {since}, and keeps deletions for {kept_ms / 3_600_000:.3g} h "
            "(delete.retention.ms), so some may be gone"
        )

    def require_all(self, position: Position | None) -> None:
        """Raises RetriableError if the states may lack deletions: the task must be opened again, as `begun_again`."""
        if position is not None and (why := self.gone(position)):
            raise RetriableError(f"{why}: the partition is folded again from its beginning")

    def noted(self, position: Position) -> Position | None:
        """Returns the position that a task without events is to write, so that a later one knows; None for none."""
        if not self._hosted.stage.compacted:
            return None
        try:
            kept_ms = self._kept(_AT_END_MS)
        except RetriableError:
            # Nothing is applied during an outage, and the task goes on answering.
            return None
        if kept_ms is None:
            return None
        seen_to_ms = self.seen_at(position.offset)
        is_late = seen_to_ms - position.seen_to_ms > min(_NOTED_EVERY_MS, (kept_ms - _margin_ms(kept_ms)) // 4)
        return replace(position, seen_to_ms=seen_to_ms) if is_late else None

    def _kept(self, away_ms: int) -> int | None:
        """Returns how long the source keeps tombstones, in ms; None if it drops none."""
        if not self._asked_ms or (away_ms >= _AT_END_MS and now_ms() - self._asked_ms > _KNOWN_FOR_MS):
            config = self._hosted.topics.config(self._hosted.source.name)
            self._kept_ms, self._asked_ms = tombstones_kept_ms(config) if is_compacted(config) else None, now_ms()
        return self._kept_ms


def begun_again(position: Position, start: int) -> Position:
    """Returns the position of a task that begins again at the first record of its source. It keeps its dead letters.

    Args:
        start: the offset of the first record.
    """
    known_up_to = max(position.offset, position.emitted_up_to)
    return replace(
        position,
        offset=start,
        # A standby may go on to answer.
        epoch=position.epoch + 1,
        keys=0,
        stream_time_ms=-1,
        emitted_up_to=known_up_to,
        seen_to_ms=now_ms(),
    )


def again_up_to(stage: Stage, position: Position) -> int:
    """Returns up to which offset a position folds records again since `begun_again`; 0 if it does not."""
    return position.emitted_up_to if stage.compacted and position.offset < position.emitted_up_to else 0


def without_states(store: StateStore) -> Iterator[Record]:
    """Yields the deletions of all states and markers of a store, which the caller may write as they come."""
    for start, stop in ((b"", RESERVED_PREFIX), MARKERS):
        while keys := store.keys(start, stop, _SCANNED):
            yield from ((key, None) for key in keys)
            start = keys[-1] + b"\0"


def _margin_ms(kept_ms: int) -> int:
    return min(_MOST_MARGIN_MS, kept_ms // 2)
