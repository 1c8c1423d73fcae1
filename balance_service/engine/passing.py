"""What a stage without states does: it passes records on by another key, or emits what is made of its events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from balance_service.avro import arrow_rows
from balance_service.engine.outputs import Sender, encoded, passed_on
from balance_service.engine.own_code import OwnCodeFailedError, made_by_own
from balance_service.engine.records import DeadLetter
from balance_service.engine.work import Folded
from balance_service.errors import FatalError, PoisonRecordError
from balance_service.model.event import event_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from balance_service.avro.codec import AvroCodec
    from balance_service.engine.letters.letters import Letters
    from balance_service.engine.outputs import Target
    from balance_service.engine.records import CombinedUpdates, Output, Position, TaskBatch
    from balance_service.engine.store.store import StateStore
    from balance_service.model.outputs import Emit

    Row = Mapping[str, Any]

# As columns: to make each row a dict would cost more than all else that is done to it.
_PASSED_ON = ("offset", "timestamp", "value", "headers", "record_key")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rekeying:
    """Passes each record on as it is, under the key that its row has."""

    source: str
    target: Target
    position_codec: AvroCodec
    letters: Letters

    def outcome(self, batch: TaskBatch, partition: int, stands_at: Position, _store: StateStore) -> Folded:
        """See `Work.outcome`."""
        folded, sender = Folded(stands_at.stream_time_ms), Sender(self.target, self.source, partition)
        for some in batch.updates:
            columns = (some.columns[name].to_pylist() for name in _PASSED_ON)
            for key, offset, timestamp_ms, value, headers, own_key in zip(some.keys.to_pylist(), *columns, strict=True):
                try:
                    output = sender.output(offset, timestamp_ms, key, value, passed_on(headers))
                except PoisonRecordError as error:
                    folded.dead_letters.append(DeadLetter(offset, timestamp_ms, own_key, value, error.cause))
                else:
                    if batch.is_to_be_sent(offset, stands_at.emitted_up_to):
                        folded.outputs.append(output)
        return folded


@dataclass(frozen=True, slots=True, kw_only=True)
class Emitting:
    """Sends what is made of each event, to some topics."""

    read_model: str
    source: str
    records: Sequence[str]
    """The source's, by their simple names."""
    outputs: Sequence[tuple[Emit, Target, AvroCodec | None]]
    """Each with the codec of what is made; None where the event's record is sent as it is."""
    position_codec: AvroCodec
    letters: Letters

    def outcome(self, batch: TaskBatch, partition: int, stands_at: Position, _store: StateStore) -> Folded:
        """See `Work.outcome`."""
        outputs = [(emit, Sender(target, self.source, partition), codec) for emit, target, codec in self.outputs]

        def made(key: bytes | None, row: Row) -> Sequence[Output]:
            try:
                return self._made(key, row, outputs)
            except OwnCodeFailedError as error:
                error.require_letter(batch, self.read_model, f"{self.source}:{partition}", row["offset"])
                raise

        return of_each_event(batch, stands_at, made)

    def _made(
        self, key: bytes | None, row: Row, outputs: Sequence[tuple[Emit, Sender, AvroCodec | None]]
    ) -> list[Output]:
        offset, timestamp_ms = row["offset"], row["timestamp"]
        event = event_of(self.records, row, timestamp_ms)
        if event is None:
            raise FatalError(f"the row of offset {offset} has no event")
        made: list[Output] = []
        for emit, sender, codec in outputs:
            if emit.where is not None and not emit.where.holds(event):
                continue
            if emit.make is None or codec is None:
                made.append(sender.output(offset, timestamp_ms, key, row["value"], passed_on(row["headers"])))
            else:
                records = made_by_own(emit.make, event)
                made += [sender.output(offset, timestamp_ms, key, encoded(codec, record)) for record in records]
        return made


def of_each_event(
    batch: TaskBatch, stands_at: Position, made: Callable[[bytes | None, Row], Sequence[Output]]
) -> Folded:
    """What a batch of events comes to that leaves every state as it is.

    Args:
        made: what is sent of an event, by its key and row; one of which that raises PoisonRecordError is a dead letter.
    """
    folded = Folded(stands_at.stream_time_ms)
    for key, row in rows_of(batch.updates):
        offset = row["offset"]
        try:
            outputs = made(key, row)
        except PoisonRecordError as error:
            folded.dead_letters.append(DeadLetter(offset, row["timestamp"], key, row["value"], error.cause))
        else:
            folded.outputs += outputs if batch.is_to_be_sent(offset, stands_at.emitted_up_to) else ()
    return folded


def rows_of(updates: Sequence[CombinedUpdates]) -> Iterator[tuple[bytes | None, Row]]:
    """The events, each with its key, in offset order."""
    for some in updates:
        yield from zip(some.keys.to_pylist(), arrow_rows.rows_of(some.columns), strict=True)
