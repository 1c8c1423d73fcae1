"""CPU time and memory of all processes of an instance."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SAMPLE_SECONDS = 0.25
_KIB = 1024


def tree(root: psutil.Process) -> list[psutil.Process]:
    """A process and its descendants; empty after its end."""
    with suppress(psutil.NoSuchProcess):
        return [root, *root.children(recursive=True)]
    return []


def cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    """User and system time so far, including children that have ended."""
    total = 0.0
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def threads(processes: Sequence[psutil.Process]) -> int:
    """The number of their threads."""
    count = 0
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            count += process.num_threads()
    return count


def resident_bytes(processes: Sequence[psutil.Process]) -> int:
    """Memory in bytes: PSS, which counts shared pages once, or RSS if the system has no PSS."""
    return sum(map(_resident, processes))


def _resident(process: psutil.Process) -> int:
    with suppress(psutil.Error, OSError):
        for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * _KIB
    with suppress(psutil.Error):
        return int(process.memory_info().rss)
    return 0


class Span:
    """Time since creation, and CPU time of the processes of an instance in that time."""

    def __init__(self, root: psutil.Process | None) -> None:
        self._root = root
        self._spent = self._now()
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """So far."""
        return time.monotonic() - self._began

    def cpu_seconds_per(self, unit: float) -> float | None:
        """CPU seconds so far, divided by `unit`; None if the processes are not accessible."""
        return None if self._root is None else (self._now() - self._spent) / unit

    def _now(self) -> float:
        return 0.0 if self._root is None else cpu_seconds(tree(self._root))


class Meter:
    """Samples the processes of an instance on its own thread, as a context manager.

    The thread writes `memory`; other threads read it after the end of the context.
    """

    def __init__(self, root: Callable[[], psutil.Process | None]) -> None:
        self._root = root
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meter", daemon=True)
        self.memory: list[tuple[float, int]] = []
        """Monotonic time and bytes."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def cpu_seconds(self) -> float:
        """Since the instance began."""
        root = self._root()
        return 0.0 if root is None else cpu_seconds(tree(root))

    @property
    def peak_bytes(self) -> int:
        """The maximum of all samples."""
        return max((held for _, held in self.memory), default=0)

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            root = self._root()
            if root is not None:
                self.memory.append((time.monotonic(), resident_bytes(tree(root))))
