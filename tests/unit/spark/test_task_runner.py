"""The task runner: after a failed commit, during the start of a query, and when Spark has ended."""

from __future__ import annotations

import secrets
import subprocess
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from py4j.protocol import Py4JNetworkError
from structlog.testing import capture_logs

from balance_service.engine.batch import PartitionUpdates
from balance_service.engine.changelog_writer import SecondWriterError
from balance_service.engine.commit import Committed
from balance_service.engine.hosted_generations import HostedGenerations
from balance_service.engine.progress import Progress
from balance_service.engine.records import DeadLetter, TaskId
from balance_service.engine.task import TaskState
from balance_service.errors import FatalError, RetriableError, TaskMigratedError
from balance_service.kafka.topics import Topic
from balance_service.model.generations import Comparison, Generations, Switch
from balance_service.observability.metrics import Metrics
from balance_service.read_models.balance import Balance
from balance_service.spark.gathering import Gathering
from balance_service.spark.row_query import QueryEndedError, RowQuery
from balance_service.spark.session import JvmEndedError, SparkSampler, require_jvm
from balance_service.spark.shared_queries import Slots
from balance_service.spark.task_runner import TaskRunner
from tests.support.fakes import DECLARED, Clock
from tests.support.shipped import jvm_scratch
from tests.support.waiting import eventually
from tests.unit.spark.spark_side import Spark, lone_session

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

FIRST = Generations("balance")


def runner(
    session: Any = None,
    topics: Any = None,
    now: Generations = FIRST,
    end: int | None = None,
    *,
    metrics: Any = None,
    states: Callable[[], Generations] | None = None,
) -> TaskRunner:
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
        generations=HostedGenerations(states or (lambda: now)),
        progress=Progress(),
    )
    return TaskRunner(hosted, parts, session or lone_session(), Slots(2), metrics or parts)


@pytest.mark.parametrize("error", [RetriableError("not acknowledged"), TaskMigratedError("fenced, or too long")])
def test_after_a_failed_commit_only_a_part_is_gathered(error: Exception) -> None:
    def process(_batch: object) -> None:
        raise error

    gathering = Gathering(1_000_000, Balance().combine, sleep=lambda _: None)
    task: Any = SimpleNamespace(task_id=TaskId("balance", 0), process=process, state=TaskState.RUNNING)
    with pytest.raises(type(error)):
        runner()._commit(PartitionUpdates(5), 0, frozenset(), task, gathering)

    rows = pa.record_batch({"offset": pa.array(range(70_000), pa.int64())})
    pulled = iter([rows])

    def part(_rows: pa.Table) -> PartitionUpdates:
        return PartitionUpdates(70_000)

    # A second pull would fail.
    assert gathering.gather(lambda _seconds: next(pulled), 0.0, 1_000_000, part, threading.Event())


def test_a_batch_that_a_closed_task_has_given_up_was_not_too_large() -> None:
    def process(_batch: object) -> None:
        raise TaskMigratedError("the task was closed while it folded a batch")

    gathering = Gathering(1_000_000, Balance().combine)
    task: Any = SimpleNamespace(task_id=TaskId("balance", 0), process=process, state=TaskState.CLOSED)
    with pytest.raises(TaskMigratedError):
        runner()._commit(PartitionUpdates(5), 0, frozenset(), task, gathering)

    assert not gathering._part_by_part


def test_a_commit_that_a_second_writer_prevents_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def commits(*_: object) -> None:
        raise SecondWriterError("another producer has written")

    monkeypatch.setattr(TaskRunner, "_run_query", commits)
    task: Any = SimpleNamespace(task_id=TaskId("balance", 0), state=TaskState.RUNNING)
    metrics = Metrics()
    with pytest.raises(SecondWriterError):
        runner(metrics=metrics).run(task, threading.Event())

    assert b"balance_second_writers_total 1.0" in metrics.text()


def test_a_commit_logs_what_is_wrong_with_the_first_dead_letter_of_each_cause() -> None:
    letter = DeadLetter(7, 0, b"ada", None, "too-much", "50 is more than 10")
    done = Committed(0, 0, 0, 3, causes={"too-much": 3}, refused={"too-much": letter})
    task: Any = SimpleNamespace(task_id=TaskId("balance", 0), process=lambda _batch: done)
    logging = runner(metrics=Metrics())

    with capture_logs() as logs:
        logging._commit(PartitionUpdates(8), 0, frozenset(), task, Gathering(1_000_000, Balance().combine))

    assert [(line["cause"], line["records"], line["offset"], line["detail"]) for line in logs] == [
        ("too-much", 3, 7, "50 is more than 10")
    ]


def test_a_bounded_rate_counts_records_and_not_the_offsets_that_are_missing_between_them() -> None:
    done = Committed(applied=3, ignored=1, duplicates=1, dead_lettered=2)
    task: Any = SimpleNamespace(task_id=TaskId("balance", 0), process=lambda _batch: done)
    paced = runner(metrics=Metrics())

    gathering = Gathering(1_000_000, Balance().combine)
    assert paced._commit(PartitionUpdates(2_000_000), 0, frozenset(), task, gathering) == 7


def test_a_pace_ends_when_the_generation_serves() -> None:
    built = FIRST.begun(DECLARED).rebuilt(DECLARED, Switch.ALWAYS, 60, 1, "", "")
    states = iter([built, built, built.compared(2, Comparison())])

    paced = runner(now=built, states=lambda: next(states))
    paced._pace(3600, threading.Event())


class Waits:
    """An interrupt that never comes, and a clock that goes on only while one waits for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, now: Generations) -> None:
        self._clock = Clock()
        monkeypatch.setattr("balance_service.spark.task_runner.time", SimpleNamespace(monotonic=self._clock))
        self._paced = runner(now=now)

    def wait(self, seconds: float) -> bool:
        self._clock.now += seconds
        return False

    def pace(self, events: int, at: float) -> float:
        """Returns when a task goes on that has committed events at a time."""
        self._clock.now = at
        self._paced._pace(events, cast("Any", self))
        return self._clock.now


BUILT = FIRST.begun(DECLARED).rebuilt(DECLARED, Switch.NEVER, 60, 100, "", "")


@pytest.mark.parametrize(
    "now",
    [
        FIRST,
        FIRST.begun(DECLARED).rebuilt(DECLARED, Switch.NEVER, 60, None, "", ""),
        BUILT.compared(2, Comparison()).switched(2, "", ""),
    ],
    ids=["the only one", "built without a rate", "serves"],
)
def test_only_a_generation_that_is_built_at_a_rate_waits(monkeypatch: pytest.MonkeyPatch, now: Generations) -> None:
    assert Waits(monkeypatch, now).pace(10**6, 5.0) == 5.0


def test_time_without_events_is_not_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = Waits(monkeypatch, BUILT)

    assert waits.pace(100, 5.0) == pytest.approx(6.0)
    assert waits.pace(100, 3_600.0) == pytest.approx(3_601.0)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 1_000)), min_size=1, max_size=20))
def test_the_tasks_of_an_instance_keep_the_rate_together(commits: list[tuple[int, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        waits, now = Waits(patch, BUILT), 0.0
        free = dict.fromkeys(range(4), now)
        for task, events in commits:
            # The next commit of a task begins after its wait.
            now = max(now, free[task])
            free[task] = waits.pace(events, now)

    assert max(free.values()) >= sum(events for _, events in commits) / 100 - 1e-6


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
        task_id=TaskId("balance", 0), state=TaskState.RUNNING, position=0, left_out=list, follow_sender=lambda: False
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
