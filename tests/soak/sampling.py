"""Samples of what an instance and its topics take, and what is promised for each."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

import httpx
import psutil

from bench.usage import resident_bytes, threads, tree
from tests.soak.slopes import Verdict, judged
from tests.support.service import process_of

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence

    from balance_service.devtools.local.stack import LocalInstance, LocalStack

SAMPLE_SECONDS = 5.0
_MIB = 1 << 20
TRACKING = "-XX:NativeMemoryTracking=summary"
"""The option that an instance's JVM needs."""
_LINE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_AREA = re.compile(r"^-\s+(\w.*\w) \(reserved=\d+KB, committed=(\d+)KB\)$", re.MULTILINE)
# `docker run --memory` of docs/how-to/deploy.md, the room that BalanceDiskFilling warns of, and its numbers of files.
_MEMORY_MIB, _DISK_MIB = 1_500.0, 1_024.0
# The memtables and the block cache of all stores, half each: balance_service/engine/database.py.
_ROCKSDB_MIB = 128.0
# Java's default of ReservedCodeCacheSize. The compilers fill it for hours, a method at a time.
_CODE_MIB = 240.0
_PYTHON_FILES, _JVM_FILES = (220, 28), (400, 12)
# Two pools of Spark that delete what jobs leave, of 100 threads each. A pool makes a thread for each request until it
# is full, and a thread ends after a minute without one.
_POOLS, _POOL_THREADS = "block-manager-", 200
_INTERNAL = ("-changelog", "-application-servers")


class Meter:
    """Samples one instance that is never restarted, from a thread, while the context is open."""

    def __init__(self, stack: LocalStack, instance: LocalInstance, url: str, tls: ssl.SSLContext) -> None:
        self._stack = stack
        self._application_id = instance.environment["BALANCE_APPLICATION_ID"]
        self._process = process_of(instance)
        self._stores: Path = instance.state_dir
        self._http = httpx.Client(base_url=url, verify=tls, timeout=10, trust_env=False)
        self._began = time.monotonic()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="soak-meter", daemon=True)
        self._measures: dict[str, _Measure] = {}
        self._failure: BaseException | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()
        self._http.close()
        if self._failure is not None:
            raise self._failure

    def verdicts(self, window_hours: float, warm_up_hours: float) -> list[Verdict]:
        """Judges all measures; called after the end of the context."""
        if not self._measures:
            raise ValueError("no sample succeeded: does the instance answer, and is its Java a JDK, with jcmd?")
        return [
            judged(name, one.unit, one.samples, one.capacity, window_hours, warm_up_hours, fills=one.fills)
            for name, one in self._measures.items()
        ]

    @property
    def series(self) -> dict[str, list[tuple[float, float]]]:
        """By measure, hour and value."""
        return {name: one.samples for name, one in self._measures.items()}

    def _run(self) -> None:
        try:
            while not self._stopping.wait(SAMPLE_SECONDS):
                # On a busy machine, an answer may come too late.
                with suppress(httpx.HTTPError, subprocess.SubprocessError):
                    self._sample()
        except BaseException as error:
            self._failure = error

    def _sample(self) -> None:
        metrics = _Metrics(self._http.get("/metrics").text)
        python, jvm = [self._process], [p for p in tree(self._process) if p.pid != self._process.pid]
        tasks = metrics.count("balance_task_epoch") + metrics.count("balance_table_position")
        memtables, cached = (
            metrics.total("balance_rocksdb_memory_bytes", f'part="{part}"') / _MIB
            for part in ("memtables", "block_cache")
        )
        used, most = (metrics.total("balance_jvm_heap_bytes", f'kind="{kind}"') / _MIB for kind in ("used", "max"))
        areas = _areas(jvm)
        code = areas.pop("Code")
        pools = _pool_threads(jvm)
        now = {"threads of Python": threads(python), "threads of the JVM": max(0, threads(jvm) - pools)}
        # The heap, compiled code, RocksDB's buffers and the stacks of Spark's pools grow to their limits for hours
        # under this load, and malloc keeps what compilers took for a moment. They would hide a leak elsewhere, so
        # slopes are judged without them, and all that is resident must stay within the container.
        of_python = resident_bytes(python) / _MIB - memtables - cached
        of_jvm = sum(areas.values()) - areas["Java Heap"] - areas["Thread"]
        elsewhere = most + _CODE_MIB + _ROCKSDB_MIB
        self._note("memory of Python", of_python, _MEMORY_MIB - elsewhere - of_jvm)
        self._note("memory in use by the JVM", of_jvm, _MEMORY_MIB - elsewhere - of_python)
        self._note("all resident memory", resident_bytes([*python, *jvm]) / _MIB, _MEMORY_MIB, fills=True)
        self._note("heap after a collection", used, most)
        self._note("compiled code of the JVM", code, _CODE_MIB, fills=True)
        self._note("memory of RocksDB's buffers", memtables + cached, _ROCKSDB_MIB, fills=True)
        files = metrics.total("process_open_fds"), metrics.total("balance_jvm_process_open_fds")
        self._note("files of Python", files[0], _PYTHON_FILES[0] + _PYTHON_FILES[1] * tasks, "files")
        self._note("files of the JVM", files[1], _JVM_FILES[0] + _JVM_FILES[1] * tasks, "files")
        # Nothing is promised: it must not double.
        for name, count in now.items():
            first = self._measures[name].samples[0][1] if name in self._measures else count
            self._note(name, count, 2 * first, "threads")
        self._note("threads of Spark's pools", pools, _POOL_THREADS, "threads", fills=True)
        self._note("stores", self._table_files() / _MIB, _DISK_MIB)
        self._note("changelogs and directory", self._internal_topics() / _MIB, _DISK_MIB)

    def _table_files(self) -> int:
        return sum(path.stat().st_size for path in self._stores.rglob("*.sst") if path.exists())

    def _internal_topics(self) -> int:
        data: Path = self._stack.data_dir / "kafka" / "data"
        size = 0
        for folder in data.glob(f"{self._application_id}-*"):
            if folder.name.rpartition("-")[0].endswith(_INTERNAL):
                for path in folder.glob("*.log"):
                    size += path.stat().st_size if path.exists() else 0
        return size

    def _note(self, name: str, value: float, capacity: float, unit: str = "MiB", *, fills: bool = False) -> None:
        one = self._measures.setdefault(name, _Measure(unit, fills))
        one.samples.append(((time.monotonic() - self._began) / 3600, value))
        one.capacity = capacity


