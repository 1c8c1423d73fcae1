"""Runs `balance-service` commands as processes and captures output and exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


@dataclass(frozen=True)
class Done:
    """The result of a command."""

    code: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def errors(self) -> list[str]:
        """Returns the error lines on stderr."""
        return [line for line in self.stderr.splitlines() if line.startswith("Error: ")]


class Command:
    """A running `balance-service …` in its own session, with its output in files."""

    def __init__(
        self,
        environment: Mapping[str, str],
        arguments: Sequence[str],
        stdin: IO[bytes],
        out: IO[bytes],
        err: IO[bytes],
    ) -> None:
        self._out, self._err = out, err
        self._began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "balance_service", *arguments],
            stdin=stdin,
            stdout=out,
            stderr=err,
            env={**os.environ, **environment},
            start_new_session=True,
        )

    @property
    def stdout(self) -> str:
        """Returns the output so far."""
        return _text(self._out)

    def interrupt(self) -> None:
        """Sends SIGINT to the process group, as a terminal does on Ctrl-C."""
        os.killpg(self.process.pid, signal.SIGINT)

    def wait(self, seconds: float) -> Done:
        code = self.process.wait(seconds)
        return Done(code, _text(self._out), _text(self._err), time.monotonic() - self._began)

    def end(self) -> None:
        """Kills the process group if the command is still running."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@contextmanager
def started(environment: Mapping[str, str], *arguments: str, stdin: bytes = b"") -> Iterator[Command]:
    """Runs a command in the background; kills it at the end if it is still running."""
    with tempfile.TemporaryFile() as stdin_file, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        stdin_file.write(stdin)
        stdin_file.seek(0)
        command = Command(environment, arguments, stdin_file, out, err)
        try:
            yield command
        finally:
            command.end()


def run(environment: Mapping[str, str], *arguments: str, stdin: bytes = b"", seconds: float = 60.0) -> Done:
    """Runs a command to its end."""
    with started(environment, *arguments, stdin=stdin) as command:
        return command.wait(seconds)


def _text(file: IO[bytes]) -> str:
    # Does not seek: the child shares the file offset.
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), size, 0).decode(errors="replace")


def assert_refused(done: Done, code: int, *named: str) -> None:
    """Checks the exit code and that stderr has one error line, which contains `named`, and no traceback."""
    assert done.code == code, done
    assert len(done.errors) == 1, done
    assert "Traceback" not in done.stdout + done.stderr, done
    for name in named:
        assert name in done.errors[0], done.errors
