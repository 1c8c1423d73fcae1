"""The commit protocol, which makes a micro-batch durable and visible with exactly-once effect.

 1. A Spark query hands over the decoded rows of the offsets `[start, end)`. `spark.gathering` and `spark.combine` make
    them one batch, and combine the updates of each key.
 2. The commit accepts the batch only if its start is the store's position. It reads and folds the states of its keys.
 3. One Kafka transaction writes the new states, the markers of idempotency keys and last the position to the changelog,
    and the dead letters and outputs to their topics.
 4. The same records are written to RocksDB; large commits in several parts. The last one has the position and the
    changelog offset after it.
 5. Queries read the store's new view.

A crash before step 3 ends leaves no trace. After step 3, the changelog has the whole commit, and the store gets it from
there when it is opened.
"""

from __future__ import annotations

import itertools
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from balance_service.engine.records import NEVER, POSITION_KEY
from balance_service.errors import ChangelogCutError, RetriableError, StoreFullError, TaskHaltedError, TaskMigratedError
from balance_service.model.record_folds import TRUNCATED
from balance_service.process.failpoints import failpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from balance_service.avro.codec import AvroCodec
    from balance_service.engine.batch import TaskBatch
    from balance_service.engine.changelog_writer import ChangelogWriter
    from balance_service.engine.dead_letters import LetterChanges
    from balance_service.engine.processor import BatchOutcome, StageProcessor
    from balance_service.engine.records import DeadLetter, Output, Position, Record
    from balance_service.engine.store import StateStore


@dataclass(frozen=True, slots=True)
class Committed:
    """The effect of a commit, counted in records.

    `causes` counts the dead letters by cause, `others` the ignored records of other types by type, `deleted` the states
    that the fold removed, `sent` the records for other topics, `healed` the dead letters whose records are applied now,
    and `scheduled` the dead letters of another application that will be sent when they are due. `changed_keys`
    takes a number, and returns the keys of the changed states; None if there are more. `refused` has the first of the
    dead letters that were sent to their topic, by cause.
    """

    applied: int
    ignored: int
    duplicates: int
    dead_lettered: int
    causes: Mapping[str, int] = field(default_factory=dict)
    deleted: int = 0
    sent: int = 0
    healed: int = 0
    scheduled: int = 0
    others: Mapping[str, int] = field(default_factory=dict)
    changed_keys: Callable[[int], Sequence[bytes] | None] = field(default=lambda _most: (), compare=False, repr=False)
    refused: Mapping[str, DeadLetter] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Folded:
    """What a batch makes of a store, before anything is written; `failed` are the records that cannot be applied."""

    position: Position
    outcome: BatchOutcome
    changes: LetterChanges
    failed: Sequence[DeadLetter]

    def records(self) -> Iterator[Record]:
        """Yields the records for changelog and store, without the position; the same at each call."""
        return itertools.chain(self.outcome.records(), self.changes.records)


def fold(
    batch: TaskBatch, partition: int, processor: StageProcessor, store: StateStore, seen_to_ms: int = NEVER
) -> Folded | None:
    """Executes step 2; returns None if a dead letter that the batch retries was closed since it was read.

    Args:
        seen_to_ms: as `Position.seen_to_ms`, at the end of the batch.

    Raises:
        TaskMigratedError: the batch does not start at the store's position, or was given up.
        TaskHaltedError: the stage's code fails.
        RetriableError: the store contains more than the changelog.
        StoreFullError: the disk has no room.
        StoreCorruptedError: the store returned data that was never written.
    """
    stands_at = store.position
    if stands_at is None or batch.start != stands_at.offset:
        raise TaskMigratedError(f"the batch starts at {batch.start}, the store stands at {stands_at}")
    _require_whole(store)
    known = processor.letters.of_batch(store, batch)
    if any(at not in known or not known[at].status.is_open for at in batch.retried):
        return None
    processor.letters.failures.require_few(batch, partition)
    _require_no_truncation(batch, stands_at)
    unsent = frozenset(offset for offset, letter in known.items() if not letter.is_sent)
    outcome = processor.outcome(replace(batch, unsent=unsent), partition, stands_at, store)
    failed = sorted((*batch.updates.dead_letters, *outcome.dead_letters), key=lambda letter: letter.offset)
    changes = processor.letters.on_commit(
        store, known, failed, batch.forgotten, outcome.letters, outcome.newest, is_silent=batch.is_silent
    )
    moved = replace(
        stands_at,
        offset=batch.end,
        stream_time_ms=outcome.stream_time_ms,
        keys=stands_at.keys + outcome.created - outcome.deleted,
        letters=changes.counted,
        seen_to_ms=max(stands_at.seen_to_ms, seen_to_ms),
    )
    return Folded(moved, outcome, changes, failed)


