"""What becomes of the next micro-batch after one that could not be committed, and of a Spark that is gone."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from structlog.testing import capture_logs

from balance_service.engine.records import TaskId
from balance_service.engine.task import TaskState
from balance_service.errors import FatalError, RetriableError, TaskMigratedError
from balance_service.kafka.topics import Topic
from balance_service.read_models.balance import Balance
from balance_service.spark.combine import PartitionUpdates
from balance_service.spark.feed import Feed
from balance_service.spark.gathering import Gathered, Gathering
from balance_service.spark.row_query import QueryEndedError
from balance_service.spark.sampler import SparkSampler
from balance_service.spark.session import require_jvm
from tests.support.shipped import jvm_scratch
from tests.unit.spark.spark_side import Spark


def spark(*, is_stopped: bool = False, exit_code: int | None = None) -> Any:
    """A session of which as much is there as tells whether its JVM lives; it has no figures."""
    gateway = SimpleNamespace(proc=SimpleNamespace(poll=lambda: exit_code))
    bean = SimpleNamespace(getRuntimeMXBean=lambda: SimpleNamespace(getPid=lambda: 1))
    java = SimpleNamespace(lang=SimpleNamespace(management=SimpleNamespace(ManagementFactory=bean)))
    context = SimpleNamespace(_gateway=gateway, _jvm=SimpleNamespace(java=java))
    session = SimpleNamespace(sparkContext=lambda: SimpleNamespace(isStopped=lambda: is_stopped))
    return SimpleNamespace(sparkContext=context, _jsparkSession=session)


def feed(session: Any = None, topics: Any = None, rehearsal: Any = None) -> Feed:
    """One without Spark."""
    parts: Any = SimpleNamespace(max_records_per_batch=1_000_000)
    hosted: Any = SimpleNamespace(
        read_model=Balance(),
        stage=Balance().stages[-1],
        settings=parts,
        topics=topics,
        source=Topic("balance", "id", 1),
        watermarks=SimpleNamespace(end=lambda _: None),
        state_directory=SimpleNamespace(scratch=jvm_scratch()),
        joined=None,
    )
    return Feed(hosted, parts, session or spark(), rehearsal or parts, parts)


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
    assert gathering.gather(source, 0.0, 1_000_000, lambda _: Gathered(PartitionUpdates(), 70_000), threading.Event())


def test_a_query_that_is_still_starting_ends_quietly_as_soon_as_its_task_is_to_do_something_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interrupted = threading.Event()
    slow = Spark(connects=False, on_start=interrupted.set)
    monkeypatch.setattr(Feed, "_rows", lambda *_: slow)
    task: Any = SimpleNamespace(
        task_id=TaskId("balance", 0), state=TaskState.RUNNING, position=0, left_out=lambda: list[int]()
    )

    with capture_logs() as logs:
        feed(slow).run(task, interrupted)

    assert slow.calls == ["start", "stop"]
    assert logs == []


def test_spark_that_has_stopped_ends_the_instance_though_its_jvm_lives() -> None:
    ended = QueryEndedError("the context was stopped")
    require_jvm(spark(), ended)
    for gone in (spark(is_stopped=True), spark(exit_code=1)):
        with pytest.raises(FatalError):
            require_jvm(gone, ended)


def test_where_no_task_runs_the_end_of_the_jvm_is_noticed_all_the_same() -> None:
    sampler = SparkSampler(spark())
    sampler.take()
    assert sampler.sample is None

    with pytest.raises(FatalError, match="Spark's JVM has ended"):
        SparkSampler(spark(exit_code=137)).take()


def test_a_partition_that_cannot_be_read_now_does_not_keep_an_instance_from_starting() -> None:
    def away(*_: object, **__: object) -> None:
        raise RetriableError("the leader of partition 0 is away")

    topics = SimpleNamespace(offsets=away)
    feed(topics=topics).rehearse()

    with pytest.raises(FatalError):
        feed(spark(exit_code=137), topics).rehearse()
