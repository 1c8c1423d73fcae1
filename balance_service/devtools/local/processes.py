"""Servers on this machine: their ports, and child processes that never outlive this one."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from balance_service.devtools.local import guard
from balance_service.errors import ConfigurationError, FatalError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

HOST = "127.0.0.1"
# A busy machine takes minutes to start a server. A server that ends early is detected at once.
READY_TIMEOUT_SECONDS = 180.0
_POLL_SECONDS = 0.05
_TAIL_LINES = 8
# Below the ephemeral ports of Linux and macOS: while a server is down, its port is not assigned to an outgoing
# connection, and a client that reconnects cannot connect to itself.
_PORTS = range(20_000, 30_000)
_ports = _PORTS

# Ports that this process has assigned, whose servers may not listen yet.
_assigned: set[int] = set()


def free_port() -> int:
    """A port without a listener; each call returns another one."""
    for port in random.sample(_ports, 200):
        if port not in _assigned and is_free(port):
            _assigned.add(port)
            return port
    raise ConfigurationError(f"no free port was found between {_PORTS.start} and {_PORTS.stop}")


def share_ports(index: int, count: int) -> None:
    """Restrict `free_port` to one of `count` disjoint sets of ports, for processes that run concurrently."""
    global _ports
    _ports = _PORTS[index::count]


def require_free(port: int, server: str, flag: str) -> None:
    """Check that a server can listen on a port, which a user chooses by `flag`.

    Raises:
        ConfigurationError: another program listens there, or the port is not allowed.
    """
    if not is_free(port):
        raise ConfigurationError(
            f"port {port} ({server}) is in use or not allowed: stop the program that uses it, or choose another "
            f"port with {flag} (0 picks a free one)"
        )
    _assigned.add(port)


def is_free(port: int) -> bool:
    # macOS allows a bind to a specific address although another server listens on the wildcard address.
    if accepts_connections(port):
        return False
    with socket.socket() as server:
        # As Java does: lingering connections of an earlier server do not block the port.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind((HOST, port))
        except OSError:
            return False
    return True


def accepts_connections(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((HOST, port)) == 0


def make_private(folder: Path) -> None:
    """Creates a folder if it is missing, and closes it to other users of the machine: events and states are in it."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)


class ChildProcess:
    """A child process that ends when this process ends, even by SIGKILL; see guard.py. For one thread.

    It runs in its own session, so Ctrl-C in a terminal does not reach it.
    """

    def __init__(self, name: str, folder: Path, log: Path) -> None:
        """Args:
        name: for messages, such as "Kafka broker".
        folder: the working directory.
        log: receives all output; the log of the previous run is moved to `<log>.1`.
        """
        self.name = name
        self.log = log
        self.inherited: tuple[int, ...] = ()
        """File descriptors that the child keeps open until it ends, such as a lock on its data."""
        self._folder = folder
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        return self._guard is not None and self._guard.poll() is None

    def run(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Start `command` and return at once; `environment` is added to that of this process."""
        if self.running:
            raise RuntimeError(f"{self.name} is already running")
        # Closes the pipe of a child that has ended by itself.
        self.begin_stop()
        if self.log.exists():
            self.log.replace(self.log.with_name(self.log.name + ".1"))
        with self.log.open("wb") as output:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), *command],
                bufsize=0,
                cwd=self._folder,
                env={**os.environ, **(environment or {})},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=self.inherited,
            )

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Poll until `ready` returns True.

        Raises:
            ConfigurationError: the child ended, or was not ready in time; with the last lines of its log.
        """
        deadline = time.monotonic() + READY_TIMEOUT_SECONDS
        while not ready():
            if not self.running:
                raise ConfigurationError(f"{self.name} ended before it was ready; {self._tail()}")
            if time.monotonic() > deadline:
                raise ConfigurationError(
                    f"{self.name} was not ready within {READY_TIMEOUT_SECONDS:.0f} s; {self._tail()}"
                )
            time.sleep(_POLL_SECONDS)

    def begin_stop(self) -> None:
        """Send SIGTERM, then SIGKILL if that is ignored, without waiting; `stop` waits."""
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.close()

    def stop(self) -> None:
        """Send SIGTERM, then SIGKILL if that is ignored; returns when the child has ended."""
        self._end(b"", guard.GRACE_SECONDS + 2)

    def kill(self) -> None:
        """Send SIGKILL; returns when the child has ended."""
        self._end(guard.KILL, 5)

    def _end(self, message: bytes, timeout_seconds: float) -> None:
        process, self._guard = self._guard, None
        if process is None or process.stdin is None:
            return
        try:
            with contextlib.suppress(BrokenPipeError):
                if message and not process.stdin.closed:
                    process.stdin.write(message)
            process.stdin.close()
            process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            # The guard was interrupted, hangs, or was killed and has left its child behind.
            if process.poll() is None or process.returncode < 0:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        return f"its log, {self.log}, ends with:\n" + "\n".join(f"  {line}" for line in lines)


class Server(ChildProcess, ABC):
    """A child process that answers requests. Its data survive a stop, a kill and a change of port."""

    @abstractmethod
    def launch(self) -> None:
        """Start the process and return at once.

        Raises:
            ConfigurationError: the port is in use, Java is missing, or a download failed.
        """

    @abstractmethod
    def is_ready(self) -> bool:
        """Whether the server answers requests now."""

    def wait_ready(self) -> None:
        """Wait until the server is ready. Raises ConfigurationError as `wait_until`."""
        self.wait_until(self.is_ready)

    def start(self) -> None:
        """`launch` and `wait_ready`."""
        self.launch()
        self.wait_ready()

    def require_running(self) -> None:
        """Raises FatalError if the process has ended unexpectedly."""
        if not self.running:
            raise FatalError(f"{self.name} ended unexpectedly; its log is {self.log}")
