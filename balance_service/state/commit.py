"""The commit protocol: how a part of a micro-batch becomes durable and visible, exactly once in effect.

 1. Spark has read `[start, end)`, and the updates of each key were combined (`events.micro_batch`).
 2. The part is taken only if its start is the store's position. Touched states are read and folded.
 3. One Kafka transaction: the new states and last the position to the changelog, the dead letters beside
     them.
 4. One RocksDB write: the same states, the position, the changelog offset after the position record.
 5. The store's new view is what queries read from now on.

A crash before 3 ends leaves nothing; after it, the changelog has all of it and the store fetches it on
opening.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from balance_service.errors import PoisonRecordError, TaskMigratedError
from balance_service.failpoints import reach
from balance_service.state.records import POSITION_KEY, Position

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from balance_service.avro.codec import AvroCodec
    from balance_service.read_models.read_model import ReadModel, State
    from balance_service.state.changelog import ChangelogWriter, Record
    from balance_service.state.records import DeadLetter, KeyedUpdate, TaskBatch
    from balance_service.state.store import StateStore

MISPLACED = "key-not-of-this-partition"


@dataclass(frozen=True, slots=True)
class Folding:
    """How updates become states, and which keys may be here; the same for all tasks of a read model."""

    read_model: ReadModel
    state_codec: AvroCodec
    position_codec: AvroCodec
    partition_of: Callable[[bytes], int]


@dataclass(frozen=True, slots=True)
class Committed:
    """What one commit did, in records."""

    applied: int
    ignored: int
    dead_lettered: int


def commit(batch: TaskBatch, partition: int, folding: Folding, store: StateStore, writer: ChangelogWriter) -> Committed:
    """Steps 2 to 5.

    Raises:
        TaskMigratedError: the part does not start at the store's position, or the task was fenced.
        RetriableError: the outcome of step 3 is unknown, or step 4 failed: the task must be opened again.
        StoreCorruptedError: the store gave back what was never written.
    """
    stands_at = store.position
    if stands_at is None or batch.start != stands_at.offset:
        raise TaskMigratedError(f"the batch starts at {batch.start}, the store stands at {stands_at}")
    states, more_letters = fold(batch, partition, folding, store)
    letters = sorted((*batch.dead_letters, *more_letters), key=lambda letter: letter.offset)
    position = folding.position_codec.encode(replace(stands_at, offset=batch.end).record())
    reach("folded")
    changelog_offset = writer.commit(states, letters, position)
    store.write((*states, (POSITION_KEY, position)), changelog_offset)
    reach("stored")
    return Committed(batch.applied - len(more_letters), batch.ignored, len(letters))


def write_position(position: Position, codec: AvroCodec, store: StateStore, writer: ChangelogWriter) -> None:
    """Record a position alone, as a task does when it is opened. Raises as `commit` does."""
    record = codec.encode(position.record())
    store.write([(POSITION_KEY, record)], writer.commit([], [], record))


def fold(
    batch: TaskBatch, partition: int, folding: Folding, store: StateStore
) -> tuple[list[Record], list[DeadLetter]]:
    """The new states of a batch, framed, and the events that turned out not to be applicable.

    Where a combined update cannot be applied, its key's events are folded singly in offset order, so that the
    outcome does not depend on where a batch begins and ends.
    """
    before = _read(store, folding, dict.fromkeys(update.key for update in batch.updates))
    # A key that has a state here was checked when it came.
    strangers = {key for key, state in before.items() if state is None and folding.partition_of(key) != partition}
    after: dict[bytes, State] = {}
    to_single = set(strangers)
    for keyed in batch.updates:
        if keyed.key in to_single:
            continue
        try:
            after[keyed.key] = _step(folding, after.get(keyed.key, before[keyed.key]), keyed)
        except PoisonRecordError:
            after.pop(keyed.key, None)
            to_single.add(keyed.key)
    letters: list[DeadLetter] = []
    for single in batch.singles(sorted(to_single)) if to_single else ():
        key = single.keyed.key
        if key in strangers:
            letters.append(replace(single.record, cause=MISPLACED))
            continue
        try:
            after[key] = _step(folding, after.get(key, before[key]), single.keyed)
        except PoisonRecordError as error:
            letters.append(replace(single.record, cause=error.cause))
    encode = folding.state_codec.encode
    return [(key, encode(state)) for key, state in after.items()], letters


def _step(folding: Folding, state: State | None, keyed: KeyedUpdate) -> State:
    return folding.read_model.fold(state, {**keyed.update, "key": keyed.key})


def _read(store: StateStore, folding: Folding, keys: Iterable[bytes]) -> dict[bytes, State | None]:
    wanted = list(keys)
    decode = folding.state_codec.decode
    return {
        key: None if frame is None else decode(frame) for key, frame in zip(wanted, store.get_many(wanted), strict=True)
    }
