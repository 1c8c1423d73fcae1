"""The metrics of an instance in states that are rare in a running one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from balance_service.cluster.directory import ServerTable
from balance_service.engine.commit import Committed
from balance_service.engine.database import Database
from balance_service.engine.records import Role, StoreSizes, TaskId, TaskSnapshot
from balance_service.engine.table_partition import TableSnapshot
from balance_service.hosting.collectors import EngineCollector, InstanceCollector
from balance_service.kafka.lease import Lease
from balance_service.kafka.signing import ControlRecords
from balance_service.kafka.topics import Topic, Watermarks
from balance_service.model.stage import Stage
from balance_service.observability.metrics import Metrics
from balance_service.settings import load_settings
from balance_service.spark.session import SparkSample
from tests.support.fakes import Clock

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from balance_service.cluster.membership import Partitions
    from balance_service.engine.tasks import Tasks

_MIB = 1 << 20


def task(partition: int, role: Role, state: str = "RUNNING", *, answers: bool = True) -> TaskSnapshot:
    sizes = StoreSizes(file_bytes=10 * _MIB, memtable_bytes=2 * _MIB, table_reader_bytes=_MIB, keys=7)
    return TaskSnapshot("balance", partition, role, state, 3, 90, "", 5, 6, sizes=sizes, answers=answers)


@dataclass
class Engine:
    """The parts of an engine that the collectors read."""

    snapshots: Sequence[TaskSnapshot]
    partitions: Partitions = frozenset({0})
    sample: SparkSample | None = None
    followed: Sequence[TableSnapshot] = ()
    problem: str = ""
    source_problem: str = ""
    losses: Sequence[str] = ()
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.lease = Lease(10_000, self.clock)
        self.lease.renew(self.clock.now)
        member = SimpleNamespace(lease=self.lease, partitions=self.partitions)
        self.memberships = SimpleNamespace(of={"balance": member})
        self.watermarks = {"balance": Watermarks("balance", lambda: {0: 100}, self.clock)}
        self.stages = {"balance": self.tasks_of("balance", "balance", 2)}
        self.tables = SimpleNamespace(snapshots=lambda: self.followed)
        self.spark_sampler = SimpleNamespace(sample=self.sample)

    @property
    def problems(self) -> list[str]:
        return [problem for tasks in self.stages.values() for problem in tasks.problems]

    generations = SimpleNamespace(known={})
    control_records = (ControlRecords("app-generations"),)

    @property
    def serving_stages(self) -> list[Tasks]:
        return [*self.stages.values()]

    @property
    def models(self) -> dict[str, Tasks]:
        return self.stages

    def stages_of(self, read_model: str) -> list[Tasks]:
        return [self.stages[read_model]]

    def add_model(self, name: str, source: str, partitions: int) -> None:
        """Another read model, with tasks like those of the first."""
        self.watermarks.setdefault(source, Watermarks(source, lambda: {0: 1_000}, self.clock))
        self.stages[name] = self.tasks_of(name, source, partitions)

    def tasks_of(self, name: str, source: str, partitions: int) -> Tasks:
        own = [replace(task, stage=name) for task in self.snapshots]
        hosted = SimpleNamespace(
            name=name,
            stage=Stage(name=name, owner=name, source=source, application_id="app"),
            source=Topic(source, "id", partitions),
            lease=self.lease,
            watermarks=self.watermarks[source],
        )
        problems = [problem for problem in (self.problem, self.source_problem) if problem]
        tasks: Any = SimpleNamespace(
            name=name, hosted=hosted, snapshots=lambda: own, problems=problems, losses=self.losses
        )
        return cast("Tasks", tasks)

    def samples(self) -> dict[str, dict[tuple[str, ...], float]]:
        registry = CollectorRegistry()
        unfinished: Any = self
        registry.register(EngineCollector(unfinished, ServerTable(self.clock)))
        return samples(registry)


class Instance:
    """An instance with given reasons not to be ready."""

    def __init__(self, *reasons: str) -> None:
        self._reasons = reasons

    def unready(self) -> Sequence[str]:
        return self._reasons

    open_streams = 0

    def stale_files(self) -> Mapping[str, bool]:
        return {"tokens": True, "jwks": False}


def samples(registry: CollectorRegistry) -> dict[str, dict[tuple[str, ...], float]]:
    """Series → label values, in the order of their names → value."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            values = tuple(value for _, value in sorted(sample.labels.items()))
            found.setdefault(sample.name, {})[values] = sample.value
    return found


