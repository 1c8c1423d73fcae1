"""Combines the updates in one batch of a partition by key, in Arrow. Does not import Spark: the test driver uses it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import lru_cache
from itertools import repeat
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from balance_service.avro.arrow_rows import rows_of
from balance_service.avro.codec import SCHEMA_GUID_UNKNOWN, SCHEMA_HEADER, SCHEMA_ID_UNKNOWN
from balance_service.engine.batch import KeyedUpdate, PartitionUpdates
from balance_service.engine.records import DeadLetter
from balance_service.errors import BalanceServiceError
from balance_service.model.record_folds import IGNORED
from balance_service.model.standard_fold import Groups
from balance_service.observability.tracing import TRACEPARENT_HEADER

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from balance_service.model.read_model import ReadModel
    from balance_service.model.standard_fold import Combination

NOTE = "note"

UNRESOLVED = "unresolved"
"""The cause of a record whose schema is not known yet."""

# Combining in Arrow costs as much as some 90 single events.
_FEW_ROWS = 80
# A batch may hold a million events, and every link is sent with the span.
_MOST_LINKS = 32
_DECIMAL_DIGITS = 38
_INTEGER_LIMIT = 2**63
_ENVELOPE = frozenset({"offset", "key", "timestamp"})


class EventsNotKeptError(BalanceServiceError):
    """The single events of merged parts are needed, which would have filled the memory; another query reads them."""


def end_of(rows: pa.RecordBatch | pa.Table) -> int:
    """Returns the offset after the last of some rows."""
    return int(rows["offset"][-1].as_py()) + 1


def merged(
    one: PartitionUpdates, later: PartitionUpdates, combine: Mapping[str, Combination] | None
) -> PartitionUpdates | None:
    """Returns two parts as one, without their events; None if that could differ from applying one after the other.

    They can be merged if the order does not matter, and sums are of one sign: then merging hides no overflow between
    the parts.
    """
    if combine is None or one.events or later.events:
        return None
    if not all(how.in_any_order for how in combine.values()):
        return None
    tables = [part.combined for part in (one, later) if part.combined is not None]
    both = pa.concat_tables(tables) if tables else None
    if both is not None and len(tables) > 1:
        if _may_overflow(both, combine) or any(map(_is_of_both_signs, _sums(both, combine))):
            return None
        both = _aggregated(both, combine)
    return PartitionUpdates(
        later.end,
        both,
        (),
        one.applied + later.applied,
        Counter(one.ignored) + Counter(later.ignored),
        (*one.dead_letters, *later.dead_letters),
        _not_kept,
        one.traces or later.traces,
    )


def _not_kept(_keys: Sequence[bytes]) -> Sequence[KeyedUpdate]:
    # Nothing is written yet. The next query gathers part by part, and each part keeps its events.
    raise EventsNotKeptError("single events")


class PartitionRows:
    """The decoded rows of one partition, at least one, in offset order.

    `updates` are the rows to fold: `offset`, `key` and the update columns. `notes` are the rows with a note, to fold or
    not: `offset` and the note's fields as columns.
    """

    def __init__(self, rows: pa.Table) -> None:
        """Takes rows as `Decoder.updates` returns them."""
        self._end = end_of(rows)
        notes = rows[NOTE]
        self.updates: pa.Table = rows.drop_columns([NOTE])
        self.notes = _no_notes(notes.type)
        if notes.null_count == len(notes):
            # Each step in Arrow costs as much as an event, and under load a commit has some dozens.
            return
        noted = rows.filter(pc.is_valid(notes))
        fields = pc.list_flatten(noted[NOTE]).combine_chunks()
        names = self.notes.column_names[1:]
        self.notes = pa.table({"offset": noted["offset"], **dict(zip(names, fields.flatten(), strict=True))})
        others = self.notes["offset"].filter(pc.is_valid(self.notes["cause"]))
        self.updates = self.updates.filter(pc.invert(pc.is_in(rows["offset"], others.combine_chunks())))

    def updates_of(self, keys: Sequence[bytes]) -> pa.Table:
        return self.updates.filter(pc.is_in(self.updates["key"], pa.array(keys, self.updates.schema.field("key").type)))

    def unresolved(self) -> pa.Table:
        """Returns the records whose schema was unknown when Spark decoded them, as Kafka's.

        Returns:
            `offset`, `timestamp`, `key`, `value`, `headers`; and `schema_id`, null if a header names the schema.
            Without records, columns may be missing.
        """
        if not self.notes.num_rows:
            return self.notes
        found = self.notes.filter(pc.equal(self.notes["cause"], UNRESOLVED))
        if not found.num_rows:
            return found
        times = pc.cast(pc.multiply(found["timestamp"], 1000), pa.timestamp("us", "UTC"))
        return pa.table(
            {
                "offset": found["offset"],
                "timestamp": times,
                "key": found["record_key"],
                "value": found["value"],
                "headers": found["headers"],
                "schema_id": found["schema_id"],
            }
        )

    def traceparents(self) -> list[str]:
        """Returns the `traceparent` headers of some of the sampled records."""
        found: list[str] = self.notes[TRACEPARENT_HEADER].drop_null().slice(0, _MOST_LINKS).to_pylist()
        return found

    def single_updates(self, updates: pa.Table, records: Mapping[int, DeadLetter] | None = None) -> list[KeyedUpdate]:
        """Returns rows of `updates` as single updates, in offset order.

        Args:
            records: the records of all rows by offset; without them, only updates with an idempotency key have theirs.
        """
        once = self.notes.filter(pc.is_valid(self.notes["idempotency_key"])).to_pylist() if self.notes.num_rows else []
        kept = {row["offset"]: _record(row, "") for row in once} if records is None else records
        idempotency_keys = {row["offset"]: row["idempotency_key"] for row in once}
        updates = updates.sort_by("offset")
        keys, offsets = updates["key"].to_pylist(), updates["offset"].to_pylist()
        has_times = "timestamp" in updates.column_names
        times = updates["timestamp"].to_pylist() if has_times else [-1] * len(offsets)
        changed = rows_of(updates.select([name for name in updates.column_names if name not in _ENVELOPE]))
        found = map(kept.get, offsets) if kept else repeat(None)
        named = map(idempotency_keys.get, offsets) if once else repeat(None)
        return [*map(KeyedUpdate, keys, changed, found, named, offsets, times)]

    def combined(self, combine: Mapping[str, Combination] | None, *, few_rows: int = _FEW_ROWS) -> PartitionUpdates:
        """Combines the updates of each key.

        Unresolved records become dead letters, so resolve those in `unresolved` first.

        Args:
            few_rows: up to this number of events, they are not combined.
        """
        updates, events = self._combined(combine, few_rows)
        return self._with_notes(updates, events)

    def folded_by(self, read_model: ReadModel, *, few_rows: int = _FEW_ROWS) -> PartitionUpdates:
        """Returns the updates as the last stage of a read model with states folds them.

        Unresolved records become dead letters, so resolve those in `unresolved` first.

        Args:
            few_rows: up to this number of events, they are single events.
        """
        if not read_model.folds_rows:
            return self.combined(read_model.combine, few_rows=few_rows)
        rows = self.updates
        if rows.num_rows <= few_rows:
            return self._with_notes(None, self.single_updates(rows))
        alone = self._keys_of_once()
        if not alone:
            return self._with_notes(rows, ())
        apart = pc.is_in(rows["key"], pa.concat_arrays(alone))
        return self._with_notes(rows.filter(pc.invert(apart)), self.single_updates(rows.filter(apart)))

    def uncombined(self) -> PartitionUpdates:
        """Returns all events unchanged, for a stage without states."""
        return self._with_notes(self.updates.combine_chunks() if self.updates.num_rows else None, ())

    def _with_notes(self, updates: pa.Table | None, events: Sequence[KeyedUpdate]) -> PartitionUpdates:
        if not self.notes.num_rows:
            return PartitionUpdates(self._end, updates, events, self.updates.num_rows)
        is_ignored = pc.equal(self.notes["cause"], IGNORED)
        ignored = pc.value_counts(pc.fill_null(self.notes["record"].filter(is_ignored), ""))
        letters = self.notes.filter(pc.and_kleene(pc.is_valid(self.notes["cause"]), pc.invert(is_ignored)))
        return PartitionUpdates(
            self._end,
            combined=updates,
            events=events,
            applied=self.updates.num_rows,
            ignored={one["values"]: one["counts"] for one in ignored.to_pylist()},
            dead_letters=[_letter(row) for row in letters.to_pylist()],
        )

    def _combined(
        self, combine: Mapping[str, Combination] | None, few_rows: int
    ) -> tuple[pa.Table | None, Sequence[KeyedUpdate]]:
        """Returns a combined update for each key where that is exact, and single events for the others."""
        rows = self.updates
        if combine is None or rows.num_rows <= few_rows or _may_overflow(rows, combine):
            return None, self.single_updates(rows)
        alone = [*_swinging_keys(rows, combine), *_keys_apart(rows, combine), *self._keys_of_once()]
        if not any(len(keys) for keys in alone):
            return _aggregated(rows, combine), ()
        apart = pc.is_in(rows["key"], pa.concat_arrays(alone))
        return _aggregated(rows.filter(pc.invert(apart)), combine), self.single_updates(rows.filter(apart))

    def _keys_of_once(self) -> list[pa.Array]:
        """Returns keys with an event that counts only if it is the first with its idempotency key."""
        if not self.notes.num_rows:
            return []
        once = self.notes["offset"].filter(pc.is_valid(self.notes["idempotency_key"])).combine_chunks()
        if not len(once):
            return []
        chunks: list[pa.Array] = self.updates["key"].filter(pc.is_in(self.updates["offset"], once)).chunks
        return chunks


@lru_cache
def _no_notes(kind: pa.DataType) -> pa.Table:
    """Returns the columns of notes, without a row."""
    fields = [("offset", pa.int64()), *((field.name, field.type) for field in kind.value_type)]
    return pa.schema(fields).empty_table()


def _sums(rows: pa.Table, combine: Mapping[str, Combination]) -> list[pa.ChunkedArray]:
    return [summands for name, how in combine.items() for summands in how.sums(rows[name])]


def _swinging_keys(rows: pa.Table, combine: Mapping[str, Combination]) -> list[pa.Array]:
    """Returns keys with summands of both signs: their sum would hide an overflow of the state in between."""
    keys = [pa.array([], rows.schema.field("key").type)]
    for summands in filter(_is_of_both_signs, _sums(rows, combine)):
        grouped = pa.table({"key": rows["key"], "n": summands}).group_by("key")
        signs = grouped.aggregate([("n", "min"), ("n", "max")])
        both = pc.equal(pc.multiply(pc.sign(signs["n_min"]), pc.sign(signs["n_max"])), -1)
        keys += signs.filter(both)["key"].chunks
    return keys


def _keys_apart(rows: pa.Table, combine: Mapping[str, Combination]) -> list[pa.Array]:
    """Returns keys with an update that must not be combined with others."""
    masks = (how.apart(rows[name]) for name, how in combine.items())
    return [chunk for mask in masks if mask is not None for chunk in rows["key"].filter(mask).chunks]


def _is_of_both_signs(summands: pa.ChunkedArray) -> bool:
    """Whether some values are positive and others negative."""
    bounds = pc.min_max(summands).as_py()
    return bounds["min"] is not None and bounds["min"] < 0 < bounds["max"]


def _aggregated(rows: pa.Table, combine: Mapping[str, Combination]) -> pa.Table:
    """Returns one row for each key, sorted by key."""
    if not all(how.in_any_order for how in combine.values()):
        rows = rows.sort_by("offset")
    asked = [aggregate for name, how in combine.items() for aggregate in how.aggregates(rows[name])]
    columns = {str(number): column for number, (column, _) in enumerate(asked)}
    functions = [(str(number), function) for number, (_, function) in enumerate(asked)]
    found = pa.table({"key": rows["key"], **columns}).group_by("key", use_threads=False).aggregate(functions)
    groups, aggregated = (
        Groups(rows["key"], found["key"]),
        (found[f"{name}_{function}"] for name, function in functions),
    )
    updates = {name: how.combined(rows[name], aggregated, groups) for name, how in combine.items()}
    # Reading and writing neighbouring keys one after the other costs the store half of any other order.
    return pa.table({"key": found["key"], **updates}).sort_by("key").combine_chunks()


def _may_overflow(rows: pa.Table, combine: Mapping[str, Combination]) -> bool:
    """Whether a sum could exceed Arrow's type, which would wrap around silently."""
    for summands in _sums(rows, combine):
        kind = summands.type
        limit = 10 ** (_DECIMAL_DIGITS - kind.scale) if pa.types.is_decimal(kind) else _INTEGER_LIMIT
        bounds = pc.min_max(summands).as_py()
        # Python rounds decimals to 28 digits here, so the product may be slightly below the limit. That is safe:
        # Arrow's decimals wrap around at 1.7 times the limit. Integers are not rounded.
        if max((abs(v) for v in bounds.values() if v is not None), default=0) * rows.num_rows >= limit:
            return True
    return False


def unknown_schema(schema_id: int | None) -> str:
    """Returns what a dead letter says whose schema the registry does not know."""
    named = f"the schema that the header {SCHEMA_HEADER} names" if schema_id is None else f"schema {schema_id}"
    return f"the registry does not know {named}"


def _letter(row: Mapping[str, Any]) -> DeadLetter:
    if row["cause"] != UNRESOLVED:
        return _record(row, row["cause"])
    schema_id = row["schema_id"]
    cause = SCHEMA_GUID_UNKNOWN if schema_id is None else SCHEMA_ID_UNKNOWN
    return replace(_record(row, cause), detail=unknown_schema(schema_id))


def _record(row: Mapping[str, Any], cause: str) -> DeadLetter:
    return DeadLetter(
        row["offset"], row["timestamp"], row["record_key"], row["value"], cause, row["detail"] or "" if cause else ""
    )
