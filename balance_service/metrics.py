"""Metrics of one instance, in Prometheus' terms.

Counters are fed where things happen; states are read on scrape.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from balance_service.state.commit import Committed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client import Metric

    from balance_service.state.records import TaskId
    from balance_service.state.tasks import Tasks

_BATCH_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_QUERY_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 1, 5)
_TASK = ("read_model", "partition")


class Ends(Protocol):
    """The ends of the source."""

    def lag(self, partition: int, position: int) -> int | None:
        """Records between a position and the end; None while the end is not known."""


class Watched(Protocol):
    """What is read on a scrape."""

    @property
    def tasks(self) -> Tasks:
        """The tasks of this instance."""

    @property
    def watermarks(self) -> Ends:
        """The ends of the source."""


class Metrics:
    """One registry a process; nothing global, so that tests can have many."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._read = self._counter("balance_events_read", "Records read from the source.", _TASK)
        self._applied = self._counter("balance_events_applied", "Events folded.", _TASK)
        self._ignored = self._counter("balance_events_ignored", "Records of other types.", _TASK)
        self._duplicates = self._counter(
            "balance_events_duplicates", "Events applied before under the same idempotency key.", _TASK
        )
        self._dead = self._counter("balance_events_dead_lettered", "Records that could not be applied.", _TASK)
        self.rebalances = self._counter("balance_rebalances", "Changes of assignment.", ("kind",))
        self.batch_seconds = Histogram(
            "balance_batch_duration_seconds",
            "From the start of a micro-batch to its last commit.",
            buckets=_BATCH_BUCKETS,
            registry=self.registry,
        )
        self.query_seconds = Histogram(
            "balance_query_duration_seconds",
            "Time to answer a balance query, by who had the answer.",
            ("answered", "status"),
            buckets=_QUERY_BUCKETS,
            registry=self.registry,
        )

    def committed(self, task_id: TaskId, done: Committed) -> None:
        """Count what a commit did."""
        labels = (task_id.read_model, str(task_id.partition))
        self._read.labels(*labels).inc(done.applied + done.ignored + done.duplicates + done.dead_lettered)
        self._applied.labels(*labels).inc(done.applied)
        self._ignored.labels(*labels).inc(done.ignored)
        self._duplicates.labels(*labels).inc(done.duplicates)
        self._dead.labels(*labels).inc(done.dead_lettered)

    def watch(self, engine: Watched) -> None:
        """Read the states of this engine's tasks on each scrape."""
        self.registry.register(_TaskCollector(engine))

    def totals(self) -> Committed:
        """What was done since the process started, over all tasks, in records."""
        counters = (self._applied, self._ignored, self._duplicates, self._dead)
        return Committed(*(int(sum(_totals(counter))) for counter in counters))

    def text(self) -> bytes:
        """All metrics, in Prometheus' text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, what: str, labels: tuple[str, ...]) -> Counter:
        return Counter(name, what, labels, registry=self.registry)


def _totals(counter: Counter) -> Iterator[float]:
    for metric in counter.collect():
        yield from (sample.value for sample in metric.samples if sample.name.endswith("_total"))


class _TaskCollector(Collector):
    def __init__(self, engine: Watched) -> None:
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        labels = ("read_model", "partition", "role")
        position = GaugeMetricFamily("balance_position", "Next source offset to apply.", labels=labels)
        lag = GaugeMetricFamily("balance_lag", "Records between position and the source's end.", labels=labels)
        size = GaugeMetricFamily("balance_store_bytes", "Bytes of the state store.", labels=labels)
        restored = GaugeMetricFamily("balance_restored_records", "Changelog records restored.", labels=labels)
        to_restore = GaugeMetricFamily(
            "balance_records_to_restore", "Changelog offsets to restore at opening.", labels=labels
        )
        state = GaugeMetricFamily("balance_task_state", "1 for the state a task is in.", labels=(*labels, "state"))
        for task in self._engine.tasks.snapshots():
            of = (task.task_id.read_model, str(task.task_id.partition), task.role.value.lower())
            behind = self._engine.watermarks.lag(task.task_id.partition, task.position)
            position.add_metric(of, task.position)
            if behind is not None:
                lag.add_metric(of, behind)
            size.add_metric(of, task.store_bytes)
            restored.add_metric(of, task.restored)
            to_restore.add_metric(of, task.to_restore)
            state.add_metric((*of, task.state), 1)
        return [position, lag, size, restored, to_restore, state]
