"""The local stack: a broker and a registry, started and stopped together, on one data directory."""

from __future__ import annotations

import fcntl
import os
import time
from typing import TYPE_CHECKING, Self

from balance_service.devtools.local.broker import Broker
from balance_service.devtools.local.guard import GRACE_SECONDS
from balance_service.devtools.local.registry import Registry
from balance_service.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path


class LocalStack:
    """A real broker and registry as child processes, which end when this process does.

    Owned and called by one thread. Topics and schemas live in `data_dir` and are there again when it is
    reopened, on whatever ports; logs are in `data_dir/logs`. Port 0 picks a free one, kept for this
    object's life, so that a server that was stopped or killed comes back under its address. `proxied` is
    the broker's second listener, see there.
    """

    def __init__(
        self, data_dir: Path, kafka_port: int = 0, registry_port: int = 0, proxied: tuple[int, int] | None = None
    ) -> None:
        if kafka_port and kafka_port == registry_port:
            raise ConfigurationError(f"--kafka-port and --registry-port are both {kafka_port}; choose two ports")
        self.data_dir = data_dir.absolute()
        logs = self.data_dir / "logs"
        self._broker = Broker(self.data_dir / "kafka", logs / "broker.log", kafka_port, proxied)
        self._registry = Registry(self.data_dir / "registry", logs / "registry.log", registry_port)
        self._lock: int | None = None

    @property
    def bootstrap_servers(self) -> str:
        """The broker's address, for BALANCE_BOOTSTRAP_SERVERS."""
        return self._broker.bootstrap_servers

    @property
    def schema_registry_url(self) -> str:
        """The registry's Confluent-compatible address, for BALANCE_SCHEMA_REGISTRY_URL."""
        return self._registry.url

    def start(self) -> None:
        """Start both at once and return when both are ready; nothing is left running on failure.

        Raises:
            ConfigurationError: a port or the data directory is in use, Java is missing, a download
                failed, or a child ended early (then with the tail of its log).
        """
        self._take_lock()
        try:
            self._registry.launch(self._held)
            self._broker.launch(self._held)
            self._broker.wait_ready()
            self._registry.wait_ready()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop the registry, then the broker, each within about 13 s; may be called at any time."""
        try:
            self._registry.stop()
        finally:
            self._broker.stop()
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

    def require_running(self) -> None:
        """Raises FatalError if either has ended by itself."""
        self._broker.require_running()
        self._registry.require_running()

    def start_broker(self) -> None:
        """Start the broker again, under its former address."""
        self._broker.start(self._held)

    def stop_broker(self) -> None:
        """Shut the broker down in good order."""
        self._broker.stop()

    def kill_broker(self) -> None:
        """End the broker with SIGKILL, as a crash would."""
        self._broker.kill()

    def start_registry(self) -> None:
        """Start the registry again, under its former address."""
        self._registry.start(self._held)

    def stop_registry(self) -> None:
        """Shut the registry down in good order."""
        self._registry.stop()

    def kill_registry(self) -> None:
        """End the registry with SIGKILL, as a crash would."""
        self._registry.kill()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def _held(self) -> list[int]:
        return [] if self._lock is None else [self._lock]

    def _take_lock(self) -> None:
        """Own the data directory, together with each child for as long as it lives."""
        try:
            (self.data_dir / "logs").mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.data_dir / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigurationError(
                f"the data directory {self.data_dir} cannot be used ({error.strerror}): choose another with --data-dir"
            ) from error
        # The children of a program that was killed a moment ago need a while to end.
        deadline = time.monotonic() + GRACE_SECONDS + 2
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    os.close(self._lock)
                    self._lock = None
                    raise ConfigurationError(
                        f"the data directory {self.data_dir} is in use by another local stack: "
                        "stop that one, or choose another with --data-dir"
                    ) from None
                time.sleep(0.1)
            else:
                return
