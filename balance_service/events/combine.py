"""Updates of one micro-batch, combined per partition and key in Arrow, on the driver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from balance_service.events.decode import IGNORED, UNRESOLVED
from balance_service.read_models.read_model import Combine
from balance_service.state.records import CombinedUpdates, DeadLetter, KeyedUpdate
from balance_service.tracing import TRACEPARENT_HEADER

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ENVELOPE = frozenset(
    {
        "partition",
        "offset",
        "cause",
        "schema_id",
        "timestamp",
        "record_key",
        "value",
        "idempotency_key",
        "key",
        TRACEPARENT_HEADER,
    }
)
SCHEMA_ID_UNKNOWN = "schema-id-unknown"
_ROW = "row"
# As Python objects keys and states take a multiple of their bytes, so they are made of some at a time.
_SLICE_KEYS = 20_000
_DECIMAL_DIGITS = 38
_INTEGER_LIMIT = 2**63


@dataclass(frozen=True, slots=True)
class PartitionUpdates:
    """What a micro-batch means for one partition: `updates` and `events` as in `TaskBatch`."""

    updates: Sequence[CombinedUpdates] = ()
    events: Sequence[KeyedUpdate] = ()
    applied: int = 0
    ignored: int = 0
    dead_letters: Sequence[DeadLetter] = ()


def unresolved(table: pa.Table) -> dict[int, set[int]]:
    """Partition → the schema ids on it that were not known when the plan was made."""
    rows = table.select(["partition", "schema_id"]).filter(pc.is_valid(table["schema_id"]))
    found: dict[int, set[int]] = {}
    for pair in rows.group_by(["partition", "schema_id"]).aggregate([]).to_pylist():
        found.setdefault(pair["partition"], set()).add(pair["schema_id"])
    return found


def by_partition(table: pa.Table, combine: Mapping[str, Combine] | None) -> dict[int, PartitionUpdates]:
    """Split a decoded micro-batch by partition, and combine the updates of each key.

    Unresolved records count as dead letters: ask the registry about `unresolved` ids first.
    """
    partitions = pc.unique(table["partition"]).to_pylist()
    return {
        partition: _of_partition(table.filter(pc.equal(table["partition"], partition)), combine)
        for partition in sorted(partitions)
    }


def traceparents(table: pa.Table, partition: int, most: int) -> list[str]:
    """Of at most so many of a partition's records whose trace is kept, what names their spans."""
    of_partition = table[TRACEPARENT_HEADER].filter(pc.equal(table["partition"], partition))
    found: list[str] = of_partition.drop_null().slice(0, most).to_pylist()
    return found


def updates_of(table: pa.Table, partition: int, keys: Sequence[bytes]) -> pa.Table:
    """The rows of a decoded micro-batch that are updates of some keys, in offset order."""
    is_wanted = pc.and_(pc.equal(table["partition"], partition), pc.is_null(table["cause"]))
    is_wanted = pc.and_(is_wanted, pc.is_in(table["key"], pa.array(keys, table.schema.field("key").type)))
    return table.filter(is_wanted).sort_by("offset")


def singles(rows: pa.Table, records: pa.Table) -> list[KeyedUpdate]:
    """Each row as an update of its own, in their order, with its record, which `records` has under its offset."""
    by_offset = {row["offset"]: row for row in records.to_pylist()}
    return [
        KeyedUpdate(row["key"], _update(row), _record(by_offset[row["offset"]], ""), row["idempotency_key"])
        for row in rows.to_pylist()
    ]


def _of_partition(rows: pa.Table, combine: Mapping[str, Combine] | None) -> PartitionUpdates:
    folded = rows.filter(pc.is_null(rows["cause"]))
    others = rows.filter(pc.is_valid(rows["cause"]))
    is_ignored = pc.equal(others["cause"], IGNORED)
    letters = others.filter(pc.invert(is_ignored))
    updates, events = _combined(folded, combine)
    return PartitionUpdates(
        updates=updates,
        events=events,
        applied=folded.num_rows,
        ignored=pc.sum(is_ignored).as_py() or 0,
        dead_letters=[
            _record(row, SCHEMA_ID_UNKNOWN if row["cause"] == UNRESOLVED else row["cause"])
            for row in letters.to_pylist()
        ],
    )


