"""What a stage without states does: it passes records on by another key, or emits what is made of its events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from balance_service.avro import arrow_rows
from balance_service.errors import PoisonRecordError
from balance_service.read_models.outputs import listed
from balance_service.read_models.read_model import event_of
from balance_service.state.outputs import (
    OF_THE_KEY,
    ORIGIN_HEADER,
    Origin,
    encoded,
    origin_prefix,
    output_of,
    passed_on,
)
from balance_service.state.own_code import OwnCodeFailedError, call_own
from balance_service.state.records import DeadLetter, Output
from balance_service.state.work import Folded

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from balance_service.avro.codec import AvroCodec
    from balance_service.read_models.outputs import Emit
    from balance_service.state.letters.letters import Letters
    from balance_service.state.outputs import Target
    from balance_service.state.records import CombinedUpdates, Position, TaskBatch
    from balance_service.state.store.store import StateStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Rekeying:
    """Passes each record on as it is, under the key that its row has."""

    source: str
    target: Target
    position_codec: AvroCodec
    letters: Letters

    def outcome(self, batch: TaskBatch, partition: int, stands_at: Position, _store: StateStore) -> Folded:
        """See `Work.outcome`."""
        folded, sent_before, sender = unchanged(stands_at), stands_at.emitted_up_to, self.target.header
        prefix = origin_prefix(self.source, partition)
        for some in batch.updates:
            columns = some.columns
            rows = zip(
                columns["offset"].to_pylist(),
                some.keys.to_pylist(),
                columns["value"].to_pylist(),
                columns["timestamp"].to_pylist(),
                columns["headers"].to_pylist(),
                strict=True,
            )
            folded.outputs += [
                Output(
                    offset,
                    self.target.topic,
                    OF_THE_KEY,
                    key,
                    value,
                    timestamp,
                    [*passed_on(headers), (ORIGIN_HEADER, f"{prefix}{offset}".encode()), sender],
                )
                for offset, key, value, timestamp, headers in rows
                if batch.is_to_be_sent(offset, sent_before)
            ]
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
        folded, sent_before = unchanged(stands_at), stands_at.emitted_up_to
        for key, row in rows_of(batch.updates):
            try:
                sent = self._sent(key, row, partition)
            except OwnCodeFailedError as error:
                raise error.halting(self.read_model, f"{self.source}:{partition}", row["offset"]) from error.__cause__
            except PoisonRecordError as error:
                folded.dead_letters.append(DeadLetter(row["offset"], row["timestamp"], key, row["value"], error.cause))
            else:
                folded.outputs += sent if batch.is_to_be_sent(row["offset"], sent_before) else ()
        return folded

    def _sent(self, key: bytes | None, row: Mapping[str, Any], partition: int) -> list[Output]:
        event = event_of({name: row[name] for name in self.records}, row["timestamp"])
        origin = Origin(self.source, partition, row["offset"], row["timestamp"])
        sent: list[Output] = []
        for emit, target, codec in self.outputs:
            if emit.where is not None and not emit.where.holds(event):
                continue
            if emit.make is None or codec is None:
                sent.append(output_of(target, key, row["value"], origin, passed_on(row["headers"])))
            else:
                made = listed(call_own(emit.make, event))
                sent += [output_of(target, key, encoded(codec, record), origin) for record in made]
        return sent


def rows_of(updates: Sequence[CombinedUpdates]) -> Iterator[tuple[bytes | None, Mapping[str, Any]]]:
    """The events, each with its key, in offset order."""
    for some in updates:
        yield from zip(some.keys.to_pylist(), arrow_rows.rows_of(some.columns), strict=True)


def unchanged(stands_at: Position) -> Folded:
    """What leaves every state, and stream time, as it is."""
    return Folded(stands_at.stream_time_ms)
