"""Another process on this machine connects to the ports of Spark's driver."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from balance_service.settings import load_settings
from balance_service.spark.jvm import MODULE_OPTIONS, class_path, spark_java
from balance_service.spark.session import start_spark
from tests.support.shipped import jvm_scratch
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyspark.sql import SparkSession

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
