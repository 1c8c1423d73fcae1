"""Events of some keys, with their records read once more: what several combined come to, only each of them can tell."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)

from balance_service.events.spark import read_range

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import SparkSession

    from balance_service.events.combine import PartitionRows
    from balance_service.settings import Settings
    from balance_service.state.records import KeyedUpdate

# Each offset that a filter names is a node of the plan.
_MOST_NAMED = 1_000


def read_updates(
    spark: SparkSession, settings: Settings, partition: int, rows: PartitionRows, keys: Sequence[bytes]
) -> list[KeyedUpdate]:
    """The updates of some keys in a micro-batch's share of a partition, in offset order, each with its record."""
    found = rows.updates_of(keys)
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
