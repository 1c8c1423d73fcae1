"""Rows of a batch as the decoder's plan yields them, and what they come to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

from balance_service.spark.combine import PartitionRows, PartitionUpdates
from balance_service.spark.notes import NOTE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from balance_service.model.folds import Combination

MONEY = pa.decimal128(18, 2)
_ENVELOPE = {"offset": pa.int64(), "key": pa.binary()}
_FIELDS = {
    "cause": pa.string(),
    "schema_id": pa.int64(),
    "timestamp": pa.int64(),
    "record_key": pa.binary(),
    "value": pa.binary(),
    "idempotency_key": pa.binary(),
    "traceparent": pa.string(),
}


def row(offset: int, key: bytes | None = b"c1", amount: Any = None, **changed: Any) -> dict[str, Any]:
    """One row: a plain update, unless fields of a note are given."""
    note = {name: changed.pop(name) for name in _FIELDS if changed.get(name) is not None}
    return {"offset": offset, "key": key, "amount": amount, NOTE: [note] if note else None, **changed}


def table(rows: Iterable[Mapping[str, Any]], amount: pa.DataType = MONEY, **more: pa.DataType) -> pa.Table:
    """The batch; `more` are its update columns besides the amount."""
    columns = {**_ENVELOPE, "amount": amount, **more, NOTE: pa.list_(pa.struct(list(_FIELDS.items())))}
    return pa.Table.from_pylist([dict(r) for r in rows], schema=pa.schema(columns))


def combined(
    rows: Iterable[Mapping[str, Any]],
    combine: Mapping[str, Combination] | None,
    amount: pa.DataType = MONEY,
    **more: pa.DataType,
) -> PartitionUpdates:
    """The updates of the batch, combined however few its rows are."""
    batch = table(rows, amount, **more)
    return PartitionRows(batch).combined(combine, few_rows=0) if batch.num_rows else PartitionUpdates()
