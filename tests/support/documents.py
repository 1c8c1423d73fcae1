"""Reads the code blocks of documents, and runs their shell blocks as written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROOT = Path(__file__).parents[2]
_POLL_SECONDS = 0.5
_PATIENCE_SECONDS = 120.0


class Block(NamedTuple):
    """A code block; `file` is the path at the end of the line above it, or empty."""

    file: str
    language: str
    text: str


def blocks(path: str) -> list[Block]:
    """Returns the code blocks of a document."""
    text = (ROOT / path).read_text(encoding="utf-8")
    found = re.findall(r"(?:`([\w./]+)`:\n\n)?^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [Block(*block) for block in found]


def files_of(path: str) -> dict[str, str]:
    """Returns the files that a document shows: path → text."""
    return {block.file: block.text for block in blocks(path) if block.file}


class Step(NamedTuple):
    """A command of a shell block, and the comment lines after it that show its output."""

    command: str
    output: Sequence[str]


def steps(script: str) -> list[Step]:
    """Splits a shell block into commands; one may continue after a backslash."""
    found: list[Step] = []
    lines = iter(script.splitlines())
    for line in lines:
        if line.startswith("# "):
            before = found.pop()
            found.append(Step(before.command, [*before.output, line.removeprefix("# ")]))
            continue
        command = line
        while command.endswith("\\"):
            command += "\n" + next(lines)
        if command.strip():
            found.append(Step(command, []))
    return found


class Shell:
    """Runs commands in a folder; exported variables and the folder stay, as in a terminal."""

    def __init__(self, folder: Path, replaced: Mapping[str, str], environment: Mapping[str, str]) -> None:
        """Args:
        replaced: text in commands and outputs → text in its place, such as addresses.
        """
        self._folder, self._replaced = folder, replaced
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._environment = {**os.environ, **environment, "PATH": path}

    def run(self, script: str) -> None:
        """Runs a block; compares each shown output, and waits for it if the command only reads."""
        for step in steps(script):
            deadline = time.monotonic() + _PATIENCE_SECONDS
            output = self._output(step.command)
            while not self._is_as_shown(output, step.output):
                waits = not re.search(r"-X POST|redrive|discard|produce", step.command)
                late = not waits or time.monotonic() > deadline
                assert not late, f"{step.command}\nprints\n{output}\nnot {step.output}"
                time.sleep(_POLL_SECONDS)
                output = self._output(step.command)

    def _is_as_shown(self, output: str, shown: Sequence[str]) -> bool:
        """Whether the last lines of the output are those shown; of headers, whether each is there."""
        if shown and shown[0].startswith("HTTP/"):
            return all(part in output for part in shown[0].split(", "))
        lines = [" ".join(line.split()) for line in output.splitlines() if line.strip()]
        return lines[len(lines) - len(shown) :] == [" ".join(self._with_addresses(line).split()) for line in shown]

    def _with_addresses(self, text: str) -> str:
        for old, new in self._replaced.items():
            text = text.replace(old, new)
        return text

    def _output(self, command: str) -> str:
        script = f"set -e\n{self._with_addresses(command)}\n{{ echo; env -0; }} >&3"
        reading, writing = os.pipe()
        with os.fdopen(reading, "rb") as end:
            try:
                done = subprocess.run(
                    ["bash", "-c", script.replace(">&3", f">&{writing}")],
                    cwd=self._folder,
                    env=self._environment,
                    pass_fds=[writing],
                    capture_output=True,
                    text=True,
                    check=False,
                )
            finally:
                os.close(writing)
            told = end.read().decode().removeprefix("\n")
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        self._environment = dict(entry.split("=", 1) for entry in told.split("\0") if "=" in entry)
        self._folder = Path(self._environment["PWD"])
        return done.stdout
