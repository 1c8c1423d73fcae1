"""Runs programs with a time limit and reports a failure in one sentence."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from balance_service.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_TAIL_LINES = 15


def run(
    command: Sequence[str | Path],
    timeout_seconds: float,
    *,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    log: Path | None = None,
) -> str:
    """Runs a program and returns its output; with `log`, the output goes there and "" is returned.

    Raises:
        ConfigurationError: the program failed or took too long; with the end of its output.
    """
    name = " ".join(str(part) for part in command[:4])
    try:
        if log is None:
            done = subprocess.run(
                command,
                env=environment,
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=timeout_seconds,
                check=False,
            )
            said = done.stdout + done.stderr
        else:
            with log.open("w") as output:
                done = subprocess.run(
                    command,
                    env=environment,
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    text=True,
                    timeout=timeout_seconds,
                    check=False,
                )
            said = log.read_text(errors="replace")
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigurationError(f"{name} … failed: {error}") from error
    if done.returncode:
        raise ConfigurationError(f"{name} … ended with code {done.returncode}:\n{_end_of(said)}")
    return done.stdout or ""


def _end_of(said: str) -> str:
    return "\n".join(f"  {line}" for line in said.splitlines()[-_TAIL_LINES:])
