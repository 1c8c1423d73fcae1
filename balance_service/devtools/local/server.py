"""A server as a child process: what broker, registry and instance have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from balance_service.errors import FatalError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from balance_service.devtools.local.process import ChildProcess


class Server(ABC):
    """Started, watched and ended by one thread, which owns it."""

    def __init__(self, process: ChildProcess) -> None:
        self._process = process

    @property
    def running(self) -> bool:
        """Whether the process is there."""
        return self._process.running

    def require_running(self) -> None:
        """Raises FatalError if the process has ended by itself."""
        if not self.running:
            raise FatalError(f"the {self._process.name} ended by itself; its log is {self._process.log}")

    @abstractmethod
    def launch(self, held: Sequence[int] = ()) -> None:
        """Start the process; see `wait_ready`.

        `held` are file descriptors to keep open until the process has ended.

        Raises:
            ConfigurationError: the port is in use, Java is missing, or the jars cannot be downloaded.
        """

    @abstractmethod
    def is_ready(self) -> bool:
        """Whether it answers now."""

    def wait_ready(self) -> None:
        """Return once it answers.

        Raises:
            ConfigurationError: it ended or is too slow; with the tail of its log.
        """
        self._process.wait_ready(self.is_ready)

    def start(self, held: Sequence[int] = ()) -> None:
        """`launch` and `wait_ready`."""
        self.launch(held)
        self.wait_ready()

    def stop(self) -> None:
        """Shut down in good order, within a bound."""
        self._process.stop()

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        self._process.kill()
