"""Folds the events of many keys by a read model's own code, and makes the outputs of each event.

All work except the calls of the code is done for many events at once: events are made of columns, and states and
outputs are checked and encoded in columns. The event-by-event way of `fold.py` defines the result. A key is left to it,
with all of its events, if the code refuses one or fails, or if a state or an output is refused, or read as another.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import compress, groupby, pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from balance_service.engine.outputs import encoded, sent_record
from balance_service.engine.steps import Stepped, numbered
from balance_service.model.events import listed
from balance_service.model.value_types import same

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from balance_service.avro.flat_records import FlatRecords
    from balance_service.engine.outputs import BatchEmission
    from balance_service.engine.records import Output
    from balance_service.engine.state_frames import StateFrames
    from balance_service.engine.store import StateStore
    from balance_service.formats.format import RecordCodec
    from balance_service.kafka.partitioner import Partitioning
    from balance_service.model.converters import StateConverter
    from balance_service.model.events import State
    from balance_service.model.read_model import ReadModel

# So many events are Python objects at a time, and more if one key has more.
_SLICE_EVENTS = 8192


class _Keeping(Protocol):
    """How the states of a read model are kept while the events of a batch are folded."""

    stored: Callable[[State], Any]
    """Returns a state of the store as `kept` would."""
    lent: Callable[[Any], Any]
    """Returns what the code receives of a kept state, and may change."""
    kept: Callable[[Any], Any]
    """Returns a copy of a state that the code returned, so that the code cannot change it later.

    Raises an error of any type if the state does not fit.
    """

    def are_exact(self, kept: Sequence[Any]) -> bool:
        """Whether the store would return the same states. May raise an error of any type if it would not."""

    def frames(self, kept: Sequence[Any]) -> pa.Array:
        """Returns the frames of some exact states."""


class _Flat:
    """Records of plain values: each is a copy that the code does not have."""

    def __init__(self, converter: StateConverter, flat: FlatRecords, most_bytes: int) -> None:
        self._flat, self._most_bytes = flat, most_bytes
        self.stored: Callable[[State], Any] = same
        self.lent = converter.lent
        self.kept: Callable[[Any], Any] = _copied if converter.to_record is same else converter.to_record

    def are_exact(self, kept: Sequence[Any]) -> bool:
        return self._flat.are_exact(self._columns_of(kept), self._most_bytes)

    def frames(self, kept: Sequence[Any]) -> pa.Array:
        return self._flat.encode_all(self._columns_of(kept))

    def _columns_of(self, kept: Sequence[Any]) -> Sequence[Sequence[Any]]:
        return _columns([*map(self._flat.values, kept)])


class _Lasting(_Flat):
    """The instances themselves: they cannot change."""

    def __init__(
        self,
        converter: StateConverter,
        flat: FlatRecords,
        most_bytes: int,
        columns_of: Callable[[Sequence[Any]], Sequence[Sequence[Any]]],
    ) -> None:
        super().__init__(converter, flat, most_bytes)
        self.stored, self.lent, self.kept = converter.from_record, same, same
        self._of_instances = columns_of

    def _columns_of(self, kept: Sequence[Any]) -> Sequence[Sequence[Any]]:
        return self._of_instances(kept)


class _Read(NamedTuple):
    state: State
    frame: bytes | None


class _Framed:
    """The records that decoding their frames returns: encoding may change them, and the code may share their values."""

    def __init__(self, converter: StateConverter, frames: StateFrames) -> None:
        self.stored: Callable[[State], Any] = lambda state: _Read(state, None)
        self.lent: Callable[[Any], Any] = lambda kept: converter.lent(kept.state)
        self.kept: Callable[[Any], Any] = lambda returned: _Read(*frames.framed(converter.to_record(returned)))

    def are_exact(self, kept: Sequence[_Read]) -> bool:
        del kept
        return True

    def frames(self, kept: Sequence[_Read]) -> pa.Array:
        return pa.array([read.frame for read in kept], pa.binary())


@dataclass(frozen=True, slots=True)
class OwnSteps:
    """Folds by a read model's own code, which makes the output of each event, or sends each state, or sends nothing."""

    model: ReadModel
    frames: StateFrames
    keeping: _Keeping

    @staticmethod
    def of_model(model: ReadModel, frames: StateFrames) -> OwnSteps:
        flat, converter = frames.codec.flat, model.state_converter
        if flat is None:
            return OwnSteps(model, frames, _Framed(converter, frames))
        if converter.columns_of is None:
            return OwnSteps(model, frames, _Flat(converter, flat, frames.most_bytes))
        return OwnSteps(model, frames, _Lasting(converter, flat, frames.most_bytes, converter.columns_of))

    def of(
        self,
        rows: pa.Table,
        store: StateStore,
        blocked: Mapping[bytes, int],
        partitioning: Partitioning,
        partition: int,
        emission: BatchEmission | None,
    ) -> Iterator[Stepped]:
        """As `Steps.of`; yields the result of a slice at a time."""
        rows = rows.combine_chunks()
        keys, of_rows = numbered(rows["key"].combine_chunks())
        by_key = rows.take(pa.array(np.argsort(of_rows, kind="stable"))).combine_chunks()
        ends = np.bincount(of_rows, minlength=len(keys)).cumsum()
        for first, last, start, part in _slices(by_key, ends):
            some = _Slice(self, keys[first:last].to_pylist(), part, ends[first:last] - start, emission)
            yield some.stepped(store, blocked, partitioning, partition)


