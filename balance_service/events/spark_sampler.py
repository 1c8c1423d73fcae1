"""Spark's own figures, a sample every five seconds: the JVM's heap, and what a streaming query says of itself.

One thread asks the JVM, which may be collecting garbage for seconds; whoever scrapes reads the latest sample, an
immutable value replaced whole. A listener, which Spark would call for every micro-batch, would cost each batch more
than this costs in a minute.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import SparkSession

log = structlog.get_logger(__name__)

_EVERY_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class StreamProgress:
    """What a streaming query says of its latest micro-batch."""

    records: int
    input_per_second: float
    processed_per_second: float
    phase_seconds: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class SparkSample:
    """The JVM at one moment; sizes in bytes. `progress` is None before a query's first micro-batch."""

    heap_used: int
    heap_committed: int
    heap_max: int
    gc_seconds: float
    progress: StreamProgress | None


class SparkSampler:
    """Samples the JVM of a session for as long as it lives."""

    def __init__(self, spark: SparkSession) -> None:
        # Private names: PySpark has no others for the JVM's side of a session.
        self._streams: Any = spark._jsparkSession.streams()
        jvm: Any = spark.sparkContext._jvm
        self._management: Any = jvm.java.lang.management.ManagementFactory
        self.jvm_pid = int(self._management.getRuntimeMXBean().getPid())
        """Of the operating system."""
        self.sample: SparkSample | None = None
        """The latest; None before the first, and while the JVM cannot be asked."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spark-sampler", daemon=True)

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()

    def stop(self, timeout_seconds: float) -> None:
        """End, within the bound."""
        self._stopping.set()
        self._thread.join(timeout_seconds)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self.sample = self._take()
            except Exception as error:  # py4j raises many things; that the JVM is gone, the stream finds out
                if not self._stopping.is_set():
                    log.warning("Spark's figures cannot be had", error=str(error).partition("\n")[0])
                self.sample = None
            self._stopping.wait(_EVERY_SECONDS)

    def _take(self) -> SparkSample:
        heap = self._management.getMemoryMXBean().getHeapMemoryUsage()
        collections_ms = sum(bean.getCollectionTime() for bean in self._management.getGarbageCollectorMXBeans())
        return SparkSample(heap.getUsed(), heap.getCommitted(), heap.getMax(), collections_ms / 1000, self._progress())

    def _progress(self) -> StreamProgress | None:
        for query in self._streams.active():
            progress = query.lastProgress()
            if progress is not None:
                return parse_progress(progress.json())
        return None


def parse_progress(text: str) -> StreamProgress:
    """Spark's JSON of a query's progress."""
    told = json.loads(text)
    return StreamProgress(
        told["numInputRows"],
        told.get("inputRowsPerSecond", 0.0),
        told.get("processedRowsPerSecond", 0.0),
        {phase: ms / 1000 for phase, ms in told["durationMs"].items()},
    )
