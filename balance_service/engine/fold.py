"""What a batch comes to: its updates folded into the states of one task. Reads the store, writes nothing."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING

import pyarrow as pa

from balance_service.engine.dead_letter import BEHIND_CAUSE, blocks_key
from balance_service.engine.idempotency import IdempotencyKeys
from balance_service.engine.outputs import ENVELOPE_BYTES
from balance_service.engine.processor import BatchOutcome, OwnCodeFailedError, call_own
from balance_service.engine.records import MISPLACED
from balance_service.errors import FatalError, PoisonRecordError, RetriableError
from balance_service.model.event import event_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from balance_service.avro.codec import AvroCodec
    from balance_service.engine.dead_letters import Letters
    from balance_service.engine.outputs import BatchEmission, Emission
    from balance_service.engine.records import (
        CombinedUpdates,
        DeadLetter,
        KeyedUpdate,
        Output,
        Position,
        Record,
        TaskBatch,
    )
    from balance_service.engine.store import StateStore
    from balance_service.model.addition import Addition
    from balance_service.model.event import Event, State
    from balance_service.model.read_model import ReadModel

STATE_UNFIT = "state-does-not-fit"
_offset = attrgetter("offset")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldProcessor:
    """How updates become states, and which keys may be here; the same for all tasks of a read model."""

    read_model: ReadModel
    acceleration: Addition | None
    """What makes states of combined updates that the fold would make alike; None: the fold makes them all."""
    state_codec: AvroCodec
    largest_bytes: int
    """Of a batch that the changelog takes."""
    position_codec: AvroCodec
    letters: Letters
    marker_codec: AvroCodec
    partitions_of_keys: Callable[[Sequence[bytes]], Sequence[int]]
    partitions_of: Callable[[NDArray[np.uint8]], NDArray[np.uint32]]
    idempotency_window_ms: int
    emission: Emission | None = None
    """How the read model emits; None if it does not."""

    def outcome(self, batch: TaskBatch, partition: int, stands_at: Position, store: StateStore) -> BatchOutcome:
        """See `StageProcessor.outcome`."""
        return fold(batch, partition, stands_at, self, store)


def fold(
    batch: TaskBatch, partition: int, stands_at: Position, folding: FoldProcessor, store: StateStore
) -> BatchOutcome:
    """The outcome of a batch; it does not depend on where batches begin and end.

    One thing aside: what standard folds make is looked at where one ends, when a later event may have made it fit.

    Events that came singly are folded so, in offset order. So are those of a key of which the combined update cannot
    be applied, from its events read again.

    Raises:
        TaskHaltedError: the read model's own code fails at an event.
        RetriableError: a record that has to be read again is not there.
    """
    held = _held(batch, folding, store)
    columns, records, read_again, strangers, created = _fold_combined(batch.updates, partition, folding, store, held)
    emission = None if folding.emission is None else folding.emission.of_batch(batch, partition, stands_at)
    singly = _by_key(batch.events)
    before = _read(store, folding, singly)
    # A key that has a state here was checked when it came.
    new = [key for key, state in before.items() if state is None]
    strangers |= {key for key, at in zip(new, folding.partitions_of_keys(new), strict=True) if at != partition}
    idempotency_keys = IdempotencyKeys.of(
        batch.events,
        store,
        folding.marker_codec,
        folding.idempotency_window_ms,
        folding.read_model.repeated,
        stands_at.stream_time_ms,
    )
    outcome = BatchOutcome(idempotency_keys.stream_time_ms, columns, created=created)
    one_by_one = _OneByOne(folding, batch, stands_at.source, held, emission, idempotency_keys, outcome)
    for key in singly.keys() - strangers:
        if not one_by_one.fold(before[key], singly[key]):
            read_again.add(key)
    again = sorted(read_again | strangers)
    before |= _read(store, folding, read_again - before.keys())
    for key, events in _by_key(batch.singles(again) if again else ()).items():
        found = [event.record for event in events if event.record is not None]
        if len(found) < len(events):
            raise RetriableError(
                f"of {len(events)} records of a key of {stands_at.source}, {len(found)} could be read again"
            )
        if key in strangers:
            outcome.dead_letters += [replace(record, cause=MISPLACED) for record in found]
        else:
            one_by_one.fold(before[key], events)
    for key, frame in one_by_one.after.items():
        if frame is not None:
            records.append((key, frame))
            outcome.created += before[key] is None
        elif before[key] is not None:
            records.append((key, None))
            outcome.deleted += 1
    outcome.others = [*records, *idempotency_keys.records(store)]
    outcome.outputs.sort(key=_offset)
    return outcome


def _held(batch: TaskBatch, folding: FoldProcessor, store: StateStore) -> Mapping[bytes, int]:
    """Where order matters: by key, the offset after which a batch's events have to wait for one that failed."""
    if not folding.letters.keeps_order or not (batch.dead_letters or folding.letters.blocks_keys(store)):
        return {}
    keys = {update.key for update in batch.events}.union(*(some.keys.to_pylist() for some in batch.updates))
    held = folding.letters.blocked_after(store, keys, batch.retried)
    for letter in batch.dead_letters:
        if letter.key in keys and letter.key is not None and blocks_key(letter.cause):
            held[letter.key] = min(letter.offset, held.get(letter.key, letter.offset))
    return held


