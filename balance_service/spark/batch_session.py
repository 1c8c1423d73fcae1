"""The Spark session of a batch job, on this machine or on a cluster. A process has one, and nothing else in it."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import structlog
from pyspark.sql import SparkSession
from pyspark.sql.classic.dataframe import DataFrame as ClassicDataFrame
from pyspark.sql.udf import UserDefinedFunction
from pyspark.util import PythonEvalType

from balance_service.errors import ConfigurationError
from balance_service.settings.spark import (
    OWN_SETTINGS,
    PREFERRED_SETTINGS,
    VALUE_SETTINGS,
    refuse_settings,
    spark_defaults,
)
from balance_service.spark.jvm import VALUE_OPTIONS, launch_jvm, own_jars
from balance_service.spark.session import connect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import pyarrow as pa
    from pyspark.sql import DataFrame

    from balance_service.process.scratch import Scratch
    from balance_service.settings import Settings
    from balance_service.spark.jvm import SparkJvm

log = structlog.get_logger(__name__)

_SECRET = "spark.authenticate.secret"  # noqa: S105  (a name)
# Of `OWN_SETTINGS`: what only a driver on this machine has, and what would let it be reached by itself alone.
_OF_ONE_MACHINE = ("spark.driver.host", "spark.driver.bindAddress", "spark.rpc.netty.dispatcher.numThreads")
OF_BATCHES: Mapping[str, str] = {
    # Kafka's is in this list by default: its older source makes an object of each row, and another time of old ones.
    "spark.sql.sources.useV1SourceList": "avro,csv,json,orc,parquet,text",
    # With any other bound in bytes, Spark computes the size of the whole batch after each row: 45 µs, with notes.
    "spark.sql.execution.arrow.maxBytesPerBatch": str((1 << 31) - 1),
    "spark.sql.execution.arrow.maxRecordsPerBatch": "256",
    "spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled": "true",
}
OF_CLUSTERS: Mapping[str, str] = {
    # Events and states go through the network, and lie on the disks of executors.
    "spark.network.crypto.enabled": "true",
    "spark.io.encryption.enabled": "true",
}
_PYTHON = "spark.pyspark.python"
# Where an executor finds what `pack-environment` has packed.
_ARCHIVE = "balance-service"


def is_local(master: str) -> bool:
    """Whether a master is this process: `local`, `local[4]`, `local[*]`."""
    return master == "local" or master.startswith("local[")


def check_cluster(master: str, conf: Mapping[str, str]) -> None:
    """Checks a master and settings of Spark before anything begins.

    Raises:
        ConfigurationError: the message names what is wrong, or missing.
    """
    known = ("spark://", "k8s://", "yarn")
    if not is_local(master) and not master.startswith(known):
        raise ConfigurationError(
            f"--master: {master!r} is none that is known: local[N], spark://HOST:PORT, k8s://, yarn"
        )
    refuse_settings((name for name in conf if is_local(master) or name not in _OF_ONE_MACHINE), "--spark-conf")
    for name, value in OF_CLUSTERS.items():
        if not is_local(master) and conf.get(name, value) != value:
            raise ConfigurationError(f"--spark-conf: {name} is always {value}: events and states would be readable")
    if master.startswith("spark://") and not conf.get(_SECRET):
        raise ConfigurationError(
            f"--spark-conf: {_SECRET} is missing; without the secret of the master and its workers, any process that "
            "reaches their ports could run code there"
        )


def launch_driver(settings: Settings, scratch: Scratch, master: str) -> SparkJvm:
    """Returns the JVM of a job's driver; starts it at the first call. Arguments and errors as for `launch_jvm`.

    The first call comes before read models are bound: one with a `transform` starts a JVM for this machine otherwise.
    """
    local = is_local(master)
    return launch_jvm(settings, scratch, None if local else (), with_clusters=not local)


def start_batch_spark(settings: Settings, scratch: Scratch, master: str, conf: Mapping[str, str]) -> SparkSession:
    """Starts the session of a job.

    Args:
        conf: further settings of Spark, as `check_cluster` lets them pass.

    Raises:
        ConfigurationError: as `start_spark`, or the master does not respond.
    """
    local = is_local(master)
    connect(launch_driver(settings, scratch, master), answer_seconds=None)
    own = {name: value for name, value in OWN_SETTINGS.items() if local or name not in _OF_ONE_MACHINE}
    if not local:
        own |= {**OF_CLUSTERS, **_executors(settings, conf)}
    configured: dict[str, Any] = {
        **PREFERRED_SETTINGS,
        **spark_defaults(),
        **conf,
        **own,
        **VALUE_SETTINGS,
        **OF_BATCHES,
        "spark.local.dir": str(scratch.files),
        # On a cluster it would listen at an address that others reach, without authentication.
        "spark.ui.enabled": str(settings.spark_ui and local).lower(),
    }
    try:
        builder = SparkSession.builder.appName(f"{settings.application_id}-rebuild").master(master)
        spark = builder.config(map=configured).getOrCreate()
    except Exception as error:  # py4j raises errors of many types
        said = " ".join(str(error).split("\n")[:2])
        raise ConfigurationError(f"--master: Spark does not start on {master}: {said}") from error
    context: Any = spark.sparkContext
    context.pythonExec = conf.get(_PYTHON) or (sys.executable if local else "python3")
    if local:
        # Its workers import what this process does.
        context.environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    elif f"#{_ARCHIVE}" in conf.get("spark.archives", ""):
        context.environment["PYTHONPATH"] = _ARCHIVE
    return spark


def _executors(settings: Settings, conf: Mapping[str, str]) -> dict[str, str]:
    """Returns what the JVMs of executors need that this process's has by its command line."""
    given = conf.get("spark.executor.extraJavaOptions", "")
    jars = [*own_jars(settings), *filter(None, conf.get("spark.jars", "").split(","))]
    return {
        "spark.jars": ",".join(jars),
        "spark.executor.extraJavaOptions": " ".join([*VALUE_OPTIONS, *given.split()]),
    }


def map_in_arrow(
    frame: DataFrame, function: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]], schema: str
) -> DataFrame:
    """As `DataFrame.mapInArrow`, which wants pandas to be installed, and does not use it."""
    udf = UserDefinedFunction(function, schema, evalType=PythonEvalType.SQL_MAP_ARROW_ITER_UDF)
    column: Any = udf(*[frame[name] for name in frame.columns])
    mapped: Any = frame._jdf.mapInArrow(column._jc, False, None)
    return ClassicDataFrame(mapped, frame.sparkSession)
