"""Faults around Spark: one that runs no queries, an unreadable source, and another process at the driver's ports."""

from __future__ import annotations

import subprocess
import threading
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from balance_service.errors import FatalError
from balance_service.process.runtime import thread_failures
from balance_service.settings import load_settings
from balance_service.spark import self_test, task_runner
from balance_service.spark.jvm import MODULE_OPTIONS, class_path, spark_java
from balance_service.spark.self_test import SelfTest
from balance_service.spark.session import start_spark
from tests.integration.engines import balance, counted, problems, running_engine, settings_for
from tests.support.kafka import Writer
from tests.support.shipped import jvm_scratch
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pyspark.sql import DataFrame, SparkSession

    from balance_service.devtools.local.stack import LocalStack

_FATAL_WITHIN_SECONDS = 150
_FOLDS_WITHIN_SECONDS = 120


def stop_executor(spark: SparkSession) -> None:
    """Stops the executor, as a process with the secret of the run could; Spark does not notice."""
    jvm: Any = spark._jvm

    def the(name: str) -> Any:
        return getattr(jvm.java.lang.Class.forName(name).getField("MODULE$"), "get")(None)  # noqa: B009

    environment = jvm.org.apache.spark.SparkEnv.get().rpcEnv()
    endpoint = environment.setupEndpointRef(environment.address(), "LocalSchedulerBackendEndpoint")
    endpoint.askSync(the("org.apache.spark.scheduler.local.StopExecutor$"), the("scala.reflect.ClassTag$").Any())


def test_a_spark_that_runs_no_queries_ends_the_instance(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    noticed = threading.Event()
    with (
        thread_failures(noticed.set) as failures,
        running_engine(settings) as engine,
        Writer(stack, settings.topic) as writer,
    ):
        writer.add("c", "1.00")
        eventually(lambda: balance(engine, "c") is not None, "the engine folds", _FOLDS_WITHIN_SECONDS)

        stop_executor(engine.spark)
        for query in engine.spark.streams.active:
            query.stop()

        eventually(lambda: problems(engine) != [] or noticed.is_set(), "queries fail")
        assert noticed.wait(_FATAL_WITHIN_SECONDS), problems(engine)
        assert isinstance(failures[0], FatalError)
        assert "Spark runs no query any more" in str(failures[0])
        assert counted(engine, "applied") == 1
    # An engine does not stop Spark if a task's thread is still running, and the next engine would reuse it.
    engine.spark.stop()


def test_an_unreadable_source_is_not_blamed_on_spark(
    stack: LocalStack, names: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    succeeded: list[bool] = []
    self_test_query = SelfTest._query

    def recorded(self: SelfTest, is_interrupted: Callable[[], bool]) -> None:
        self_test_query(self, is_interrupted)
        succeeded.append(True)

    monkeypatch.setattr(SelfTest, "_query", recorded)
    monkeypatch.setattr(self_test, "_DOUBTFUL_SECONDS", 0.0)
    monkeypatch.setattr(self_test, "_EVERY_SECONDS", 0.0)
    with (
        thread_failures(lambda: None) as failures,
        running_engine(settings) as engine,
        Writer(stack, settings.topic) as writer,
    ):
        writer.add("c", "1.00")
        eventually(lambda: balance(engine, "c") is not None, "the engine folds", _FOLDS_WITHIN_SECONDS)
        with monkeypatch.context() as away:
            away.setattr(task_runner, "read_source", _gone)
            for query in engine.spark.streams.active:
                query.stop()
            eventually(lambda: len(succeeded) > 4, "the engine has tested Spark repeatedly", _FOLDS_WITHIN_SECONDS)
            assert problems(engine)
        writer.add("c", "1.00")
        eventually(lambda: balance(engine, "c") == Decimal("2.00"), "the engine folds again", _FOLDS_WITHIN_SECONDS)

    assert failures == []


def _gone(spark: SparkSession, *_: object) -> DataFrame:
    return spark.readStream.format("gone").load()


_STRANGER = Path(__file__).with_name("java") / "Stranger.java"
_STRANGER_SECONDS = 200


@pytest.fixture
def spark() -> Iterator[SparkSession]:
    session = start_spark(load_settings(), jvm_scratch(), slots=1)
    yield session
    session.stop()


def strangers(spark: SparkSession, *secrets: str) -> Sequence[str]:
    """Returns the outcome of each attempt of a process that tries these secrets in order; an empty one means none."""
    jvm: Any = spark._jvm
    context: Any = spark.sparkContext
    environment = jvm.org.apache.spark.SparkEnv.get()
    # Spark removes the blocks of an unreferenced variable, so `rows` must stay alive.
    rows = context._jsc.broadcast("rows")
    block = f"broadcast_{rows.id()}_piece0"
    ports = [environment.rpcEnv().address().port(), environment.blockManager().blockManagerId().port()]
    options = ["-Xmx256m", "-XX:TieredStopAtLevel=1", *MODULE_OPTIONS]
    command = [str(spark_java()), *options, "-cp", ":".join(class_path(load_settings())), str(_STRANGER)]
    done = subprocess.run(
        [*command, *map(str, ports), spark.sparkContext.applicationId, block, *secrets],
        capture_output=True,
        text=True,
        timeout=_STRANGER_SECONDS,
        check=True,
    )
    return done.stdout.splitlines()


@pytest.mark.shows("local-users")
def test_the_driver_answers_only_processes_with_the_secret_of_its_run(spark: SparkSession) -> None:
    jvm: Any = spark._jvm
    secret = jvm.org.apache.spark.SparkEnv.get().securityManager().getSecretKey() or "none"

    attempts = strangers(spark, "", "wrong", secret)

    assert [attempt.split()[:2] for attempt in attempts] == [
        ["block", "refused"],
        ["stop", "refused"],
        ["block", "refused"],
        ["stop", "refused"],
        ["block", "got"],
        ["stop", "got"],
    ], attempts
    assert len(secret) >= 64


def test_each_session_has_its_own_secret() -> None:
    def secret() -> str:
        session = start_spark(load_settings(), jvm_scratch(), slots=1)
        jvm: Any = session._jvm
        found: str = jvm.org.apache.spark.SparkEnv.get().securityManager().getSecretKey()
        session.stop()
        return found

    first, second = secret(), secret()

    assert first
    assert first != second


@pytest.mark.shows("local-users")
def test_python_opens_no_port_for_spark() -> None:
    def listening() -> set[int]:
        connections = psutil.Process().net_connections("tcp")
        return {connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN}

    before = listening()
    session = start_spark(load_settings(), jvm_scratch(), slots=1)
    try:
        eventually(lambda: listening() <= before, "the accumulator port is closed")
    finally:
        session.stop()
