"""The task runner: after a failed commit, during the start of a query, and when Spark has ended."""

from __future__ import annotations

import secrets
import subprocess
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from py4j.protocol import Py4JNetworkError
from structlog.testing import capture_logs

from balance_service.engine.commit import Committed
from balance_service.engine.progress import Progress
from balance_service.engine.records import TaskId
from balance_service.engine.siblings import Siblings
from balance_service.engine.task import TaskState
from balance_service.errors import FatalError, RetriableError, TaskMigratedError
from balance_service.kafka.topics import Topic
from balance_service.model.generations import Comparison, Generations, Switch
from balance_service.read_models.balance import Balance
from balance_service.spark.combine import PartitionUpdates
from balance_service.spark.gathering import Gathered, Gathering
from balance_service.spark.row_query import QueryEndedError, RowQuery
from balance_service.spark.session import JvmEndedError, SparkSampler, require_jvm
from balance_service.spark.shared_queries import Slots
from balance_service.spark.task_runner import TaskRunner
from tests.support.fakes import DECLARED
from tests.support.shipped import jvm_scratch
from tests.support.waiting import eventually
from tests.unit.spark.spark_side import Spark, lone_session

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

FIRST = Generations("balance")


def runner(session: Any = None, topics: Any = None, now: Generations = FIRST, end: int | None = None) -> TaskRunner:
    """Returns a task runner without Spark, of the newest generation of `balance`."""
    parts: Any = SimpleNamespace(max_records_per_batch=1_000_000, without_slots=lambda *_, **__: None)
    hosted: Any = SimpleNamespace(
        name="balance",
        read_model=Balance(),
        stage=Balance().stages[-1].of_generation(now.newest),
        settings=parts,
        topics=topics,
        source=Topic("balance", "id", 1),
        watermarks=SimpleNamespace(end=lambda _: end),
        state_directory=SimpleNamespace(
            scratch=jvm_scratch(), suspects_path=lambda _: jvm_scratch().files / "suspects" / secrets.token_hex(8)
        ),
        joined=None,
        siblings=Siblings(lambda: now),
        progress=Progress(),
    )
    return TaskRunner(hosted, parts, session or lone_session(), Slots(2), parts)


@pytest.mark.parametrize("error", [RetriableError("not acknowledged"), TaskMigratedError("fenced, or too long")])
def test_after_a_failed_commit_only_a_part_is_gathered(error: Exception) -> None:
    def process(_batch: object) -> None:
        raise error

    gathering = Gathering(1_000_000, Balance().combine, sleep=lambda _: None)
    task: Any = SimpleNamespace(task_id=TaskId("balance", 0), process=process)
    with pytest.raises(type(error)):
        runner()._commit(Gathered(PartitionUpdates(), 5), 0, frozenset(), task, gathering)

    rows = pa.record_batch({"offset": pa.array(range(70_000), pa.int64())})
    pulled = iter([rows])

    def part(_rows: pa.Table) -> Gathered:
        return Gathered(PartitionUpdates(), 70_000)

    # A second pull would fail.
    assert gathering.gather(lambda _seconds: next(pulled), 0.0, 1_000_000, part, threading.Event())


def test_a_bounded_rate_counts_records_and_not_the_offsets_that_are_missing_between_them() -> None:
    done = Committed(applied=3, ignored=1, duplicates=1, dead_lettered=2)
    task: Any = SimpleNamespace(task_id=TaskId("balance", 0), process=lambda _batch: done)
    paced = runner()
    metrics: Any = SimpleNamespace(committed=lambda *_: None, batch_seconds=SimpleNamespace(observe=lambda _: None))
    paced._metrics = metrics

    gathering = Gathering(1_000_000, Balance().combine)
    assert paced._commit(Gathered(PartitionUpdates(), 2_000_000), 0, frozenset(), task, gathering) == 7


