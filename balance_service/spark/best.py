"""Of lists of entries, the best of each key, in Arrow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from balance_service.model.folds import Best


def best_of(rows: pa.Table, name: str, best: Best, keys: pa.ChunkedArray) -> pa.ListArray:
    """The best entries of each key, greatest first, of equal ones the earlier first.

    Args:
        rows: in the events' order, with `key` and, as `name`, lists of entries.
        keys: every key that `rows` has, once.

    Returns:
        A list for each of `keys`.
    """
    lists = rows[name].combine_chunks()
    entries = pc.list_flatten(lists)
    owners = pc.index_in(rows["key"].combine_chunks().take(pc.list_parent_indices(lists)), keys.combine_chunks())
    by = entries.field(best.by)
    ranked = pc.is_valid(by)
    if pa.types.is_floating(by.type):
        ranked = pc.and_(ranked, pc.invert(pc.is_nan(by).fill_null(True)))
    table = pa.table({"owner": owners, "by": by, "at": pa.array(range(len(by)), pa.int64())}).filter(ranked)
    table = table.sort_by([("owner", "ascending"), ("by", "descending"), ("at", "ascending")])
    owner = table["owner"].to_numpy()
    rank = np.arange(len(owner)) - np.searchsorted(owner, owner, side="left")
    kept = rank < best.most
    counts = np.bincount(owner[kept], minlength=len(keys))
    offsets = np.concatenate([[0], counts.cumsum()]).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, entries.take(table["at"].combine_chunks().filter(pa.array(kept))))
