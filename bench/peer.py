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
from balance_service.process.jars import cache_folder, java_executable, locked, resolve_jars

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
# The collector is the JVM's own choice: G1 on a machine with two cores or more.
_JVM_FLAGS = (
    "-Djava.awt.headless=true",
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
    # It warns at each start of a default that bears on global stores, of which there are none.
    "-Dorg.slf4j.simpleLogger.log.org.apache.kafka.streams.StreamsConfig=error",
    # Java's HTTP server keeps 200 connections by default, for 30 s, and would wait to fill segments.
    "-Dsun.net.httpserver.nodelay=true",
    "-Dsun.net.httpserver.maxIdleConnections=2000",
    "-Dsun.net.httpserver.idleInterval=300",
)
# The shell leaves its own process id, which is the JVM's once it has become the JVM.
_LAUNCHER = ("/bin/sh", "-c", f'echo $$ >{_PID} && exec "$@"', "sh")


def compile_peer(folder: Path = SOURCES) -> Path:
    """Folder with the classes of the Java sources in `folder`; compiled if they, the jars or javac are new.

    Raises:
        ConfigurationError: there is no javac, the sources do not compile, or the jars cannot be had.
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
    """One instance of the peer. Its `folder` holds state and log, and outlives a stop, a kill and a new object.

    Owned and called by one thread. `http_port` 0 picks a free one, kept for this object's life. `heap` is the most
    that the JVM's heap may take; RocksDB's comes on top, at most 98 MB a partition (block cache 50, write buffers 48).
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
        program: the class that is run.
        more: further options of that program.
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
        """Whether the process is there."""
        return self._process.running

    @property
    def pid(self) -> int:
        """Process id of the JVM itself, from `start` on; ConfigurationError if it does not come into being."""
        file = self._folder / _PID
        deadline = time.monotonic() + _BEGIN_SECONDS
        while not (file.is_file() and (text := file.read_text()).endswith("\n")):
            if time.monotonic() > deadline:
                raise ConfigurationError(f"the Kafka Streams program has not begun; read its log, {self.log}")
            time.sleep(_POLL_SECONDS)
        return int(text)

    def start(self) -> None:
        """Start the process; returns at once (but compiles first, if that was never done), see `wait_ready`.

        Raises:
            ConfigurationError: there is no JDK, the port is in use, or the jars cannot be downloaded.
        """
        classpath = f"{resolve_jars('bench')[0].parent}/*:{compile_peer()}"
        require_free(self._port, "Kafka Streams program", "http_port")
        # RocksDB unpacks its library there at each start, and a killed JVM leaves it behind.
        temporary = self._folder / "tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        (self._folder / _PID).unlink(missing_ok=True)
        flags = [f"-Xmx{self._heap}", f"-Djava.io.tmpdir={temporary}", *_JVM_FLAGS]
        options = [word for name, value in self._options.items() for word in (f"--{name}", value)]
        java = str(java_executable(JAVA))
        self._process.run([*_LAUNCHER, java, *flags, "-cp", classpath, self._program, *options])

    def wait_ready(self, seconds: float) -> None:
        """Return once its tasks are restored and running, which is also when it may be asked.

        Raises:
            ConfigurationError: it ended, or took longer than `seconds`; names its log.
        """
        deadline = time.monotonic() + seconds
        while (self.status() or {}).get("state") != "RUNNING":
            if not self.running:
                raise ConfigurationError(f"the Kafka Streams program ended before it was ready; read {self.log}")
            if time.monotonic() > deadline:
                raise ConfigurationError(f"the Kafka Streams program was not ready in {seconds} s; read {self.log}")
            time.sleep(_POLL_SECONDS)

    def status(self) -> dict[str, Any] | None:
        """What it says of itself; None while it does not answer.

        `state` as Kafka Streams names it; `positions`: partition (a string) → next offset to apply, for what it owns;
        `restored`: records read from the changelog. `readyAtMs`, `firstAppliedAtMs`, `restoredAtMs`: milliseconds
        since the process began, null if it has not come to that.
        """
        try:
            answer = httpx.get(f"{self.url}/status", timeout=_ANSWER_SECONDS, trust_env=False)
        except httpx.HTTPError:
            return None
        said: dict[str, Any] | None = answer.json() if answer.is_success else None
        return said

    def stop(self) -> None:
        """Leave the group in good order and end, within a bound."""
        self._process.stop()

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        self._process.kill()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _javac() -> Path:
    # Beside the java that will run the classes, wherever the links to that lead.
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
