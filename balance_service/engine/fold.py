"""Folds the updates of a batch into the states of one task. Reads the store, writes nothing."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING

import pyarrow as pa

from balance_service.engine.batch import events_in, updates_in
from balance_service.engine.dead_letter import BEHIND_CAUSE, blocks_key
from balance_service.engine.idempotency import IdempotencyKeys
from balance_service.engine.processor import BatchOutcome, OwnCodeFailedError, Tolerance, call_own_code
from balance_service.engine.records import MISPLACED
from balance_service.errors import PoisonRecordError, RetriableError
from balance_service.model.record_folds import UNAVAILABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any

    import numpy as np
    from numpy.typing import NDArray

    from balance_service.avro.codec import AvroCodec
    from balance_service.engine.batch import KeyedUpdate, TaskBatch
    from balance_service.engine.dead_letters import Letters
    from balance_service.engine.misplaced import MisplacedKeys
    from balance_service.engine.outputs import BatchEmission, Emission
    from balance_service.engine.own_steps import OwnSteps
    from balance_service.engine.records import DeadLetter, Output, Position
    from balance_service.engine.state_frames import StateFrames
    from balance_service.engine.steps import Steps
    from balance_service.engine.store import StateStore
    from balance_service.model.addition import Addition
    from balance_service.model.events import State
    from balance_service.model.read_model import ReadModel

_offset = attrgetter("offset")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldProcessor:
    """Folds events into the states of a read model.

    `acceleration` computes states of combined updates
    without the fold, with the same result; without one, the fold computes all. `emission` is None if the read model
    emits nothing; `steps` folds and emits many events at once, with the same result, if there is such a way.
    """

    read_model: ReadModel
    acceleration: Addition | None
    frames: StateFrames
    position_codec: AvroCodec
    letters: Letters
    marker_codec: AvroCodec
    misplaced: MisplacedKeys
    idempotency_window_ms: int
    tolerance: Tolerance
    emission: Emission | None = None
    steps: Steps | OwnSteps | None = None

    def outcome(self, batch: TaskBatch, partition: int, position: Position, store: StateStore) -> BatchOutcome:
        """As `StageProcessor.outcome`.

        Single events are folded in offset order. If a combined update cannot be applied, the events of its key are read
        again and folded one by one.

        Raises:
            TaskHaltedError: the read model's own code fails on an event.
            TaskMigratedError: the batch was given up.
            RetriableError: a record that must be read again is missing.
        """
        keys = IdempotencyKeys.of(
            batch.updates.events,
            store,
            self.marker_codec,
            self.idempotency_window_ms,
            self.read_model.repeated,
            position.stream_time_ms,
        )
        outcome = BatchOutcome(keys.stream_time_ms)
        blocked = self._blocked(batch, store)
        emission = None if self.emission is None else self.emission.of_batch(batch, partition, position)
        events, read_again, strangers = batch.updates.events, set[bytes](), set[bytes]()
        if self.read_model.folds_rows:
            events = [*events, *self._stepped(batch, partition, store, blocked, emission, outcome)]
        else:
            read_again, strangers = self._fold_combined(batch, partition, store, blocked, outcome)
        singly = _by_key(events)
        before = self._states(store, singly)
        # The partition of a key that has a state was checked with its first event.
        new = [key for key, state in before.items() if state is None]
        places = zip(new, self.misplaced.partitioning.of_keys(new), strict=True)
        strangers |= {key for key, place in places if place != partition}
        if strangers:
            self.misplaced.found(strangers, partition)
        sent = self.read_model.key_type.sent
        lacking = {sent(key): key for key, of in singly.items() if any(self.read_model.lacks(one.update) for one in of)}
        unread = {lacking[key]: offset for key, offset in self.letters.first_open(store, lacking, batch).items()}
        one_by_one = _OneByOne(self, batch, partition, position.source, blocked, emission, keys, outcome, unread)
        for key in singly.keys() - strangers:
            batch.require_wanted()
            if not one_by_one.fold(before[key], singly[key]):
                read_again.add(key)
        batch.require_wanted()
        again = sorted(read_again | strangers)
        before |= self._states(store, read_again - before.keys())
        for key, events in _by_key(batch.updates.singles(again) if again else ()).items():
            batch.require_wanted()
            found = [event.record for event in events if event.record is not None]
            if len(found) < len(events):
                raise RetriableError(
                    f"of {len(events)} records of a key of {position.source}, only {len(found)} could be read again"
                )
            if key in strangers:
                detail = self.misplaced.detail(key)
                outcome.dead_letters += [replace(record, cause=MISPLACED, detail=detail) for record in found]
            else:
                one_by_one.fold(before[key], events)
        for key, frame in one_by_one.after.items():
            outcome.add(key, frame, is_new=before[key] is None)
        if outcome.columns or outcome.others:
            self.tolerance.applied(partition)
        outcome.others += keys.records(store)
        outcome.outputs.sort(key=_offset)
        return outcome

    def _blocked(self, batch: TaskBatch, store: StateStore) -> Mapping[bytes, int]:
        """Returns the offset after which the events of each blocked key must wait; empty if order does not matter."""
        updates = batch.updates
        if not self.letters.keeps_order or not (updates.dead_letters or self.letters.blocks_keys(store)):
            return {}
        combined = (some["key"].to_pylist() for some in updates.slices())
        sent = self.read_model.key_type.sent
        # Dead letters have the keys of their records.
        keys = {sent(key): key for key in {update.key for update in updates.events}.union(*combined)}
        blocked = self.letters.blocked_after(store, keys, batch.retried)
        for letter in updates.dead_letters:
            if letter.key in keys and letter.key is not None and blocks_key(letter.cause):
                blocked[letter.key] = min(letter.offset, blocked.get(letter.key, letter.offset))
        return {keys[key]: offset for key, offset in blocked.items()}

    def _stepped(
        self,
        batch: TaskBatch,
        partition: int,
        store: StateStore,
        blocked: Mapping[bytes, int],
        emission: BatchEmission | None,
        outcome: BatchOutcome,
    ) -> Sequence[KeyedUpdate]:
        """Adds the states and outputs of events in columns to the outcome; returns the events of the other keys."""
        rows = batch.updates.combined
        if rows is None:
            return ()
        if self.steps is None:
            return events_in(rows)
        rest: list[pa.Table] = []
        for stepped in self.steps.of(rows, store, blocked, self.misplaced.partitioning, partition, emission):
            batch.require_wanted()
            outcome.columns.append((stepped.keys, stepped.frames))
            outcome.created += stepped.created
            outcome.outputs += stepped.outputs
            for key in stepped.deleted:
                outcome.add(key, None, is_new=False)
            rest.append(stepped.rest)
        left = pa.concat_tables(rest).sort_by("offset")
        if left.num_rows < rows.num_rows:
            self.tolerance.applied(partition)
        return events_in(left)

    def _belong(self, partition: int) -> Callable[[NDArray[np.uint8]], NDArray[np.bool_]]:
        return lambda keys: self.misplaced.partitioning.of_rows(keys) == partition

    def _fold_combined(
        self,
        batch: TaskBatch,
        partition: int,
        store: StateStore,
        blocked: Mapping[bytes, int],
        outcome: BatchOutcome,
    ) -> tuple[set[bytes], set[bytes]]:
        """Adds the new states to the outcome.

        Returns the keys whose combined update cannot be applied, and the keys that belong to another partition.
        """
        inapplicable: set[bytes] = set()
        strangers: set[bytes] = set()
        decode = self.frames.codec.decode
        supersedes = self.letters.supersedes(store, batch.updates.dead_letters)
        for some in batch.updates.slices():
            keys = some["key"].to_pylist()
            frames = store.get_many(keys)
            after = self._accelerated(partition, frames, some)
            if blocked:
                after = [None if key in blocked else frame for key, frame in zip(keys, after, strict=True)]
            outcome.columns.append((some["key"], pa.array(after, pa.binary())))
            outcome.created += sum(new is not None and frame is None for frame, new in zip(frames, after, strict=True))
            rest = [row for row, frame in enumerate(after) if frame is None]
            for update, before in zip(updates_in(some, rest), (frames[row] for row in rest), strict=True):
                if before is None and self.misplaced.partitioning.of(update.key) != partition:
                    strangers.add(update.key)
                    continue
                if update.key in blocked:
                    inapplicable.add(update.key)
                    continue
                try:
                    state = self.step(None if before is None else decode(before), update)
                    frame = None if state is None else self.frames.framed(state)[1]
                except PoisonRecordError:
                    inapplicable.add(update.key)
                    continue
                outcome.add(update.key, frame, is_new=before is None)
                if supersedes:
                    outcome.newest[self.read_model.key_type.sent(update.key)] = update.offset
        return inapplicable, strangers

    def _accelerated(self, partition: int, frames: Sequence[bytes | None], some: pa.RecordBatch) -> list[bytes | None]:
        """Returns the next states that the acceleration computes, with None for those that the fold must compute.

        These states always fit the changelog: they contain a short key and numbers of 8 bytes.
        """
        if self.acceleration is None:
            return [None] * len(frames)
        return self.acceleration.next_states(some["key"], some, frames, self._belong(partition))

    def step(self, state: State | None, update: KeyedUpdate, event: Any = None) -> State | None:
        """Returns the next state, or None if the fold deletes it. Raises as `call_own_code`."""
        return call_own_code(self.read_model.next_state, state, update.key, update.update, event)

    def _states(self, store: StateStore, keys: Iterable[bytes]) -> dict[bytes, State | None]:
        wanted = list(keys)
        decode = self.frames.codec.decode
        return {
            key: None if frame is None else decode(frame)
            for key, frame in zip(wanted, store.get_many(wanted), strict=True)
        }


@dataclass(frozen=True, slots=True)
class _OneByOne:
    """Folds the events of keys one by one, and adds the results to `outcome` and `after`."""

    processor: FoldProcessor
    batch: TaskBatch
    partition: int
    source: str
    """A topic and its partition."""
    blocked: Mapping[bytes, int]
    """By key, the offset after which its events must wait."""
    emission: BatchEmission | None
    idempotency_keys: IdempotencyKeys
    outcome: BatchOutcome
    unread: dict[bytes, int]
    """By key, the offset of the first event that might have a value which a later one lacks; see `ReadModel.lacks`."""
    after: dict[bytes, bytes | None] = field(default_factory=dict)
    """The frames of the new states by key; None for a deleted state."""

    def fold(self, before: State | None, events: Sequence[KeyedUpdate], *, frames_each: bool = False) -> bool:
        """Folds the events of one key. Returns False and changes nothing if an event that fails has no record.

        Args:
            frames_each: whether each state is encoded, and not only the last one, also if a model has standard folds.

        Raises:
            TaskHaltedError: the read model's own code fails on an event.
        """
        # A state of an own fold may change when it is encoded, such as a float that is rounded, and its code may hold
        # on to it. Encoding each state makes the result independent of where batches end.
        is_sent = self.emission is not None and self.emission.takes_each_frame
        frames_each = frames_each or is_sent or not self.processor.read_model.standard_folds
        processor, model = self.processor, self.processor.read_model
        letters: list[DeadLetter] = []
        outputs: list[Output] = []
        state, duplicates, last, frame = before, 0, None, None
        last_to_send, state_in_topic = None, before
        blocked_after = self.blocked.get(events[0].key, events[-1].offset)
        for update in events:
            try:
                if update.offset > blocked_after:
                    why = f"the event of this key at offset {blocked_after} could not be applied yet"
                    raise PoisonRecordError(BEHIND_CAUSE, why)
                if self.idempotency_keys.is_repeated(update):
                    duplicates += 1
                    continue
                lacks = processor.read_model.lacks(update.update)
                if lacks and self.unread.get(update.key, update.offset) < update.offset:
                    why = f"a value was not sent, and the record at offset {self.unread[update.key]} may have it"
                    raise PoisonRecordError(UNAVAILABLE, why)
                event = None if model.standard_folds else model.told(update.update, update.timestamp_ms)
                following, following_frame = processor.step(state, update, event), None
                if frames_each and following is not None:
                    following, following_frame = processor.frames.framed(following)
                if self.emission is not None:
                    outputs += self.emission.of_event(update, event, following, following_frame)
            except PoisonRecordError as error:
                if update.record is None:
                    self.idempotency_keys.forget(events)
                    return False
                if isinstance(error, OwnCodeFailedError):
                    if self.after or last is not None:
                        processor.tolerance.applied(self.partition)
                    why_not = processor.tolerance.why_not(error, self.partition, update.offset)
                    self._require_retried(error, update, why_not)
                    if processor.letters.keeps_order:
                        blocked_after = update.offset
                letters.append(replace(update.record, cause=error.cause, detail=error.detail))
                self.unread.setdefault(update.key, update.offset)
            else:
                # A batch may begin with events, and retries may end with one, whose outputs were sent before.
                if self.emission is not None and self.emission.sends_for(update):
                    state_in_topic = state if last_to_send is None else state_in_topic
                    last_to_send = update
                if not lacks:
                    self.unread.pop(update.key, None)
                state, frame, last = following, following_frame, update
                self.idempotency_keys.remember(update)
        if last is not None:
            if frame is None and state is not None:
                try:
                    _, frame = processor.frames.framed(state)
                except PoisonRecordError:
                    # Encoding the state after each event finds the event that made it unfit.
                    self.idempotency_keys.forget(events)
                    return self.fold(before, events, frames_each=True)
            if self.emission is not None and last_to_send is not None and state != state_in_topic:
                try:
                    outputs += self.emission.of_last(last_to_send, state, frame)
                except OwnCodeFailedError as error:
                    # The output depends on all of the events, so none of them is applied.
                    self._require_retried(error, last_to_send)
                    self.idempotency_keys.forget(events)
                    refused = {letter.offset for letter in letters}
                    rest = [event.record for event in events if event.record and event.offset not in refused]
                    self.outcome.dead_letters += [
                        *letters,
                        *(replace(one, cause=error.cause, detail=error.detail) for one in rest),
                    ]
                    return True
            self.after[last.key] = frame
            if processor.letters.keeps_newest:
                self.outcome.newest[processor.read_model.key_type.sent(last.key)] = last.offset
        self.outcome.dead_letters += letters
        self.outcome.outputs += outputs
        self.outcome.duplicates += duplicates
        return True

    def _require_retried(self, error: OwnCodeFailedError, event: KeyedUpdate, why_not: str | None = "") -> None:
        model = self.processor.read_model.name
        error.require_retried(self.batch, model, self.source, event.offset, event.key, why_not)


def _by_key(updates: Iterable[KeyedUpdate]) -> dict[bytes, list[KeyedUpdate]]:
    grouped: dict[bytes, list[KeyedUpdate]] = {}
    for update in updates:
        grouped.setdefault(update.key, []).append(update)
    return grouped
