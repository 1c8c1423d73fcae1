"""What a task of a batch job does with the rows of one split, in a Python worker: it deals them out by shares of keys.

All that depends on the order of the partition's records is found here, before they are ordered by key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from balance_service.avro.codec import SCHEMA_HEADER
from balance_service.bulk.folder import Split
from balance_service.engine.batch import PartitionUpdates, TaskBatch
from balance_service.engine.idempotency import running_times
from balance_service.engine.records import DeadLetter
from balance_service.engine.transform_failures import TransformFailures
from balance_service.errors import BalanceServiceError, FatalError
from balance_service.model.events import OnFailure
from balance_service.model.record_folds import IGNORED
from balance_service.model.transform import TRANSFORM_FAILED, TRANSFORM_TOO_LARGE
from balance_service.observability.logs import quiet_logging
from balance_service.process.failpoints import part_size
from balance_service.spark.batch_plan import UnresolvedError, telling, unresolved_name
from balance_service.spark.combine import NOTE, UNRESOLVED

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from balance_service.spark.batch_plan import Plan

SHARE = "#share"
DEALT = "share int, first bigint, rows binary"
"""The columns of what is dealt out: a share, counted through all partitions; the offset of the first row; rows of one
split as an Arrow stream, in offset order."""
_DEALT = pa.schema({"share": pa.int32(), "first": pa.int64(), "rows": pa.binary()})
# A dead letter's record in changelog and store lacks these fields, so they need not be sent.
_NOT_KEPT = ("value", "headers")
# Spark's batches are bounded by their few rows alone, so rows are gathered here, and dealt out in small pieces.
_ROWS = 20_000
_BATCH_BYTES, _PIECE_BYTES = 64 << 20, 256 << 10


def dealt(plan: Plan, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yields the rows of a split by share, without those that change nothing, and marks the split as read.

    Args:
        batches: the columns of `Decoder.updates`, and the share of each row.
    """
    quiet_logging()
    try:
        plan.require_same_code()
        yield from _Split(plan).dealt(batches)
    except BalanceServiceError as error:
        raise telling(error) from error


