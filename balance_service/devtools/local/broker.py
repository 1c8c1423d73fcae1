"""A local Kafka broker, alone or one of three: a process in KRaft mode with a controller, sized for one machine."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from balance_service.devtools.local.processes import (
    HOST,
    ChildProcess,
    Server,
    accepts_connections,
    free_port,
    make_private,
    require_free,
)
from balance_service.errors import ConfigurationError
from balance_service.kafka.topics import in_sync_replicas
from balance_service.process.jars import resolve_jars
from balance_service.process.java import java_executable

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

KAFKA_JAVA = 17
_FORMAT_TIMEOUT_SECONDS = 60

# The first compiler alone would start it half a second sooner, but handle less load.
_JVM_FLAGS = (
    "-Xmx512m",
    "-XX:+UseSerialGC",
    "-Djava.awt.headless=true",
    "-Dlog4j2.configurationFile=log4j2.properties",
)

_FENCING = "Fencing broker 1 at epoch"
_ACTIVATED = "Activated periodic tasks"
_FENCED_WITHIN_SECONDS = 2.0

_PROPERTIES = """\
process.roles={roles}
node.id={number}
# Set here and not stored in the metadata log, so that the ports can change from run to run.
controller.quorum.voters={voters}
listeners={listeners}
controller.listener.names=CONTROLLER
log.dirs={log_dir}

auto.create.topics.enable=false
group.initial.rebalance.delay.ms=0
default.replication.factor={replicas}
min.insync.replicas={in_sync}
offsets.topic.replication.factor={replicas}
offsets.topic.num.partitions=4
transaction.state.log.replication.factor={replicas}
transaction.state.log.min.isr={in_sync}
transaction.state.log.num.partitions=4
share.coordinator.state.topic.replication.factor={replicas}
share.coordinator.state.topic.min.isr={in_sync}
share.coordinator.state.topic.num.partitions=1

