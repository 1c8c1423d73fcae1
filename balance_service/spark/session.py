"""The Spark session, and a partition of the source as a streaming DataFrame."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark import SparkContext
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from balance_service.errors import FatalError
from balance_service.settings.jvm_properties import jvm_properties
from balance_service.spark.jvm import launch_jvm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import DataFrame

    from balance_service.process.scratch import Scratch
    from balance_service.settings import Settings
    from balance_service.spark.jvm import SparkJvm


_GATEWAY = ("PYSPARK_GATEWAY_PORT", "PYSPARK_GATEWAY_SECRET")


def start_spark(
    settings: Settings, scratch: Scratch, slots: int, archive_options: Sequence[str] | None = None
) -> SparkSession:
    """Start the session, and the JVM if it was not started before.

    Args:
        scratch: where the session keeps its temporary files, and the JVM if it is started now.
        slots: how many partitions can be read at once. A query that finds no slot waits for one, and says nothing.
        archive_options: of the JVM; by default those that use the class archive, if there is one.

    Raises:
        ConfigurationError: no suitable Java, or the connector jars cannot be had, or the JVM does not start.
    """
    _connect(launch_jvm(settings, scratch, archive_options))
    builder = (
        SparkSession.builder.appName(settings.application_id)
        .config(map=_defaults())
        .master(f"local[{slots}]")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        # Its ports answer processes that have the secret, which Spark makes for each session and keeps in memory.
        .config("spark.authenticate", "true")
        .config("spark.local.dir", str(scratch.files))
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        # Of what Spark keeps for its user interface, each task would be written down as it goes.
        .config("spark.ui.liveUpdate.period", "-1")
        # It keeps those of a thousand queries.
        .config("spark.ui.retainedJobs", "10")
        .config("spark.ui.retainedStages", "10")
        .config("spark.sql.ui.retainedExecutions", "10")
        .config("spark.log.level", "ERROR")
        .config("spark.sql.session.timeZone", "UTC")
        # There is nothing to adapt: no plan of ours shuffles.
        .config("spark.sql.adaptive.enabled", "false")
        .config("spark.sql.streaming.numRecentProgressUpdates", "1")
        # A consumer belongs to one query; kept after that, it holds what it has fetched.
        .config("spark.kafka.consumer.cache.timeout", "10s")
        .config("spark.kafka.consumer.cache.evictorThreadRunInterval", "10s")
        # Spark's checkpoint is scratch here, but in its way: Hadoop's local file system sets permissions by a chmod
        # process for each file, and only Spark's older manager of checkpoint files lets another one be named.
        .config("spark.hadoop.fs.permissions.umask-mode", "077")
        .config("spark.hadoop.fs.file.impl", "com.globalmentor.apache.hadoop.fs.BareLocalFileSystem")
        .config(
            "spark.sql.streaming.checkpointFileManagerClass",
            "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager",
        )
    )
    spark = builder.getOrCreate()
    _close_accumulators(spark)
    return spark


def read_source(spark: SparkSession, settings: Settings, topic: str, partition: int, position: int) -> DataFrame:
    """One partition of a topic from a position on, as a stream of what is committed."""
    options = {
        "kafka.bootstrap.servers": settings.bootstrap_servers,
        "kafka.isolation.level": "read_committed",
        # The broker answers as soon as there is a record: this is how often it says that there is none.
        "kafka.fetch.max.wait.ms": "2000",
        "kafka.max.partition.fetch.bytes": str(1 << 20),
        "kafka.max.poll.records": "5000",
        **{f"kafka.{name}": value for name, value in jvm_properties(settings.kafka_properties).items()},
        "assign": json.dumps({topic: [partition]}),
        "startingOffsets": json.dumps({topic: {str(partition): position}}),
        "includeHeaders": "true",
        "failOnDataLoss": "true",
    }
    return spark.readStream.format("kafka").options(**options).load()


def require_jvm(spark: SparkSession, error: Exception) -> None:
    """Raises FatalError if the end of Spark is why something has failed: another attempt would not help."""
    if jvm_has_ended(spark):
        raise FatalError("Spark's JVM has ended") from error
    session: Any = spark._jsparkSession
    if session.sparkContext().isStopped():
        raise FatalError("Spark has stopped by itself") from error


def jvm_has_ended(spark: SparkSession) -> bool:
    """Whether the process is gone. It is not asked for that."""
    context: Any = spark.sparkContext
    return context._gateway is None or context._gateway.proc.poll() is not None


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


def _close_accumulators(spark: SparkSession) -> None:
    """Close the port to which the JVM would send the accumulators of Python workers: none is started."""
    context: Any = spark.sparkContext
    server, context._accumulatorServer = context._accumulatorServer, None
    if server is not None:
        # It takes half a second.
        threading.Thread(target=server.shutdown, name="accumulators-end", daemon=True).start()


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