def _combined(
    rows: pa.Table, combine: Mapping[str, Combine] | None
) -> tuple[Sequence[CombinedUpdates], Sequence[KeyedUpdate]]:
    """An update of each key that can have one, and the events of the others."""
    if combine is None or _may_overflow(rows, combine):
        return (), _single(rows)
    alone = [*_swinging_keys(rows, combine), *_keys_of_once(rows)]
    if not any(len(keys) for keys in alone):
        return _aggregated(rows, combine), ()
    apart = pc.is_in(rows["key"], pa.concat_arrays(alone))
    return _aggregated(rows.filter(pc.invert(apart)), combine), _single(rows.filter(apart))


def _single(rows: pa.Table) -> list[KeyedUpdate]:
    """Each row as an update of its own, in offset order; its record with it if it names an idempotency key."""
    return [
        KeyedUpdate(row["key"], _update(row))
        if row["idempotency_key"] is None
        else KeyedUpdate(row["key"], _update(row), _record(row, ""), row["idempotency_key"])
        for row in rows.sort_by("offset").to_pylist()
    ]


def _keys_of_once(rows: pa.Table) -> list[pa.Array]:
    """Keys of which an event counts only if it is the first of its idempotency key."""
    chunks: list[pa.Array] = rows.filter(pc.is_valid(rows["idempotency_key"]))["key"].chunks
    return chunks


def _swinging_keys(rows: pa.Table, combine: Mapping[str, Combine]) -> list[pa.Array]:
    """Keys with updates of both signs: their sum would hide that the state overflowed on the way to it."""
    keys = [pa.array([], rows.schema.field("key").type)]
    for name, how in combine.items():
        bounds = pc.min_max(rows[name]).as_py()
        if how is Combine.SUM and bounds["min"] is not None and bounds["min"] < 0 < bounds["max"]:
            signs = rows.group_by("key").aggregate([(name, "min"), (name, "max")])
            both = pc.equal(pc.multiply(pc.sign(signs[f"{name}_min"]), pc.sign(signs[f"{name}_max"])), -1)
            keys += signs.filter(both)["key"].chunks
    return keys


def _aggregated(rows: pa.Table, combine: Mapping[str, Combine]) -> list[CombinedUpdates]:
    aggregates = [(name, how.value) for name, how in combine.items() if how is not Combine.LAST]
    if len(aggregates) < len(combine):
        # Arrow knows no last decimal, but the greatest row number of a key is that of its last row.
        rows = rows.sort_by("offset").append_column(_ROW, pa.array(range(rows.num_rows), pa.int64()))
        aggregates.append((_ROW, "max"))
    result = rows.group_by("key").aggregate(aggregates)
    columns = {
        name: rows[name].take(result[f"{_ROW}_max"]) if how is Combine.LAST else result[f"{name}_{how.value}"]
        for name, how in combine.items()
    }
    table = pa.table({"key": result["key"], **columns}).combine_chunks()
    return [
        CombinedUpdates(some["key"], some.drop_columns(["key"])) for some in table.to_batches(max_chunksize=_SLICE_KEYS)
    ]


def _may_overflow(rows: pa.Table, combine: Mapping[str, Combine]) -> bool:
    """Whether a sum could leave Arrow's type for it, which would wrap without a word."""
    for name, how in combine.items():
        kind = rows.schema.field(name).type
        if how is not Combine.SUM or not (pa.types.is_decimal(kind) or pa.types.is_integer(kind)):
            continue
        limit = 10 ** (_DECIMAL_DIGITS - kind.scale) if pa.types.is_decimal(kind) else _INTEGER_LIMIT
        bounds = pc.min_max(rows[name]).as_py()
        # Rounding, should the product have more digits than the context, never takes it below the limit.
        if max((abs(v) for v in bounds.values() if v is not None), default=0) * rows.num_rows >= limit:
            return True
    return False


def _update(row: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in row.items() if name not in ENVELOPE}


def _record(row: Mapping[str, object], cause: str) -> DeadLetter:
    return DeadLetter(row["offset"], row["timestamp"], row["record_key"], row["value"], cause)  # type: ignore[arg-type]
