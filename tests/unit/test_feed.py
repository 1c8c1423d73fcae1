"""What becomes of the next micro-batch after one that could not be committed, and of a Spark that is gone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from balance_service.errors import FatalError, RetriableError, TaskMigratedError
from balance_service.events.combine import PartitionUpdates
from balance_service.events.feed import Feed
from balance_service.events.gathering import Gathered, Gathering
from balance_service.events.spark.row_query import QueryEndedError
from balance_service.read_models.balance import Balance
from balance_service.state.records import TaskId


def feed(*, is_stopped: bool = False, exit_code: int | None = None) -> Feed:
    """One without Spark."""
    gateway = SimpleNamespace(proc=SimpleNamespace(poll=lambda: exit_code))
    context = SimpleNamespace(_gateway=gateway)
    session = SimpleNamespace(sparkContext=lambda: SimpleNamespace(isStopped=lambda: is_stopped))
    parts: Any = SimpleNamespace(sparkContext=context, _jsparkSession=session, max_records_per_batch=1_000_000)
    return Feed(
        spark=parts,
        settings=parts,
        source="balance",
        read_model=Balance(),
        leg=Balance.legs[-1],
        decoder=parts,
        topics=parts,
        known_end=lambda _: None,
        metrics=parts,
    )


@pytest.mark.parametrize("error", [RetriableError("nobody knows"), TaskMigratedError("fenced, or too long")])
def test_after_a_commit_that_failed_no_more_than_a_part_is_gathered(error: Exception) -> None:
    def process(_batch: object) -> None:
        raise error

    gathering = Gathering(1_000_000, Balance().combine, sleep=lambda _: None)
    task: Any = SimpleNamespace(task_id=TaskId("balance", 0), process=process)
    with pytest.raises(type(error)):
        feed()._commit(Gathered(PartitionUpdates(), 5), 0, task, gathering)

    rows = pa.record_batch({"offset": pa.array(range(70_000), pa.int64())})
    pulled = iter([rows])
    source: Any = SimpleNamespace(pull=lambda _seconds: next(pulled))
    # A second pull would fail.
    assert gathering.gather(source, 0.0, 1_000_000, lambda _: Gathered(PartitionUpdates(), 70_000))


def test_spark_that_has_stopped_ends_the_instance_though_its_jvm_lives() -> None:
    ended = QueryEndedError("the context was stopped")
    feed()._require_jvm(ended)
    for gone in (feed(is_stopped=True), feed(exit_code=1)):
        with pytest.raises(FatalError):
            gone._require_jvm(ended)
