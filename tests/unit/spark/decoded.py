"""Rows of a batch in the form of the decoder's plan, and their combination."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

from balance_service.engine.batch import PartitionUpdates
from balance_service.spark.combine import NOTE, PartitionRows

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from balance_service.model.standard_fold import Combination

MONEY = pa.decimal128(38, 2)
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
_ENVELOPE = {"offset": pa.int64(), "key": pa.binary()}
_FIELDS = {
    "cause": pa.string(),
    "detail": pa.string(),
    "record": pa.string(),
    "schema_id": pa.int64(),
    "timestamp": pa.int64(),
    "record_key": pa.binary(),
    "value": pa.binary(),
    "headers": HEADERS,
    "idempotency_key": pa.binary(),
    "traceparent": pa.string(),
}


def row(offset: int, key: bytes | None = b"c1", amount: Any = None, **changed: Any) -> dict[str, Any]:
    """Returns one row: a plain update, or with a note if `changed` has fields of one."""
    note = {name: changed.pop(name) for name in _FIELDS if changed.get(name) is not None}
    return {"offset": offset, "key": key, "amount": amount, NOTE: [note] if note else None, **changed}


def table(rows: Iterable[Mapping[str, Any]], amount: pa.DataType = MONEY, **more: pa.DataType) -> pa.Table:
    """Returns a batch; `more` are update columns in addition to the amount."""
    columns = {**_ENVELOPE, "amount": amount, **more, NOTE: pa.list_(pa.struct(list(_FIELDS.items())))}
    return pa.Table.from_pylist([dict(r) for r in rows], schema=pa.schema(columns))


def combined(
    rows: Iterable[Mapping[str, Any]],
    combine: Mapping[str, Combination] | None,
    amount: pa.DataType = MONEY,
    **more: pa.DataType,
) -> PartitionUpdates:
    """Returns the updates of a batch, combined even if it has few rows."""
    batch = table(rows, amount, **more)
    return PartitionRows(batch).combined(combine, few_rows=0) if batch.num_rows else PartitionUpdates(0)
