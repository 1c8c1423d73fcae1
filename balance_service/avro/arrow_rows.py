"""Converts Arrow columns to Python rows.

`to_pylist` converts the members of structs and lists one by one, which takes many times as long as a column of them.
Decimals are also faster here: Python parses their digits.
"""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from collections.abc import Sequence


def rows_of(columns: pa.Table | pa.RecordBatch) -> list[dict[str, Any]]:
    """The rows as dicts by column name, equal to `to_pylist(maps_as_pydicts="strict")`."""
    return _records(columns.column_names, [values_of(column) for column in columns.columns], columns.num_rows)


def values_of(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    if isinstance(column, pa.ChunkedArray):
        return [value for chunk in column.chunks for value in values_of(chunk)]
    if pa.types.is_struct(column.type):
        names = [column.type.field(i).name for i in range(column.type.num_fields)]
        return _with_nulls(column, _records(names, [values_of(field) for field in column.flatten()], len(column)))
    if pa.types.is_list(column.type):
        values, start, lists = values_of(column.flatten()), 0, []
        for length in pc.fill_null(pc.list_value_length(column), 0).to_pylist():
            lists.append(values[start : start + length])
            start += length
        return _with_nulls(column, lists)
    if pa.types.is_decimal(column.type):
        return [None if digits is None else Decimal(digits) for digits in column.cast(pa.string()).to_pylist()]
    # With the option for maps, Arrow creates an intermediate object for every value.
    plain: list[Any] = column.to_pylist(maps_as_pydicts="strict" if pa.types.is_nested(column.type) else None)
    return plain


def _records(names: Sequence[str], columns: Sequence[Sequence[Any]], count: int) -> list[dict[str, Any]]:
    if not columns:
        return [{} for _ in range(count)]
    if len(names) == 1:
        return [{names[0]: value} for value in columns[0]]
    # Columns are as many as names, and of one length.
    return [dict(zip(names, row)) for row in zip(*columns)]  # noqa: B905


def _with_nulls(column: pa.Array, values: list[Any]) -> list[Any]:
    if not column.null_count:
        return values
    valid = column.is_valid().to_pylist()
    return [value if is_valid else None for value, is_valid in zip(values, valid, strict=True)]
