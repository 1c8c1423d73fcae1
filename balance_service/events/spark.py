"""The Spark session, and the source as a streaming DataFrame."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark import SparkContext
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from balance_service.events.jvm import launch_jvm
from balance_service.kafka.jvm_properties import jvm_properties

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark.sql import DataFrame

    from balance_service.events.jvm import SparkJvm
    from balance_service.settings import Settings


_RECORDS_PER_SPARK_TASK = 500_000
_GATEWAY = ("PYSPARK_GATEWAY_PORT", "PYSPARK_GATEWAY_SECRET")


def start_spark(settings: Settings, archive_options: Sequence[str] | None = None) -> SparkSession:
    """Start the session, and the JVM if it was not started before.

    Args:
        archive_options: of the JVM; by default those that use the class archive, if there is one.

    Raises:
        ConfigurationError: no suitable Java, or the connector jars cannot be had, or the JVM does not start.
    """
    _connect(launch_jvm(settings, archive_options))
    builder = (
        SparkSession.builder.appName(settings.application_id)
        .config(map=_defaults())
        .master(settings.spark_master)
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.maxResultSize", "0")
        .config("spark.task.maxDirectResultSize", "100m")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        # Of what Spark keeps for its user interface, each task would be written down as it goes.
        .config("spark.ui.liveUpdate.period", "-1")
        .config("spark.log.level", "ERROR")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", "2")
        # There is nothing to adapt: no plan of ours shuffles.
        .config("spark.sql.adaptive.enabled", "false")
        # Each micro-batch's plan is described at length otherwise, for an interface that is off.
        .config("spark.sql.ui.explainMode", "simple")
        .config("spark.sql.maxPlanStringLength", "0")
        .config("spark.sql.streaming.pollingDelay", f"{settings.polling_delay_ms}ms")
        .config("spark.sql.streaming.noDataMicroBatches.enabled", "false")
        .config("spark.sql.streaming.numRecentProgressUpdates", "2")
        .config("spark.sql.streaming.minBatchesToRetain", "2")
        # Each is copied a few times on its way: small ones while they are in the processor's cache.
        .config("spark.sql.execution.arrow.maxRecordsPerBatch", "16384")
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


def read_range(spark: SparkSession, settings: Settings, partition: int, start: int, end: int) -> DataFrame:
    """The source's committed records at the offsets `[start, end)` of one partition."""
    ends = {"endingOffsets": json.dumps({settings.topic: {str(partition): end}})}
    return spark.read.format("kafka").options(**_source_options(settings, {partition: start}), **ends).load()


def _connect(jvm: SparkJvm) -> None:
    """Make this JVM PySpark's own, once."""
    if SparkContext._gateway is not None:
        return
    # PySpark looks for a JVM that it has not started itself in the environment, and nowhere else.
    port, secret = jvm.gateway()
    try:
        os.environ.update(zip(_GATEWAY, (str(port), secret), strict=True))
        gateway: Any = launch_gateway()  # type: ignore[no-untyped-call]
    finally:
        for name in _GATEWAY:
            os.environ.pop(name, None)
    gateway.proc = jvm.process
    SparkContext._ensure_initialized(gateway=gateway)


def _defaults() -> dict[str, Any]:
    """What `spark-defaults.conf` in SPARK_CONF_DIR says; all that is set here goes before it."""
    folder = os.environ.get("SPARK_CONF_DIR")
    file = Path(folder) / "spark-defaults.conf" if folder else None
    if file is None or not file.is_file():
        return {}
    java: Any = SparkContext._jvm
    properties = java.java.util.Properties()
    properties.load(java.java.io.FileInputStream(str(file)))
    return dict(properties)


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
