"""The commit protocol: how a micro-batch becomes durable and visible, exactly once in effect.

 1. The task has pulled `[start, end)`, and the updates of each key were combined (`events.feed`).
 2. The batch is taken only if its start is the store's position. Touched states are read and folded.
 3. One Kafka transaction: the new states, markers of idempotency keys, and last the position to the changelog; the
    dead letters and what the stage sends beside them.
 4. The same records to RocksDB, last the position and with it the changelog offset after its record. Many go in parts.
 5. The store's new view is what queries read from now on.

A crash before 3 ends leaves nothing; after it, the changelog has all of it and the store fetches it on
opening.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from balance_service.errors import RetriableError, TaskMigratedError
from balance_service.process.failpoints import reach
from balance_service.state.records import POSITION_KEY

if TYPE_CHECKING:
    from collections.abc import Mapping

    from balance_service.avro.codec import AvroCodec
    from balance_service.state.changelog.writer import ChangelogWriter
    from balance_service.state.records import Position, TaskBatch
    from balance_service.state.store.store import StateStore
    from balance_service.state.work import Work


@dataclass(frozen=True, slots=True)
class Committed:
    """What one commit did, in records."""

    applied: int
    ignored: int
    duplicates: int
    dead_lettered: int
    causes: Mapping[str, int] = field(default_factory=dict)
    """Of the dead letters."""
    deleted: int = 0
    """States that the fold removed."""
    sent: int = 0
    """Records for other topics."""


def commit(batch: TaskBatch, partition: int, work: Work, store: StateStore, writer: ChangelogWriter) -> Committed:
    """Steps 2 to 5.

    Raises:
        TaskMigratedError: the batch does not start at the store's position, or the task was fenced.
        RetriableError: the outcome of step 3 is unknown, or step 4 failed, now or before: open the task again.
        StoreFullError: the disk has no room; if only step 4 finds that, the changelog is ahead of the store.
        StoreCorruptedError: the store gave back what was never written, or holds more than the changelog does.
    """
    stands_at = store.position
    if stands_at is None or batch.start != stands_at.offset:
        raise TaskMigratedError(f"the batch starts at {batch.start}, the store stands at {stands_at}")
    holds_up_to = store.changelog_offset
    if store.reaches > holds_up_to:
        # Some of it is folded in there, and would be once more.
        raise RetriableError("the store holds part of a commit, which the changelog has in full")
    store.require_room()
    folded = work.outcome(batch, partition, store)
    letters = sorted((*batch.dead_letters, *folded.dead_letters), key=lambda letter: letter.offset)
    moved = replace(
        stands_at,
        offset=batch.end,
        stream_time_ms=folded.stream_time_ms,
        keys=stands_at.keys + folded.created - folded.deleted,
    )
    position = work.position_codec.encode(moved.record())
    reach("folded")
    changelog_offset = writer.commit(folded.records(), letters, position, holds_up_to, folded.outputs)
    store.write(itertools.chain(folded.records(), [(POSITION_KEY, position)]), changelog_offset)
    reach("stored")
    applied = batch.applied - len(folded.dead_letters) - folded.duplicates
    causes = Counter(letter.cause for letter in letters)
    sent = len(folded.outputs)
    return Committed(applied, batch.ignored, folded.duplicates, len(letters), causes, folded.deleted, sent)


def write_position(position: Position, codec: AvroCodec, store: StateStore, writer: ChangelogWriter) -> None:
    """Record a position alone, as a task does when it is opened. Raises as `commit` does."""
    record = codec.encode(position.record())
    store.write([(POSITION_KEY, record)], writer.commit([], [], record, store.changelog_offset))