def commit(
    batch: TaskBatch,
    partition: int,
    processor: StageProcessor,
    store: StateStore,
    writer: ChangelogWriter,
    audit: Sequence[Output] = (),
    seen_to_ms: int = NEVER,
) -> Committed:
    """Executes steps 2 to 5. A batch of dead letters has no effect if one of them was closed since they were read.

    Args:
        audit: records of the decision that makes the batch, if an operator does.
        seen_to_ms: as of `fold`.

    Raises:
        TaskMigratedError: as `fold`, or the task was fenced.
        TaskHaltedError, StoreCorruptedError: as `fold`; nothing is committed.
        RetriableError: the outcome of step 3 is unknown, step 4 failed now or earlier, or as `fold`. The task must be
            opened again.
        StoreFullError: the disk has no room. If step 4 raises it, the changelog is ahead of the store; a decision
            raises RetriableError then.
    """
    folded = fold(batch, partition, processor, store, seen_to_ms)
    if folded is None:
        return Committed(0, 0, 0, 0)
    outcome, changes, updates = folded.outcome, folded.changes, batch.updates
    failpoint("folded")
    # Another generation has written these dead letters.
    fresh = () if batch.is_silent else changes.fresh
    codec, outputs = processor.position_codec, [*outcome.outputs, *audit]
    with _decided() if audit else nullcontext():
        _write(folded.position, codec, store, writer, folded.records, fresh, outputs)
    failpoint("stored")
    return Committed(
        applied=updates.applied - len(outcome.dead_letters) - outcome.duplicates - len(outcome.letters),
        ignored=sum(updates.ignored.values()),
        duplicates=outcome.duplicates,
        dead_lettered=len(folded.failed),
        causes=Counter(letter.cause for letter in changes.fresh),
        deleted=outcome.deleted,
        sent=len(outcome.outputs),
        healed=changes.applied,
        scheduled=len(outcome.letters),
        others={name: records for name, records in updates.ignored.items() if name},
        changed_keys=outcome.changed_keys,
        refused={letter.cause: letter for letter in reversed(fresh)},
    )


def decide(
    changes: LetterChanges,
    audit: Sequence[Output],
    processor: StageProcessor,
    store: StateStore,
    writer: ChangelogWriter,
) -> None:
    """Commits an operator's decision about dead letters, with its audit records. Raises as `commit`."""
    stands_at = store.position
    if stands_at is None:
        raise TaskMigratedError("the store has no position")
    _require_whole(store)
    moved = replace(stands_at, letters=changes.counted)
    with _decided():
        _write(moved, processor.position_codec, store, writer, lambda: iter(changes.records), (), audit)


def write_position(
    position: Position,
    codec: AvroCodec,
    store: StateStore,
    writer: ChangelogWriter,
    letters: LetterChanges | None = None,
    schemas: Sequence[Record] = (),
    outputs: Iterable[Output] = (),
) -> None:
    """Commits the position, and the dead letters, that a task starts with. Raises as `commit`.

    Args:
        schemas, outputs: as `SchemaRecords.missing` returns them.
    """
    records: Sequence[Record] = schemas
    if letters is not None and letters.records:
        position, records = replace(position, letters=letters.counted), [*schemas, *letters.records]
    _write(position, codec, store, writer, lambda: iter(records), (), outputs)


def write_part(
    records: Sequence[Record], position: Position, codec: AvroCodec, store: StateStore, writer: ChangelogWriter
) -> None:
    """Commits a part of what a store is loaded from: new records with values, sorted by key. Raises as `commit`."""
    _require_whole(store)
    _write(position, codec, store, writer, lambda: iter(records), ingested=records)


def write_records(
    records: Callable[[], Iterable[Record]],
    position: Position,
    codec: AvroCodec,
    store: StateStore,
    writer: ChangelogWriter,
    outputs: Iterable[Output] = (),
) -> None:
    """Commits any other records with a position. Raises as `commit`.

    Args:
        records: returns the same records at each call.
    """
    _require_whole(store)
    _write(position, codec, store, writer, records, (), outputs)


@contextmanager
def _decided() -> Iterator[None]:
    """Raises RetriableError in place of StoreFullError, which says of a decision that it was not taken."""
    try:
        yield
    except StoreFullError as error:
        # Only the task's own loop can wait for room while the changelog is ahead of the store.
        raise RetriableError(f"the decision is written, and the store lacks it: {error}") from error


def _require_no_truncation(batch: TaskBatch, stands_at: Position) -> None:
    for letter in batch.updates.dead_letters:
        if letter.cause == TRUNCATED and letter.offset not in batch.retried:
            raise TaskHaltedError(
                f"offset {letter.offset} of {stands_at.source} says that the table was truncated, but not which rows "
                "it had, so states would remain of rows that are gone; let the connector write a new snapshot to a "
                "new topic, with `skipped.operations=t`, and read that by a model of another name"
            )


def _require_whole(store: StateStore) -> None:
    if store.written_up_to > store.changelog_offset:
        # Folding the batch again would apply that part twice.
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
    ingested: Sequence[Record] = (),
) -> None:
    """Executes steps 3 to 5. `records` returns the same records on each call, or `ingested`, if those are given."""
    frame = codec.encode(position.record())
    try:
        changelog_offset = writer.commit(records(), dead_letters, frame, store.changelog_offset, outputs)
        if ingested:
            store.ingest(ingested, (POSITION_KEY, frame), changelog_offset)
        else:
            store.write(itertools.chain(records(), [(POSITION_KEY, frame)]), changelog_offset)
    except ChangelogCutError:
        writer.close()
        # Uncommitted records take offsets too, so the changelog may now end beyond the store.
        store.distrust()
        raise
    except BaseException:
        # The changelog may be ahead of the store now. A further commit, such as a decision, would reset the position.
        writer.close()
        raise