@dataclass(slots=True)
class _Measure:
    """What `judged` takes."""

    unit: str
    fills: bool
    capacity: float = 0.0
    samples: list[tuple[float, float]] = field(default_factory=list)


def _areas(processes: Sequence[psutil.Process]) -> dict[str, float]:
    """What JVMs use, in MiB, by the categories of Java's native memory tracking."""
    areas: dict[str, float] = {}
    for process in processes:
        with suppress(psutil.Error):  # a child may have ended
            java = Path(process.exe())
            if java.name == "java":
                asked = [str(java.with_name("jcmd")), str(process.pid), "VM.native_memory", "summary", "scale=KB"]
                told = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=True).stdout
                for name, committed in _AREA.findall(told):
                    areas[name] = areas.get(name, 0.0) + int(committed) / 1024
    return areas


def _pool_threads(processes: Sequence[psutil.Process]) -> int:
    """The number of threads of Spark's pools."""
    count = 0
    for process in processes:
        for name in Path(f"/proc/{process.pid}/task").glob("*/comm"):
            with suppress(OSError):  # a thread may have ended
                count += name.read_text().startswith(_POOLS)
    return count


class _Metrics:
    """Prometheus text."""

    def __init__(self, text: str) -> None:
        self._lines = _LINE.findall(text)

    def total(self, name: str, label: str = "") -> float:
        return sum(float(value) for found, labels, value in self._lines if found == name and label in labels)

    def count(self, name: str) -> int:
        return sum(found == name for found, _, _ in self._lines)
