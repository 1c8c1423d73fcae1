"""Updates of one micro-batch, combined per partition and key in Arrow, on the driver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from balance_service.events.decode import IGNORED, UNRESOLVED
from balance_service.read_models.read_model import Combine
from balance_service.state.records import DeadLetter, KeyedUpdate, SingleUpdate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ENVELOPE = frozenset({"partition", "offset", "cause", "schema_id", "timestamp", "record_key", "value", "key"})
_DECIMAL_DIGITS = 38


@dataclass(frozen=True, slots=True)
class PartitionUpdates:
    """What a micro-batch means for one partition."""

    updates: Sequence[KeyedUpdate] = ()
    applied: int = 0
    ignored: int = 0
    dead_letters: Sequence[DeadLetter] = ()
    unresolved: frozenset[int] = frozenset()


def by_partition(table: pa.Table, combine: Mapping[str, Combine] | None) -> dict[int, PartitionUpdates]:
    """Split a decoded micro-batch by partition, and combine the updates of each key."""
    partitions = pc.unique(table["partition"]).to_pylist()
    return {
        partition: _of_partition(table.filter(pc.equal(table["partition"], partition)), combine)
        for partition in sorted(partitions)
    }


def singles(table: pa.Table) -> list[SingleUpdate]:
    """Each row as an update of its own, with its record, in the table's order."""
    return [
        SingleUpdate(_record(row, ""), KeyedUpdate(row["key"], _update(row))) for row in table.to_pylist()
    ]


def _of_partition(rows: pa.Table, combine: Mapping[str, Combine] | None) -> PartitionUpdates:
    cause = rows["cause"]
    folded = rows.filter(pc.is_null(cause))
    others = rows.filter(pc.is_valid(cause))
    ignored = pc.sum(pc.equal(others["cause"], IGNORED)).as_py() or 0
    unresolved = others.filter(pc.equal(others["cause"], UNRESOLVED))
    letters = others.filter(pc.invert(pc.is_in(others["cause"], pa.array([IGNORED, UNRESOLVED]))))
    return PartitionUpdates(
        updates=_combined(folded, combine),
        applied=folded.num_rows,
        ignored=ignored,
        dead_letters=[_record(row, row["cause"]) for row in letters.to_pylist()],
        unresolved=frozenset(pc.unique(unresolved["schema_id"]).to_pylist()),
    )


def _combined(rows: pa.Table, combine: Mapping[str, Combine] | None) -> list[KeyedUpdate]:
    if combine is None or _may_overflow(rows, combine):
        return [KeyedUpdate(row["key"], _update(row)) for row in rows.sort_by("offset").to_pylist()]
    ordered = Combine.LAST in combine.values()
    grouped = (rows.sort_by("offset") if ordered else rows).group_by("key", use_threads=not ordered)
    result = grouped.aggregate([(column, how.value) for column, how in combine.items()])
    columns = {name: result[f"{name}_{how.value}"].to_pylist() for name, how in combine.items()}
    return [
        KeyedUpdate(key, dict(zip(columns, values, strict=True)))
        for key, *values in zip(result["key"].to_pylist(), *columns.values(), strict=True)
    ]


def _may_overflow(rows: pa.Table, combine: Mapping[str, Combine]) -> bool:
    """Whether a sum could leave Arrow's decimal128, which would wrap without a word."""
    for name, how in combine.items():
        if how is not Combine.SUM or not pa.types.is_decimal(rows.schema.field(name).type):
            continue
        bounds = pc.min_max(rows[name]).as_py()
        largest = max((abs(v) for v in bounds.values() if v is not None), default=0)
        scale = rows.schema.field(name).type.scale
        if largest * rows.num_rows >= 10 ** (_DECIMAL_DIGITS - scale):
            return True
    return False


def _update(row: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in row.items() if name not in ENVELOPE}


def _record(row: Mapping[str, object], cause: str) -> DeadLetter:
    return DeadLetter(row["offset"], row["timestamp"], row["record_key"], row["value"], cause)  # type: ignore[arg-type]