def test_an_owner_answers_while_its_lease_holds_and_a_standby_always() -> None:
    engine = Engine([task(0, Role.ACTIVE), task(1, Role.STANDBY, "TAILING")])

    before = engine.samples()["balance_task_answers"]
    engine.clock.now += 60
    after = engine.samples()

    owner, standby = ("0", "balance", "active"), ("1", "balance", "standby")
    assert before == {owner: 1, standby: 1}
    assert after["balance_task_answers"] == {owner: 0, standby: 1}
    assert after["balance_lease_holds"] == {("balance",): 0}


def test_a_restoring_task_does_not_answer() -> None:
    found = Engine([task(0, Role.ACTIVE, "RESTORING", answers=False)]).samples()

    assert set(found["balance_task_answers"].values()) == {0}
    assert found["balance_task_state"] == {("0", "balance", "active", "RESTORING"): 1}
    assert found["balance_restored_records"] == {("0", "balance", "active"): 5}
    assert found["balance_records_to_restore"] == {("0", "balance", "active"): 6}


def test_an_instance_without_partitions_has_no_lease_series() -> None:
    assert "balance_lease_holds" not in Engine([], partitions=frozenset()).samples()


def test_there_is_no_lag_series_before_the_ends_are_known() -> None:
    engine = Engine([task(0, Role.ACTIVE)])

    unknown = engine.samples()
    engine.watermarks["balance"].refresh()
    known = engine.samples()

    assert "balance_lag" not in unknown
    assert unknown["balance_watermark_age_seconds"] == {(): float("inf")}
    assert known["balance_lag"] == {("0", "balance", "active"): 10}
    assert known["balance_watermark_age_seconds"] == {(): 0}


def test_the_lag_of_a_read_model_is_measured_against_its_own_source() -> None:
    engine = Engine([task(0, Role.ACTIVE)])
    engine.add_model("orders", "shop", 5)
    for watermarks in engine.watermarks.values():
        watermarks.refresh()

    found = engine.samples()

    assert found["balance_partitions"] == {("balance",): 2, ("orders",): 5}
    assert found["balance_lag"] == {("0", "balance", "active"): 10, ("0", "orders", "active"): 910}
    assert found["balance_position"] == {("0", "balance", "active"): 90, ("0", "orders", "active"): 90}


def test_the_watermark_age_is_that_of_the_source_asked_longest_ago() -> None:
    engine = Engine([task(0, Role.ACTIVE)])
    engine.add_model("orders", "shop", 5)
    engine.watermarks["balance"].refresh()
    engine.clock.now += 7
    engine.watermarks["shop"].refresh()

    assert engine.samples()["balance_watermark_age_seconds"] == {(): 7}


def test_rocksdb_memory_is_that_of_all_stores(tmp_path: Path) -> None:
    engine = Engine([task(0, Role.ACTIVE), task(1, Role.STANDBY)])
    engine.followed = [
        TableSnapshot("products", 0, 8, True, "", skipped={}, late=0, sizes=StoreSizes(table_reader_bytes=_MIB))
    ]
    before = engine.samples()["balance_rocksdb_memory_bytes"]
    store = Database(tmp_path / "store")
    store.write([(f"{n}".encode(), bytes(1_000)) for n in range(5_000)])
    found = engine.samples()
    store.close()

    memory = found["balance_rocksdb_memory_bytes"]
    assert memory[("memtables",)] - before[("memtables",)] >= 5_000_000
    assert memory[("table_readers",)] == 3 * _MIB
    assert memory[("block_cache",)] >= 0
    assert set(found["balance_store_bytes"].values()) == {12 * _MIB}
    assert set(found["balance_store_keys"].values()) == {7}


def test_jvm_metrics_are_those_of_the_latest_sample() -> None:
    without = Engine([]).samples()
    found = Engine([], sample=SparkSample(1, 2, 3, 0.5)).samples()

    assert not any(name.startswith("balance_jvm") for name in without)
    assert found["balance_jvm_heap_bytes"] == {("used",): 1, ("committed",): 2, ("max",): 3}
    assert found["balance_jvm_gc_seconds_total"] == {(): 0.5}


