"""Processors of stages without states: they pass records on under another key, join, emit or schedule them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from balance_service.avro import arrow_rows
from balance_service.avro.schemas import fields_of
from balance_service.engine.dead_letter import Letter
from balance_service.engine.outputs import OutputBuilder, encoded, form_of_unchanged_key, forwarded
from balance_service.engine.processor import BatchOutcome, OwnCodeFailedError, Tolerance, records_of_own_code
from balance_service.engine.records import RESERVED_PREFIX, DeadLetter
from balance_service.errors import FatalError, PoisonRecordError
from balance_service.kafka.clients import IDEMPOTENCY_HEADER
from balance_service.model.events import event_of
from balance_service.model.made_records import output_column
from balance_service.model.record_folds import UNAVAILABLE
from balance_service.model.transform import FRAMES, KEYS, TRANSFORM_TOO_LARGE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from balance_service.avro.codec import AvroCodec
    from balance_service.avro.schemas import Schema
    from balance_service.engine.batch import PartitionUpdates, TaskBatch
    from balance_service.engine.dead_letters import Letters
    from balance_service.engine.outputs import Target
    from balance_service.engine.records import Output, Position
    from balance_service.engine.store import StateStore
    from balance_service.engine.tables import JoinedTables
    from balance_service.formats.format import RecordCodec
    from balance_service.model.events import Emit, Event
    from balance_service.model.keys import KeyType
    from balance_service.model.stream import Table

Row = Mapping[str, Any]
Headers = list[tuple[str, bytes | None]]

_offset = attrgetter("offset")
# Columns, because making a dict of each row would cost more than all other processing.
_FORWARDED = ("offset", "timestamp", "value", "headers", "record_key")
_JOIN_MISSING = "join-missing"
_FIELD_NULL = "field-null"
_KEY_RESERVED = "key-reserved"
ATTEMPT_HEADER = "retry-attempt"
"""Counts how often a record was sent for another attempt. A producer that fails again keeps it in its dead letter."""
# Of all rows of an event, each of which has those of the event.
_MOST_HEADER_BYTES = 8 << 20
_NUMBER = re.compile(rb"[0-9]{1,9}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RepartitionProcessor:
    """Passes each record on unchanged, under the key of its row.

    One of the `placeholders` stands in records for a value that is the one before. Such a record waits for an operator
    if an earlier one of its key could not be passed on.
    """

    source: str
    target: Target
    position_codec: AvroCodec
    letters: Letters
    placeholders: Sequence[bytes] = ()

    def outcome(self, batch: TaskBatch, partition: int, position: Position, store: StateStore) -> BatchOutcome:
        outcome, builder = BatchOutcome(position.stream_time_ms), OutputBuilder(self.target, self.source, partition)
        supersedes = self.letters.supersedes(store, batch.updates.dead_letters)
        for some in batch.updates.slices():
            own_keys = some["record_key"].drop_null().to_pylist() if supersedes else ()
            unread = self.letters.first_open(store, own_keys, batch)
            rest = some
            if not supersedes:
                made = _Made(builder, np.arange(some.num_rows), some["key"], some["value"])
                sent, rest = _in_columns(some, [made], _has_no_headers(some), batch, position)
                outcome.outputs += sent
            columns = (rest[name].to_pylist() for name in ("key", *_FORWARDED))
            for key, offset, timestamp_ms, value, headers, own_key in zip(*columns, strict=True):
                try:
                    if unread.get(own_key, offset) < offset and any(one in (value or b"") for one in self.placeholders):
                        why = f"a value was not sent, and the record at offset {unread[own_key]} may have it"
                        raise PoisonRecordError(UNAVAILABLE, why)
                    output = builder.build(offset, timestamp_ms, key, value, forwarded(headers))
                except PoisonRecordError as error:
                    outcome.dead_letters.append(
                        DeadLetter(offset, timestamp_ms, own_key, value, error.cause, error.detail)
                    )
                    if supersedes:
                        unread.setdefault(own_key, offset)
                else:
                    if batch.is_to_be_sent(offset, position.emitted_up_to):
                        outcome.outputs.append(output)
                    if supersedes and own_key is not None:
                        unread.pop(own_key, None)
                        outcome.newest[own_key] = offset
        outcome.outputs.sort(key=_offset)
        return outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsProcessor:
    """Passes on the rows that a transform makes of each event, all of them or none, each under its key.

    `multiplies` says whether an event may have several rows; `codec` is that of the rows.
    """

    source: str
    multiplies: bool
    codec: AvroCodec
    target: Target
    position_codec: AvroCodec
    letters: Letters

    def outcome(self, batch: TaskBatch, partition: int, position: Position, _store: StateStore) -> BatchOutcome:
        outcome, builder = BatchOutcome(position.stream_time_ms), OutputBuilder(self.target, self.source, partition)
        for some in batch.updates.slices():
            rest = some
            if not self.multiplies:
                row_keys, frames = (pc.list_flatten(some[name]) for name in (KEYS, FRAMES))
                made = _Made(builder, np.arange(some.num_rows), row_keys, frames)
                sent, rest = _in_columns(some, [made], _has_no_headers(some), batch, position)
                outcome.outputs += sent
            columns = (rest[name].to_pylist() for name in (KEYS, FRAMES, *_FORWARDED))
            for keys, frames, offset, timestamp_ms, value, headers, own_key in zip(*columns, strict=True):
                try:
                    rows = [*zip(keys, frames, strict=True)]
                    each = zip(rows, self._headers(rows, forwarded(headers)), strict=True)
                    outputs = [builder.build(offset, timestamp_ms, key, frame, own) for (key, frame), own in each]
                except PoisonRecordError as error:
                    outcome.dead_letters.append(
                        DeadLetter(offset, timestamp_ms, own_key, value, error.cause, error.detail)
                    )
                else:
                    if batch.is_to_be_sent(offset, position.emitted_up_to):
                        outcome.outputs += outputs
        outcome.outputs.sort(key=_offset)
        return outcome

    def _headers(self, rows: Sequence[tuple[bytes, bytes]], own: Headers) -> Sequence[Headers]:
        """Returns the headers of each row of an event.

        Each of several rows counts once, so each has an idempotency key of its own, numbered among the rows of its
        key: an event that is sent again may have its rows in another order, such as those of a map.

        Raises:
            PoisonRecordError: with the headers, the rows take too many bytes.
        """
        if not self.multiplies:
            return [own]
        size = sum(len(name) + len(value or b"") for name, value in own) * len(rows)
        if size > _MOST_HEADER_BYTES:
            raise PoisonRecordError(
                TRANSFORM_TOO_LARGE, f"the headers of its {len(rows):,} rows take {size:,} bytes: send smaller ones"
            )
        headers: list[Headers] = []
        seen: Counter[bytes] = Counter()
        for key, _ in rows:
            number = b"#%d" % seen[key]
            seen[key] += 1
            headers.append(
                [(name, value + number if name == IDEMPOTENCY_HEADER and value else value) for name, value in own]
            )
        return headers


@dataclass(frozen=True, slots=True, kw_only=True)
class EmitProcessor:
    """Sends the records that a read model makes of each event.

    `records` are the simple names of the source's record types. `outputs` have the codec of the record that is made,
    or None if the event's record is sent unchanged. The rows say which events an output sends.
    """

    read_model: str
    source: str
    records: Sequence[str]
    outputs: Sequence[tuple[Emit, Target, RecordCodec | None]]
    position_codec: AvroCodec
    letters: Letters
    tolerance: Tolerance

    def outcome(self, batch: TaskBatch, partition: int, position: Position, _store: StateStore) -> BatchOutcome:
        outputs = [(emit, OutputBuilder(target, self.source, partition), codec) for emit, target, codec in self.outputs]

        def made(key: bytes | None, row: Row) -> Sequence[Output]:
            try:
                sent = self._made(key, row, outputs)
            except OwnCodeFailedError as error:
                why_not = self.tolerance.why_not(error, partition, row["offset"])
                source = f"{self.source}:{partition}"
                error.require_retried(batch, self.read_model, source, row["offset"], key, why_not)
                raise
            self.tolerance.applied(partition)
            return sent

        if any(emit.make is not None for emit, _, _ in outputs):
            return _of_each_event(batch, position, made)
        in_columns = BatchOutcome(position.stream_time_ms)
        left: list[pa.RecordBatch] = []
        for some in batch.updates.slices():
            sent, rest = _emitted(some, outputs, batch, position)
            in_columns.outputs += sent
            left.append(rest)
        rest = pa.Table.from_batches(left) if left else None
        outcome = _of_each_event(replace(batch, updates=replace(batch.updates, combined=rest)), position, made)
        outcome.outputs += in_columns.outputs
        # The outputs of an event keep their order, because all of them were made in the same way.
        outcome.outputs.sort(key=_offset)
        return outcome

    def _made(
        self, key: bytes | None, row: Row, outputs: Sequence[tuple[Emit, OutputBuilder, RecordCodec | None]]
    ) -> list[Output]:
        offset, timestamp_ms = row["offset"], row["timestamp"]
        made: list[Output] = []
        for number, (emit, builder, codec) in enumerate(outputs):
            given = row[output_column(number)]
            if given is None:
                continue
            if emit.of is not None and codec is not None:
                made += [builder.build(offset, timestamp_ms, key, codec.frame(body)) for body in given]
            elif emit.fields and codec is not None:
                made.append(builder.build(offset, timestamp_ms, key, codec.frame(given)))
            elif emit.make is None or codec is None:
                made.append(builder.build(offset, timestamp_ms, key, row["value"], forwarded(row["headers"])))
            else:
                records = records_of_own_code(emit.make, self._event(row))
                made += [builder.build(offset, timestamp_ms, key, encoded(codec, record)) for record in records]
        return made

    def _event(self, row: Row) -> Event:
        event = event_of(self.records, row, row["timestamp"])
        if event is None:
            raise FatalError(f"the row of offset {row['offset']} has no event")
        return event


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinProcessor:
    """Joins each event with the rows of tables as of the event's time, and passes the result on.

    A header names the version of each row: `playerVersion: partition:offset`. The result is kept: an event is joined
    again only if the commit failed. `record` is the simple name of the event type; `schema` and `codec` are those of
    the result. Its keys are of `key_type`, or as the table has them that it is joined with next.
    """

    source: str
    record: str
    joined: JoinedTables
    schema: Schema
    codec: AvroCodec
    key_type: KeyType
    target: Target
    position_codec: AvroCodec
    letters: Letters
    next_table: Table | None = None

    def outcome(self, batch: TaskBatch, partition: int, position: Position, _store: StateStore) -> BatchOutcome:
        """Raises as `JoinedTables.as_of`."""
        builder = OutputBuilder(self.target, self.source, partition)
        # Decoded rows by their frames: many events of a batch name the same row.
        rows: dict[bytes, Row] = {}

        def made(_key: bytes | None, row: Row) -> Sequence[Output]:
            # The earlier result or dead letter stands; a second join could give another.
            is_new = batch.is_to_be_sent(row["offset"], position.emitted_up_to)
            return self._made(row, partition, rows, builder) if is_new else ()

        return _of_each_event(batch, position, made)

    def _made(self, row: Row, partition: int, rows: dict[bytes, Row], builder: OutputBuilder) -> Sequence[Output]:
        event, timestamp_ms = row[self.record], row["timestamp"]
        values, versions = dict(event), forwarded(row["headers"])
        for join in self.joined.joins:
            if event[join.on] is None:
                raise PoisonRecordError(_FIELD_NULL, f"the event has no '{join.on}'")
            own, version = self.joined.as_of(join, join.table.key_of(event[join.on]), timestamp_ms, partition)
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
                    _JOIN_MISSING, f"there is no {join.table.record} {event[join.on]} in '{join.table.topic}'"
                )
            values |= {name: of_row[column] for column, name in join.take.items()}
        record = {name: values[name] for name in fields_of(self.schema)}
        key = self._key(record)
        return (builder.build(row["offset"], timestamp_ms, key, encoded(self.codec, record), versions),)

    def _key(self, record: Row) -> bytes:
        for column in self.key_type.columns:
            if record[column] is None:
                raise PoisonRecordError(_FIELD_NULL, f"the joined record has no '{column}'")
        if self.next_table is not None:
            return self.next_table.sent_key(record[self.key_type.columns[0]])
        key = self.key_type.of(record)
        if key.startswith(RESERVED_PREFIX):
            raise PoisonRecordError(_KEY_RESERVED, "the key of the joined record begins with 0xFF")
        return key


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryProcessor:
    """Schedules each record, which another producer wrote as a dead letter. A due record is sent unchanged.

    Each time, the `retry-attempt` header is one higher.
    """

    source: str
    target: Target
    position_codec: AvroCodec
    letters: Letters

    def outcome(self, batch: TaskBatch, partition: int, position: Position, _store: StateStore) -> BatchOutcome:
        if batch.retried:
            builder = OutputBuilder(self.target, self.source, partition)
            return _of_each_event(batch, position, lambda key, row: (_next_attempt(key, row, builder),))
        outcome, now_ms = BatchOutcome(position.stream_time_ms), self.letters.now_ms()
        for key, row in _rows_of(batch.updates):
            attempt = _attempts(row["headers"])
            outcome.letters.append(
                Letter.retry(row["offset"], key, attempt, row["timestamp"], now_ms, self.letters.every_ms)
            )
        return outcome


def _next_attempt(key: bytes | None, row: Row, builder: OutputBuilder) -> Output:
    headers = [(name, value) for name, value in forwarded(row["headers"]) if name != ATTEMPT_HEADER]
    headers.append((ATTEMPT_HEADER, str(_attempts(row["headers"]) + 1).encode()))
    headers += form_of_unchanged_key(row["headers"])
    return builder.build(row["offset"], row["timestamp"], key, row["value"], headers)


def _attempts(headers: Sequence[Mapping[str, Any]] | None) -> int:
    """Returns the number in the last attempt header, or 0 without a header that is a number of up to nine digits."""
    values = [header["value"] for header in headers or () if header["key"] == ATTEMPT_HEADER]
    return int(values[-1]) if values and values[-1] is not None and _NUMBER.fullmatch(values[-1]) else 0


class _Made(NamedTuple):
    """Records that an output sends: the numbers of their rows, and keys and values, record for record."""

    builder: OutputBuilder
    rows: NDArray[np.int64]
    keys: pa.Array
    values: pa.Array


def _in_columns(
    some: pa.RecordBatch,
    made: Sequence[_Made],
    is_plain: NDArray[np.bool_],
    batch: TaskBatch,
    position: Position,
) -> tuple[list[Output], pa.RecordBatch]:
    """Returns the outputs of rows in columns, in the order of `made`; and the rows that must be looked at singly.

    Those are not plain, or have a record without a key, or one that does not fit.
    """
    for builder, rows, keys, values in made:
        fits = builder.fit(keys, values) & keys.is_valid().to_numpy(zero_copy_only=False)
        is_plain[rows[~fits]] = False
    is_sent = is_plain & batch.are_to_be_sent(some["offset"].to_numpy(), position.emitted_up_to)
    sent: list[Output] = []
    for builder, rows, keys, values in made:
        kept = pa.array(is_sent[rows])
        envelope = [column.take(pa.array(rows)).filter(kept) for column in (some["offset"], some["timestamp"])]
        names = ["offset", "timestamp", "key"]
        records = pa.RecordBatch.from_arrays([*envelope, keys.filter(kept)], names)
        sent += builder.build_all(records, values.filter(kept))
    return sent, some.filter(pa.array(~is_plain))


def _has_no_headers(some: pa.RecordBatch) -> NDArray[np.bool_]:
    return np.array(some["headers"].is_null().to_numpy(zero_copy_only=False))


def _emitted(
    some: pa.RecordBatch,
    outputs: Sequence[tuple[Emit, OutputBuilder, RecordCodec | None]],
    batch: TaskBatch,
    position: Position,
) -> tuple[list[Output], pa.RecordBatch]:
    """As `_in_columns`, for the outputs of a read model.

    Rows with headers that an output keeps, or a record that is no Avro, are not plain.
    """
    is_plain, has_no_headers = np.ones(some.num_rows, dtype=bool), _has_no_headers(some)
    made: list[_Made] = []
    for number, (emit, builder, codec) in enumerate(outputs):
        given = some[output_column(number)]
        rows = np.flatnonzero(given.is_valid().to_numpy(zero_copy_only=False))
        values = some["value"].take(pa.array(rows))
        if codec is None:
            is_plain[rows] &= has_no_headers[rows]
        elif codec.header is None:
            is_plain[rows] = False
            continue
        else:
            if emit.of is not None:
                rows, given = pc.list_parent_indices(given).to_numpy(), pc.list_flatten(given)
            header, nothing = (pa.scalar(one, pa.binary()) for one in (codec.header, b""))
            values = pc.binary_join_element_wise(header, given.drop_null(), nothing)
        made.append(_Made(builder, rows, some["key"].take(pa.array(rows)), values))
    return _in_columns(some, made, is_plain, batch, position)


def _of_each_event(
    batch: TaskBatch, position: Position, made: Callable[[bytes | None, Row], Sequence[Output]]
) -> BatchOutcome:
    """Returns the outcome of a batch without new states.

    Args:
        made: returns the outputs of an event, given its key and row. If it raises PoisonRecordError, the event is a
            dead letter.
    """
    outcome = BatchOutcome(position.stream_time_ms)
    for key, row in _rows_of(batch.updates):
        offset = row["offset"]
        try:
            outputs = made(key, row)
        except PoisonRecordError as error:
            outcome.dead_letters.append(
                DeadLetter(offset, row["timestamp"], key, row["value"], error.cause, error.detail)
            )
        else:
            outcome.outputs += outputs if batch.is_to_be_sent(offset, position.emitted_up_to) else ()
    return outcome


def _rows_of(updates: PartitionUpdates) -> Iterator[tuple[bytes | None, Row]]:
    """Yields the key and row of each event, in offset order."""
    for some in updates.slices():
        yield from zip(some["key"].to_pylist(), arrow_rows.rows_of(some.drop_columns(["key"])), strict=True)
