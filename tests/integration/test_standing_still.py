"""A partition whose position does not move: the status reports it, and its record is set aside."""

from __future__ import annotations

import time
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest

from balance_service.cluster.directory import ServerTable
from balance_service.engine import records
from balance_service.engine.decisions import Decision, Verdict
from balance_service.hosting.collectors import EngineCollector
from balance_service.process.runtime import elapsed
from balance_service.spark import task_runner
from balance_service.spark.session import read_source
from balance_service.spark.trials import Trials
from tests.integration.engines import (
    balance,
    customers_in,
    hosted,
    problems,
    queries,
    running_engine,
    settings_for,
    tasks_of,
)
from tests.support.kafka import Writer, read_topic
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from balance_service.devtools.local.stack import LocalStack
    from balance_service.engine.dead_letter import Letter
    from balance_service.hosting.engine import Engine
    from balance_service.settings import Settings

SECONDS = 120
STANDS_AFTER_SECONDS = 4.0
STEADY_SECONDS = 6.0
PARTITION = 0
SET_ASIDE = Verdict(Decision.SET_ASIDE, "alice", "Spark fails at it")


FAILS = "raise_error('this record is hostile')"
STALLS = "cast(reflect('java.lang.Thread', 'sleep', 600000L) as binary)"


def hostile_at(offset: int, does: str) -> Any:
    """Returns a source at whose record of partition 0 every query of Spark fails, or stalls."""

    def read(spark: SparkSession, settings: Settings, source: str, positions: Mapping[int, int]) -> DataFrame:
        is_it = f"partition = {PARTITION} and offset = {offset}"
        value = f"if({is_it}, {does}, value) as value"
        return read_source(spark, settings, source, positions).selectExpr("* except (value)", value)

    return read


def letters(engine: Engine) -> list[Letter]:
    task = tasks_of(engine).task(PARTITION)
    assert task is not None
    assert task.view is not None
    return hosted(engine).processor.letters.page(task.view, 0, 10)


def standing_seconds(engine: Engine) -> dict[str, float]:
    """Returns the metric of each partition."""
    (metric,) = [
        metric
        for metric in EngineCollector(engine, ServerTable(elapsed)).collect()
        if metric.name == "balance_task_standing_still_seconds"
    ]
    return {sample.labels["partition"]: sample.value for sample in metric.samples}


@pytest.mark.shows("stands-still")
@pytest.mark.parametrize("does", [FAILS, STALLS])
def test_a_partition_that_stands_still_is_reported_without_a_pause_and_goes_on_when_its_record_is_set_aside(
    stack: LocalStack, names: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str
) -> None:
    monkeypatch.setattr(records, "STANDS_AFTER_SECONDS", STANDS_AFTER_SECONDS)
    settings = settings_for(stack, names, tmp_path / "state")
    customer, hostile = customers_in(PARTITION, count=2)
    (other,) = customers_in(1, count=1)
    monkeypatch.setattr(task_runner, "read_source", hostile_at(1, does))
    # Without a query, Spark would decode the record.
    monkeypatch.setattr(Trials, "may_query", lambda *_: True)
    with running_engine(settings) as engine, Writer(stack, settings.topic) as writer:
        writer.add(customer, "1.00")
        eventually(lambda: balance(engine, customer) == Decimal("1.00"), "the engine folds", SECONDS)
        writer.add(hostile, "5.00")
        writer.add(customer, "1.00")
        writer.add(other, "1.00")

        told = "balance_0 stands still: partition 0 has been at position 1 since "
        eventually(lambda: any(told in one for one in problems(engine)), lambda: f"told: {problems(engine)}", SECONDS)
        until = time.monotonic() + STEADY_SECONDS
        while time.monotonic() < until:
            (problem,) = (one for one in problems(engine) if one.startswith("balance_0 "))
            assert problem.startswith(told)
            assert ", and is 2 records behind" in problem
            assert ("this record is hostile" in problem) == (does == FAILS)
            time.sleep(0.02)
        eventually(lambda: balance(engine, other) == Decimal("1.00"), "the other partition goes on", SECONDS)
        ((_, behind), (_, idle)) = sorted(standing_seconds(engine).items())
        assert behind > STANDS_AFTER_SECONDS
        assert idle == 0

        refused = tasks_of(engine).decide(PARTITION, [2], SET_ASIDE)
        assert refused == {2: "the task's position is 1, and its next record has offset 1"}
        assert tasks_of(engine).decide(PARTITION, [1], SET_ASIDE) == {}

        eventually(lambda: balance(engine, customer) == Decimal("2.00"), "the event behind counts", SECONDS)
        eventually(lambda: problems(engine) == [], lambda: f"no problem is left: {problems(engine)}", SECONDS)
        assert does == FAILS or queries(engine, PARTITION, "set aside") == 1
        (letter,) = letters(engine)
        assert (letter.offset, letter.cause, letter.status.value) == (1, "set-aside", "waiting")
        assert (letter.key, letter.detail) == (hostile.encode(), "alice set it aside: Spark fails at it")
        assert tasks_of(engine).decide(PARTITION, [1], SET_ASIDE) == {
            1: "it is a dead letter already: redrive or discard it"
        }
        assert tasks_of(engine).decide(PARTITION, [3], SET_ASIDE) == {
            3: "the task's position is 3, and no committed record is there or behind it"
        }
        (written,) = read_topic(stack, f"{settings.topic}-dead-letters")
        assert written.key() == hostile.encode()

        monkeypatch.setattr(task_runner, "read_source", read_source)
        assert tasks_of(engine).decide(PARTITION, [1], SET_ASIDE._replace(decision=Decision.REDRIVE)) == {}
        eventually(lambda: balance(engine, hostile) == Decimal("5.00"), "the redriven record counts", SECONDS)