def _slices(rows: pa.Table, ends: NDArray[np.int64]) -> Iterator[tuple[int, int, int, pa.RecordBatch]]:
    """Yields slices of whole keys: the first key, the one after the last, the first row, and the rows."""
    first = start = 0
    while first < len(ends):
        last = max(int(np.searchsorted(ends, start + _SLICE_EVENTS, side="right")), first + 1)
        end = int(ends[last - 1])
        (part,) = rows.slice(start, end - start).to_batches()
        yield first, last, start, part
        first, start = last, end


class _Slice:
    """Some keys and their events, in the order of the keys, and of offsets."""

    def __init__(
        self,
        steps: OwnSteps,
        keys: Sequence[bytes],
        rows: pa.RecordBatch,
        ends: NDArray[np.int64],
        emission: BatchEmission | None,
    ) -> None:
        self._model, self._keeping, self._codec = steps.model, steps.keeping, steps.frames.codec
        self._keys, self._rows, self._emission = keys, rows, emission
        self._bounds = [*pairwise([0, *ends.tolist()])]
        self._of_rows = np.repeat(np.arange(len(keys)), np.diff(ends, prepend=0))
        """The number of each row's key."""
        self._is_left = np.zeros(len(keys), dtype=bool)
        """Which keys are left to the event-by-event way, by number."""
        self._after: list[Any] = [None] * rows.num_rows
        """The state after each event, in the form that `kept` returns."""
        self._made: list[Any] = []
        """The outputs in order: values, or the fields of flat records."""
        self._made_by: list[int] = []
        """The row of each output."""

    def stepped(
        self, store: StateStore, blocked: Mapping[bytes, int], partitioning: Partitioning, partition: int
    ) -> Stepped:
        before = store.get_many(self._keys)
        if blocked:
            self._is_left |= [key in blocked for key in self._keys]
        # The partition of a key that has a state was checked with its first event.
        new = [number for number, frame in enumerate(before) if frame is None]
        places = partitioning.of_keys([self._keys[number] for number in new])
        self._is_left[new] |= np.array(places, dtype=np.int64) != partition
        self._fold(before)
        self._require(self._after, range(len(self._after)), self._keeping.are_exact)
        outputs: Sequence[Output] = ()
        changed: Sequence[int] = ()
        frames = pa.array([], pa.binary())
        try:
            if self._emission is not None:
                outputs = self._outputs(self._emission)
            last = [self._after[end - 1] for _, end in self._bounds]
            changed = [number for number, state in enumerate(last) if state is not None and not self._is_left[number]]
            if changed:
                frames = self._keeping.frames([last[number] for number in changed])
        except pa.ArrowException:
            # The states or outputs are too large for columns.
            self._is_left[:] = True
            return self._none()
        return Stepped(
            keys=pa.array([self._keys[number] for number in changed], pa.binary()),
            frames=frames,
            created=sum(before[number] is None for number in changed),
            outputs=outputs,
            rest=self._rest(),
            deleted=[
                self._keys[number]
                for number in np.flatnonzero(~self._is_left).tolist()
                if last[number] is None and before[number] is not None
            ],
        )

    def _none(self) -> Stepped:
        return Stepped(pa.array([], pa.binary()), pa.array([], pa.binary()), 0, (), self._rest())

    def _rest(self) -> pa.Table:
        return pa.Table.from_batches([self._rows]).filter(pa.array(self._is_left[self._of_rows]))

    def _fold(self, before: Sequence[bytes | None]) -> None:
        model, keeping, emission, decode = self._model, self._keeping, self._emission, self._codec.decode
        events = model.told_all(self._rows)
        emit = model.emit if emission is not None and emission.is_by_code else None
        to_emit = events if emit is None else model.told_all_to_emit(events, self._rows)
        as_sent = None if emission is None else _as_sent(emission.emission.codec)
        fold, stored, lent, kept = model.fold, keeping.stored, keeping.lent, keeping.kept
        after, made, made_by = self._after, self._made, self._made_by
        for number in np.flatnonzero(~self._is_left).tolist():
            frame, (start, end), made_before = before[number], self._bounds[number], len(made)
            try:
                if frame is None:
                    model.check_key(self._keys[number])
                state = None if frame is None else stored(decode(frame))
                for at in range(start, end):
                    event = events[at]
                    state = None if event is None else fold(None if state is None else lent(state), event)
                    if state is not None:
                        after[at] = state = kept(state)
                    if emit is not None and as_sent is not None:
                        sent = emit(None if state is None else lent(state), to_emit[at])
                        for record in (sent,) if sent.__class__ is dict else listed(sent):
                            made.append(as_sent(record))
                            made_by.append(at)
            except Exception:  # Own code may raise anything. The event-by-event way finds the event.
                self._is_left[number] = True
                after[start:end] = [None] * (end - start)
                del made[made_before:], made_by[made_before:]

    def _require(
        self, found: Sequence[Any], of_rows: Iterable[int], are_exact: Callable[[Sequence[Any]], bool]
    ) -> None:
        """Leaves each key with a state or output that is not exact.

        Args:
            found: of each row in `of_rows`; None is passed over.
        """
        if _hold(are_exact, [one for one in found if one is not None]):
            return
        numbers = self._of_rows[[*of_rows]].tolist()
        given = [(number, one) for number, one in zip(numbers, found, strict=True) if one is not None]
        for number, of_key in groupby(given, key=itemgetter(0)):
            self._is_left[number] |= not _hold(are_exact, [one for _, one in of_key])

    def _outputs(self, emission: BatchEmission) -> Sequence[Output]:
        codec, flat = emission.emission.codec, emission.emission.codec.flat
        if not emission.is_by_code:
            self._made, self._made_by = self._after, [*range(len(self._after))]
            if codec.header is None:
                self._require(self._made, self._made_by, lambda kept: all(self._reframed(kept, codec)))
        elif flat is not None:
            most_bytes = emission.emission.target.largest_bytes
            self._require(self._made, self._made_by, lambda made: flat.are_exact(_columns(made), most_bytes))
        made_by = np.array(self._made_by, dtype=np.int64)
        made = self._made
        if self._is_left.any():
            is_kept = ~self._is_left[self._of_rows[made_by]]
            made, made_by = [*compress(made, is_kept.tolist())], made_by[is_kept]
        if not made:
            return ()
        if not emission.is_by_code:
            values = pa.array(self._reframed(made, codec), pa.binary())
        else:
            values = pa.array(made, pa.binary()) if flat is None else flat.encode_all(_columns(made))
        envelope = self._rows.select(["offset", "timestamp", "key"]).take(pa.array(made_by))
        self._is_left[self._of_rows[made_by[~emission.builder.fit(envelope["key"], values)]]] = True
        is_sent = pa.array(~self._is_left[self._of_rows[made_by]] & emission.are_sent(envelope["offset"].to_numpy()))
        return emission.builder.build_all(envelope.filter(is_sent), values.filter(is_sent))

    def _reframed(self, kept: Sequence[Any], codec: RecordCodec) -> list[bytes | None]:
        """Returns states as frames of an output's codec; None for None. Raises PoisonRecordError as that codec."""
        states = [state for state in kept if state is not None]
        frames = iter(self._keeping.frames(states).to_pylist() if states else ())
        return [None if state is None else codec.reframed(next(frames)) for state in kept]


def _as_sent(codec: RecordCodec) -> Callable[[Any], Any]:
    """Returns the function that copies a record that the code sends, so that the code cannot change it later."""
    if (flat := codec.flat) is None:
        return lambda record: encoded(codec, record)
    values = flat.values
    return lambda record: values(record if record.__class__ is dict else sent_record(record))


def _copied(record: State) -> State:
    return {**record}


def _columns(records: Sequence[Sequence[Any]]) -> Sequence[Sequence[Any]]:
    return [*zip(*records, strict=True)]


def _hold(are_exact: Callable[[Sequence[Any]], bool], some: Sequence[Any]) -> bool:
    try:
        return not some or are_exact(some)
    except Exception:  # A value of a wrong type may fail in any way.
        return False
