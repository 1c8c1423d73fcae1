"""What a stage without states does: it passes records on by another key, or emits what is made of its events."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from balance_service.avro import arrow_rows
from balance_service.avro.types import fields_of
from balance_service.engine.dead_letter import Letter
from balance_service.engine.outputs import Sender, encoded, passed_on
from balance_service.engine.processor import BatchOutcome, OwnCodeFailedError, made_by_own
from balance_service.engine.records import RESERVED_PREFIX, DeadLetter
from balance_service.errors import FatalError, PoisonRecordError
from balance_service.model.event import event_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from balance_service.avro.codec import AvroCodec
    from balance_service.engine.dead_letters import Letters
    from balance_service.engine.outputs import Target
    from balance_service.engine.records import CombinedUpdates, Output, Position, TaskBatch
    from balance_service.engine.store import StateStore
    from balance_service.model.outputs import Emit

    Row = Mapping[str, Any]
    from balance_service.avro.schemas import Schema
    from balance_service.engine.tables import JoinedTables
    from balance_service.model.keys import KeyType

    Headers = list[tuple[str, bytes | None]]
    from collections.abc import Mapping


# As columns: to make each row a dict would cost more than all else that is done to it.
_PASSED_ON = ("offset", "timestamp", "value", "headers", "record_key")


@dataclass(frozen=True, slots=True, kw_only=True)
class RepartitionProcessor:
    """Passes each record on as it is, under the key that its row has."""

    source: str
    target: Target
    position_codec: AvroCodec
    letters: Letters

    def outcome(self, batch: TaskBatch, partition: int, stands_at: Position, _store: StateStore) -> BatchOutcome:
        """See `StageProcessor.outcome`."""
        outcome, sender = BatchOutcome(stands_at.stream_time_ms), Sender(self.target, self.source, partition)
        for some in batch.updates:
            columns = (some.columns[name].to_pylist() for name in _PASSED_ON)
            for key, offset, timestamp_ms, value, headers, own_key in zip(some.keys.to_pylist(), *columns, strict=True):
                try:
                    output = sender.output(offset, timestamp_ms, key, value, passed_on(headers))
                except PoisonRecordError as error:
                    outcome.dead_letters.append(DeadLetter(offset, timestamp_ms, own_key, value, error.cause))
                else:
                    if batch.is_to_be_sent(offset, stands_at.emitted_up_to):
                        outcome.outputs.append(output)
        return outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class EmitProcessor:
    """Sends what is made of each event, to some topics."""

    read_model: str
    source: str
    records: Sequence[str]
    """The source's, by their simple names."""
    outputs: Sequence[tuple[Emit, Target, AvroCodec | None]]
    """Each with the codec of what is made; None where the event's record is sent as it is."""
    position_codec: AvroCodec
    letters: Letters

    def outcome(self, batch: TaskBatch, partition: int, stands_at: Position, _store: StateStore) -> BatchOutcome:
        """See `StageProcessor.outcome`."""
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
) -> BatchOutcome:
    """What a batch of events comes to that leaves every state as it is.

    Args:
        made: what is sent of an event, by its key and row; one of which that raises PoisonRecordError is a dead letter.
    """
    outcome = BatchOutcome(stands_at.stream_time_ms)
    for key, row in rows_of(batch.updates):
        offset = row["offset"]
        try:
            outputs = made(key, row)
        except PoisonRecordError as error:
            outcome.dead_letters.append(DeadLetter(offset, row["timestamp"], key, row["value"], error.cause))
        else:
            outcome.outputs += outputs if batch.is_to_be_sent(offset, stands_at.emitted_up_to) else ()
    return outcome


def rows_of(updates: Sequence[CombinedUpdates]) -> Iterator[tuple[bytes | None, Row]]:
    """The events, each with its key, in offset order."""
    for some in updates:
        yield from zip(some.keys.to_pylist(), arrow_rows.rows_of(some.columns), strict=True)


