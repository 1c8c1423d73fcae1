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

from balance_service.engine.changelog_writer import ChangelogCutError
from balance_service.engine.records import POSITION_KEY
from balance_service.errors import RetriableError, StoreFullError, TaskMigratedError
from balance_service.process.failpoints import reach

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from balance_service.avro.codec import AvroCodec
    from balance_service.engine.changelog_writer import ChangelogWriter
    from balance_service.engine.dead_letter import Letter, LetterChanges, Status
    from balance_service.engine.processor import StageProcessor
    from balance_service.engine.records import DeadLetter, Output, Position, Record, TaskBatch
    from balance_service.engine.store import StateStore


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
    healed: int = 0
    """Dead letters of which the record is applied now."""
    scheduled: int = 0
    """Records of another producer's dead letters, to be sent on when they are due."""


def commit(
    batch: TaskBatch, partition: int, processor: StageProcessor, store: StateStore, writer: ChangelogWriter
) -> Committed:
    """Steps 2 to 5.

    Of a batch of dead letters, nothing, if one of them was closed since they were looked up.

    Raises:
        TaskMigratedError: the batch does not start at the store's position, or the task was fenced.
        RetriableError: the outcome of step 3 is unknown, step 4 failed, now or before, or the store holds more than the
            changelog does: open the task again.
        StoreFullError: the disk has no room; if only step 4 finds that, the changelog is ahead of the store.
        StoreCorruptedError: the store gave back what was never written.
    """
    stands_at = store.position
    if stands_at is None or batch.start != stands_at.offset:
        raise TaskMigratedError(f"the batch starts at {batch.start}, the store stands at {stands_at}")
    _require_whole(store)
    known = processor.letters.of_batch(store, batch)
    if any(at not in known or not known[at].status.is_open for at in batch.retried):
        return Committed(0, 0, 0, 0)
    unsent = frozenset(offset for offset, letter in known.items() if not letter.is_sent)
    outcome = processor.outcome(replace(batch, unsent=unsent), partition, stands_at, store)
    failed = sorted((*batch.dead_letters, *outcome.dead_letters), key=lambda letter: letter.offset)
    changes = processor.letters.after(store, known, failed, batch.forgotten, outcome.letters)
    moved = replace(
        stands_at,
        offset=batch.end,
        stream_time_ms=outcome.stream_time_ms,
        keys=stands_at.keys + outcome.created - outcome.deleted,
        letters=changes.counted,
    )

    def records() -> Iterator[Record]:
        return itertools.chain(outcome.records(), changes.records)

    reach("folded")
    _write(moved, processor.position_codec, store, writer, records, changes.fresh, outcome.outputs)
    reach("stored")
    return Committed(
        applied=batch.applied - len(outcome.dead_letters) - outcome.duplicates - len(outcome.letters),
        ignored=batch.ignored,
        duplicates=outcome.duplicates,
        dead_lettered=len(failed),
        causes=Counter(letter.cause for letter in changes.fresh),
        deleted=outcome.deleted,
        sent=len(outcome.outputs),
        healed=changes.applied,
        scheduled=len(outcome.letters),
    )


def decide(
    decided: Iterable[Letter],
    status: Status,
    audit: Sequence[Output],
    processor: StageProcessor,
    store: StateStore,
    writer: ChangelogWriter,
) -> None:
    """Write what was decided about dead letters, with the records that say so. Raises as `commit` does."""
    stands_at = store.position
    if stands_at is None:
        raise TaskMigratedError("the store has no position")
    _require_whole(store)
    changes = processor.letters.decided(store, decided, status)
    moved = replace(stands_at, letters=changes.counted)
    try:
        _write(moved, processor.position_codec, store, writer, lambda: iter(changes.records), (), audit)
    except StoreFullError as error:
        # Only the task's own loop waits for room with a store that lacks what the changelog has.
        raise RetriableError(f"the decision is written, and the store lacks it: {error}") from error


def write_position(
    position: Position,
    codec: AvroCodec,
    store: StateStore,
    writer: ChangelogWriter,
    letters: LetterChanges | None = None,
) -> None:
    """Record a position as a task does when it is opened, with the letters that it begins with. Raises as `commit`."""
    if letters is None or not letters.records:
        _write(position, codec, store, writer, tuple)
    else:
        moved = replace(position, letters=letters.counted)
        _write(moved, codec, store, writer, lambda: iter(letters.records))


def _require_whole(store: StateStore) -> None:
    if store.reaches > store.changelog_offset:
        # Some of it is folded in there, and would be once more.
        raise RetriableError("the store holds part of a commit, which the changelog has in full")
    store.require_room()


def _write(
    position: Position,
    codec: AvroCodec,
    store: StateStore,
    writer: ChangelogWriter,
    records: Callable[[], Iterable[Record]],
    dead_letters: Iterable[DeadLetter] = (),
    outputs: Iterable[Output] = (),
) -> None:
    """Steps 3 to 5; `records` gives the same each time."""
    frame = codec.encode(position.record())
    try:
        changelog_offset = writer.commit(records(), dead_letters, frame, store.changelog_offset, outputs)
        store.write(itertools.chain(records(), [(POSITION_KEY, frame)]), changelog_offset)
    except ChangelogCutError:
        writer.close()
        # What was sent and not committed takes offsets, too: the changelog may end beyond the store from now on.
        store.distrust()
        raise
    except BaseException:
        # The changelog may have what the store lacks. A decision about a dead letter, say, would put the position back.
        writer.close()
        raise
