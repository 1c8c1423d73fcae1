"""The rows of a query, received over its socket."""

from __future__ import annotations

import os
import resource
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from balance_service.errors import ConfigurationError
from balance_service.process.scratch import Scratch, temporary_scratch
from balance_service.spark.row_query import BatchEndedError, QueryEndedError, RowQuery
from tests.unit.spark.spark_side import LONG, SCHEMA, Message, Spark, message

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import pyarrow as pa


@pytest.fixture
def sparks() -> Iterator[list[Spark]]:
    """The queries of the test, which have ended after it."""
    started: list[Spark] = []
    yield started
    for spark in started:
        spark.end()


@pytest.fixture
def scratch() -> Iterator[Scratch]:
    with temporary_scratch() as scratch:
        yield scratch


@pytest.fixture
def opened(sparks: list[Spark], scratch: Scratch) -> Callable[..., RowQuery]:
    def query(spark: Spark, position: int = 0, into: Scratch = scratch) -> RowQuery:
        sparks.append(spark)
        anything: Any = spark
        return RowQuery(anything, into, lambda _positions: anything, {0: position})

    return query


def offsets(batches: Iterable[pa.RecordBatch | None]) -> list[int]:
    return [offset for batch in batches if batch is not None for offset in batch["offset"].to_pylist()]


def pulled(query: RowQuery, times: int) -> Sequence[int]:
    with query:
        return offsets(query.rows[0].pull(LONG) for _ in range(times))


def test_rows_arrive_in_order_and_each_batch_is_requested_once(opened: Callable[..., RowQuery]) -> None:
    spark = Spark(message(5, 6), message(7), message(9, 12))

    with opened(spark, 5) as query:
        batches = [query.rows[0].pull(LONG) for _ in range(3)]

    assert offsets(batches) == [5, 6, 7, 9, 12]
    assert [batch.num_rows for batch in batches if batch is not None] == [2, 1, 2]
    assert batches[0] is not None
    assert batches[0].schema == SCHEMA
    assert batches[0]["key"].to_pylist() == [b"k5", b"k6"]
    spark.end()
    assert spark.asked == 3


def test_a_batch_larger_than_a_socket_buffer_arrives_whole(opened: Callable[..., RowQuery]) -> None:
    assert pulled(opened(Spark(message(*range(200_000)))), 1) == list(range(200_000))


def test_a_pull_without_rows_in_time_returns_none_and_requests_no_second_batch(
    opened: Callable[..., RowQuery],
) -> None:
    spark = Spark(message(0), message(1), ends=False)
    spark.has_rows.clear()

    with opened(spark) as query:
        assert [query.rows[0].pull(0.01), query.rows[0].pull(0.01), query.rows[0].pull(0)] == [None, None, None]
        spark.has_rows.set()
        assert offsets(
            [query.rows[0].pull(LONG), query.rows[0].pull(LONG), query.rows[0].pull(0.01), query.rows[0].pull(0.01)]
        ) == [0, 1]
    spark.end()

    # One request for each message, and one without an answer.
    assert spark.asked == 3


def test_a_connection_closed_within_a_message_ends_the_query(
    opened: Callable[..., RowQuery],
) -> None:
    whole, failure = message(1, 2), RuntimeError("the broker is away")

    for sent in range(len(whole.data)):
        with opened(Spark(message(0), Message(2, whole.data[:sent]), failure=failure)) as query:
            assert offsets([query.rows[0].pull(LONG)]) == [0]
            with pytest.raises(QueryEndedError, match="the broker is away"):
                query.rows[0].pull(LONG)


def test_rows_before_a_regular_end_of_the_query_are_returned(opened: Callable[..., RowQuery]) -> None:
    with opened(Spark(message(0))) as query:
        assert offsets([query.rows[0].pull(LONG)]) == [0]
        with pytest.raises(QueryEndedError, match="batch has come to its end"):
            query.rows[0].pull(LONG)
        with pytest.raises(QueryEndedError):
            query.rows[0].pull(LONG)


def test_a_query_that_stops_sending_rows_without_ending_has_failed(opened: Callable[..., RowQuery]) -> None:
    with opened(Spark(message(0), is_endless=True)) as query:
        assert offsets([query.rows[0].pull(LONG)]) == [0]
        with pytest.raises(QueryEndedError, match="has not ended the query") as caught:
            query.rows[0].pull(LONG)

    assert not isinstance(caught.value, BatchEndedError)


def test_a_completed_batch_is_no_failure_however_long_spark_takes_to_end_the_query(
    opened: Callable[..., RowQuery],
) -> None:
    with opened(Spark(message(0), completes=True, is_endless=True)) as query:
        assert offsets([query.rows[0].pull(LONG)]) == [0]
        for _ in range(2):
            with pytest.raises(BatchEndedError):
                query.rows[0].pull(LONG)
        assert query.is_over


def test_a_batch_that_is_handed_over_twice_ends_the_query(opened: Callable[..., RowQuery]) -> None:
    with opened(Spark(message(0, 1), message(0, 1))) as query:
        query.rows[0].pull(LONG)
        with pytest.raises(QueryEndedError, match="offset 0 after 1"):
            query.rows[0].pull(LONG)


def test_a_batch_that_overlaps_the_previous_one_ends_the_query(opened: Callable[..., RowQuery]) -> None:
    with opened(Spark(message(0, 1), message(1, 2))) as query:
        query.rows[0].pull(LONG)
        with pytest.raises(QueryEndedError, match="offset 1 after 1"):
            query.rows[0].pull(LONG)


def test_rows_from_below_the_position_end_the_query(opened: Callable[..., RowQuery]) -> None:
    with opened(Spark(message(6)), 7) as query, pytest.raises(QueryEndedError, match="offset 6 after 6"):
        query.rows[0].pull(LONG)


