"""Starts Spark's JVM as a child of this process, with its class path and options.

PySpark would start it through a shell script and a second JVM that assembles the command line, after its own import.
Started directly, and first of all, it comes up while Python imports the rest. The JVM ends with this process. PySpark
knows one JVM per process, and so does this module.
"""

from __future__ import annotations

import atexit
import contextlib
import fnmatch
import hashlib
import importlib.util
import os
import secrets
import shutil
import struct
import subprocess
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from balance_service.errors import ConfigurationError
from balance_service.process.jars import cache_folder, connectors, locked, partial_folder
from balance_service.process.java import java_executable
from balance_service.process.package import resource, with_extra
from balance_service.settings.spark import spark_defaults

if TYPE_CHECKING:
    from collections.abc import Sequence

    from balance_service.process.scratch import Scratch
    from balance_service.settings import Settings

_MAIN = "parts.code.balance.Gateway"
_LOOK_EVERY_SECONDS = 0.01
# Spark would prefer the first to its configuration for temporary files, and show its user interface under the second.
_LEFT_OUT = ("SPARK_LOCAL_DIRS", "SPARK_PUBLIC_DNS")
# The user interface listens here, whatever Spark's configuration says.
_LOCAL_IP = {"SPARK_LOCAL_IP": "127.0.0.1"}
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
    # Java 17 does not know the two options for memory access and native code, which later versions need.
    "-XX:+IgnoreUnrecognizedVMOptions",
    *(f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in _PACKAGES),
    "--add-opens=java.security.jgss/sun.security.krb5=ALL-UNNAMED",
    "-Dio.netty.tryReflectionSetAccessible=true",
    "-Dio.netty.allocator.type=pooled",
    "-Dio.netty.handler.ssl.defaultEndpointVerificationAlgorithm=NONE",
    "--sun-misc-unsafe-memory-access=allow",
    "--enable-native-access=ALL-UNNAMED",
)
"""The options of Spark's launcher, without the vector module, which only its linear algebra uses."""
# The server compiler compiles code that is hot for long, not code that a start runs once or a few thousand times: ten
# times Java's own thresholds. Code that runs for every record reaches them within some 100,000 records.
_JIT_OPTIONS = (
    "-XX:Tier4InvocationThreshold=50000",
    "-XX:Tier4MinInvocationThreshold=6000",
    "-XX:Tier4CompileThreshold=150000",
    "-XX:Tier4BackEdgeThreshold=400000",
)
# Few of Spark's objects live longer than a commit, so the heap need not grow for them.
_HEAP_OPTIONS = ("-Xms96m", "-Xmn64m", "-XX:GCTimeRatio=19")
# A third of the CPU share of a process with niceness 0, if both need all of it.
_NICENESS = 5
_MIB = 1 << 20
# Avro allocates the length that it reads before it checks whether the data is as long.
_AVRO_LIMITS = {"bytes": 16 * _MIB, "collectionItems": _MIB}
VALUE_OPTIONS = (
    *MODULE_OPTIONS,
    # Some functions of Spark read the JVM's time zone, and not the session's.
    "-Duser.timezone=UTC",
    *(f"-Dorg.apache.avro.limits.{what}.maxLength={most}" for what, most in _AVRO_LIMITS.items()),
)
"""The options without which a JVM does not run Spark, or computes other values."""
_SOURCES = Path(__file__).with_name("java")
_COMPILER = "org.codehaus.commons.compiler.samples.CompilerDemo"
_COMPILE_SECONDS = 60
QUIET = (
    "-Xshare:auto",
    "-Xlog:disable",
    "-Xlog:all=error:stderr",
    "-Xlog:cds=off",
    "-Xlog:cds+dynamic=off",
    "-Xlog:class+path=off",
)
# At another address, the JVM would have to write to every page of the archive, and could not share it.
_IN_PLACE = ("-XX:+UnlockDiagnosticVMOptions", "-XX:ArchiveRelocationMode=0")


def spark_java() -> Path:
    """Returns the path of the Java that runs Spark. Raises ConfigurationError if there is none."""
    return java_executable().resolve()


def spark_jars() -> Path:
    """Returns the folder of PySpark's jars. Raises ConfigurationError if PySpark is not installed."""
    # `find_spec` does not import pyspark, which would take most of a second.
    spec = importlib.util.find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise ConfigurationError(f"pyspark is not installed: install {with_extra('service')}")
    return Path(spec.origin).parent / "jars"