# The default takes 128 MB of heap.
log.cleaner.dedupe.buffer.size=16777216
num.network.threads=2
num.io.threads=4
background.threads=2
# The interval of no-op records in the metadata log when idle; twice a second by default.
metadata.max.idle.interval.ms=10000
"""

_LOG4J_PROPERTIES = """\
appender.out.type=Console
appender.out.name=out
appender.out.layout.type=PatternLayout
appender.out.layout.pattern=%d{ISO8601} %p %c{1}: %m%n
rootLogger.level=INFO
rootLogger.appenderRef.out.ref=out
# Logs every setting with its value, several times.
logger.config.name=org.apache.kafka.common.config.AbstractConfig
logger.config.level=WARN
"""

_PROXIED_LISTENER = """\
advertised.listeners=PLAINTEXT://{host}:{port},PROXIED://{host}:{advertised_port}
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,PROXIED:PLAINTEXT
"""


def new_cluster_id() -> str:
    # Kafka's form of a UUID; the first byte prevents a leading hyphen, which would be read as an option.
    return base64.urlsafe_b64encode(b"b" + os.urandom(15)).decode().rstrip("=")


@dataclass(frozen=True, slots=True)
class BrokerExtras:
    """Additional configuration of a broker, such as secured listeners."""

    listeners: tuple[str, ...] = ()
    """Each as `NAME://host:port`; `properties` define the names."""
    properties: str = ""
    """Lines for server.properties."""
    jvm_flags: tuple[str, ...] = ()


class Broker(Server):
    """A broker whose data are in `folder`.

    Args:
        port: 0 picks a free one, which the object keeps.
        number: its node id.
        voters: node id → port of the controller of each broker of the cluster, this one included; None if it is alone.
        cluster_id: of a cluster that does not exist yet; the same for all its brokers, as of `new_cluster_id`.
        proxied: adds a listener for clients that connect through a proxy: the port it binds, and the port of the proxy,
            which it advertises to these clients so that they stay there.
    """

    def __init__(
        self,
        folder: Path,
        log: Path,
        port: int = 0,
        proxied: tuple[int, int] | None = None,
        extras: BrokerExtras | None = None,
        *,
        number: int = 1,
        voters: Mapping[int, int] | None = None,
        cluster_id: str = "",
    ) -> None:
        is_alone = voters is None or len(voters) == 1
        super().__init__("Kafka broker" if is_alone else f"Kafka broker {number}", folder, log)
        self.port = port or free_port()
        self.number = number
        self._voters = voters or {number: free_port()}
        self._proxied = proxied
        self._extras = extras or BrokerExtras()
        self._cluster_id = cluster_id or new_cluster_id()

    @property
    def bootstrap_servers(self) -> str:
        return f"{HOST}:{self.port}"

    @property
    def has_data(self) -> bool:
        """Whether it was started before."""
        return (self._folder / "data").is_dir()

    def launch(self) -> None:
        java = str(java_executable(KAFKA_JAVA))
        classpath = f"{resolve_jars('kafka')[0].parent}/*"
        require_free(self.port, self.name, "--kafka-port")
        make_private(self._folder)
        (self._folder / "log4j2.properties").write_text(_LOG4J_PROPERTIES)
        command = [java, *_JVM_FLAGS, *self._extras.jvm_flags, "-cp", classpath]
        if not self.has_data:
            self._format(command)
        meta = (self._folder / "data" / "meta.properties").read_text()
        self._cluster_id = dict(line.partition("=")[::2] for line in meta.splitlines())["cluster.id"]
        # One of three is fenced by the others, which lead its partitions.
        if len(self._voters) == 1 and self._was_killed():
            self._fence_former_session(command)
        self._configure("data")
        self.run([*command, "kafka.Kafka", "server.properties"])

    def is_ready(self) -> bool:
        """Whether this broker, and not another one on its port, answers now."""
        if not accepts_connections(self.port):
            return False
        try:
            client = AdminClient({"bootstrap.servers": self.bootstrap_servers, "log_level": 0})
            cluster = client.list_topics(timeout=2)
        except KafkaException:
            return False
        return str(cluster.cluster_id) == self._cluster_id and self.number in cluster.brokers

    def _configure(self, log_dir: str, *, controller_only: bool = False) -> None:
        """Write server.properties.

        Args:
            log_dir: relative to the working directory, because Kafka splits paths at commas and reads the file as
                Latin-1.
            controller_only: without the broker role, and with a short session timeout.
        """
        listeners = [f"CONTROLLER://{HOST}:{self._voters[self.number]}"]
        if controller_only:
            more = "broker.session.timeout.ms=100\n"
        else:
            listeners.append(f"PLAINTEXT://{HOST}:{self.port}")
            more = self._extras.properties
            if self._proxied is not None:
                bound, advertised = self._proxied
                listeners.append(f"PROXIED://{HOST}:{bound}")
                more = _PROXIED_LISTENER.format(host=HOST, port=self.port, advertised_port=advertised) + more
            listeners += self._extras.listeners
        text = _PROPERTIES.format(
            roles="controller" if controller_only else "broker,controller",
            number=self.number,
            voters=",".join(f"{number}@{HOST}:{port}" for number, port in self._voters.items()),
            replicas=len(self._voters),
            in_sync=in_sync_replicas(len(self._voters)),
            listeners=",".join(listeners),
            log_dir=log_dir,
        )
        (self._folder / "server.properties").write_text(text + more)

    def _was_killed(self) -> bool:
        data = self._folder / "data"
        return (data / "__cluster_metadata-0").is_dir() and not (data / ".kafka_cleanshutdown").exists()

    def _fence_former_session(self, command: list[str]) -> None:
        """Fence the killed broker by a controller alone, before the new broker starts.

        Otherwise the new broker considers itself the leader until the former session times out. When that session is
        fenced, it drops the commit markers of transactions that the kill interrupted (seen with 4.3.0), and
        read-committed consumers never get their records.
        """
        self._configure("data", controller_only=True)
        controller = ChildProcess("Kafka controller", self._folder, self.log.with_name("broker-recovery.log"))
        controller.inherited = self.inherited
        controller.run([*command, "kafka.Kafka", "server.properties"])
        activated_at: float | None = None

        def is_fenced() -> bool:
            nonlocal activated_at
            log = controller.log.read_text(errors="replace")
            if activated_at is None and _ACTIVATED in log:
                activated_at = time.monotonic()
            # A broker that was killed while it was still fenced is not fenced again: the log has no such line.
            over = activated_at is not None and time.monotonic() > activated_at + _FENCED_WITHIN_SECONDS
            return over or "fenced=1" in log.partition(_FENCING)[2]

        try:
            controller.wait_until(is_fenced)
        finally:
            controller.stop()

    def _format(self, command: list[str]) -> None:
        partial = self._folder / "data.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        self._configure(partial.name)
        tool = ["kafka.tools.StorageTool", "format", "-t", self._cluster_id, "-c", "server.properties"]
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
        partial.rename(self._folder / "data")
