"""The heap of Spark's JVM, a sample every five seconds.

One thread asks the JVM, which may be collecting garbage for seconds; whoever scrapes reads the latest sample, an
immutable value replaced whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog

from balance_service.errors import FatalError
from balance_service.spark.session import jvm_has_ended

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class SparkSample:
    """The JVM at one moment; sizes in bytes."""

    heap_used: int
    heap_committed: int
    heap_max: int
    gc_seconds: float


class SparkSampler:
    """Samples the JVM of a session for as long as it lives."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        jvm: Any = spark.sparkContext._jvm
        self._management: Any = jvm.java.lang.management.ManagementFactory
        self.jvm_pid = int(self._management.getRuntimeMXBean().getPid())
        """Of the operating system."""
        self.sample: SparkSample | None = None
        """The latest; None before the first, and while the JVM cannot be asked."""

    def take(self) -> None:
        """Take a sample.

        Raises:
            FatalError: the JVM has ended, which nobody else would notice where no task runs.
        """
        try:
            self.sample = self._taken()
        except Exception as error:  # py4j raises many things
            if jvm_has_ended(self._spark):
                raise FatalError("Spark's JVM has ended") from error
            log.warning("Spark's figures cannot be had", error=str(error).partition("\n")[0])
            self.sample = None

    def _taken(self) -> SparkSample:
        heap = self._management.getMemoryMXBean().getHeapMemoryUsage()
        collections_ms = sum(bean.getCollectionTime() for bean in self._management.getGarbageCollectorMXBeans())
        return SparkSample(heap.getUsed(), heap.getCommitted(), heap.getMax(), collections_ms / 1000)