def test_a_pace_ends_when_the_generation_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    built = FIRST.begun(DECLARED).rebuilt(DECLARED, Switch.ALWAYS, 60, 1, "", "")
    paced = runner(now=built)
    states = iter([built, built, built.compared(2, Comparison())])
    paced._siblings = Siblings(lambda: next(states))
    monkeypatch.setattr(paced, "_seconds_after", lambda _events: 3600.0)

    paced._pace(3600, threading.Event())


def test_an_interrupt_cancels_a_query_during_its_start_without_a_log_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interrupted = threading.Event()
    slow = Spark(connects=False, on_start=interrupted.set)
    anything: Any = slow

    def query(_: TaskRunner, positions: Mapping[int, int], is_interrupted: Callable[[], bool]) -> RowQuery:
        return RowQuery(anything, jvm_scratch(), lambda _positions: anything, positions, is_interrupted)

    monkeypatch.setattr(TaskRunner, "_query", query)
    task: Any = SimpleNamespace(
        task_id=TaskId("balance", 0), state=TaskState.RUNNING, position=0, left_out=lambda: list[int]()
    )

    with capture_logs() as logs:
        runner(slow).run(task, interrupted)
        eventually(lambda: slow.calls == ["start", "stop"], "the start is cancelled")

    assert logs == []


def test_a_stopped_spark_ends_the_instance_even_if_its_jvm_lives() -> None:
    ended = QueryEndedError("the context was stopped")
    require_jvm(lone_session(), ended)
    for gone in (lone_session(is_stopped=True), lone_session(exit_code=1)):
        with pytest.raises(FatalError):
            require_jvm(gone, ended)


@pytest.mark.parametrize("answer", [Py4JNetworkError("reset"), ConnectionRefusedError(111, "refused")])
@pytest.mark.parametrize(("exit_code", "error"), [(3, "has ended"), (None, "does not answer")])
def test_a_jvm_that_ends_closes_its_sockets_first(exit_code: int | None, error: str, answer: Exception) -> None:
    def is_stopped() -> bool:
        raise answer

    def wait(seconds: float) -> None:
        if exit_code is None:
            raise subprocess.TimeoutExpired("java", seconds)
        process.poll = lambda: exit_code

    session = lone_session()
    session._jsparkSession = SimpleNamespace(sparkContext=lambda: SimpleNamespace(isStopped=is_stopped))
    process = session.sparkContext._gateway.proc
    process.wait = wait

    with pytest.raises(FatalError, match=error) as ended:
        require_jvm(session, QueryEndedError("the query failed"))
    # Only its end counts against the records that it decoded.
    assert isinstance(ended.value, JvmEndedError) is (exit_code is not None)


def test_the_sampler_detects_the_end_of_the_jvm() -> None:
    sampler = SparkSampler(lone_session())
    sampler.take()
    assert sampler.sample is None

    with pytest.raises(FatalError, match="Spark's JVM has ended"):
        SparkSampler(lone_session(exit_code=137)).take()


def test_a_warm_up_that_fails_does_not_fail_the_start() -> None:
    runner().warm_up([1])

    with pytest.raises(FatalError):
        runner(lone_session(exit_code=137)).warm_up([1])


@pytest.mark.parametrize(
    ("left_out", "limit", "end", "left"),
    [
        ([], None, None, []),
        ([7], None, None, [7]),
        ([5], None, 6, []),
        ([5, 6, 8], None, 7, [8]),
        ([5, 6], 6, 6, [6]),
        ([5], 5, None, [5]),
    ],
)
def test_no_query_begins_at_a_record_that_is_left_out(
    left_out: list[int], limit: int | None, end: int | None, left: list[int]
) -> None:
    moves: list[tuple[int, int]] = []
    task: Any = SimpleNamespace(
        position=5,
        limit=limit,
        left_out=lambda: left_out,
        process=lambda batch: moves.append((batch.start, batch.end)),
    )

    assert runner()._skip(task) == left
    assert moves == ([] if end is None else [(5, end)])
