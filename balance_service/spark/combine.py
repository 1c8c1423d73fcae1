"""Updates of one batch of a partition, combined by key in Arrow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from balance_service.avro.arrow_rows import rows_of
from balance_service.engine.records import CombinedUpdates, DeadLetter, KeyedUpdate
from balance_service.model.folds import Best, Combine
from balance_service.observability.tracing import TRACEPARENT_HEADER
from balance_service.spark.best import best_of
from balance_service.spark.notes import IGNORED, NOTE, UNRESOLVED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from balance_service.model.folds import Combination

SCHEMA_ID_UNKNOWN = "schema-id-unknown"
# No name that a column can have.
_ROW = "#row"
# As Python objects keys and states take a multiple of their bytes, so they are made of some at a time.
_SLICE_KEYS = 20_000
# To set columns up costs as much as so many events one by one.
_FEW_ROWS = 32
# A batch may hold a million events, and each link is sent with the span.
_MOST_LINKS = 32
# As a Python object.
_LETTER_BYTES = 500
_DECIMAL_DIGITS = 38
_INTEGER_LIMIT = 2**63


_ENVELOPE = frozenset({"offset", "key", "timestamp"})
# What these come to does not depend on the order of the events, ties aside.
_IN_ANY_ORDER = (Combine.SUM, Combine.MAX, Combine.MIN)


@dataclass(frozen=True, slots=True)
class PartitionUpdates:
    """What some events of a partition come to; `updates` and `events` as in `TaskBatch`.

    `combined` has a row for each key that `events` has none of: `key` and the update columns, sorted by key. Of a stage
    without states it has all events, as they came.
    """

    combined: pa.Table | None = None
    events: Sequence[KeyedUpdate] = ()
    applied: int = 0
    ignored: int = 0
    dead_letters: Sequence[DeadLetter] = ()

    @property
    def keys(self) -> int:
        """How many keys have a combined update."""
        return 0 if self.combined is None else int(self.combined.num_rows)

    @property
    def combined_bytes(self) -> int:
        """What the combined updates take."""
        return 0 if self.combined is None else int(self.combined.nbytes)

    @property
    def letter_bytes(self) -> int:
        """What the dead letters take."""
        return sum(_LETTER_BYTES + len(letter.key or b"") + len(letter.value or b"") for letter in self.dead_letters)

    @property
    def updates(self) -> list[CombinedUpdates]:
        """The combined updates, some keys at a time."""
        if self.combined is None:
            return []
        slices = self.combined.to_batches(max_chunksize=_SLICE_KEYS)
        return [CombinedUpdates(some["key"], some.drop_columns(["key"])) for some in slices]

    def and_then(self, later: PartitionUpdates, combine: Mapping[str, Combination] | None) -> PartitionUpdates | None:
        """What both mean together; None where that is not what one after the other means.

        They can be one where each key's updates are sums of one sign, or extremes: then nothing that came of the way
        from one to the other, an overflow, is hidden.
        """
        if combine is None or self.events or later.events:
            return None
        if any(how not in _IN_ANY_ORDER for how in combine.values()):
            return None
        tables = [part.combined for part in (self, later) if part.combined is not None]
        both = pa.concat_tables(tables) if tables else None
        if both is not None and len(tables) > 1:
            sums = [both[name] for name, how in combine.items() if how is Combine.SUM]
            if _may_overflow(both, combine) or any(map(_is_of_both_signs, sums)):
                return None
            both = _aggregated(both, combine)
        return PartitionUpdates(
            both,
            (),
            self.applied + later.applied,
            self.ignored + later.ignored,
            (*self.dead_letters, *later.dead_letters),
        )


class PartitionRows:
    """Decoded rows of one partition, in offset order; there is at least one.

    `updates` are those to fold: `offset`, `key` and the update columns. `notes` are those with a note, its fields as
    columns beside `offset`, be they to fold or not.
    """

    def __init__(self, rows: pa.Table) -> None:
        """Rows as `Decoder.updates` has them."""
        notes = rows[NOTE]
        self.updates: pa.Table = _widest(rows.drop_columns([NOTE]))
        noted = rows.filter(pc.is_valid(notes)) if notes.null_count < len(notes) else rows.slice(0, 0)
        fields = pc.list_flatten(noted[NOTE]).combine_chunks()
        names = [field.name for field in rows.schema.field(NOTE).type.value_type]
        self.notes = pa.table({"offset": noted["offset"], **dict(zip(names, fields.flatten(), strict=True))})
        if noted.num_rows:
            others = self.notes["offset"].filter(pc.is_valid(self.notes["cause"]))
            self.updates = self.updates.filter(pc.invert(pc.is_in(rows["offset"], others.combine_chunks())))

    def updates_of(self, keys: Sequence[bytes]) -> pa.Table:
        """Those of `updates` that are of some keys."""
        return self.updates.filter(pc.is_in(self.updates["key"], pa.array(keys, self.updates.schema.field("key").type)))

    def unresolved(self) -> set[int]:
        """The schema ids that were not known when the plan was made."""
        return set(pc.unique(self.notes["schema_id"].drop_null()).to_pylist())

    def traceparents(self) -> list[str]:
        """Of some of the records whose trace is kept, what names their spans."""
        found: list[str] = self.notes[TRACEPARENT_HEADER].drop_null().slice(0, _MOST_LINKS).to_pylist()
        return found

    def singly(self, updates: pa.Table, records: Mapping[int, DeadLetter] | None = None) -> list[KeyedUpdate]:
        """Some of `updates`, in offset order.

        Args:
            records: the records of all of them by offset; without them, an update has its record if it names an
                idempotency key.
        """
        once = self.notes.filter(pc.is_valid(self.notes["idempotency_key"])).to_pylist()
        kept = {row["offset"]: _record(row, "") for row in once} if records is None else records
        idempotency_keys = {row["offset"]: row["idempotency_key"] for row in once}
        updates = updates.sort_by("offset")
        keys, offsets = updates["key"].to_pylist(), updates["offset"].to_pylist()
        has_times = "timestamp" in updates.column_names
        times = updates["timestamp"].to_pylist() if has_times else [-1] * len(offsets)
        changed = rows_of(updates.select([name for name in updates.column_names if name not in _ENVELOPE]))
        return [
            KeyedUpdate(key, update, kept.get(at), idempotency_keys.get(at), at, timestamp_ms)
            for key, update, at, timestamp_ms in zip(keys, changed, offsets, times, strict=True)
        ]

    def combined(self, combine: Mapping[str, Combination] | None, *, few_rows: int = _FEW_ROWS) -> PartitionUpdates:
        """The updates of each key as one.

        Unresolved records count as dead letters: ask the registry about `unresolved` ids first.

        Args:
            few_rows: so many events are not worth combining.
        """
        updates, events = self._combined(combine, few_rows)
        return self._with_notes(updates, events)

    def as_they_came(self) -> PartitionUpdates:
        """All events, for a stage without states."""
        return self._with_notes(self.updates.combine_chunks() if self.updates.num_rows else None, ())

    def _with_notes(self, updates: pa.Table | None, events: Sequence[KeyedUpdate]) -> PartitionUpdates:
        is_ignored = pc.equal(self.notes["cause"], IGNORED)
        letters = self.notes.filter(pc.and_kleene(pc.is_valid(self.notes["cause"]), pc.invert(is_ignored)))
        return PartitionUpdates(
            combined=updates,
            events=events,
            applied=self.updates.num_rows,
            ignored=pc.sum(is_ignored).as_py() or 0,
            dead_letters=[
                _record(row, SCHEMA_ID_UNKNOWN if row["cause"] == UNRESOLVED else row["cause"])
                for row in letters.to_pylist()
            ],
        )

    def _combined(
        self, combine: Mapping[str, Combination] | None, few_rows: int
    ) -> tuple[pa.Table | None, Sequence[KeyedUpdate]]:
        """An update of each key that can have one, and the events of the others."""
        rows = self.updates
        if combine is None or rows.num_rows <= few_rows or _may_overflow(rows, combine):
            return None, self.singly(rows)
        alone = [*_swinging_keys(rows, combine), *self._keys_of_once()]
        if not any(len(keys) for keys in alone):
            return _aggregated(rows, combine), ()
        apart = pc.is_in(rows["key"], pa.concat_arrays(alone))
        return _aggregated(rows.filter(pc.invert(apart)), combine), self.singly(rows.filter(apart))

    def _keys_of_once(self) -> list[pa.Array]:
        """Keys of which an event counts only if it is the first of its idempotency key."""
        once = self.notes["offset"].filter(pc.is_valid(self.notes["idempotency_key"])).combine_chunks()
        if not len(once):
            return []
        chunks: list[pa.Array] = self.updates["key"].filter(pc.is_in(self.updates["offset"], once)).chunks
        return chunks


def _widest(rows: pa.Table) -> pa.Table:
    """The same with decimals of all digits there are: how many come from Spark depends on what writers there are."""
    fields = [
        field.with_type(pa.decimal128(_DECIMAL_DIGITS, field.type.scale)) if pa.types.is_decimal(field.type) else field
        for field in rows.schema
    ]
    return rows.cast(pa.schema(fields))


def _swinging_keys(rows: pa.Table, combine: Mapping[str, Combination]) -> list[pa.Array]:
    """Keys with updates of both signs: their sum would hide that the state overflowed on the way to it."""
    keys = [pa.array([], rows.schema.field("key").type)]
    for name, how in combine.items():
        if how is Combine.SUM and _is_of_both_signs(rows[name]):
            signs = rows.group_by("key").aggregate([(name, "min"), (name, "max")])
            both = pc.equal(pc.multiply(pc.sign(signs[f"{name}_min"]), pc.sign(signs[f"{name}_max"])), -1)
            keys += signs.filter(both)["key"].chunks
    return keys


def _is_of_both_signs(summands: pa.ChunkedArray) -> bool:
    """Whether some are above zero and others below."""
    bounds = pc.min_max(summands).as_py()
    return bounds["min"] is not None and bounds["min"] < 0 < bounds["max"]


def _aggregated(rows: pa.Table, combine: Mapping[str, Combination]) -> pa.Table:
    """One row for each key, in their order."""
    of_arrow = {name: how for name, how in combine.items() if how in _IN_ANY_ORDER}
    aggregates = [(name, how.value) for name, how in of_arrow.items()]
    if len(of_arrow) < len(combine):
        # Arrow knows no first or last decimal, but the row numbers of a key tell its first and last row.
        rows = rows.sort_by("offset").append_column(_ROW, pa.array(range(rows.num_rows), pa.int64()))
        for name, how in combine.items():
            if isinstance(how, Combine) and how not in _IN_ANY_ORDER:
                known = pc.if_else(pc.is_valid(rows[name]), rows[_ROW], None)
                rows = rows.append_column(_ROW + name, known)
                aggregates.append((_ROW + name, "max" if how is Combine.LAST else "min"))
    result = rows.group_by("key", use_threads=False).aggregate(aggregates)
    columns = {
        name: best_of(rows, name, how, result["key"])
        if isinstance(how, Best)
        else result[f"{name}_{how.value}"]
        if name in of_arrow
        else rows[name].take(result[f"{_ROW}{name}_{'max' if how is Combine.LAST else 'min'}"])
        for name, how in combine.items()
    }
    # Neighbours in the store one after the other: reading and writing them costs it half of what any order would.
    return pa.table({"key": result["key"], **columns}).sort_by("key").combine_chunks()


def _may_overflow(rows: pa.Table, combine: Mapping[str, Combination]) -> bool:
    """Whether a sum could leave Arrow's type for it, which would wrap without a word."""
    for name, how in combine.items():
        kind = rows.schema.field(name).type
        if how is not Combine.SUM or not (pa.types.is_decimal(kind) or pa.types.is_integer(kind)):
            continue
        limit = 10 ** (_DECIMAL_DIGITS - kind.scale) if pa.types.is_decimal(kind) else _INTEGER_LIMIT
        bounds = pc.min_max(rows[name]).as_py()
        # Python rounds decimals to 28 digits here, so the product may fall short of the limit by a hair. That does no
        # harm: Arrow's wrap around 1.7 times as far away. Integers are not rounded.
        if max((abs(v) for v in bounds.values() if v is not None), default=0) * rows.num_rows >= limit:
            return True
    return False


def _record(row: Mapping[str, object], cause: str) -> DeadLetter:
    return DeadLetter(row["offset"], row["timestamp"], row["record_key"], row["value"], cause)  # type: ignore[arg-type]
