"""A child process that never outlives this one, whichever way this one ends; see guard.py."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from balance_service.devtools.local import guard
from balance_service.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

# A child that ends is noticed at once; one that starts on a busy machine takes minutes.
READY_TIMEOUT_SECONDS = 180.0
_POLL_SECONDS = 0.05
_TAIL_LINES = 8


class ChildProcess:
    """One child behind its guard, in a session of its own, so a terminal's Ctrl-C does not reach it.

    Owned and called by one thread. `name` is for people, e.g. "Kafka broker". `folder` is the child's
    working directory. `log` receives all that the child prints; the previous run's moves to `<log>.1`.
    """

    def __init__(self, name: str, folder: Path, log: Path) -> None:
        self.name = name
        self.log = log
        self._folder = folder
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        """Whether the child was started and has not ended."""
        return self._guard is not None and self._guard.poll() is None

    def start(
        self, command: Sequence[str], held: Sequence[int] = (), environment: Mapping[str, str] | None = None
    ) -> None:
        """Start `command`; returns at once, see `wait_ready`.

        `held` are file descriptors to keep open until the child has ended, such as a lock on its data;
        `environment` is added to this process's own.
        """
        if self.running:
            raise RuntimeError(f"the {self.name} is already running")
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
                pass_fds=held,
            )

    def wait_ready(self, ready: Callable[[], bool]) -> None:
        """Return once `ready` says so; it is asked again and again.

        Raises:
            ConfigurationError: the child ended, or was not ready in time; with the tail of its log.
        """
        deadline = time.monotonic() + READY_TIMEOUT_SECONDS
        while not ready():
            if not self.running:
                raise ConfigurationError(f"the {self.name} ended before it was ready; {self._tail()}")
            if time.monotonic() > deadline:
                raise ConfigurationError(
                    f"the {self.name} was not ready within {READY_TIMEOUT_SECONDS:.0f} s; {self._tail()}"
                )
            time.sleep(_POLL_SECONDS)

    def stop(self) -> None:
        """End the child with SIGTERM, or SIGKILL when it does not heed that; returns when it is gone."""
        self._end(b"", guard.GRACE_SECONDS + 2)

    def kill(self) -> None:
        """End the child with SIGKILL, as a crash would; returns when it is gone."""
        self._end(guard.KILL, 5)

    def _end(self, word: bytes, patience_seconds: float) -> None:
        process, self._guard = self._guard, None
        if process is None or process.stdin is None:
            return
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(word)
            process.stdin.close()
            process.wait(patience_seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            # The guard was interrupted, hangs, or was killed by someone and has left its child behind.
            if process.poll() is None or process.returncode < 0:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        return f"its log, {self.log}, ends with:\n" + "\n".join(f"  {line}" for line in lines)
