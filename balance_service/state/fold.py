"""What a batch comes to: its updates folded into the states of one task. Reads the store, writes nothing."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pyarrow as pa

from balance_service.errors import PoisonRecordError
from balance_service.state.idempotency import Retries

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from balance_service.avro.codec import AvroCodec
    from balance_service.read_models.read_model import ReadModel, State
    from balance_service.state.addition import Addition
    from balance_service.state.records import CombinedUpdates, DeadLetter, KeyedUpdate, Record, TaskBatch
    from balance_service.state.store import StateStore

MISPLACED = "key-not-of-this-partition"


@dataclass(frozen=True, slots=True)
class Folding:
    """How updates become states, and which keys may be here; the same for all tasks of a read model."""

    read_model: ReadModel
    addition: Addition | None
    state_codec: AvroCodec
    position_codec: AvroCodec
    marker_codec: AvroCodec
    partition_of: Callable[[bytes], int]
    partitions_of: Callable[[NDArray[np.uint8]], NDArray[np.uint32]]
    idempotency_window_ms: int


@dataclass(slots=True)
class Folded:
    """New states and markers, framed; the events that turned out not to be applicable, or were applied before.

    `columns` are keys and states, row for row, some at a time and null where there is none: as Python's objects, those
    of a large batch would take a multiple of their bytes.
    """

    stream_time_ms: int
    columns: list[tuple[pa.Array, pa.Array]]
    others: list[Record] = field(default_factory=list)
    dead_letters: list[DeadLetter] = field(default_factory=list)
    duplicates: int = 0

    def records(self) -> Iterator[Record]:
        """All that is new, for the changelog and for the store."""
        for keys, frames in self.columns:
            yield from (
                (key, frame)
                for key, frame in zip(keys.to_pylist(), frames.to_pylist(), strict=True)
                if frame is not None
            )
        yield from self.others


def fold(batch: TaskBatch, partition: int, folding: Folding, store: StateStore) -> Folded:
    """The outcome of a batch; it does not depend on where batches begin and end.

    Events that came singly are folded so, in offset order. So are those of a key of which the combined update cannot
    be applied, from its events read again.
    """
    columns, records, read_again, strangers = _fold_combined(batch.updates, partition, folding, store)
    singly = _by_key(batch.events)
    before = _read(store, folding, singly)
    # A key that has a state here was checked when it came.
    strangers |= {key for key, state in before.items() if state is None and folding.partition_of(key) != partition}
    retries = Retries.of(
        itertools.chain.from_iterable(singly.values()),
        store,
        folding.marker_codec,
        folding.idempotency_window_ms,
        -1 if store.position is None else store.position.stream_time_ms,
    )
    folded = Folded(retries.stream_time_ms, columns)
    after: dict[bytes, State] = {}
    for key in singly.keys() - strangers:
        if not _fold_singly(folding, before[key], singly[key], retries, folded, after):
            read_again.add(key)
    again = sorted(read_again | strangers)
    before |= _read(store, folding, read_again - before.keys())
    for key, events in _by_key(batch.singles(again) if again else ()).items():
        if key in strangers:
            folded.dead_letters += [replace(event.record, cause=MISPLACED) for event in events if event.record]
        else:
            _fold_singly(folding, before[key], events, retries, folded, after)
    encode = folding.state_codec.encode
    folded.others = [*records, *((key, encode(state)) for key, state in after.items()), *retries.records(store)]
    return folded


def _fold_combined(
    updates: Iterable[CombinedUpdates], partition: int, folding: Folding, store: StateStore
) -> tuple[list[tuple[pa.Array, pa.Array]], list[Record], set[bytes], set[bytes]]:
    """The new states, in columns and others; the keys whose update cannot be applied; those that do not belong here."""
    columns: list[tuple[pa.Array, pa.Array]] = []
    records: list[Record] = []
    inapplicable: set[bytes] = set()
    strangers: set[bytes] = set()
    encode, decode = folding.state_codec.encode, folding.state_codec.decode
    for some in updates:
        keys = some.keys.to_pylist()
        frames = store.get_many(keys)
        added = _added(folding, partition, frames, some)
        columns.append((some.keys, pa.array(added, pa.binary())))
        rest = [row for row, frame in enumerate(added) if frame is None]
        for update, before in zip(some.take(rest), (frames[row] for row in rest), strict=True):
            if before is None and folding.partition_of(update.key) != partition:
                strangers.add(update.key)
                continue
            try:
                state = _step(folding, None if before is None else decode(before), update)
            except PoisonRecordError:
                inapplicable.add(update.key)
            else:
                records.append((update.key, encode(state)))
    return columns, records, inapplicable, strangers


def _added(
    folding: Folding, partition: int, frames: Sequence[bytes | None], some: CombinedUpdates
) -> list[bytes | None]:
    """The next states that come of adding columns; None for those that only the fold can tell."""
    if folding.addition is None:
        return [None] * len(frames)
    amounts = some.columns[folding.addition.column]
    added = folding.addition.add(frames, amounts)
    new = pa.array([row for row, frame in enumerate(frames) if frame is None], pa.int64())
    begun = folding.addition.begin(
        some.keys.take(new), amounts.take(new), lambda keys: folding.partitions_of(keys) == partition
    )
    for row, frame in zip(new.to_pylist(), begun, strict=True):
        added[row] = frame
    return added


def _fold_singly(
    folding: Folding,
    state: State | None,
    events: Sequence[KeyedUpdate],
    retries: Retries,
    folded: Folded,
    after: dict[bytes, State],
) -> bool:
    """Fold one key's events; False, with nothing changed, if one that cannot be applied has no record."""
    letters: list[DeadLetter] = []
    duplicates, is_changed = 0, False
    for event in events:
        try:
            if retries.is_repeated(event):
                duplicates += 1
                continue
            state = _step(folding, state, event)
        except PoisonRecordError as error:
            if event.record is None:
                retries.forget(events)
                return False
            letters.append(replace(event.record, cause=error.cause))
        else:
            is_changed = True
            retries.remember(event)
    if is_changed and state is not None:
        after[events[0].key] = state
    folded.dead_letters += letters
    folded.duplicates += duplicates
    return True


def _step(folding: Folding, state: State | None, update: KeyedUpdate) -> State:
    return folding.read_model.fold(state, {**update.update, "key": update.key})


def _by_key(updates: Iterable[KeyedUpdate]) -> dict[bytes, list[KeyedUpdate]]:
    grouped: dict[bytes, list[KeyedUpdate]] = {}
    for update in updates:
        grouped.setdefault(update.key, []).append(update)
    return grouped


def _read(store: StateStore, folding: Folding, keys: Iterable[bytes]) -> dict[bytes, State | None]:
    wanted = list(keys)
    decode = folding.state_codec.decode
    return {
        key: None if frame is None else decode(frame) for key, frame in zip(wanted, store.get_many(wanted), strict=True)
    }
