"""Tests the checks: plants one bug at a time into a copy of the package and runs the test that must find it.

`make chaos-mutants`, or `python -m tests.chaos.mutants [WORD…]` for the bugs whose name contains a word. Plays the
unchanged copy first, which must pass. Exits with 1 if it fails or if a bug survives.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tests.chaos.mutations import CONTROLS, MUTATIONS, QUIET, Mutation
from tests.chaos.pinpoint import PINPOINT_MUTATIONS
from tests.chaos.plan import PARTITIONS

if TYPE_CHECKING:
    from collections.abc import Collection

ALL_MUTATIONS = (*PINPOINT_MUTATIONS, *MUTATIONS)
_PROJECT = Path(__file__).parents[2]
_COPIED = ("balance_service", "schemas", "deploy", "docs", "tests", "pyproject.toml")
_ROUND_SECONDS = 900
_VIOLATION = re.compile(r"VIOLATION \(([a-z ]+)\): (.*)")
# A bug may also prevent the service from finishing; any other failure is no proof that the bug was found.
_STANDSTILL = re.compile(r"AssertionError: (not caught up|.* was not read to)")
_FAILED = re.compile(r"^FAILED \S+?::(\w+)", re.MULTILINE)
_SEED = "1"
_SHOWN = 100


class Outcome(NamedTuple):
    """The result of a round or of another test."""

    passed: bool
    kind: str
    """Kind of the first violation; empty if the test failed for another reason."""
    detail: str
    seconds: float


def main(words: list[str]) -> int:
    """Plays the control and the selected mutations; returns the exit code."""
    wanted = [m for m in ALL_MUTATIONS if not words or any(word in m.name for word in words)]
    with tempfile.TemporaryDirectory(prefix="chaos-mutants-") as folder:
        for mutation in wanted:
            mutated(mutation, _PROJECT / mutation.file)  # fails early if a mutation is outdated
        survivors = 0
        for test in dict.fromkeys(mutation.test for mutation in wanted):
            control = _play(Path(folder), test, CONTROLS.get(test, QUIET))
            verdict = "passes" if control.passed else f"FAILS: {control.kind} {control.detail}"
            _tell(f"{test} without a bug", verdict, control.seconds)
            survivors += not control.passed
        for mutation in wanted:
            outcome = _play(Path(folder), mutation.test, mutation.faults, mutation)
            if outcome.passed:
                verdict = "SURVIVED"
            elif outcome.kind in mutation.kinds:
                verdict = f"caught: {outcome.kind}" + f" ({outcome.detail})" * bool(outcome.detail)
            elif outcome.kind:
                verdict = f"BY CHANCE? {outcome.kind} ({outcome.detail}) is not an expected kind"
            else:
                verdict = "BROKEN: the test failed without a violation"
            survivors += not verdict.startswith("caught")
            _tell(mutation.name, verdict, outcome.seconds)
    print(f"{len(wanted)} bugs planted, {survivors} unexpected verdicts", flush=True)
    return 1 if survivors else 0


def _play(folder: Path, test: str, faults: str, mutation: Mutation | None = None) -> Outcome:
    """Runs a round, or another test file, on a fresh copy."""
    copy = folder / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    for name in _COPIED:
        source = _PROJECT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy / name)
    if mutation is not None:
        (copy / mutation.file).write_text(mutated(mutation, copy / mutation.file), encoding="utf-8")
    environment = {
        **os.environ,
        "PYTHONPATH": str(copy),
        "CHAOS_SEED": _SEED,
        "CHAOS_FAULTS": faults,
        "CHAOS_PARTITIONS": str(PARTITIONS[0]),
        "CHAOS_MINUTES": "",
        "CHAOS_BROKERS": "",
        "CHAOS_STOP_EARLY": "" if mutation is None else "1",
    }
    command = [sys.executable, "-m", "pytest", test, "-s", "-p", "no:cacheprovider"]
    command += [f"--basetemp={folder / 'pytest'}"]
    began = time.monotonic()
    log = folder / "round.log"
    with (
        log.open("wb") as output,
        subprocess.Popen(command, cwd=copy, env=environment, stdout=output, stderr=subprocess.STDOUT) as playing,
    ):
        try:
            code = playing.wait(_ROUND_SECONDS)
        except subprocess.TimeoutExpired:
            playing.kill()  # the guards end the child processes
            code = playing.wait()
    text = log.read_text(encoding="utf-8", errors="replace")
    if code and mutation is None:
        print(text[-10_000:], flush=True)
    kinds = () if mutation is None else mutation.kinds
    found = _violation(text) if test in CONTROLS else _failed(text, kinds)
    return Outcome(code == 0, *found, time.monotonic() - began)


def mutated(mutation: Mutation, path: Path) -> str:
    """Returns the text of the file with the bug. Fails unless the replaced text occurs exactly once."""
    text = path.read_text(encoding="utf-8")
    if text.count(mutation.old) != 1:
        count = text.count(mutation.old)
        raise SystemExit(f"'{mutation.name}' is outdated: its text occurs {count} times in {mutation.file}")
    return text.replace(mutation.old, mutation.new)


def _failed(text: str, kinds: Collection[str]) -> tuple[str, str]:
    """Returns the name of a failed test, preferably an expected one."""
    failed = _FAILED.findall(text)
    expected = [name for name in failed if name in kinds]
    return next(iter(expected or failed), ""), ""


def _violation(text: str) -> tuple[str, str]:
    """Returns kind and detail of the first violation."""
    violation, standstill = _VIOLATION.search(text), _STANDSTILL.search(text)
    if violation is not None:
        return violation[1], violation[2][:_SHOWN]
    return ("", "") if standstill is None else ("stuck", standstill[1][:_SHOWN])


def _tell(name: str, verdict: str, seconds: float) -> None:
    print(f"{seconds:6.0f} s  {name:<75}  {verdict}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
