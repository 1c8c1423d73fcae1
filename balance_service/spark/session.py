"""The Spark session, a partition of the source as a streaming DataFrame, and samples of the JVM's heap."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog
from py4j.protocol import Py4JError
from pyspark import SparkConf, SparkContext
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession
from pyspark.sql.classic.dataframe import DataFrame as ClassicDataFrame

from balance_service.avro.frames import frame_header
from balance_service.errors import FatalError
from balance_service.process.scratch import temporary_scratch
from balance_service.settings import load_settings
from balance_service.settings.kafka import jvm_properties
from balance_service.settings.spark import (
    JAVA_OPTIONS,
    OWN_SETTINGS,
    PREFERRED_SETTINGS,
    SETTINGS_WITHOUT_UI,
    VALUE_SETTINGS,
    refuse_settings,
    spark_defaults,
)
from balance_service.spark.jvm import launch_jvm

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark.sql import DataFrame

    from balance_service.process.scratch import Scratch
    from balance_service.settings import Settings
    from balance_service.spark.jvm import SparkJvm

log = structlog.get_logger(__name__)

_GATEWAY = ("PYSPARK_GATEWAY_PORT", "PYSPARK_GATEWAY_SECRET")
# The longest calls, such as the start of the session, take some seconds.
_ANSWER_SECONDS = 60.0
# From the end of the JVM's sockets to that of its process, which gives its heap back.
_END_SECONDS = 15.0
_BODY_BYTES = 1_000
_WITHOUT_JOBS: list[SparkSession] = []
"""The session that `any_session` has started."""


def start_spark(
    settings: Settings, scratch: Scratch, slots: int, archive_options: Sequence[str] | None = None
) -> SparkSession:
    """Starts the session, and the JVM unless it was started before.

    Args:
        scratch: for temporary files of the session, and of the JVM if it is started now.
        slots: the number of partitions that can be read at once. A query without a slot waits silently.
        archive_options: for the JVM; by default, those that use the class archive, if there is one.

    Raises:
        ConfigurationError: there is no suitable Java, the connector jars cannot be obtained, the JVM does not start,
            or it is given a setting of Spark that only the service sets.
    """
    connect(launch_jvm(settings, scratch, archive_options))
    refuse_settings(dict(SparkConf().getAll()), JAVA_OPTIONS)
    configured: dict[str, bool | float | int | str | None] = {
        **PREFERRED_SETTINGS,
        **({} if settings.spark_ui else SETTINGS_WITHOUT_UI),
        **spark_defaults(),
        **OWN_SETTINGS,
        **VALUE_SETTINGS,
        "spark.local.dir": str(scratch.files),
        "spark.ui.enabled": str(settings.spark_ui).lower(),
    }
    builder = SparkSession.builder.appName(settings.application_id).master(f"local[{slots}]")
    spark = builder.config(map=configured).getOrCreate()
    _close_accumulators(spark)
    if spark.sparkContext.uiWebUrl is not None:
        log.info("Spark's UI", url=spark.sparkContext.uiWebUrl)
    return spark


def any_session(settings: Settings | None = None) -> SparkSession:
    """Returns the session of this process; starts one if there is none, for plans and for a few records at a time.

    `start_spark` replaces that one. Raises as `start_spark`.

    Args:
        settings: by default, those of the environment.
    """
    if (running := SparkSession._instantiatedSession) is not None:
        return running
    log.info("Spark starts, because a read model has a `transform`")
    scratch = ExitStack()
    atexit.register(scratch.close)
    spark = start_spark(settings or load_settings(), scratch.enter_context(temporary_scratch()), 1)
    _WITHOUT_JOBS.append(spark)
    return spark


def read_source(spark: SparkSession, settings: Settings, topic: str, positions: Mapping[int, int]) -> DataFrame:
    """Returns the committed records of some partitions, each from its position on, as a streaming DataFrame."""
    return spark.readStream.format("kafka").options(**source_options(settings, topic, positions)).load()


def source_options(settings: Settings, topic: str, positions: Mapping[int, int]) -> dict[str, str]:
    """Returns the options of Spark's Kafka source for the committed records of some partitions."""
    return {
        "kafka.bootstrap.servers": settings.bootstrap_servers,
        "kafka.isolation.level": "read_committed",
        # The broker answers as soon as there is a record; this bounds the wait if there is none.
        "kafka.fetch.max.wait.ms": "2000",
        "kafka.max.partition.fetch.bytes": str(1 << 20),
        "kafka.max.poll.records": "5000",
        "kafka.auto.include.jmx.reporter": "false",
        "kafka.metric.reporters": "",
        "kafka.enable.metrics.push": "false",
        **{f"kafka.{name}": value for name, value in jvm_properties(settings.kafka_properties).items()},
        "assign": json.dumps({topic: [*positions]}),
        "startingOffsets": json.dumps({topic: {str(partition): position for partition, position in positions.items()}}),
        "includeHeaders": "true",
        "failOnDataLoss": "true",
    }


