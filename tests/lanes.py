"""Runs the tests in parallel lanes, as many as fill two processors: more would only make each test wait for one.

`python -m tests.lanes` runs the unit tests in parallel with the main end-to-end stories, and with the integration tests
of what librdkafka does.
`python -m tests.lanes rest` runs the integration tests; then the other end-to-end tests and the slowest integration
tests; then the chaos suite alone, because it has time limits. In CI, whose time is limited, it plays a sixth of the
second part a day, and one of the two chaos suites.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_PROJECT = Path(__file__).parents[1]
_TESTS = _PROJECT / "tests"
# The main promises: answers from every instance through kills, standbys and rebuilds, and healing dead letters.
_STORIES = tuple(
    f"tests/e2e/test_{name}.py" for name in ("two_instances", "standbys", "kill", "rebuild", "dead_letters")
)
_OF_LIBRDKAFKA = ("test_assignments.py", "test_groups.py", "test_offsets.py")

# They take minutes: a record that ends the JVM restarts it five times, recorded instances start twice, Spark analyses
# and runs each transform, and others start many queries or brokers.
_LATER = tuple(
    f"test_{name}.py"
    for name in (
        *("spark_faults", "recorded_data", "memory", "batch_cluster", "batch_job", "leaderboard", "real_time"),
        *("transformed_rows", "transforms_refused", "transform_fingerprints", "transform_bounds", "transformed_events"),
        *("writer_schemas", "decoded_types", "conditions", "retries", "spark_settings", "jvm"),
        *("local_stack", "topic_copy", "log_faults", "storage_faults"),
    )
)

# `make chaos` also restarts brokers in turn, and upgrades instances.
_CHAOS = tuple(f"tests/chaos/test_{name}.py" for name in ("systems", "chaos"))

# The time of CI is limited: it plays a sixth of the other end-to-end tests a day, each file every sixth day.
_DAYS = 6

# Of the slowest files that are distributed, so that all lanes end at about the same time. Any other takes about one.
_MINUTES = {
    "e2e/test_generation_kills.py": 24,
    "e2e/test_generations.py": 15,
    "e2e/test_generation_faults.py": 15,
    "e2e/test_demo_and_samples.py": 12,
    "e2e/test_versions.py": 7,
    "e2e/test_ten_models.py": 6,
    "e2e/test_documents.py": 6,
    "e2e/test_dead_letter_operations.py": 6,
    "e2e/test_retry_topics.py": 5,
    "integration/test_recorded_data.py": 5,
    "integration/test_batch_job.py": 6,
    "e2e/test_loads.py": 6,
    "integration/test_spark_faults.py": 4,
    "integration/test_real_time.py": 3,
    "integration/test_writer_schemas.py": 3,
    "integration/test_decoded_types.py": 3,
    "integration/test_log_faults.py": 3,
    "integration/test_local_stack.py": 2,
    "e2e/test_network_and_clock.py": 4,
    "e2e/test_files.py": 4,
    "e2e/test_generation_letters.py": 3,
    "e2e/test_project.py": 3,
}

# RocksDB and Kafka sync their writes, and most tests would wait for the disk. No test needs data after a power failure.
# The chaos suite uses a real disk.
_MEMORY, _ROOM_BYTES = Path("/dev/shm"), 8 << 30

# The start of pytest's lines about a failure; groups of exceptions have a margin.
_FAILURE = re.compile(r"FAILED |ERROR |[ |]*E  ")


def _shares(paths: Iterable[Path], count: int) -> list[list[Path]]:
    """Distributes test files over shares, the slowest first, each to the share that would end first."""

    def minutes(path: Path) -> int:
        return _MINUTES.get(str(path.relative_to(_TESTS)), 1)

    shares: list[list[Path]] = [[] for _ in range(count)]
    for path in sorted(paths, key=lambda path: (-minutes(path), path)):
        min(shares, key=lambda share: sum(map(minutes, share))).append(path)
    return shares


def _lanes(name: str, paths: Iterable[Path], count: int) -> dict[str, Sequence[str]]:
    """Returns lanes by name, each with a share of the files."""
    return {
        f"{name} {number}/{count}": [str(path.relative_to(_PROJECT)) for path in share]
        for number, share in enumerate(_shares(paths, count), 1)
    }


def _turns(which: str) -> Sequence[Mapping[str, Sequence[str]]]:
    """Returns the turns: in each, the lanes by name, with their files."""
    if which == "rest":
        others = [path for path in (_TESTS / "e2e").glob("test_*.py") if f"tests/e2e/{path.name}" not in _STORIES]
        others += [_TESTS / "integration" / name for name in _LATER]
        chaos = _CHAOS
        if os.environ.get("CI"):
            day = int(time.time() // 86_400)
            share = day % _DAYS
            others, chaos = _shares(others, _DAYS)[share], (_CHAOS[day % len(_CHAOS)],)
            print(f"of {_DAYS} shares of the other end-to-end tests, CI plays number {share + 1} today", flush=True)
        apart = {*_LATER, *_OF_LIBRDKAFKA}
        soon = [path for path in (_TESTS / "integration").glob("test_*.py") if path.name not in apart]
        chaos_lane = {"chaos": ["tests/chaos/test_checks.py", *chaos]}
        return _lanes("integration", soon, 2), _lanes("e2e", others, 2), chaos_lane
    stories = [*_STORIES, *(f"tests/integration/{name}" for name in _OF_LIBRDKAFKA)]
    return [{"stories": stories, **_lanes("unit", (_TESTS / "unit").rglob("test_*.py"), 2)}]


class _Lane:
    """A run of pytest whose output is printed line by line."""

    def __init__(self, place: str, name: str, paths: Sequence[str], folder: str) -> None:
        """Args:
        place: the number of this lane and the number of lanes: `0/4`.
        folder: for temporary files of the tests.
        """
        self._name = name
        self._failures: list[str] = []
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", "pytest", *paths, "-p", "no:cacheprovider", "--durations=15"],
            cwd=_PROJECT,
            env={**os.environ, "TESTS_LANE": place, "TMPDIR": folder},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._printer = threading.Thread(target=self._print)
        self._printer.start()

    def wait(self) -> list[str]:
        """Waits for the end; returns the failures."""
        code = self._process.wait()
        self._printer.join()
        return [*self._failures, f"{self._name} failed"] if code else []

    def stop(self) -> None:
        """Interrupts pytest, which stops the processes that its tests have started."""
        self._process.send_signal(signal.SIGINT)

    def _print(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if _FAILURE.match(line):
                self._failures.append(line.rstrip())
            print(f"{self._name:>16} | {line.rstrip()}", flush=True)


def _folder(turn: Iterable[str]) -> str:
    """Returns a folder for temporary files: in memory if there is room, unless TMPDIR is set."""
    in_memory = "chaos" not in turn and "TMPDIR" not in os.environ and _memory_has_room()
    return tempfile.mkdtemp(prefix="balance-tests-", dir=_MEMORY if in_memory else None)


def _memory_has_room() -> bool:
    if not _MEMORY.is_dir() or os.statvfs(_MEMORY).f_flag & os.ST_NOEXEC:
        return False
    figures = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(figures["MemAvailable"].split()[0]) << 10
    return min(available, shutil.disk_usage(_MEMORY).free) > _ROOM_BYTES


def _run(turn: Mapping[str, Sequence[str]]) -> list[str]:
    """Runs the lanes of a turn; returns the failures. Keeps the temporary files on failure."""
    folder = _folder(turn)
    lanes = [_Lane(f"{place}/{len(turn)}", name, paths, folder) for place, (name, paths) in enumerate(turn.items())]
    try:
        failed = [line for lane in lanes for line in lane.wait()]
    except KeyboardInterrupt:
        for lane in lanes:
            lane.stop()
        for lane in lanes:
            lane.wait()
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if not failed:
        shutil.rmtree(folder, ignore_errors=True)
        return []
    return [*failed, f"the temporary files of these tests are in {folder}; remove it after use"]


def main(which: str = "first") -> int:
    """Runs the tests; returns 0 if all pass."""
    began = time.monotonic()
    try:
        failed = [line for turn in _turns(which) for line in _run(turn)]
    except KeyboardInterrupt:
        return 130
    minutes = (time.monotonic() - began) / 60
    if not failed:
        print(f"every test passed, in {minutes:.0f} min")
        return 0
    # Repeats the failures at the end of a long log.
    print(*failed, sep="\n")
    print(f"FAILED in {minutes:.0f} min")
    return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
