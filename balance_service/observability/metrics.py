"""Counters and histograms of events. Gauges are read at each scrape by `hosting/collectors.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from balance_service.cluster.signatures import REASONS
from balance_service.engine.commit import Committed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from balance_service.engine.records import TaskId

_BATCH_BUCKETS = (0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_QUERY_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 1, 5)
_COMMAND_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_TASK = ("read_model", "partition")
# Addresses of peers and names of records come from topics, and each one makes a time series.
_MOST_PEERS = 100
_MOST_RECORDS = 50


class Metrics:
    """The metrics of one instance, in their own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._of_stages: list[Counter] = []
        self._read = self._counter("balance_events_read", "Records read from the source and committed.", _TASK)
        self._applied = self._counter("balance_events_applied", "Events folded.", _TASK)
        self._ignored = self._counter(
            "balance_events_ignored", "Records of other types, and events that do not meet a condition.", _TASK
        )
        self._others = self._counter(
            "balance_records_ignored",
            "Records of other types, by the full name of their type: a series begins with its first record. "
            "Beyond fifty names, record is other.",
            ("read_model", "record"),
        )
        self._duplicates = self._counter(
            "balance_events_duplicates", "Events whose idempotency key was applied before.", _TASK
        )
        self._dead = self._counter(
            "balance_events_dead_lettered", "Records that could not be applied. Retries do not count.", _TASK
        )
        self._deleted = self._counter("balance_states_deleted", "States that the fold deleted.", _TASK)
        self._sent = self._counter("balance_records_sent", "Records passed on under another key, or emitted.", _TASK)
        self._causes = self._counter(
            "balance_dead_letters",
            "Records that could not be applied, by cause: a series begins with its first dead letter. Retries do "
            "not count.",
            (*_TASK, "cause"),
        )
        self._retried = self._counter("balance_dead_letters_retried", "Dead letters retried.", _TASK)
        self._healed = self._counter(
            "balance_dead_letters_applied",
            "Dead letters closed because a retry applied their record, or found it to be ignored or a duplicate.",
            _TASK,
        )
        self._proxied = self._counter(
            "balance_proxied_requests",
            "Queries forwarded to a peer: answered, misdirected (421), unavailable (503) or failed. Beyond a "
            "hundred peers, peer is other.",
            ("peer", "outcome"),
        )
        self._peers: set[str] = set()
        self._records: set[str] = set()
        self._directory_refused = self._counter(
            "balance_directory_records_refused",
            "Directory records ignored because of BALANCE_PEER_SECRET: unsigned, wrongly signed, not of now "
            "(clocks) or repeated.",
            ("reason",),
        )
        # Prometheus sees no increase if a series begins at one.
        for reason in REASONS:
            self._directory_refused.labels(reason)
        self.rebalances = self._counter(
            "balance_rebalances", "Changes of assignment: assigned, revoked or lost.", ("kind",)
        )
        for kind in ("assigned", "revoked", "lost"):
            self.rebalances.labels(kind)
        self.batch_seconds = Histogram(
            "balance_batch_duration_seconds",
            "Duration of a commit: folded, committed, stored and visible.",
            buckets=_BATCH_BUCKETS,
            registry=self.registry,
        )
        self._queries = self._counter(
            "balance_stream_queries",
            "Spark queries started: opened (the task began or continued to fold), single events (a combined "
            "update needs its events), replaced (one query took the place of others), failed or stalled (the previous "
            "one failed, or handed over no row of those that there were), read apart (records were read without a "
            "query in between), batch ended, or set aside (an operator "
            "had a record passed over). A query that several partitions share counts for each.",
            (*_TASK, "reason"),
        )
        self._without_slots = self._counter(
            "balance_stream_queries_without_slots",
            "Spark queries that found no free slots in Spark. Report this as a bug.",
            ("read_model",),
        )
        self._query_start_seconds = Histogram(
            "balance_stream_start_seconds",
            "Time that a partition was not read while its Spark query started.",
            buckets=_BATCH_BUCKETS,
            registry=self.registry,
        )
        self.query_seconds = Histogram(
            "balance_query_duration_seconds",
            "Duration of a query for one key; answered is local, proxied or none.",
            ("read_model", "answered", "status"),
            buckets=_QUERY_BUCKETS,
            registry=self.registry,
        )
        self.command_seconds = Histogram(
            "balance_command_duration_seconds",
            "Duration of appending an event, up to its acknowledgement.",
            ("status",),
            buckets=_COMMAND_BUCKETS,
            registry=self.registry,
        )
        self.coalesced = Counter(
            "balance_stream_changes_coalesced",
            "Changes of a followed key that its reader got only the newest state of.",
            registry=self.registry,
        )
        self.second_writers = Counter(
            "balance_second_writers",
            "Commits given up because another producer had written to the changelog; the task opened again.",
            registry=self.registry,
        )
        self.refused = Counter(
            "balance_requests_refused",
            "Requests answered 503 because too many were in progress. No other metric counts them.",
            registry=self.registry,
        )

    def committed(self, task_id: TaskId, done: Committed) -> None:
        labels = (task_id.stage, str(task_id.partition))
        read = done.applied + done.ignored + done.duplicates + done.dead_lettered + done.scheduled
        self._read.labels(*labels).inc(read)
        self._ignored.labels(*labels).inc(done.ignored)
        for record, records in done.others.items():
            self._others.labels(task_id.stage, _bounded(record, self._records, _MOST_RECORDS)).inc(records)
        self._dead.labels(*labels).inc(done.dead_lettered)
        self._count_effects(labels, done)
        for cause, letters in done.causes.items():
            self._causes.labels(*labels, cause).inc(letters)
        for counter in (self._retried, self._healed):
            # Prometheus sees no increase if a series begins at one.
            counter.labels(*labels)

    def redriven(self, task_id: TaskId, letters: int, done: Committed) -> None:
        """Count retried dead letters, and the effects of their records."""
        labels = (task_id.stage, str(task_id.partition))
        self._retried.labels(*labels).inc(letters)
        self._healed.labels(*labels).inc(done.healed)
        self._count_effects(labels, done)

    def without_slots(self, stage: str, queries: int = 1) -> None:
        """Count queries that Spark had no slots for."""
        self._without_slots.labels(stage).inc(queries)

    def query_started(self, task_id: TaskId, reason: str, seconds: float | None = None) -> None:
        """Count a task's Spark query, and the time that the task waited for it."""
        self._queries.labels(task_id.stage, str(task_id.partition), reason).inc()
        if seconds is not None:
            self._query_start_seconds.observe(seconds)

    def proxied(self, peer: str, outcome: str) -> None:
        """Count a forwarded query. All peers beyond the first hundred count as `other`."""
        self._proxied.labels(_bounded(peer, self._peers, _MOST_PEERS), outcome).inc()

    def directory_record_refused(self, reason: str) -> None:
        self._directory_refused.labels(reason).inc()

    def forget_stage(self, name: str) -> None:
        """Ends the series of a stage that is gone. To be called once nothing counts for it any more."""
        for metric in (*self._of_stages, self.query_seconds):
            metric.remove_by_labels({"read_model": name})

    def totals(self) -> Committed:
        """Totals of all tasks that are here since the process started."""
        counters = (self._applied, self._ignored, self._duplicates, self._dead)
        applied, ignored, duplicates, dead_lettered = (int(sum(_totals(counter))) for counter in counters)
        return Committed(applied, ignored, duplicates, dead_lettered)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def _count_effects(self, labels: tuple[str, str], done: Committed) -> None:
        self._applied.labels(*labels).inc(done.applied)
        self._duplicates.labels(*labels).inc(done.duplicates)
        self._deleted.labels(*labels).inc(done.deleted)
        self._sent.labels(*labels).inc(done.sent)

    def _counter(self, name: str, help_text: str, labels: tuple[str, ...]) -> Counter:
        counter = Counter(name, help_text, labels, registry=self.registry)
        if "read_model" in labels:
            self._of_stages.append(counter)
        return counter


def _bounded(name: str, known: set[str], most: int) -> str:
    """The name, which is then known; `other` if there are too many."""
    if name not in known and len(known) < most:
        known.add(name)
    return name if name in known else "other"


def _totals(counter: Counter) -> Iterator[float]:
    for metric in counter.collect():
        yield from (sample.value for sample in metric.samples if sample.name.endswith("_total"))
