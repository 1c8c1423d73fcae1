"""Faults around Spark: one that runs no queries, an unreadable source, and another process at the driver's ports."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource
from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)

from balance_service.errors import FatalError
from balance_service.kafka.topics import Topics
from balance_service.process.runtime import thread_failures
from balance_service.settings import load_settings
from balance_service.spark import redrive, task_runner
from balance_service.spark.decode import Decoder
from balance_service.spark.jvm import MODULE_OPTIONS, class_path, spark_java
from balance_service.spark.session import start_spark
from tests.integration.engines import (
    SESSION_TIMEOUT_MS,
    balance,
    catch_up,
    counted,
    customers_in,
    prepare,
    problems,
    running_engine,
    settings_for,
    tasks_of,
)
from tests.support.kafka import Writer
from tests.support.shipped import jvm_scratch
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyspark.sql import DataFrame, SparkSession

    from balance_service.devtools.local.stack import LocalStack

_FATAL_WITHIN_SECONDS = 150
_FOLDS_WITHIN_SECONDS = 120
_MOST_STARTS = 8


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
        assert "Spark decodes nothing any more" in str(failures[0])
        eventually(lambda: counted(engine, "applied") == 1, "the events are counted")
    # An engine does not stop Spark if a task's thread is still running, and the next engine would reuse it.
    engine.spark.stop()


def test_events_count_without_a_query_while_the_queries_fail(
    stack: LocalStack, names: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
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
            eventually(lambda: problems(engine) != [], "queries fail")
            writer.add("c", "1.00")
            eventually(lambda: balance(engine, "c") == Decimal("2.00"), "the records are read", _FOLDS_WITHIN_SECONDS)
        writer.add("c", "1.00")
        eventually(lambda: balance(engine, "c") == Decimal("3.00"), "the engine folds again", _FOLDS_WITHIN_SECONDS)

    assert failures == []


_MARK = b"MARK"
_RAISES = "cast(raise_error('marked') as binary)"
_HANGS = "cast(reflect('java.lang.Thread', 'sleep', 600000L) as binary)"


def _decoder_that(monkeypatch: pytest.MonkeyPatch, does: str) -> None:
    """Has Spark do this at each marked value."""
    updates = Decoder.updates

    def marked(self: Decoder, records: DataFrame) -> DataFrame:
        is_marked = F.col("value") == F.lit(_MARK)
        return updates(self, records.withColumn("value", F.when(is_marked, F.expr(does)).otherwise(F.col("value"))))

    monkeypatch.setattr(Decoder, "updates", marked)


@pytest.mark.parametrize("does", [_RAISES, _HANGS], ids=["raises", "hangs"])
def test_records_at_which_spark_fails_become_dead_letters_and_hold_up_nothing(
    stack: LocalStack, names: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str
) -> None:
    monkeypatch.setattr(task_runner, "_STALL_SECONDS", 3.0)
    monkeypatch.setattr(redrive, "_DECODE_SECONDS", 2.0)
    _decoder_that(monkeypatch, does)
    settings = settings_for(stack, names, tmp_path / "state")
    here, there = customers_in(0)[0], customers_in(1)[0]
    with (
        thread_failures(lambda: None) as failures,
        running_engine(settings) as engine,
        Writer(stack, settings.topic) as writer,
    ):
        for customer in (here, there):
            writer.add(customer, "1.00")
        catch_up(engine, _FOLDS_WITHIN_SECONDS)
        for value in (_MARK, None, _MARK, _MARK):
            writer.producer.produce(settings.topic, value or writer.frame(here, "1.00"), here.encode(), partition=0)
        writer.add(here, "1.00")
        writer.add(there, "1.00")
        eventually(lambda: balance(engine, here) == Decimal("3.00"), "those behind count", _FOLDS_WITHIN_SECONDS)
        eventually(lambda: balance(engine, there) == Decimal("2.00"), "the other partition counts")

        (letters,) = [task.snapshot().dead_letters for task in tasks_of(engine).all() if task.task_id.partition == 0]
        assert letters == {"decoder-failed/waiting": 3}
        # A query reads again.
        writer.add(here, "1.00")
        eventually(lambda: balance(engine, here) == Decimal("4.00"), "the engine folds again")

    assert failures == []
    # The other partition's is there until its query ends, if that had failed with this one's.
    assert not (tmp_path / "state" / "suspects" / "balance_0.json").exists()


_INSTANCE = """
import json, os, sys, threading
from pathlib import Path
from pyspark.sql import functions as F
from balance_service.process.runtime import thread_failures
from balance_service.settings import load_settings
from balance_service.spark.decode import Decoder
from tests.integration.engines import catch_up, running_engine, tasks_of