def _fold_combined(
    updates: Iterable[CombinedUpdates],
    partition: int,
    folding: FoldProcessor,
    store: StateStore,
    held: Mapping[bytes, int],
) -> tuple[list[tuple[pa.Array, pa.Array]], list[Record], set[bytes], set[bytes], int]:
    """The new states, in columns and others; the keys whose update cannot be applied; those that do not belong here.

    Last, how many of the states are of keys that had none.
    """
    columns: list[tuple[pa.Array, pa.Array]] = []
    records: list[Record] = []
    inapplicable: set[bytes] = set()
    strangers: set[bytes] = set()
    created = 0
    decode = folding.state_codec.decode
    for some in updates:
        keys = some.keys.to_pylist()
        frames = store.get_many(keys)
        after = _accelerated(folding, partition, frames, some)
        if held:
            after = [None if key in held else frame for key, frame in zip(keys, after, strict=True)]
        columns.append((some.keys, pa.array(after, pa.binary())))
        created += sum(new is not None and frame is None for frame, new in zip(frames, after, strict=True))
        rest = [row for row, frame in enumerate(after) if frame is None]
        for update, before in zip(some.take(rest), (frames[row] for row in rest), strict=True):
            if before is None and folding.partitions_of_keys([update.key]) != [partition]:
                strangers.add(update.key)
                continue
            if update.key in held:
                inapplicable.add(update.key)
                continue
            try:
                state = _step(folding, None if before is None else decode(before), update)
                if state is None:
                    # Only a fold of its own deletes, and its updates are not combined.
                    raise FatalError(f"a standard fold of {folding.read_model.name} has deleted a state")
                _, frame = _framed(folding, state)
            except PoisonRecordError:
                inapplicable.add(update.key)
            else:
                records.append((update.key, frame))
                created += before is None
    return columns, records, inapplicable, strangers, created


def _accelerated(
    folding: FoldProcessor, partition: int, frames: Sequence[bytes | None], some: CombinedUpdates
) -> list[bytes | None]:
    """The next states that the acceleration makes; None for those that only the fold can tell.

    None is too large for the changelog: it holds a key, which is short, and a number of 8 bytes.
    """
    if folding.acceleration is None:
        return [None] * len(frames)
    return folding.acceleration.next_states(
        some.keys, some.columns, frames, lambda keys: folding.partitions_of(keys) == partition
    )