MISSING = "join-missing"
_NULL = "field-null"
_RESERVED = "key-reserved"


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinProcessor:
    """Joins each event with rows as of its time.

    What is passed on is kept, and names in its headers the version of each row: `playerVersion: partition:offset`. It
    is not made a second time but where a commit has failed.
    """

    source: str
    record: str
    """The events', by its simple name."""
    joined: JoinedTables
    schema: Schema
    """Of what is made."""
    codec: AvroCodec
    """Of the same."""
    key_type: KeyType
    target: Target
    position_codec: AvroCodec
    letters: Letters

    def outcome(self, batch: TaskBatch, partition: int, stands_at: Position, _store: StateStore) -> BatchOutcome:
        """See `StageProcessor.outcome`. Raises as `JoinedTables.as_of` does."""
        sender = Sender(self.target, self.source, partition)
        # Many events of a batch name one row.
        rows: dict[bytes, Row] = {}

        def made(_key: bytes | None, row: Row) -> Sequence[Output]:
            # What was made of it is kept, and its dead letter too: a second join might come to something else.
            is_new = batch.is_to_be_sent(row["offset"], stands_at.emitted_up_to)
            return self._made(row, partition, rows, sender) if is_new else ()

        return of_each_event(batch, stands_at, made)

    def _made(self, row: Row, partition: int, rows: dict[bytes, Row], sender: Sender) -> Sequence[Output]:
        """What is passed on of an event: a record, or nothing.

        Args:
            rows: those of the batch that are decoded already, by their frames.
        """
        event, timestamp_ms = row[self.record], row["timestamp"]
        values, versions = dict(event), passed_on(row["headers"])
        for join in self.joined.joins:
            if event[join.on] is None:
                raise PoisonRecordError(_NULL, f"the event has no '{join.on}'")
            own, version = self.joined.as_of(join, join.key_of(event[join.on]), timestamp_ms, partition)
            if version is not None and version.frame is not None:
                if version.frame not in rows:
                    rows[version.frame] = self.joined.row(join, version.frame)
                of_row = rows[version.frame]
                versions.append((join.version_header, f"{own}:{version.offset}".encode()))
            elif join.missing == "null":
                of_row = dict.fromkeys(join.take)
            elif join.missing == "drop":
                return ()
            else:
                raise PoisonRecordError(
                    MISSING, f"there is no {join.table.record} {event[join.on]} in '{join.table.topic}'"
                )
            values |= {name: of_row[column] for column, name in join.take.items()}
        record = {name: values[name] for name in fields_of(self.schema)}
        key = self._key(record[self.key_type.column])
        return (sender.output(row["offset"], timestamp_ms, key, encoded(self.codec, record), versions),)

    def _key(self, value: Any) -> bytes:
        if value is None:
            raise PoisonRecordError(_NULL, f"what is made has no '{self.key_type.column}'")
        key = self.key_type.encode(value if self.key_type.is_number else str(value))
        if key.startswith(RESERVED_PREFIX):
            raise PoisonRecordError(_RESERVED, "the key of what is made begins with 0xFF")
        return key


ATTEMPT_HEADER = "retry-attempt"
"""Says how often a record was sent to be tried again; set by us, and kept by a producer that fails once more."""
_NUMBER = re.compile(rb"[0-9]{1,9}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryProcessor:
    """Schedules each record as it comes. Tried again, when it is due, it is sent as it is, one attempt further."""

    source: str
    target: Target
    position_codec: AvroCodec
    letters: Letters

    def outcome(self, batch: TaskBatch, partition: int, stands_at: Position, _store: StateStore) -> BatchOutcome:
        """See `StageProcessor.outcome`."""
        if batch.retried:
            sender = Sender(self.target, self.source, partition)
            return of_each_event(batch, stands_at, lambda key, row: (_sent(key, row, sender),))
        outcome, now_ms, every_ms = BatchOutcome(stands_at.stream_time_ms), self.letters.now_ms(), self.letters.every_ms
        for key, row in rows_of(batch.updates):
            attempt = attempts_before(row["headers"])
            outcome.letters.append(Letter.retry(row["offset"], key, attempt, row["timestamp"], now_ms, every_ms))
        return outcome


def _sent(key: bytes | None, row: Row, sender: Sender) -> Output:
    """A record as it is, one attempt further."""
    headers = [(name, value) for name, value in passed_on(row["headers"]) if name != ATTEMPT_HEADER]
    headers.append((ATTEMPT_HEADER, str(attempts_before(row["headers"]) + 1).encode()))
    return sender.output(row["offset"], row["timestamp"], key, row["value"], headers)


def attempts_before(headers: Sequence[Mapping[str, Any]] | None) -> int:
    """What the last header of that name says; 0 if there is none, or no number of up to nine digits in it."""
    said = [header["value"] for header in headers or () if header["key"] == ATTEMPT_HEADER]
    return int(said[-1]) if said and said[-1] is not None and _NUMBER.fullmatch(said[-1]) else 0
