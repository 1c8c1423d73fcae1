"""Events of some keys, read once more: what several combined come to, only each of them can tell."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)

from balance_service.events.combine import by_partition
from balance_service.events.spark import read_range

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import SparkSession

    from balance_service.events.combine import PartitionRows
    from balance_service.events.decode import Decoder
    from balance_service.settings import Settings
    from balance_service.state.records import KeyedUpdate

# Each key or offset that a filter names is a node of the plan.
_MOST_NAMED = 1_000


def read_updates(
    spark: SparkSession,
    settings: Settings,
    decoder: Decoder,
    partition: int,
    start: int,
    end: int,
    rows: PartitionRows | None,
    keys: Sequence[bytes],
    letters: Sequence[int],
) -> list[KeyedUpdate]:
    """The updates of some keys at the offsets `[start, end)` of a partition, in offset order, each with its record.

    Args:
        rows: all that is there, decoded; None if it has to be decoded once more.
        letters: offsets of dead letters, which are no updates even if they could be decoded by now.
    """
    if rows is None:
        updates = decoder.updates(read_range(spark, settings, partition, start, end))
        if len(keys) <= _MOST_NAMED:
            updates = updates.where(F.col("key").isin([F.lit(bytearray(key)) for key in keys]))
        rows = by_partition(updates.toArrow()).get(partition)
        if rows is None:
            return []
    found = rows.updates_of(keys)
    found = found.filter(pc.invert(pc.is_in(found["offset"], pa.array(letters, pa.int64()))))
    if not found.num_rows:
        return []
    offsets = found["offset"].to_pylist()
    records = read_range(spark, settings, partition, min(offsets), max(offsets) + 1)
    if len(offsets) <= _MOST_NAMED:
        records = records.where(F.col("offset").isin(offsets))
    kept = records.select(
        "offset", F.unix_millis("timestamp").alias("timestamp"), F.col("key").alias("record_key"), "value"
    )
    return rows.singly(found, kept.toArrow())
