"""Spark's JVM: a child of this process that ends with it, and PySpark's way to it.

PySpark would start it through a shell script and a JVM that only puts its command line together, once it is itself
imported. Started straight, and first of all, it comes up while Python imports the rest. PySpark knows one JVM for each
process, so this module does too.
"""

from __future__ import annotations

import atexit
import contextlib
import fnmatch
import os
import struct
import subprocess
import time
from typing import TYPE_CHECKING

from balance_service.errors import ConfigurationError
from balance_service.process.jars import java_executable, resolve_jars
from balance_service.process.package import resource
from balance_service.spark import class_archive
from balance_service.spark.handover_jar import handover_jar, spark_jars

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from balance_service.process.scratch import Scratch
    from balance_service.settings import Settings

_MAIN = "org.apache.spark.api.python.PythonGatewayServer"
_LOOK_EVERY_SECONDS = 0.01
# Spark would put its scratch there, before all that its configuration says.
_LOCAL_DIRS = "SPARK_LOCAL_DIRS"
_PACKAGES = (
    "java.io",
    "java.lang",
    "java.lang.invoke",
    "java.lang.reflect",
    "java.net",
    "java.nio",
    "java.util",
    "java.util.concurrent",
    "java.util.concurrent.atomic",
    "jdk.internal.ref",
    "sun.nio.ch",
    "sun.nio.cs",
    "sun.security.action",
    "sun.util.calendar",
)
MODULE_OPTIONS = (
    # Java 17 does not know the two options about memory and native code, which later versions want.
    "-XX:+IgnoreUnrecognizedVMOptions",
    *(f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in _PACKAGES),
    "--add-opens=java.security.jgss/sun.security.krb5=ALL-UNNAMED",
    "-Dio.netty.tryReflectionSetAccessible=true",
    "-Dio.netty.allocator.type=pooled",
    "-Dio.netty.handler.ssl.defaultEndpointVerificationAlgorithm=NONE",
    "--sun-misc-unsafe-memory-access=allow",
    "--enable-native-access=ALL-UNNAMED",
)
"""What Spark's launcher gives every JVM, but for the module of vectors, which its linear algebra alone uses."""
# The server compiler works on what is hot for long, not on what a start runs once or a few thousand times: ten times
# Java's own thresholds. Code that runs for every record is there within some 100,000 records.
_JIT_OPTIONS = (
    "-XX:Tier4InvocationThreshold=50000",
    "-XX:Tier4MinInvocationThreshold=6000",
    "-XX:Tier4CompileThreshold=150000",
    "-XX:Tier4BackEdgeThreshold=400000",
)
# Little of what Spark makes here lives for longer than a commit: the heap need not grow for that.
_HEAP_OPTIONS = ("-Xms96m", "-Xmn64m", "-XX:GCTimeRatio=19")
# A third of the share of a process at 0, where both want all there is.
_NICENESS = 5
_MIB = 1 << 20
# Avro allocates what a length in the data asks for before it looks whether there is as much.
_AVRO_LIMITS = {"string": 16 * _MIB, "bytes": 16 * _MIB, "collectionItems": _MIB}


def spark_java() -> Path:
    """The Java that runs Spark. Raises ConfigurationError if there is none."""
    return java_executable().resolve()


def class_path(settings: Settings) -> list[str]:
    """The jars of Spark's connectors, ours, and those of Spark's own that are needed, in the same order everywhere.

    A class archive is good for one order, so one that was made where an image was built would be of no use where the
    image runs, if the order were the file system's.

    Raises:
        ConfigurationError: the connectors' cannot be had.
    """
    connectors = settings.spark_jars.split(",") if settings.spark_jars else map(str, resolve_jars("spark"))
    lines = resource("deploy/spark-jars-left-out.txt").read_text(encoding="utf-8").splitlines()
    left_out = [line for line in lines if line and not line.startswith("#")]
    own = sorted(spark_jars().glob("*.jar"))
    return [
        *connectors,
        str(handover_jar()),
        *(str(jar) for jar in own if not any(fnmatch.fnmatch(jar.name, out) for out in left_out)),
    ]


def _give_way(process: int) -> None:
    """Where processors are short, let a query go before a batch: it takes far less time, and somebody waits for it."""
    # Its threads inherit this. Who may not lower it has a system that decides otherwise.
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, process, _NICENESS)


class SparkJvm:
    """A JVM that is coming up, or is up. It ends when its standard input does: at the latest, with this process."""

    def __init__(self, settings: Settings, scratch: Scratch, archive_options: Sequence[str] | None = None) -> None:
        """Start it; returns at once.

        Args:
            scratch: where it keeps its temporary files.
            archive_options: by default those that use the class archive, if there is one.

        Raises:
            ConfigurationError: no suitable Java, or the connector jars cannot be had.
        """
        java, jars = spark_java(), class_path(settings)
        limits = [f"-Dorg.apache.avro.limits.{what}.maxLength={most}" for what, most in _AVRO_LIMITS.items()]
        self._told = scratch.files / "gateway"
        command = [
            str(java),
            f"-Xmx{settings.spark_driver_memory}",
            *_HEAP_OPTIONS,
            "-XX:+UseParallelGC",
            f"-Djava.io.tmpdir={scratch.files}",
            # Performance counters are a file in /tmp otherwise, even with another java.io.tmpdir.
            "-XX:+PerfDisableSharedMem",
            *MODULE_OPTIONS,
            *_JIT_OPTIONS,
            *limits,
            f"-Dlog4j2.configurationFile={resource('deploy/log4j2.properties').as_uri()}",
            *(class_archive.jvm_options(java, jars) if archive_options is None else archive_options),
            "-cp",
            os.pathsep.join(jars),
            _MAIN,
        ]
        environment = {name: value for name, value in os.environ.items() if name != _LOCAL_DIRS}
        # In a group of its own: Ctrl-C is for this process, which then ends the JVM in its turn.
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            env={**environment, "_PYSPARK_DRIVER_CONN_INFO_PATH": str(self._told)},
            process_group=0,
        )
        _give_way(self.process.pid)
        atexit.register(self._discard)

    def gateway(self) -> tuple[int, str]:
        """Port and secret by which to reach it; waits until it is up.

        Raises:
            ConfigurationError: it has ended.
        """
        try:
            # Written under another name, then renamed.
            while not self._told.is_file():
                code = self.process.poll()
                if code is not None:
                    raise ConfigurationError(
                        f"Spark's JVM ended with code {code} as it started; it says why above: check "
                        "BALANCE_SPARK_DRIVER_MEMORY and the memory of this machine"
                    )
                time.sleep(_LOOK_EVERY_SECONDS)
            told = self._told.read_bytes()
        finally:
            # It has the secret.
            self._told.unlink(missing_ok=True)
            atexit.unregister(self._discard)
        port, length = struct.unpack_from(">ii", told)
        return port, told[8 : 8 + length].decode()

    def _discard(self) -> None:
        """End one that was not used."""
        self.process.kill()
        self._told.unlink(missing_ok=True)


_launched: list[SparkJvm] = []


def launch_jvm(settings: Settings, scratch: Scratch, archive_options: Sequence[str] | None = None) -> SparkJvm:
    """This process' JVM, started now unless it was before. Arguments and errors as of `SparkJvm`."""
    if not _launched:
        _launched.append(SparkJvm(settings, scratch, archive_options))
    return _launched[0]