given = json.loads(sys.argv[1])
settings = load_settings(**{**given, "state_dir": Path(given["state_dir"])})
updates = Decoder.updates

def marked(self, records):
    is_marked = F.col("value") == F.lit(b"MARK")
    large = F.expr("cast(repeat(left(cast(offset as string), 1), 2000000000) as binary)")
    return updates(self, records.withColumn("value", F.when(is_marked, large).otherwise(F.col("value"))))

Decoder.updates = marked
has_failed = threading.Event()

# As an instance ends: its tasks are stopped first, so that each notes what it has seen fail.
with thread_failures(has_failed.set), running_engine(settings) as engine:
    catch_up(engine, 120, has_failed.is_set)
    if not has_failed.is_set():
        (letters,) = [task.snapshot().dead_letters for task in tasks_of(engine).all() if task.task_id.partition == 0]
        print("LETTERS", json.dumps(dict(letters)), flush=True)
os._exit(1 if has_failed.is_set() else 0)
"""


def test_a_record_that_ends_the_jvm_becomes_a_dead_letter_after_some_restarts(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    prepare(Topics(settings), settings)
    with Writer(stack, settings.topic) as writer:
        customer = customers_in(0)[0]
        frame = writer.frame(customer, "1.00")
        for value in (*[frame] * 20, _MARK, *[frame] * 20):
            writer.producer.produce(settings.topic, value, customer.encode(), partition=0)
    servers = {"bootstrap_servers": stack.bootstrap_servers, "schema_registry_url": stack.schema_registry_url}
    given = {**servers, **names, "state_dir": str(settings.state_dir), "session_timeout_ms": SESSION_TIMEOUT_MS}
    ends: list[int] = []
    written = ""
    while 0 not in ends:
        assert len(ends) < _MOST_STARTS, ends
        done = subprocess.run(
            [sys.executable, "-c", _INSTANCE, json.dumps(given)], stdout=subprocess.PIPE, text=True, check=False
        )
        ends.append(done.returncode)
        written = done.stdout

    assert 'LETTERS {"decoder-failed/waiting": 1}' in written
    # Two queries, all records, the record twice; and two more queries if one commits the records before it.
    restarts = ends.index(0)
    assert 5 <= restarts <= 7
    assert set(ends[:restarts]) == {1}


def test_a_record_whose_time_is_beyond_sparks_becomes_a_dead_letter(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    with running_engine(settings) as engine, Writer(stack, settings.topic) as writer:
        customer = customers_in(0)[0]
        frame = writer.frame(customer, "1.00")
        topic = ConfigResource(ConfigResource.Type.TOPIC, settings.topic)
        topic.add_incremental_config(
            ConfigEntry("message.timestamp.after.max.ms", str(2**63 - 1), incremental_operation=AlterConfigOpType.SET)
        )
        admin = AdminClient({"bootstrap.servers": stack.bootstrap_servers})
        admin.incremental_alter_configs([topic])[topic].result()
        writer.producer.produce(settings.topic, frame, customer.encode(), partition=0, timestamp=1 << 61)
        writer.add(customer, "1.00")

        eventually(lambda: balance(engine, customer) == Decimal("1.00"), "that behind counts", _FOLDS_WITHIN_SECONDS)
        catch_up(engine)
        (letters,) = [task.snapshot().dead_letters for task in tasks_of(engine).all() if task.task_id.partition == 0]
        assert letters == {"time-out-of-range/waiting": 1}


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