def own_jar() -> Path:
    """Returns the jar with the classes in `java/`; compiles them if the cache lacks it.

    The compiler is Janino, which ships with Spark, so no JDK is needed. The jar's name contains the digest of its
    sources. Its own digest is stored in a file next to it and checked at each start: a damaged jar is compiled again.

    Raises:
        ConfigurationError: there is no Java, the cache is not writable, or a source does not fit this Spark version.
    """
    jars = spark_jars()
    made_of = [source.read_bytes() for source in _sources()]
    made_of += sorted(jar.name.encode() for jar in jars.glob("spark-*.jar"))
    jar = cache_folder() / f"own-{hashlib.sha256(b''.join(made_of)).hexdigest()[:16]}.jar"
    if not _is_whole(jar):
        with locked(jar):
            if not _is_whole(jar):
                _make(jar, jars)
    return jar


def _sources() -> list[Path]:
    return sorted(_SOURCES.glob("*.java"))


def _digest_of(jar: Path) -> Path:
    return jar.with_name(jar.name + ".sha256")


def _is_whole(jar: Path) -> bool:
    try:
        return _digest_of(jar).read_text(encoding="ascii") == hashlib.sha256(jar.read_bytes()).hexdigest()
    except (OSError, ValueError):
        return False


def _make(jar: Path, jars: Path) -> None:
    folder = partial_folder(jar.with_name(jar.name + ".classes"))
    try:
        classes = _compiled(folder, jars)
        partial = jar.with_name(jar.name + ".partial")
        with zipfile.ZipFile(partial, "w") as archive:
            for found in classes:
                # Without a time, equal sources make equal jars.
                archive.writestr(zipfile.ZipInfo(found.relative_to(folder).as_posix()), found.read_bytes())
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    _digest_of(jar).write_text(hashlib.sha256(partial.read_bytes()).hexdigest(), encoding="ascii")
    partial.rename(jar)


def _compiled(folder: Path, jars: Path) -> list[Path]:
    command = [
        str(java_executable()),
        "-cp",
        os.pathsep.join(str(found) for name in ("janino", "commons-compiler") for found in jars.glob(f"{name}-*.jar")),
        _COMPILER,
        "-g:source,lines",
        "-d",
        str(folder),
        "-classpath",
        os.pathsep.join(map(str, sorted(jars.glob("*.jar")))),
        *map(str, _sources()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_SECONDS, check=False)
    classes = sorted(folder.rglob("*.class"))
    if done.returncode or not classes:
        said = (done.stderr or done.stdout).strip()
        raise ConfigurationError(f"{_SOURCES.name}/*.java do not compile against the installed pyspark: {said}")
    return classes


def own_jars(settings: Settings) -> list[str]:
    """Returns the jars of the connectors and the jar of this package. Raises as `class_path`."""
    given = settings.spark_jars.split(",") if settings.spark_jars else map(str, connectors())
    return [*given, str(own_jar())]


def class_path(settings: Settings, *, with_clusters: bool = False) -> list[str]:
    """Returns the jars of the connectors, the jar of this package, and the needed jars of Spark, in a fixed order.

    Args:
        with_clusters: whether all jars of Spark are needed, those of the cluster managers among them.

    A class archive is valid for one order only: in the order of the file system, an archive that was made with the
    image would not fit where the image runs.

    Raises:
        ConfigurationError: the connector jars cannot be obtained.
    """
    lines = resource("deploy/spark-jars-left-out.txt").read_text(encoding="utf-8").splitlines()
    left_out = [line for line in lines if line and not line.startswith("#")] if not with_clusters else []
    own = sorted(spark_jars().glob("*.jar"))
    return [
        *own_jars(settings),
        *(str(jar) for jar in own if not any(fnmatch.fnmatch(jar.name, out) for out in left_out)),
    ]


def archive_of(java: Path, jars: Sequence[str]) -> Path:
    """Returns the path of the archive for a JVM and a class path."""
    return _archive_of("classes", java, jars)


def _archive_of(what: str, java: Path, jars: Sequence[str]) -> Path:
    release = java.parent.parent / "release"
    spec = importlib.util.find_spec("pyspark")
    parts = [str(java), release.read_text() if release.is_file() else "", spec.origin if spec else "", *jars]
    digest = hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:16]
    return cache_folder() / f"{what}-{digest}.jsa"


def base_archive_of(java: Path) -> Path | None:
    """Returns the path of the archive of Java's own classes, below the other; None if the runtime has it itself."""
    home = java.parent.parent
    return None if (home / "lib" / "server" / "classes.jsa").is_file() else _archive_of("base", java, ())