class _Split:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        halts = plan.read_model.on_failure is not OnFailure.DEAD_LETTER
        self._failures = TransformFailures(plan.stage.name, halts, plan.stage.passes_on)
        self._unresolved = set[str]()

    def dealt(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        kept, partition, first, last, records = [], -1, -1, -1, 0
        for read in in_batches((pa.Table.from_batches([batch]) for batch in batches), _ROWS):
            offsets = read["offset"].to_numpy()
            partitions = pc.min_max(read["partition"]).as_py()
            if partition < 0:
                partition, first = partitions["min"], int(offsets[0])
            steps = np.diff(offsets, prepend=last)
            if partitions != {"min": partition, "max": partition} or not (steps > 0).all():
                raise FatalError(f"Spark reads partition {partition} out of order, near offset {offsets[0]}")
            records, last = records + read.num_rows, int(offsets[-1])
            kept.append(self._kept(read.drop_columns(["partition"]), partition))
        if self._unresolved:
            raise UnresolvedError(sorted(self._unresolved))
        if not kept:
            return
        rows, stream_time_ms = _with_stream_time(pa.concat_tables(kept))
        for share in sorted(pc.unique(rows[SHARE]).to_pylist()):
            some = rows.filter(pc.equal(rows[SHARE], share)).drop_columns([SHARE]).combine_chunks()
            number = partition * self._plan.shares + share
            for piece in _pieces(some):
                dealt_out = {"share": number, "first": piece["offset"][0].as_py(), "rows": _stream(piece)}
                yield pa.RecordBatch.from_pylist([dealt_out], _DEALT)
        # A task that fails before its end is tried again, and its rows do not count.
        self._plan.folder.mark(Split(partition, first, last, records, rows.num_rows, stream_time_ms))

    def _kept(self, rows: pa.Table, partition: int) -> pa.Table:
        """Returns the rows of a batch that may change anything."""
        notes = _Notes(rows)
        causes = notes.field("cause")
        is_unresolved = pc.fill_null(pc.equal(causes, UNRESOLVED), fill_value=False)
        if pc.any(is_unresolved).as_py():
            self._note_unresolved(notes.rows.filter(is_unresolved))
        self._require_few_failures(rows, notes, partition)
        rows = notes.without(_NOT_KEPT)
        is_ignored = notes.of_rows(pc.fill_null(pc.equal(causes, IGNORED), fill_value=False))
        rows = rows.filter(pa.array(~is_ignored))
        if left_out := self._plan.left_out(partition):
            rows = rows.filter(pc.invert(pc.is_in(rows["offset"], pa.array(sorted(left_out), pa.int64()))))
        return rows

    def _note_unresolved(self, notes: pa.StructArray) -> None:
        for note in notes.to_pylist():
            named = [one["value"] for one in note.get("headers") or () if one["key"] == SCHEMA_HEADER and one["value"]]
            name = unresolved_name(note["schema_id"], named[-1] if named else None)
            if name not in self._plan.unknown:
                self._unresolved.add(name)

    def _require_few_failures(self, rows: pa.Table, notes: _Notes, partition: int) -> None:
        """Raises TaskHaltedError: a `transform` fails at more than half of 1,000 successive records."""
        if self._plan.stage.transform is None:
            return
        failed = [
            DeadLetter(offset, -1, note["record_key"], None, note["cause"], note["detail"] or "")
            for offset, note in zip(notes.offsets.to_pylist(), notes.rows.to_pylist(), strict=True)
            if note["cause"] in (TRANSFORM_FAILED, TRANSFORM_TOO_LARGE)
        ]
        first, last = rows["offset"][0].as_py(), rows["offset"][-1].as_py()
        updates = PartitionUpdates(last + 1, applied=rows.num_rows - len(failed), dead_letters=failed)
        self._failures.require_few(TaskBatch(first, updates), partition)


class _Notes:
    """The notes of some rows, as structs."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table
        self._valid: NDArray[np.bool_] = table[NOTE].is_valid().to_numpy()
        self.rows: pa.StructArray = pc.list_flatten(table[NOTE]).combine_chunks()
        self.offsets: pa.Array = table["offset"].filter(table[NOTE].is_valid()).combine_chunks()

    def field(self, name: str) -> pa.Array:
        return pc.struct_field(self.rows, name)

    def of_rows(self, of_notes: pa.Array) -> NDArray[np.bool_]:
        """Returns what is true of notes for all rows; not for those without a note."""
        found = np.zeros(self._table.num_rows, dtype=bool)
        found[self._valid] = of_notes.to_numpy(zero_copy_only=False)
        return found

    def without(self, names: tuple[str, ...]) -> pa.Table:
        """Returns the rows, with fields of the notes null."""
        kinds = {field.name: field.type for field in self.rows.type}
        return self.replaced({name: pa.nulls(len(self.rows), kinds[name]) for name in names if name in kinds})

    def replaced(self, columns: dict[str, pa.Array]) -> pa.Table:
        """Returns the rows, with other values of fields of the notes."""
        fields = [*self.rows.type]
        values = [columns[field.name] if field.name in columns else self.field(field.name) for field in fields]
        structs = pa.StructArray.from_arrays(values, fields=fields)
        ends = pa.array(np.concatenate([[0], np.cumsum(self._valid)]), pa.int32())
        lists = pa.ListArray.from_arrays(ends, structs, mask=pa.array(~self._valid))
        position = self._table.column_names.index(NOTE)
        return self._table.set_column(position, NOTE, lists.cast(self._table.schema.field(NOTE).type))


def _with_stream_time(rows: pa.Table) -> tuple[pa.Table, int]:
    """Returns the rows, with the split's stream time in place of the time of each event with an idempotency key.

    Also returns the last one. A share has only some of the partition's events, and markers expire by the time of all.
    """
    notes = _Notes(rows)
    is_once = notes.field("idempotency_key").is_valid().to_numpy(zero_copy_only=False)
    if not is_once.any():
        return rows, -1
    times = notes.field("timestamp").fill_null(-1).to_numpy(zero_copy_only=False).copy()
    times[is_once] = running = running_times(times[is_once])
    return notes.replaced({"timestamp": pa.array(times, pa.int64())}), int(running[-1])


def with_time_before(rows: pa.Table, before: int) -> pa.Table:
    """Returns the rows of a split, with the stream time of the splits before it counted in."""
    notes = _Notes(rows)
    is_once = notes.field("idempotency_key").is_valid().to_numpy(zero_copy_only=False)
    if before < 0 or not is_once.any():
        return rows
    times = notes.field("timestamp").fill_null(-1).to_numpy(zero_copy_only=False).copy()
    times[is_once] = np.maximum(times[is_once], before)
    return notes.replaced({"timestamp": pa.array(times, pa.int64())})


def in_batches(tables: Iterable[pa.Table], most_rows: int) -> Iterator[pa.Table]:
    """Yields the rows of all tables in order, gathered: at most so many at a time, and fewer if they are large."""
    waiting, rows, size = [], 0, 0
    for table in tables:
        left = table
        while left.num_rows:
            some = left.slice(0, most_rows - rows)
            left = left.slice(some.num_rows)
            waiting.append(some)
            rows, size = rows + some.num_rows, size + some.nbytes
            if rows >= most_rows or size >= _BATCH_BYTES:
                yield pa.concat_tables(waiting).combine_chunks()
                waiting, rows, size = [], 0, 0
    if waiting:
        yield pa.concat_tables(waiting).combine_chunks()


def _pieces(rows: pa.Table) -> Iterator[pa.Table]:
    size = part_size(max(1, rows.num_rows * _PIECE_BYTES // max(1, rows.nbytes)))
    for start in range(0, rows.num_rows, size):
        yield rows.slice(start, size)


def _stream(rows: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def rows_in(content: Any) -> pa.Table:
    """Returns the rows in what `dealt` yields."""
    with pa.ipc.open_stream(content) as reader:
        return reader.read_all()
