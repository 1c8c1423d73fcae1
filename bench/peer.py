"""The peer: the Kafka Streams program in `kafka_streams/`, compiled once and run as a child process."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import httpx

from balance_service.devtools.local.processes import HOST, ChildProcess, free_port, require_free
from balance_service.errors import ConfigurationError
from balance_service.process.jars import cache_folder, locked, resolve_jars
from balance_service.process.java import java_executable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from balance_service.devtools.local.stack import LocalStack

SOURCES = Path(__file__).parent / "kafka_streams"
JAVA = 17

_COMPILE_TIMEOUT_SECONDS = 300
_BEGIN_SECONDS = 30.0
_ANSWER_SECONDS = 2.0
_POLL_SECONDS = 0.05
_PID = "jvm.pid"
# The JVM chooses the collector: G1 on a machine with two or more cores.
_JVM_FLAGS = (
    "-Djava.awt.headless=true",
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
    # Each start logs a warning about a default of global stores, which are not used.
    "-Dorg.slf4j.simpleLogger.log.org.apache.kafka.streams.StreamsConfig=error",
    # By default, Java's HTTP server keeps 200 idle connections for 30 s, and delays small segments.
    "-Dsun.net.httpserver.nodelay=true",
    "-Dsun.net.httpserver.maxIdleConnections=2000",
    "-Dsun.net.httpserver.idleInterval=300",
)
# The shell writes its process id, which becomes that of the JVM by `exec`.
_LAUNCHER = ("/bin/sh", "-c", f'echo $$ >{_PID} && exec "$@"', "sh")


def compile_peer(folder: Path = SOURCES) -> Path:
    """Folder with the classes of the Java sources in `folder`; compiled if the sources, the jars or javac changed.

    Raises:
        ConfigurationError: there is no javac, the sources do not compile, or the jars cannot be downloaded.
    """
    javac = _javac()
    sources = sorted(folder.glob("*.java"))
    digest = hashlib.sha256(b"\0".join([str(javac).encode(), *(source.read_bytes() for source in sources)]))
    classes = cache_folder() / f"peer-{digest.hexdigest()[:16]}"
    if not classes.is_dir():
        with locked(classes):
            if not classes.is_dir():
                _compile(javac, sources, classes)
    return classes


class KafkaStreams:
    """An instance of the peer. State and log are in `folder`, and survive a stop and a kill. For one thread.

    `http_port` 0 picks a free one, which the object keeps. `heap` limits the heap of the JVM; RocksDB uses up to 98 MB
    per partition in addition (block cache 50, write buffers 48).
    """

    def __init__(
        self,
        stack: LocalStack,
        topic: str,
        application_id: str,
        folder: Path,
        *,
        http_port: int = 0,
        stream_threads: int = 2,
        cache_bytes: int = 0,
        commit_interval_ms: int = 100,
        heap: str = "1g",
        program: str = "BalanceStreams",
        more: Mapping[str, str] | None = None,
    ) -> None:
        """Args:
        program: the main class.
        more: additional options of the program.
        """
        self._program = program
        self._folder = folder.absolute()
        self._port = http_port or free_port()
        self._heap = heap
        self.url = f"http://{HOST}:{self._port}"
        self.log = self._folder / "kafka-streams.log"
        self._options = {
            "bootstrap-servers": stack.bootstrap_servers,
            "schema-registry-url": stack.schema_registry_url,
            "topic": topic,
            "application-id": application_id,
            "state-dir": str(self._folder / "state"),
            "http-port": str(self._port),
            "application-server": f"{HOST}:{self._port}",
            "stream-threads": str(stream_threads),
            "cache-bytes": str(cache_bytes),
            "commit-interval-ms": str(commit_interval_ms),
            **(more or {}),
        }
        self._process = ChildProcess("Kafka Streams program", self._folder, self.log)

    @property
    def running(self) -> bool:
        return self._process.running

    @property
    def pid(self) -> int:
        """Process id of the JVM after `start`. Raises ConfigurationError if it does not start."""
        file = self._folder / _PID
        deadline = time.monotonic() + _BEGIN_SECONDS
        while not (file.is_file() and (text := file.read_text()).endswith("\n")):
            if time.monotonic() > deadline:
                raise ConfigurationError(f"the Kafka Streams program has not begun; read its log, {self.log}")
            time.sleep(_POLL_SECONDS)
        return int(text)

    def start(self) -> None:
        """Compile the program if necessary, start the process, and return at once; see `wait_ready`.

        Raises:
            ConfigurationError: there is no JDK, the port is in use, or the jars cannot be downloaded.
        """
        classpath = f"{resolve_jars('bench')[0].parent}/*:{compile_peer()}"
        require_free(self._port, "Kafka Streams program", "http_port")
        # RocksDB unpacks its library there at each start, and a killed JVM does not delete it.
        temporary = self._folder / "tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        (self._folder / _PID).unlink(missing_ok=True)
        flags = [f"-Xmx{self._heap}", f"-Djava.io.tmpdir={temporary}", *_JVM_FLAGS]
        options = [word for name, value in self._options.items() for word in (f"--{name}", value)]
        java = str(java_executable(JAVA))
        self._process.run([*_LAUNCHER, java, *flags, "-cp", classpath, self._program, *options])

    def wait_ready(self, seconds: float) -> None:
        """Wait until the tasks are restored and running, and queries are answered.

        Raises:
            ConfigurationError: the process ended, or took longer than `seconds`; names its log.
        """
        deadline = time.monotonic() + seconds
        while (self.status() or {}).get("state") != "RUNNING":
            if not self.running:
                raise ConfigurationError(f"the Kafka Streams program ended before it was ready; read {self.log}")
            if time.monotonic() > deadline:
                raise ConfigurationError(f"the Kafka Streams program was not ready in {seconds} s; read {self.log}")
            time.sleep(_POLL_SECONDS)

    def status(self) -> dict[str, Any] | None:
        """The status of the instance; None if it does not answer.

        `state` is that of Kafka Streams; `positions`: partition (a string) → next offset to apply, of owned partitions;
        `restored`: records read from the changelog; `readyAtMs`, `firstAppliedAtMs`, `restoredAtMs`: milliseconds since
        the start of the process, or null.
        """
        try:
            answer = httpx.get(f"{self.url}/status", timeout=_ANSWER_SECONDS, trust_env=False)
        except httpx.HTTPError:
            return None
        said: dict[str, Any] | None = answer.json() if answer.is_success else None
        return said

    def stop(self) -> None:
        """Leave the group and stop, within a time limit."""
        self._process.stop()

    def kill(self) -> None:
        self._process.kill()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _javac() -> Path:
    # In the folder of the java that runs the classes, after resolving symbolic links.
    javac = java_executable(JAVA).resolve().with_name("javac")
    if not javac.is_file():
        raise ConfigurationError(
            f"{javac} does not exist, and the benchmark compiles a program: install a JDK {JAVA} or newer, "
            "not only a JRE (Debian: apt-get install openjdk-17-jdk-headless), and point JAVA_HOME at it"
        )
    return javac


def _compile(javac: Path, sources: list[Path], classes: Path) -> None:
    fresh = classes.with_name(classes.name + ".partial")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    jars = f"{resolve_jars('bench')[0].parent}/*"
    command = [str(javac), "--release", str(JAVA), "-encoding", "UTF-8", "-cp", jars, "-d", str(fresh)]
    try:
        done = subprocess.run(
            [*command, *map(str, sources)], stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=_COMPILE_TIMEOUT_SECONDS, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigurationError(f"{javac} did not run: {error}") from error
    if done.returncode:
        raise ConfigurationError(f"{sources[0].parent} does not compile: {done.stdout}{done.stderr}")
    fresh.rename(classes)