def class_archive_options(java: Path, jars: Sequence[str]) -> list[str]:
    """Returns the JVM options that use the archive; empty if there is none. The JVM ignores a stale archive."""
    base, archive = base_archive_of(java), archive_of(java, jars)
    archives = [archive] if base is None else [base, archive]
    if not all(one.is_file() for one in archives):
        return []
    return [f"-XX:SharedArchiveFile={os.pathsep.join(map(str, archives))}", *_IN_PLACE, *QUIET]


def is_stale(archive: Path, jars: Sequence[str]) -> bool:
    """Whether there is no archive, or a jar is newer than it; the JVM ignores such an archive silently."""
    if not archive.is_file():
        return True
    made = archive.stat().st_mtime
    return any(Path(jar).stat().st_mtime > made for jar in jars)


def _give_way(process: int) -> None:
    """Lowers the priority of the JVM, so that a query, which is short and interactive, goes before a batch."""
    # Its threads inherit the niceness. If the system does not permit the change, it decides otherwise.
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, process, _NICENESS)


class SparkJvm:
    """A JVM that is starting or running. It ends when its standard input is closed, at the latest with this process."""

    def __init__(
        self,
        settings: Settings,
        scratch: Scratch,
        archive_options: Sequence[str] | None = None,
        *,
        with_clusters: bool = False,
    ) -> None:
        """Starts the JVM, without waiting for it.

        Args:
            scratch: for its temporary files.
            archive_options: by default, those that use the class archive, if there is one.
            with_clusters: whether it is the driver of a cluster, which reaches it by this machine's address.

        Raises:
            ConfigurationError: there is no suitable Java, or the connector jars cannot be obtained.
        """
        java, jars = spark_java(), class_path(settings, with_clusters=with_clusters)
        # A name of its own: the JVM of a killed process may still write its file.
        self._gateway_file = scratch.files / f"gateway-{secrets.token_hex(4)}"
        command = [
            str(java),
            f"-Xmx{settings.spark_driver_memory}",
            *_HEAP_OPTIONS,
            "-XX:+UseParallelGC",
            # Otherwise the thread that lacked memory ends alone: Spark goes on without it, and rows never come.
            "-XX:+ExitOnOutOfMemoryError",
            f"-Djava.io.tmpdir={scratch.files}",
            # Otherwise performance counters are a file in /tmp, even with another java.io.tmpdir.
            "-XX:+PerfDisableSharedMem",
            *VALUE_OPTIONS,
            *_JIT_OPTIONS,
            f"-Dlog4j2.configurationFile={resource('deploy/log4j2.properties').as_uri()}",
            *(class_archive_options(java, jars) if archive_options is None else archive_options),
            "-cp",
            os.pathsep.join(jars),
            _MAIN,
        ]
        environment = {name: value for name, value in os.environ.items() if name not in _LEFT_OUT}
        environment |= {} if with_clusters else _LOCAL_IP
        # In its own process group: Ctrl-C interrupts this process only, which then ends the JVM.
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            env={**environment, "_PYSPARK_DRIVER_CONN_INFO_PATH": str(self._gateway_file)},
            process_group=0,
        )
        _give_way(self.process.pid)
        atexit.register(self._discard)

    def gateway(self) -> tuple[int, str]:
        """Waits until the JVM is up; returns the port and the secret of its gateway.

        Raises:
            ConfigurationError: the JVM has ended.
        """
        try:
            # The JVM writes the file under another name, then renames it.
            while not self._gateway_file.is_file():
                code = self.process.poll()
                if code is not None:
                    raise ConfigurationError(
                        f"Spark's JVM ended with code {code} as it started; it says why above: check "
                        "BALANCE_SPARK_DRIVER_MEMORY and the memory of this machine"
                    )
                time.sleep(_LOOK_EVERY_SECONDS)
            data = self._gateway_file.read_bytes()
        finally:
            # The file holds the secret.
            self._gateway_file.unlink(missing_ok=True)
            atexit.unregister(self._discard)
        port, length = struct.unpack_from(">ii", data)
        return port, data[8 : 8 + length].decode()

    def _discard(self) -> None:
        self.process.kill()
        self._gateway_file.unlink(missing_ok=True)


_launched: list[SparkJvm] = []


def launch_jvm(
    settings: Settings,
    scratch: Scratch,
    archive_options: Sequence[str] | None = None,
    *,
    with_clusters: bool = False,
) -> SparkJvm:
    """Returns this process's JVM; starts it at the first call. Arguments and errors as for `SparkJvm`.

    Raises:
        ConfigurationError: also if `spark-defaults.conf` has a setting that it must not have.
    """
    if not _launched:
        # Refused before anything waits for a broker.
        spark_defaults()
        _launched.append(SparkJvm(settings, scratch, archive_options, with_clusters=with_clusters))
    return _launched[0]