@dataclass(frozen=True, slots=True)
class _OneByOne:
    """Folds the events of keys one by one. The results go to `folded` and `after`."""

    folding: FoldProcessor
    batch: TaskBatch
    source: str
    """A topic and its partition."""
    held: Mapping[bytes, int]
    """By key, the offset after which its events wait."""
    emission: BatchEmission | None
    idempotency_keys: IdempotencyKeys
    outcome: BatchOutcome
    after: dict[bytes, bytes | None] = field(default_factory=dict)
    """The frames of the new states by key; None of a key that has none any more."""

    def fold(self, before: State | None, events: Sequence[KeyedUpdate]) -> bool:
        """Fold the events of a key; False, with nothing changed, if one that cannot be applied has no record.

        Raises:
            TaskHaltedError: the read model's own code failed at an event.
        """
        # What a fold of its own made may come back as another value, a float's nearest; that must not depend on where a
        # batch ends.
        is_sent = self.emission is not None and self.emission.takes_each_frame
        return self._fold(before, events, frames_each=is_sent or not self.folding.read_model.standard_folds)

    def _fold(self, before: State | None, events: Sequence[KeyedUpdate], *, frames_each: bool) -> bool:
        records = self.folding.read_model.stages[-1].records
        letters: list[DeadLetter] = []
        outputs: list[Output] = []
        state, duplicates, last, frame = before, 0, None, None
        held_after = self.held.get(events[0].key, events[-1].offset)
        for update in events:
            try:
                if update.offset > held_after:
                    raise PoisonRecordError(BEHIND_CAUSE, "an earlier event of this key could not be applied yet")
                if self.idempotency_keys.is_repeated(update):
                    duplicates += 1
                    continue
                event = event_of(records, update.update, update.timestamp_ms)
                following, following_frame = _step(self.folding, state, update, event), None
                if frames_each and following is not None:
                    following, following_frame = _framed(self.folding, following)
                if self.emission is not None:
                    outputs += self.emission.of_event(update, event, following, following_frame)
            except PoisonRecordError as error:
                if update.record is None:
                    self.idempotency_keys.forget(events)
                    return False
                if isinstance(error, OwnCodeFailedError):
                    self._require_letter(error, update)
                    if self.folding.letters.keeps_order:
                        held_after = update.offset
                letters.append(replace(update.record, cause=error.cause))
            else:
                state, frame, last = following, following_frame, update
                self.idempotency_keys.remember(update)
        if last is not None:
            if frame is None and state is not None:
                try:
                    _, frame = _framed(self.folding, state)
                except PoisonRecordError:
                    # One of the events is to blame.
                    self.idempotency_keys.forget(events)
                    return self._fold(before, events, frames_each=True)
            if self.emission is not None and state != before:
                try:
                    outputs += self.emission.of_last(last, state, frame)
                except OwnCodeFailedError as error:
                    # What is sent is of all events together, so none of them is applied.
                    self._require_letter(error, last)
                    self.idempotency_keys.forget(events)
                    refused = {letter.offset for letter in letters}
                    rest = [event.record for event in events if event.record and event.offset not in refused]
                    self.outcome.dead_letters += [*letters, *(replace(record, cause=error.cause) for record in rest)]
                    return True
            self.after[last.key] = frame
        self.outcome.dead_letters += letters
        self.outcome.outputs += outputs
        self.outcome.duplicates += duplicates
        return True

    def _require_letter(self, error: OwnCodeFailedError, event: KeyedUpdate) -> None:
        error.require_letter(self.batch, self.folding.read_model.name, self.source, event.offset)


def _step(folding: FoldProcessor, state: State | None, update: KeyedUpdate, event: Event | None = None) -> State | None:
    return call_own(folding.read_model.next_state, state, update.key, update.update, event)


def _framed(folding: FoldProcessor, state: State) -> tuple[State, bytes]:
    """A state as it is read again, and its frame.

    Raises:
        PoisonRecordError: it cannot be kept, or not be read again.
    """
    try:
        frame = folding.state_codec.encode(state)
        if len(frame) + ENVELOPE_BYTES > folding.largest_bytes:
            raise ValueError(f"the changelog would refuse its {len(frame)} bytes for ever")
        # What standard folds make comes back as it was.
        return state if folding.read_model.standard_folds else folding.state_codec.decode(frame), frame
    except Exception as error:  # fastavro raises whatever its writer and reader trip over
        raise PoisonRecordError(STATE_UNFIT, f"the fold's state cannot be kept: {error}") from error


def _by_key(updates: Iterable[KeyedUpdate]) -> dict[bytes, list[KeyedUpdate]]:
    grouped: dict[bytes, list[KeyedUpdate]] = {}
    for update in updates:
        grouped.setdefault(update.key, []).append(update)
    return grouped


def _read(store: StateStore, folding: FoldProcessor, keys: Iterable[bytes]) -> dict[bytes, State | None]:
    wanted = list(keys)
    decode = folding.state_codec.decode
    return {
        key: None if frame is None else decode(frame) for key, frame in zip(wanted, store.get_many(wanted), strict=True)
    }
