"""The Spark session, and the source as a streaming DataFrame."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pyspark
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)

from balance_service.events import class_archive
from balance_service.jars import resolve_jars
from balance_service.java import java_executable
from balance_service.kafka.jvm_properties import jvm_properties
from balance_service.resources import resource

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark.sql import DataFrame

    from balance_service.settings import Settings


_RECORDS_PER_SPARK_TASK = 500_000
# Each offset that a filter names is a node of the plan.
_MOST_NAMED = 1_000
# Avro allocates what a length in the data asks for before it looks whether there is as much.
_AVRO_LIMITS = " ".join(
    f"-Dorg.apache.avro.limits.{what}.maxLength={most}"
    for what, most in {"string": 16 << 20, "bytes": 16 << 20, "collectionItems": 1 << 20}.items()
)


def spark_java() -> Path:
    """The Java that runs Spark. Raises ConfigurationError if there is none."""
    return java_executable().resolve()


def class_path(settings: Settings) -> list[str]:
    """The jars of Spark's connectors, then Spark's own, in an order that is the same everywhere.

    Spark names its own by a wildcard, which the JVM expands in the file system's order; a class archive is good for one
    order, so one that was made where an image was built would be of no use where the image runs.

    Raises:
        ConfigurationError: the connectors' cannot be had.
    """
    connectors = settings.spark_jars.split(",") if settings.spark_jars else map(str, resolve_jars("spark"))
    return [*connectors, *sorted(str(jar) for jar in (Path(pyspark.__file__).parent / "jars").glob("*.jar"))]


def start_spark(settings: Settings, jvm_options: str | None = None) -> SparkSession:
    """Start the JVM and the session.

    Args:
        jvm_options: by default those that make it start fast.

    Raises:
        ConfigurationError: no suitable Java, or the connector jars cannot be had.
    """
    java, jars = spark_java(), class_path(settings)
    os.environ["JAVA_HOME"] = str(java.parent.parent)
    options = class_archive.jvm_options(java, jars) if jvm_options is None else jvm_options
    log4j = f"-Dlog4j2.configurationFile={resource('deploy/log4j2.properties').as_uri()}"
    builder = (
        SparkSession.builder.appName(settings.application_id)
        .master(settings.spark_master)
        # On the class path, not as spark.jars, which would be served to and copied by an executor in the same JVM.
        .config("spark.driver.extraClassPath", os.pathsep.join(jars))
        .config("spark.driver.memory", settings.spark_driver_memory)
        .config("spark.driver.extraJavaOptions", f"{log4j} -XX:+UseParallelGC {_AVRO_LIMITS} {options}")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.maxResultSize", "0")
        .config("spark.task.maxDirectResultSize", "100m")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.log.level", "ERROR")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.streaming.pollingDelay", f"{settings.polling_delay_ms}ms")
        .config("spark.sql.streaming.noDataMicroBatches.enabled", "false")
        .config("spark.sql.streaming.numRecentProgressUpdates", "2")
        .config("spark.sql.streaming.minBatchesToRetain", "2")
        .config("spark.sql.execution.arrow.maxRecordsPerBatch", "100000")
        # Spark's checkpoint is scratch here, but in its way: Hadoop's local file system sets permissions by a chmod
        # process for each file, and only Spark's older manager of checkpoint files lets another one be named.
        .config("spark.hadoop.fs.file.impl", "com.globalmentor.apache.hadoop.fs.BareLocalFileSystem")
        .config(
            "spark.sql.streaming.checkpointFileManagerClass",
            "org.apache.spark.sql.execution.streaming.FileSystemBasedCheckpointFileManager",
        )
    )
    return builder.getOrCreate()


def read_source(spark: SparkSession, settings: Settings, positions: Mapping[int, int]) -> DataFrame:
    """The source topic from these positions on, as a stream: only these partitions, only what is committed."""
    options = _source_options(settings, positions)
    bound = {
        "maxOffsetsPerTrigger": str(settings.max_records_per_batch),
        # What a Spark task has read is kept as a whole, more than once, until the driver has it.
        "maxRecordsPerPartition": str(_RECORDS_PER_SPARK_TASK),
    }
    return spark.readStream.format("kafka").options(**options, **bound).load()


def read_records(spark: SparkSession, settings: Settings, partition: int, offsets: Sequence[int]) -> DataFrame:
    """Some of the source's committed records of one partition, as they are.

    Returns:
        Columns `offset`, `timestamp` (ms), `record_key`, `value`; where many records are asked for, of others among
        them too.
    """
    first, last = min(offsets), max(offsets)
    ends = {"endingOffsets": json.dumps({settings.topic: {str(partition): last + 1}})}
    records = spark.read.format("kafka").options(**_source_options(settings, {partition: first}), **ends).load()
    if len(offsets) <= _MOST_NAMED:
        records = records.where(F.col("offset").isin(list(offsets)))
    return records.select(
        "offset", F.unix_millis("timestamp").alias("timestamp"), F.col("key").alias("record_key"), "value"
    )


def _source_options(settings: Settings, positions: Mapping[int, int]) -> dict[str, str]:
    topic = settings.topic
    translated = jvm_properties(settings.kafka_properties)
    return {
        "kafka.bootstrap.servers": settings.bootstrap_servers,
        "kafka.isolation.level": "read_committed",
        # The connector prefetches behind a batch's end; the default wait of 500 ms would hold up the next batch.
        "kafka.fetch.max.wait.ms": "10",
        "kafka.max.partition.fetch.bytes": str(4 << 20),
        # The connector asks for its position after each poll.
        "kafka.max.poll.records": "20000",
        **{f"kafka.{name}": value for name, value in translated.items()},
        "assign": json.dumps({topic: sorted(positions)}),
        "startingOffsets": json.dumps({topic: {str(p): o for p, o in positions.items()}}),
        "includeHeaders": "true",
        "failOnDataLoss": "true",
    }