def test_a_batch_after_lost_rows_ends_the_query(opened: Callable[..., RowQuery]) -> None:
    with opened(Spark(message(0, 1), message(4), lost_rows=1)) as query:
        query.rows[0].pull(LONG)
        with pytest.raises(QueryEndedError, match="3 rows before it where 2 have arrived"):
            query.rows[0].pull(LONG)


def test_a_closed_stream_leaves_the_query_running(opened: Callable[..., RowQuery]) -> None:
    spark = Spark(message(0), ends=False)

    with opened(spark) as query:
        assert offsets([query.rows[0].pull(LONG)]) == [0]
        query.rows[0].close()
        spark.end()
        assert spark.is_left
        assert spark.calls == ["start"]


def test_the_query_runs_in_real_time_mode_with_private_scratch_files(
    opened: Callable[..., RowQuery],
) -> None:
    spark = Spark()

    with opened(spark):
        assert (spark.told["mode"], spark.told["realTime"]) == ("update", "24 hours")
        for folder in (spark.checkpoint, spark.listener.parent):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("fails", [False, True], ids=["spark stops it", "spark cannot stop it"])
def test_closing_stops_the_query_closes_the_connection_and_removes_the_files(
    opened: Callable[..., RowQuery], scratch: Scratch, fails: bool
) -> None:
    def on_stop() -> None:
        if fails:
            raise ConnectionError("the JVM is gone")

    spark = Spark(ends=False, on_stop=on_stop)
    query = opened(spark)

    with query:
        assert spark.checkpoint.is_dir()
        while not spark.asked:
            query.rows[0].pull(0.01)
    spark.end()

    assert spark.calls == ["start", "stop"]
    assert spark.is_left
    assert list(scratch.files.iterdir()) == []


def test_the_error_of_a_query_that_fails_before_it_reads_names_the_reason(
    opened: Callable[..., RowQuery], scratch: Scratch
) -> None:
    spark = Spark(connects=False, failure=RuntimeError("an error occurred\n: java.lang.Error: no such topic\n\tat x"))

    with pytest.raises(QueryEndedError) as caught, opened(spark):
        pass

    assert str(caught.value) == "an error occurred : java.lang.Error: no such topic"
    assert spark.calls == ["start", "stop"]
    assert list(scratch.files.iterdir()) == []


def test_a_query_that_opens_no_partition_times_out(
    opened: Callable[..., RowQuery], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("balance_service.spark.row_query._CONNECT_SECONDS", 0.25)
    spark = Spark(connects=False)

    with pytest.raises(QueryEndedError, match="did not begin to read"), opened(spark):
        pass

    assert spark.calls == ["start", "stop"]


def test_a_query_that_spark_refuses_has_ended(opened: Callable[..., RowQuery], scratch: Scratch) -> None:
    def refuse() -> None:
        raise LookupError("no such format")

    spark = Spark(on_start=refuse)

    with pytest.raises(QueryEndedError, match="no such format"), opened(spark):
        pass

    assert spark.calls == ["start"]
    assert list(scratch.files.iterdir()) == []


def test_a_plan_whose_last_column_is_not_the_partition_is_refused(opened: Callable[..., RowQuery]) -> None:
    spark = Spark()
    spark.columns.reverse()

    with pytest.raises(QueryEndedError, match="the last column of a plan is `partition`, not `offset`"), opened(spark):
        pass

    assert spark.calls == []


def test_the_error_for_a_missing_grant_names_it_and_the_document(opened: Callable[..., RowQuery]) -> None:
    deep = RuntimeError(
        "Job aborted\n\tat x\nCaused by: TopicAuthorizationException: Not authorized to access topics: [b]"
    )

    with (
        pytest.raises(QueryEndedError, match=r"not allow Spark to read: .*\[b\]; grant .* \(docs/how-to/secure.md\)"),
        opened(Spark(connects=False, failure=deep)),
    ):
        pass


@pytest.fixture
def with_paths_of() -> Iterator[Callable[[int], Scratch]]:
    """A scratch whose sockets have paths of so many bytes."""
    with tempfile.TemporaryDirectory(dir="/tmp") as short:

        def make(length: int) -> Scratch:
            shallow = Scratch(Path(short), Path(short))
            deep = Path(short) / ("d" * (length - len(str(shallow.new_socket())) - 1))
            return Scratch(deep, deep)

        yield make


def test_the_error_for_a_socket_path_that_is_too_long_names_the_setting(
    opened: Callable[..., RowQuery], with_paths_of: Callable[[int], Scratch]
) -> None:
    scratch, spark = with_paths_of(97), Spark()

    with (
        pytest.raises(ConfigurationError, match="too long for a socket; set XDG_RUNTIME_DIR or TMPDIR"),
        opened(spark, into=scratch),
    ):
        pass

    assert spark.calls == []
    assert not scratch.sockets.exists()


def test_the_longest_accepted_socket_path_works(
    opened: Callable[..., RowQuery], with_paths_of: Callable[[int], Scratch]
) -> None:
    scratch = with_paths_of(96)
    scratch.files.mkdir(0o700)
    spark = Spark(message(0))

    assert pulled(opened(spark, into=scratch), 1) == [0]
    assert len(str(spark.listener)) == 96


def test_rows_arrive_with_more_than_a_thousand_open_files(opened: Callable[..., RowQuery]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < 2048:
        resource.setrlimit(resource.RLIMIT_NOFILE, (2048, hard))
    held: list[int] = []
    try:
        while not held or held[-1] <= 1024:
            held.append(os.open(os.devnull, os.O_RDONLY))
        assert pulled(opened(Spark(message(0))), 1) == [0]
    finally:
        for file in held:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
