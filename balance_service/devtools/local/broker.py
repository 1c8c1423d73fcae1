"""A Kafka broker: one process in KRaft mode that is its own controller, sized for one machine."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import time
from typing import TYPE_CHECKING

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from balance_service.devtools.local.broker_config import LOG4J_PROPERTIES, BrokerExtras, server_properties
from balance_service.devtools.local.ports import HOST, accepts_connections, free_port, require_free
from balance_service.devtools.local.process import ChildProcess
from balance_service.devtools.local.server import Server
from balance_service.errors import ConfigurationError
from balance_service.process.jars import java_executable, resolve_jars

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

KAFKA_JAVA = 17
_FORMAT_TIMEOUT_SECONDS = 60

# With the first compiler alone it would start half a second sooner and carry less load.
_JVM_FLAGS = (
    "-Xmx512m",
    "-XX:+UseSerialGC",
    "-Djava.awt.headless=true",
    "-Dlog4j2.configurationFile=log4j2.properties",
)

_FENCING = "Fencing broker 1 at epoch"
_ACTIVATED = "Activated periodic tasks"
_FENCED_WITHIN_SECONDS = 2.0


class Broker(Server):
    """The broker whose data lie in `folder`; its state survives a stop, a kill and a change of port.

    `port` 0 picks a free one, kept for this object's life. `proxied` adds a listener for clients that come through
    a proxy: the port it binds, and the proxy's port, which it advertises to them so that they stay there. `extras` is
    what it is told beyond that.
    """

    def __init__(
        self,
        folder: Path,
        log: Path,
        port: int = 0,
        proxied: tuple[int, int] | None = None,
        extras: BrokerExtras | None = None,
    ) -> None:
        self.port = port or free_port()
        self._proxied = proxied
        self._extras = extras or BrokerExtras()
        self._folder = folder
        self._log = log
        self._cluster_id = ""
        super().__init__(ChildProcess("Kafka broker", folder, log))

    @property
    def bootstrap_servers(self) -> str:
        """Where clients start from."""
        return f"{HOST}:{self.port}"

    def launch(self, held: Sequence[int] = ()) -> None:
        """Start the process, formatting its storage first if new."""
        java = str(java_executable(KAFKA_JAVA))
        classpath = f"{resolve_jars('kafka')[0].parent}/*"
        require_free(self.port, "Kafka broker", "--kafka-port")
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "log4j2.properties").write_text(LOG4J_PROPERTIES)
        command = [java, *_JVM_FLAGS, *self._extras.jvm_flags, "-cp", classpath]
        if not (self._folder / "data").is_dir():
            self._format(command)
        meta = (self._folder / "data" / "meta.properties").read_text()
        self._cluster_id = dict(line.partition("=")[::2] for line in meta.splitlines())["cluster.id"]
        if self._was_killed():
            self._end_former_session(command, held)
        self._configure("data")
        self._process.start([*command, "kafka.Kafka", "server.properties"], held)

    def is_ready(self) -> bool:
        """Whether it answers now, as itself."""
        if not accepts_connections(self.port):
            return False
        try:
            client = AdminClient({"bootstrap.servers": self.bootstrap_servers, "log_level": 0})
            cluster = client.list_topics(timeout=2)
        except KafkaException:
            return False
        return str(cluster.cluster_id) == self._cluster_id and len(cluster.brokers) == 1

    def _configure(self, log_dir: str, *, controller_only: bool = False) -> None:
        text = server_properties(
            self.port, log_dir, controller_only=controller_only, proxied=self._proxied, extras=self._extras
        )
        (self._folder / "server.properties").write_text(text)

    def _was_killed(self) -> bool:
        data = self._folder / "data"
        return (data / "__cluster_metadata-0").is_dir() and not (data / ".kafka_cleanshutdown").exists()

    def _end_former_session(self, command: list[str], held: Sequence[int]) -> None:
        """Fence the killed broker, by a controller alone, before the new one starts.

        Otherwise the new one would have to wait until the former session times out, taking itself for
        the leader meanwhile; and when that fences it, it drops the commit markers of transactions that
        the kill interrupted (seen with 4.3.0), whose records no read-committed consumer ever gets.
        """
        self._configure("data", controller_only=True)
        controller = ChildProcess("Kafka controller", self._folder, self._log.with_name("broker-recovery.log"))
        controller.start([*command, "kafka.Kafka", "server.properties"], held)
        activated_at: float | None = None

        def settled() -> bool:
            nonlocal activated_at
            log = controller.log.read_text(errors="replace")
            if activated_at is None and _ACTIVATED in log:
                activated_at = time.monotonic()
            # It may have been killed while still fenced; then nothing more is said.
            over = activated_at is not None and time.monotonic() > activated_at + _FENCED_WITHIN_SECONDS
            return over or "fenced=1" in log.partition(_FENCING)[2]

        try:
            controller.wait_ready(settled)
        finally:
            controller.stop()

    def _format(self, command: list[str]) -> None:
        fresh = self._folder / "data.partial"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir()
        self._configure(fresh.name)
        # Kafka's form of a UUID; the first byte keeps it from looking like an option.
        cluster_id = base64.urlsafe_b64encode(b"b" + os.urandom(15)).decode().rstrip("=")
        tool = ["kafka.tools.StorageTool", "format", "-t", cluster_id, "-c", "server.properties"]
        try:
            subprocess.run(
                [*command, *tool],
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=_FORMAT_TIMEOUT_SECONDS,
                check=True,
            )
        except subprocess.SubprocessError as error:
            output = getattr(error, "stdout", None) or ""
            raise ConfigurationError(f"the Kafka broker's storage could not be formatted: {error}\n{output}") from error
        fresh.rename(self._folder / "data")