def test_a_failed_query_and_an_unreadable_source_both_make_the_stream_unhealthy() -> None:
    engines = [Engine([]), Engine([], problem="it failed"), Engine([], source_problem="the broker is away")]

    assert [engine.samples()["balance_stream_healthy"][()] for engine in engines] == [1, 0, 0]


def test_a_topic_that_several_stages_say_may_lose_records_is_counted_once() -> None:
    engine = Engine([], losses=["the source is compacted"])
    engine.stages["other"] = engine.tasks_of("other", "balance", 2)

    assert engine.samples()["balance_topics_losing_records"] == {(): 1}
    assert Engine([]).samples()["balance_topics_losing_records"] == {(): 0}


def test_an_instance_reports_its_identity_and_its_readiness(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    instance = Instance("this instance is starting")
    settings = load_settings(state_dir=tmp_path, application_server="here:1")
    registry.register(InstanceCollector(instance, settings))

    found = samples(registry)

    assert found["balance_ready"] == {(): 0}
    assert found["balance_security_file_stale"] == {("tokens",): 1, ("jwks",): 0}
    assert "here:1" in next(iter(found["balance_instance_info"]))
    assert found["balance_state_directory_free_bytes"][()] > 0


def test_there_is_no_disk_series_before_the_state_directory_exists(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    settings = load_settings(state_dir=tmp_path / "none")
    registry.register(InstanceCollector(Instance(), settings))

    assert "balance_state_directory_free_bytes" not in samples(registry)


def test_dead_letters_are_counted_by_cause() -> None:
    metrics = Metrics()
    metrics.committed(TaskId("balance", 1), Committed(2, 0, 0, 3, {"value-null": 2, "key-null": 1}))

    found = samples(metrics.registry)

    assert found["balance_dead_letters_total"] == {("value-null", "1", "balance"): 2, ("key-null", "1", "balance"): 1}
    assert metrics.totals() == Committed(2, 0, 0, 3)


def test_the_series_of_a_stage_end_with_it() -> None:
    metrics = Metrics()
    for stage in ("balance", "balance.g2"):
        metrics.committed(TaskId(stage, 1), Committed(2, 1, 0, 1, {"value-null": 1}, others={"a.R": 1}))
        metrics.query_started(TaskId(stage, 1), "opened", 0.5)
        metrics.query_seconds.labels(stage, "local", "200").observe(0.1)

    metrics.forget_stage("balance")

    labels = {value for series in samples(metrics.registry).values() for values in series for value in values}
    assert "balance" not in labels
    assert "balance.g2" in labels


def test_records_of_other_types_are_counted_by_a_bounded_number_of_names() -> None:
    metrics = Metrics()
    for name in range(60):
        done = Committed(0, 3, 0, 0, others={f"a.R{name}": 2})
        metrics.committed(TaskId("balance", 1), done)
        metrics.committed(TaskId("balance", 2), done)

    found = samples(metrics.registry)

    assert found["balance_events_ignored_total"] == {("1", "balance"): 180, ("2", "balance"): 180}
    assert len(found["balance_records_ignored_total"]) == 51
    assert found["balance_records_ignored_total"]["balance", "a.R0"] == 4
    assert found["balance_records_ignored_total"]["balance", "other"] == 40


def test_spark_queries_are_counted_by_the_reason_of_their_start_with_its_duration() -> None:
    metrics = Metrics()
    for reason, seconds in (("opened", 0.5), ("failed", 0.25), ("failed", 0.25)):
        metrics.query_started(TaskId("balance", 1), reason, seconds)

    found = samples(metrics.registry)

    assert found["balance_stream_queries_total"] == {("1", "balance", "opened"): 1, ("1", "balance", "failed"): 2}
    assert found["balance_stream_start_seconds_count"] == {(): 3}
    assert found["balance_stream_start_seconds_sum"] == {(): 1.0}


def test_the_number_of_peers_with_a_series_is_bounded() -> None:
    metrics = Metrics()
    for peer in range(200):
        metrics.proxied(f"peer-{peer}:1", "answered")

    found = samples(metrics.registry)["balance_proxied_requests_total"]

    assert len(found) == 101
    assert found[("answered", "other")] == 100
