"""The local stack, a Kafka broker and a schema registry on one data directory, and instances of the service on it."""

from __future__ import annotations

import fcntl
import os
import sys
import time
from typing import TYPE_CHECKING, Any, Self

import httpx

from balance_service.client import Client, ClientError
from balance_service.devtools.local.broker import Broker
from balance_service.devtools.local.guard import GRACE_SECONDS
from balance_service.devtools.local.processes import (
    HOST,
    Server,
    accepts_connections,
    free_port,
    make_private,
    require_free,
)
from balance_service.errors import ConfigurationError
from balance_service.process.jars import REGISTRY_JAVA, java_executable, resolve_jars, unpack

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_REGISTRY_FLAGS = (
    "-Xmx256m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-Djava.awt.headless=true",
    "-Dapicurio.storage.kind=sql",
    "-Dapicurio.storage.sql.kind=h2",
    # WRITE_DELAY=0: schema ids survive SIGKILL. The path is relative to the working directory, because a semicolon in
    # it would end it.
    "-Dapicurio.datasource.url=jdbc:h2:file:./registry;WRITE_DELAY=0",
    f"-Dquarkus.http.host={HOST}",
    f"-Dquarkus.management.host={HOST}",
    # Unused; any free port will do.
    "-Dquarkus.management.port=0",
)
_READY_TIMEOUT_SECONDS = 2.0
REGISTRY = "registry"
"""The folder of its schemas, in the data directory."""


class Registry(Server):
    """Apicurio with Confluent's API; its schemas are in `folder`. Port 0 picks a free one, which the object keeps."""

    def __init__(self, folder: Path, log: Path, port: int = 0) -> None:
        super().__init__("schema registry", folder, log)
        self.port = port or free_port()

    @property
    def url(self) -> str:
        """Base address of Confluent's API."""
        return f"http://{HOST}:{self.port}/apis/ccompat/v7"

    def launch(self) -> None:
        java = str(java_executable(REGISTRY_JAVA, bundled=True))
        program = unpack(resolve_jars("registry")[0]) / "quarkus-run.jar"
        require_free(self.port, self.name, "--registry-port")
        make_private(self._folder)
        self.run([java, *_REGISTRY_FLAGS, f"-Dquarkus.http.port={self.port}", "-jar", str(program)])

    def is_ready(self) -> bool:
        if not accepts_connections(self.port):
            return False
        try:
            return httpx.get(f"{self.url}/subjects", timeout=5, trust_env=False).is_success
        except httpx.HTTPError:
            return False


class LocalStack:
    """A broker, and a registry unless its port is None, as child processes, which end with this one. For one thread.

    Topics and schemas are kept in `data_dir`, logs in `data_dir/logs`, closed to other users of the machine. Port 0
    picks a free one, which the object keeps, so a server keeps its address when it is stopped or killed and started
    again.

    Args:
        proxied: the additional listener of `Broker`.
    """

    def __init__(
        self,
        data_dir: Path,
        kafka_port: int = 0,
        registry_port: int | None = 0,
        proxied: tuple[int, int] | None = None,
    ) -> None:
        if kafka_port and kafka_port == registry_port:
            raise ConfigurationError(f"--kafka-port and --registry-port are both {kafka_port}; choose two ports")
        self.data_dir = data_dir.absolute()
        logs = self.data_dir / "logs"
        self.broker = Broker(self.data_dir / "kafka", logs / "broker.log", kafka_port, proxied)
        self.has_registry = registry_port is not None
        self.registry = Registry(self.data_dir / REGISTRY, logs / "registry.log", registry_port or 0)
        self._lock: int | None = None

    @property
    def bootstrap_servers(self) -> str:
        return self.broker.bootstrap_servers

    @property
    def schema_registry_url(self) -> str:
        return self.registry.url

    @property
    def addresses(self) -> dict[str, str]:
        """The settings of clients of the servers. Without a registry, its address is empty."""
        return {
            "BALANCE_BOOTSTRAP_SERVERS": self.bootstrap_servers,
            "BALANCE_SCHEMA_REGISTRY_URL": self.schema_registry_url if self.has_registry else "",
        }

    def start(self) -> None:
        """Start the servers and wait until they are ready. If that fails, they are stopped.

        Raises:
            ConfigurationError: a port or the data directory is in use, Java is missing, a download failed, or a child
                ended early.
        """
        self._lock_data_dir()
        try:
            if self.has_registry:
                self.registry.launch()
            self.broker.launch()
            self.broker.wait_ready()
            if self.has_registry:
                self.registry.wait_ready()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop the registry, then the broker, each within about 13 s. Idempotent."""
        try:
            self.registry.stop()
        finally:
            self.broker.stop()
            self._unlock()

    def require_running(self) -> None:
        """Raises FatalError if a server has ended unexpectedly."""
        self.broker.require_running()
        if self.has_registry:
            self.registry.require_running()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _lock_data_dir(self) -> None:
        """Lock the data directory; the children inherit the lock, and hold it until they end."""
        try:
            lock = self.data_dir / "lock"
            # A folder that the user had before keeps its permissions.
            if not self.data_dir.exists() or lock.exists():
                make_private(self.data_dir)
            make_private(self.data_dir / "logs")
            self._lock = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigurationError(
                f"the data directory {self.data_dir} cannot be used ({error.strerror}): choose another with --data-dir"
            ) from error
        # The children of a program that was just killed take some time to end.
        deadline = time.monotonic() + GRACE_SECONDS + 2
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    self._unlock()
                    raise ConfigurationError(
                        f"the data directory {self.data_dir} is in use by another local stack: "
                        "stop that one, or choose another with --data-dir"
                    ) from None
                time.sleep(0.1)
            else:
                self.broker.inherited = self.registry.inherited = (self._lock,)
                return

    def _unlock(self) -> None:
        self.broker.inherited = self.registry.inherited = ()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class LocalInstance(Server):
    """An instance of the service on a local stack; it keeps its state directory. Port 0 picks a free one.

    Args:
        environment: additional variables, `BALANCE_*` among them.
        checkout: runs another checkout of this project, from its `.venv`.
    """

    def __init__(
        self,
        number: int,
        stack: LocalStack,
        http_port: int = 0,
        environment: Mapping[str, str] | None = None,
        checkout: Path | None = None,
    ) -> None:
        name = f"instance-{number}"
        super().__init__(name, checkout or stack.data_dir, stack.data_dir / "logs" / f"{name}.log")
        self.port = http_port or free_port()
        self.url = f"http://{HOST}:{self.port}"
        self.state_dir = stack.data_dir / name
        self.environment = {
            **stack.addresses,
            "BALANCE_HTTP_HOST": HOST,
            "BALANCE_HTTP_PORT": str(self.port),
            "BALANCE_APPLICATION_SERVER": f"{HOST}:{self.port}",
            "BALANCE_STATE_DIR": str(self.state_dir),
            **(environment or {}),
        }
        self._python = str(checkout / ".venv/bin/python") if checkout else sys.executable

    def launch(self) -> None:
        require_free(self.port, self.name, "--http-port")
        self.run([self._python, "-m", "balance_service", "serve"], self.environment)

    def is_ready(self) -> bool:
        port = self.environment.get("BALANCE_HEALTH_PORT", self.port)
        with Client(f"http://{HOST}:{port}", trust_env=False, timeout_seconds=_READY_TIMEOUT_SECONDS) as client:
            try:
                return client.ready().is_ready
            except ClientError:
                return False

    def client(self, **options: Any) -> Client:
        """Returns a client; `options` are those of `Client`."""
        return Client(self.url, trust_env=False, **options)
