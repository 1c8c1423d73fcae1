"""The metrics that show a state. Each scrape reads the latest values of other threads and waits for none."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import chain
from typing import TYPE_CHECKING, Protocol

from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

from balance_service.engine.database import block_cache_bytes, memtables_bytes, room_bytes
from balance_service.engine.dead_letter import open_letters
from balance_service.engine.records import Role
from balance_service.process.package import __version__
from balance_service.process.runtime import elapsed

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from prometheus_client import Metric
    from prometheus_client.registry import CollectorRegistry

    from balance_service.cluster.directory import ServerTable
    from balance_service.engine.records import TaskSnapshot
    from balance_service.engine.tasks import Tasks
    from balance_service.hosting.engine import Engine
    from balance_service.settings import Settings
    from balance_service.spark.session import SparkSample

_TASK = ("read_model", "partition", "role")


class Readable(Protocol):
    """An instance, as far as its own metrics need it."""

    def unready(self) -> Sequence[str]: ...

    @property
    def open_streams(self) -> int: ...

    def stale_files(self) -> Mapping[str, bool]: ...


class InstanceCollector(Collector):
    """The metrics of an instance that exist before its engine starts."""

    def __init__(self, instance: Readable, settings: Settings) -> None:
        self._instance = instance
        self._settings = settings

    def collect(self) -> Iterable[Metric]:
        settings = self._settings
        info = InfoMetricFamily(
            "balance_instance", "1; identifies the instance. application_server is its address for peers."
        )
        info.add_metric(
            (),
            {
                "version": __version__,
                "application_server": settings.application_server,
                "application_id": settings.application_id,
                "topic": settings.topic,
            },
        )
        yield info
        yield _gauge("balance_ready", "1 while /health/ready returns 200.", not self._instance.unready())
        stale = GaugeMetricFamily(
            "balance_security_file_stale",
            "1 while a file (tokens, jwks, or certificate with its key and CAs) is unusable and its previous "
            "content applies.",
            labels=("file",),
        )
        for name, is_stale in self._instance.stale_files().items():
            stale.add_metric((name,), is_stale)
        yield stale
        yield _gauge("balance_streams_open", "Streams of events that clients have open.", self._instance.open_streams)
        if settings.state_dir.exists():
            free = room_bytes(settings.state_dir)
            yield _gauge("balance_state_directory_free_bytes", "Free space on the disk of the stores.", free)


class EngineCollector(Collector):
    """The metrics of tasks, tables, the cluster and Spark's JVM."""

    def __init__(self, engine: Engine, servers: ServerTable) -> None:
        self._engine = engine
        self._servers = servers

    def register(self, registry: CollectorRegistry) -> None:
        """Registers these metrics and those of the two processes, Python and the JVM."""
        registry.register(self)
        ProcessCollector(registry=registry)
        pid = self._engine.spark_sampler.jvm_pid
        ProcessCollector(namespace="balance_jvm", pid=lambda: pid, registry=registry)

    def collect(self) -> Iterable[Metric]:
        yield from self._tasks()
        yield from self._tables()
        yield from self._generations()
        yield from self._cluster()
        sample = self._engine.spark_sampler.sample
        if sample is not None:
            yield from _jvm(sample)

    def _tasks(self) -> Iterable[Metric]:
        position = _of_tasks("balance_position", "The next source offset to apply; -1 before there is a store.")
        lag = _of_tasks("balance_lag", "Records between the position and the source's end.")
        epoch = _of_tasks("balance_task_epoch", "Fencing number of the task; 0 if it has never owned its partition.")
        answers = _of_tasks(
            "balance_task_answers",
            "1 while the task answers queries in its role, which an owner does only with its lease.",
        )
        size = _of_tasks("balance_store_bytes", "Live table files of the store, and data not yet written to one.")
        keys = _of_tasks("balance_store_keys", "Keys in the store, as RocksDB estimates them.")
        still = _of_tasks(
            "balance_task_standing_still_seconds",
            "Time since the position moved or the first record came behind it; 0 without records to apply.",
        )
        restored = _of_tasks("balance_restored_records", "Changelog records restored since the restore began.")
        to_restore = _of_tasks("balance_records_to_restore", "Changelog offsets to restore at opening.")
        state = GaugeMetricFamily("balance_task_state", "1 for the state of the task.", labels=(*_TASK, "state"))
        letters = GaugeMetricFamily(
            "balance_dead_letters_open",
            "Dead letters whose record may still be applied: scheduled, waiting for an operator, behind another "
            "of its key, or parked. A standby has the owner's.",
            labels=(*_TASK, "cause", "status"),
        )
        memory = GaugeMetricFamily(
            "balance_rocksdb_memory_bytes",
            "Memory of RocksDB: block_cache, memtables or table_readers.",
            labels=("part",),
        )
        for tasks, task in self._snapshots():
            of = (task.task_id.stage, str(task.task_id.partition), task.role.value.lower())
            behind = tasks.hosted.watermarks.lag(task.task_id.partition, task.position)
            position.add_metric(of, task.position)
            if behind is not None:
                lag.add_metric(of, behind)
            epoch.add_metric(of, task.epoch)
            if task.role is Role.ACTIVE:
                still.add_metric(of, task.stand.seconds if task.stand is not None and task.stand.lag else 0.0)
            answers.add_metric(of, task.answers and (task.role is Role.STANDBY or tasks.hosted.lease.holds))
            size.add_metric(of, task.sizes.store_bytes)
            keys.add_metric(of, task.sizes.keys)
            restored.add_metric(of, task.restored)
            to_restore.add_metric(of, task.to_restore)
            state.add_metric((*of, task.state), 1)
            for (cause, status), count in open_letters(task.dead_letters).items():
                letters.add_metric((*of, cause, status), count)
        of_tasks = (task.sizes for tasks in self._engine.stages.values() for task in tasks.snapshots())
        of_tables = (table.sizes for table in self._engine.tables.snapshots())
        memory.add_metric(("block_cache",), block_cache_bytes())
        memory.add_metric(("memtables",), memtables_bytes())
        memory.add_metric(("table_readers",), sum(each.table_reader_bytes for each in chain(of_tasks, of_tables)))
        return [position, lag, still, epoch, answers, size, keys, restored, to_restore, state, letters, memory]

    def _tables(self) -> Iterable[Metric]:
        labels = ("table", "partition")
        position = GaugeMetricFamily(
            "balance_table_position", "The next offset of the table's topic to read; -1 if unknown.", labels=labels
        )
        followed = GaugeMetricFamily(
            "balance_table_followed", "0 while the table cannot be read; /api/status has the reason.", labels=labels
        )
        size = GaugeMetricFamily(
            "balance_table_store_bytes", "As balance_store_bytes, of the table's store.", labels=labels
        )
        late = CounterMetricFamily(
            "balance_table_records_late",
            "Rows that arrived after an event with a later timestamp had been joined.",
            labels=labels,
        )
        skipped = CounterMetricFamily(
            "balance_table_records_skipped",
            "Records that are not rows; a series begins with its first.",
            labels=(*labels, "cause"),
        )
        for table in self._engine.tables.snapshots():
            of = (table.topic, str(table.partition))
            position.add_metric(of, table.position)
            followed.add_metric(of, not table.reason)
            size.add_metric(of, table.sizes.store_bytes)
            late.add_metric(of, table.late)
            for cause, count in table.skipped.items():
                skipped.add_metric((*of, cause), count)
        return [position, followed, size, late, skipped]

    def _generations(self) -> Iterable[Metric]:
        labels = ("read_model", "generation")
        status = GaugeMetricFamily(
            "balance_generation",
            "1 for the status of each generation of a read model: serving, building, ready or kept.",
            labels=(*labels, "status"),
        )
        lag = GaugeMetricFamily(
            "balance_generation_lag",
            "Records that the owners here have not applied, of a generation that does not serve.",
            labels=labels,
        )
        overdue = GaugeMetricFamily(
            "balance_generation_overdue_seconds",
            "Time since a kept generation should have been dropped; negative before.",
            labels=labels,
        )
        for name, now in self._engine.generations.known.items():
            for number in now.live:
                status.add_metric((name, str(number), now.status_of(number)), 1)
            if now.kept is not None and now.kept_until is not None:
                late = datetime.now(UTC) - now.kept_until
                overdue.add_metric((name, str(now.kept)), late.total_seconds())
        serving = self._engine.serving_stages
        for tasks in self._engine.models.values():
            if tasks not in serving:
                behind = [
                    tasks.hosted.watermarks.lag(task.task_id.partition, task.position)
                    for task in tasks.snapshots()
                    if task.role is Role.ACTIVE
                ]
                of = tasks.hosted.stage
                lag.add_metric((of.owner, str(of.generation)), sum(one for one in behind if one is not None))
        return [status, lag, overdue]

    def _snapshots(self) -> Iterable[tuple[Tasks, TaskSnapshot]]:
        """Yields the tasks that answers come from. Alerts must not take a generation that is built for one of them."""
        for tasks in self._engine.serving_stages:
            yield from ((tasks, task) for task in tasks.snapshots())

    def _cluster(self) -> Iterable[Metric]:
        engine, now = self._engine, elapsed()
        partitions = GaugeMetricFamily("balance_partitions", "Partitions of the source.", labels=("read_model",))
        for tasks in engine.serving_stages:
            partitions.add_metric((tasks.name,), tasks.hosted.source.partitions)
        yield partitions
        refused = GaugeMetricFamily(
            "balance_control_records_refused",
            "Records about generations, or decisions about dead letters, that do not count.",
            labels=("topic",),
        )
        for records in engine.control_records:
            refused.add_metric((records.topic,), len(records.refused))
        yield refused
        spread = GaugeMetricFamily(
            "balance_partitions_spread",
            "Partitions of the instance with the most, less those of the one with the fewest.",
            labels=("read_model",),
        )
        for tasks in engine.serving_stages:
            spread.add_metric((tasks.name,), self._servers.spread(tasks.name, tasks.hosted.stage.owner))
        yield spread
        lease = GaugeMetricFamily(
            "balance_lease_holds",
            "1 while the instance may answer as owner of its partitions of a topic; no sample while it owns none.",
            labels=("topic",),
        )
        # An instance without partitions commits nothing, and so does not renew a lease.
        for topic, membership in engine.memberships.of.items():
            if membership.partitions:
                lease.add_metric((topic,), float(membership.lease.holds))
        yield lease
        yield _gauge(
            "balance_stream_healthy",
            "0 while a partition is not folded because of a problem.",
            not engine.problems,
        )
        yield _gauge(
            "balance_topics_losing_records",
            "Topics whose configuration was changed so that they may lose what a rebuild or a restore needs.",
            len({loss for tasks in engine.stages.values() for loss in tasks.losses}),
        )
        yield _gauge(
            "balance_watermark_age_seconds",
            "Age of the source's end offsets, from which lag is computed.",
            max(watermarks.age_seconds for watermarks in engine.watermarks.values()),
        )
        servers = GaugeMetricFamily(
            "balance_application_servers",
            "Known instances; suspect ones have been silent for 3 s.",
            labels=("suspect",),
        )
        known = self._servers.servers()
        suspects = [server.is_suspect(now) for server in known]
        servers.add_metric(("false",), suspects.count(False))
        servers.add_metric(("true",), suspects.count(True))
        yield servers
        yield _gauge(
            "balance_shared_addresses",
            "Addresses (BALANCE_APPLICATION_SERVER) that several running instances have.",
            sum(server.is_shared for server in known),
        )


def _jvm(sample: SparkSample) -> Iterable[Metric]:
    heap = GaugeMetricFamily("balance_jvm_heap_bytes", "Heap of Spark's JVM: used, committed or max.", labels=("kind",))
    for kind, value in (("used", sample.heap_used), ("committed", sample.heap_committed), ("max", sample.heap_max)):
        heap.add_metric((kind,), value)
    yield heap
    collected = "Time that Spark's JVM spent on garbage collection."
    yield CounterMetricFamily("balance_jvm_gc_seconds", collected, value=sample.gc_seconds)


def _gauge(name: str, what: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, what, value=float(value))


def _of_tasks(name: str, what: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, what, labels=_TASK)
