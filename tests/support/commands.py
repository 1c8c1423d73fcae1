"""The command line as a person uses it: a process of its own, what it says and how it ends."""

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
    """What a command said, and how it ended."""

    code: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def errors(self) -> list[str]:
        """The sentences for the person."""
        return [line for line in self.stderr.splitlines() if line.startswith("error: ")]


class Command:
    """`balance-service …` in a session of its own, its output in files."""

    def __init__(
        self,
        environment: Mapping[str, str],
        arguments: Sequence[str],
        given: IO[bytes],
        out: IO[bytes],
        err: IO[bytes],
    ) -> None:
        self._out, self._err = out, err
        self._began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "balance_service", *arguments],
            stdin=given,
            stdout=out,
            stderr=err,
            env={**os.environ, **environment},
            start_new_session=True,
        )

    @property
    def stdout(self) -> str:
        """What it has printed so far."""
        return _text(self._out)

    def interrupt(self) -> None:
        """Ctrl-C, which a terminal sends to the whole group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def wait(self, seconds: float) -> Done:
        """Wait for its end."""
        code = self.process.wait(seconds)
        return Done(code, _text(self._out), _text(self._err), time.monotonic() - self._began)

    def end(self) -> None:
        """Whatever is left of it is killed."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@contextmanager
def started(environment: Mapping[str, str], *arguments: str, stdin: bytes = b"") -> Iterator[Command]:
    """A command in the background."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(stdin)
        given.seek(0)
        command = Command(environment, arguments, given, out, err)
        try:
            yield command
        finally:
            command.end()


def run(environment: Mapping[str, str], *arguments: str, stdin: bytes = b"", seconds: float = 60.0) -> Done:
    """A command from start to end."""
    with started(environment, *arguments, stdin=stdin) as command:
        return command.wait(seconds)


def _text(file: IO[bytes]) -> str:
    # Not by seeking: the child writes at the same offset.
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), size, 0).decode(errors="replace")


def assert_refused(done: Done, code: int, *named: str) -> None:
    """One sentence for the person, which names what is wrong, and nothing of our insides."""
    assert done.code == code, done
    assert len(done.errors) == 1, done
    assert "Traceback" not in done.stdout + done.stderr, done
    for name in named:
        assert name in done.errors[0], done.errors
