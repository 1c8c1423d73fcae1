"""Resources of an instance: no more after many commits and queries than after a few."""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from balance_service.engine import tasks
from balance_service.errors import RetriableError
from balance_service.spark import shared_queries, task_runner
from balance_service.spark.decode import Decoder
from tests.integration.engines import catch_up, is_running, running_engine, settings_for, tasks_of
from tests.support.kafka import Writer
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import pytest
    from pyspark.sql import DataFrame

    from balance_service.devtools.local.stack import LocalStack
    from balance_service.hosting.engine import Engine

PARTITIONS = 2
FEW, MANY = 10, 30
COMMITS_PER_ROUND = 6
SETTLE_SECONDS = 0.5
BURST = 100_000
# Allowance for plans that are being released or await Python's garbage collection.
PLANS_ON_THEIR_WAY = 3 * PARTITIONS
# Spark trims its own history of executions in the background.
RUNS_ON_THEIR_WAY = 20
# The broker's clients open and close connections.
FILES_ON_THEIR_WAY = 12
# Spark keeps the consumer of an ended query for up to two seconds.
COOLS_DOWN_WITHIN_SECONDS = 60


class Held(NamedTuple):
    """Resources in use while the engine is idle."""

    plans: int
    handover_threads: int
    arrow_bytes: int
    runs: int
    jvm_files: int
    folders: int
    threads: int
    files: int


def test_many_commits_and_queries_release_their_resources(
    stack: LocalStack, names: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_for(stack, names, tmp_path / "state", partitions=PARTITIONS)
    monkeypatch.setattr(shared_queries, "_SETTLE_SECONDS", SETTLE_SECONDS)
    monkeypatch.setattr(task_runner, "_BACK_OFF_SECONDS", 0.05)
    monkeypatch.setattr(tasks, "_BACK_OFF_SECONDS", (0.05,))
    with running_engine(settings) as engine, Writer(stack, settings.topic) as writer:
        watched = _Watched(engine, monkeypatch)
        for turn in range(FEW):
            _restart_queries(engine, writer, watched, turn % PARTITIONS)
        _share_a_query(engine, writer, watched)
        few = watched.held()
        for turn in range(MANY - FEW):
            _restart_queries(engine, writer, watched, turn % PARTITIONS)
        _share_a_query(engine, writer, watched)
        assert watched.queries > MANY
        assert watched.commits() > 2 * MANY

        many = few

        def has_cooled_down() -> bool:
            nonlocal many
            many = watched.held()
            return _is_no_more(many, few)

        eventually(has_cooled_down, lambda: f"after many: {many}; after few: {few}", COOLS_DOWN_WITHIN_SECONDS)
    assert _checkpoints(engine) == []
    assert not engine.state_directory.scratch.sockets.exists()


def test_a_query_gives_back_the_memory_of_large_batches(
    stack: LocalStack, names: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_for(stack, names, tmp_path / "state", partitions=PARTITIONS)
    with running_engine(settings) as engine, Writer(stack, settings.topic) as writer:
        watched = _Watched(engine, monkeypatch)

        def after_small_batches() -> int:
            for n in range(COMMITS_PER_ROUND):
                writer.add(f"customer-{n}", "0.01")
            catch_up(engine)
            return watched.held().arrow_bytes

        after_small_batches()
        before = after_small_batches()
        frame = writer.frame("customer", "0.01")
        for n in range(BURST):
            writer.send(f"customer-{n}", frame)
        writer.producer.flush(10)
        catch_up(engine)

        def gives_back() -> bool:
            return after_small_batches() <= before

        eventually(gives_back, lambda: f"before: {before} bytes; after: {watched.held().arrow_bytes}", 20)


def _checkpoints(engine: Engine) -> Sequence[Path]:
    return list(engine.state_directory.scratch.files.glob("checkpoint-*"))


def _is_no_more(many: Held, few: Held) -> bool:
    return (
        many.plans < PLANS_ON_THEIR_WAY
        and many.handover_threads == PARTITIONS
        and many.folders == 1
        and many.runs < RUNS_ON_THEIR_WAY
        and many.arrow_bytes <= few.arrow_bytes
        and many.threads <= few.threads
        and many.files <= few.files + FILES_ON_THEIR_WAY
        and many.jvm_files <= few.jvm_files + FILES_ON_THEIR_WAY
    )


class _Watched:
    """Counts the resources of an engine."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self._engine = engine
        self._jvm: Any = engine.spark.sparkContext._jvm
        self._plans: list[Any] = []
        make_plan = Decoder.updates

        def noted(decoder: Decoder, records: DataFrame) -> DataFrame:
            rows = make_plan(decoder, records)
            frame: Any = rows
            self._plans.append(self._jvm.java.lang.ref.WeakReference(frame._jdf))
            return rows

        monkeypatch.setattr(Decoder, "updates", noted)

    @property
    def queries(self) -> int:
        """Returns the number of queries started."""
        return len(self._plans)

    def commits(self) -> float:
        """Returns the number of commits."""
        (histogram,) = self._engine.metrics.batch_seconds.collect()
        return sum(sample.value for sample in histogram.samples if sample.name.endswith("_count"))

    def held(self) -> Held:
        """Returns the resources in use after both garbage collectors have run."""
        gc.collect()
        self._jvm.java.lang.System.gc()
        spark: Any = self._engine.spark
        process = psutil.Process()
        return Held(
            plans=sum(plan.get() is not None for plan in self._plans),
            handover_threads=sum(name.startswith("handover-") for name in self._jvm_threads()),
            arrow_bytes=self._jvm.org.apache.spark.sql.util.ArrowUtils.rootAllocator().getAllocatedMemory(),
            runs=spark._jsparkSession.sharedState().statusStore().executionsCount(),
            jvm_files=psutil.Process(self._engine.spark_sampler.jvm_pid).num_fds(),
            folders=len(_checkpoints(self._engine)),
            threads=process.num_threads(),
            files=process.num_fds(),
        )

    def _jvm_threads(self) -> Iterator[str]:
        for thread in self._jvm.java.lang.Thread.getAllStackTraces().keySet():
            yield thread.getName()


def _restart_queries(engine: Engine, writer: Writer, watched: _Watched, partition: int) -> None:
    """Makes some commits, then replaces all queries: one by reopening its task, the others by stopping them."""
    for n in range(COMMITS_PER_ROUND):
        writer.add(f"customer-{n}", "0.01")
        time.sleep(0.03)
    catch_up(engine)
    seen = watched.queries
    task = tasks_of(engine).task(partition)
    assert task is not None
    tasks_of(engine).failed(task, RetriableError("for the test"))
    for query in engine.spark.streams.active:
        query.stop()
    eventually(lambda: watched.queries > seen and is_running(engine), "new queries run")


def _share_a_query(engine: Engine, writer: Writer, watched: _Watched) -> None:
    """Waits until one query has replaced all others, and has handed over a row of each partition."""
    for _ in range(2):
        eventually(lambda: len(_checkpoints(engine)) == 1 == len(engine.spark.streams.active), "one query reads")
        time.sleep(4 * SETTLE_SECONDS)
    for n in range(COMMITS_PER_ROUND):
        writer.add(f"customer-{n}", "0.01")
    catch_up(engine)
    eventually(lambda: watched.held().handover_threads == PARTITIONS, "each partition has handed over rows once")