def one_record(spark: SparkSession, schema_id: int = 1) -> DataFrame:
    """Returns one record from a memory stream, the only source with real-time mode except Kafka's.

    Args:
        schema_id: of its value, whose fields are empty or zero.
    """
    jvm: Any = spark._jvm
    session: Any = spark._jsparkSession
    streams = jvm.org.apache.spark.sql.execution.streaming.sources.LowLatencyMemoryStream
    stream = streams.singlePartition(session, jvm.org.apache.spark.sql.Encoders.INT())
    stream.addData(jvm.scala.jdk.javaapi.CollectionConverters.asScala(jvm.java.util.List.of(1)))
    return ClassicDataFrame(stream.toDF(), spark).selectExpr(
        "cast(value as bigint) as offset",
        "current_timestamp() as timestamp",
        "cast('c' as binary) as key",
        f"unhex('{frame_header(schema_id).hex()}{'00' * _BODY_BYTES}') as value",
        "cast(null as array<struct<key:string,value:binary>>) as headers",
        "0 as partition",
    )


class JvmEndedError(FatalError):
    """Spark's JVM has ended, and this process has not."""


def require_jvm(spark: SparkSession, error: Exception) -> None:
    """Checks whether an operation failed because Spark has ended: a retry would not help.

    Raises:
        JvmEndedError: the JVM has ended.
        FatalError: the JVM does not answer, or Spark has stopped in it.
    """
    session: Any = spark._jsparkSession
    try:
        is_stopped = not jvm_has_ended(spark) and session.sparkContext().isStopped()
    except (Py4JError, OSError) as silence:
        # A JVM that ends closes its sockets first.
        if not _jvm_ends(spark):
            raise FatalError(f"Spark's JVM does not answer: {silence}") from error
        is_stopped = False
    if jvm_has_ended(spark):
        raise JvmEndedError("Spark's JVM has ended") from error
    if is_stopped:
        raise FatalError("Spark has stopped by itself") from error


def jvm_has_ended(spark: SparkSession) -> bool:
    """Whether the JVM's process has ended. Does not call the JVM."""
    context: Any = spark.sparkContext
    return context._gateway is None or context._gateway.proc.poll() is not None


def _jvm_ends(spark: SparkSession) -> bool:
    context: Any = spark.sparkContext
    with suppress(subprocess.TimeoutExpired):
        context._gateway.proc.wait(_END_SECONDS)
    return jvm_has_ended(spark)


def connect(jvm: SparkJvm, answer_seconds: float | None = _ANSWER_SECONDS) -> None:
    """Makes PySpark use this JVM, and ends the session of `any_session`.

    Args:
        answer_seconds: how long a call of the JVM may take; None for any time.
    """
    if SparkContext._gateway is None:
        # PySpark finds a JVM that it has not started only by environment variables.
        port, secret = jvm.gateway()
        try:
            os.environ.update(zip(_GATEWAY, (str(port), secret), strict=True))
            gateway: Any = launch_gateway()  # type: ignore[no-untyped-call]
        finally:
            for name in _GATEWAY:
                os.environ.pop(name, None)
        gateway.proc = jvm.process
        SparkContext._ensure_initialized(gateway=gateway)
        # By itself, Hadoop asks the operating system for the user's name, which a container's user may lack.
        users: Any = SparkContext._jvm.org.apache.hadoop.security.UserGroupInformation  # type: ignore[union-attr]
        users.setLoginUser(users.createRemoteUser("balance-service"))
    connected: Any = SparkContext._gateway
    connected.java_parameters.read_timeout = answer_seconds
    # This thread may have a connection already; the others use the parameter.
    if (own := connected._gateway_client.get_thread_connection()) is not None:
        own.socket.settimeout(answer_seconds)
    while _WITHOUT_JOBS:
        _WITHOUT_JOBS.pop().stop()


def _close_accumulators(spark: SparkSession) -> None:
    """Closes the port for the accumulators of Python workers: none is started."""
    context: Any = spark.sparkContext
    server, context._accumulatorServer = context._accumulatorServer, None
    if server is not None:
        # Takes half a second.
        threading.Thread(target=server.shutdown, name="accumulators-end", daemon=True).start()


@dataclass(frozen=True, slots=True)
class SparkSample:
    """Heap and garbage collection of the JVM at one moment; sizes in bytes."""

    heap_used: int
    heap_committed: int
    heap_max: int
    gc_seconds: float


class SparkSampler:
    """Samples the JVM of a session, every five seconds in its own thread: the JVM may not answer for seconds.

    A scrape reads the latest sample, an immutable value that is replaced as a whole.
    """

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        jvm: Any = spark.sparkContext._jvm
        self._management: Any = jvm.java.lang.management.ManagementFactory
        self.jvm_pid = int(self._management.getRuntimeMXBean().getPid())
        """The process id."""
        self.sample: SparkSample | None = None
        """The latest sample; None before the first, and while the JVM does not answer."""

    def take(self) -> None:
        """Takes a sample.

        Raises:
            FatalError: the JVM has ended, or answers nothing; while the tasks are idle, nothing else detects that.
        """
        began = time.monotonic()
        try:
            self.sample = self._taken()
        except Exception as error:  # py4j raises many types of errors.
            if jvm_has_ended(self._spark):
                raise FatalError("Spark's JVM has ended") from error
            if time.monotonic() - began >= _ANSWER_SECONDS:
                raise FatalError(f"Spark's JVM has not answered for {_ANSWER_SECONDS:.0f} s") from error
            log.warning("Spark's heap cannot be read", error=str(error).partition("\n")[0])
            self.sample = None

    def _taken(self) -> SparkSample:
        heap = self._management.getMemoryMXBean().getHeapMemoryUsage()
        collections_ms = sum(bean.getCollectionTime() for bean in self._management.getGarbageCollectorMXBeans())
        return SparkSample(heap.getUsed(), heap.getCommitted(), heap.getMax(), collections_ms / 1000)
