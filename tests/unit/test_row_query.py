"""The rows of a query as they come over the socket; the other side, Spark with its JVM, is played by a thread."""

from __future__ import annotations

import os
import resource
import socket
import stat
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from balance_service.errors import ConfigurationError
from balance_service.events.spark.row_query import QueryEndedError, RowQuery

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

SCHEMA = pa.schema({"offset": pa.int64(), "key": pa.binary()})
LONG = 10.0


def message(*offsets: int) -> bytes:
    """A record batch as it goes over the socket."""
    batch = pa.record_batch({"offset": offsets, "key": [b"k%d" % n for n in offsets]}, schema=SCHEMA)
    return batch.serialize().to_pybytes()  # type: ignore[no-any-return]


class Spark:
    """As far as a query uses it: session, DataFrame, writer and query in one.

    It sends the schema, then a message for each byte that asks for one; then it closes the connection, unless it is not
    to end.
    """

    def __init__(
        self,
        *messages: bytes,
        ends: bool = True,
        connects: bool = True,
        failure: Exception | None = None,
        on_start: Callable[[], None] = lambda: None,
        on_stop: Callable[[], None] = lambda: None,
    ) -> None:
        self._messages = messages
        self._ends = ends
        self._connects = connects
        self._failure = failure
        self._on_start = on_start
        self._on_stop = on_stop
        self._path = ""
        self._thread = threading.Thread(target=self._run)
        self.has_rows = threading.Event()
        """Set it unless the rows come at once."""
        self.has_rows.set()
        self.asked = 0
        self.is_left = False
        """Whether the other end has closed the connection."""
        self.told: dict[str, object] = {}
        self.calls: list[str] = []
        self.isActive = connects or failure is None

    def __getattr__(self, name: str) -> Any:
        # Of the way to a class or a method of the JVM, each step is this object.
        if name in {"_jvm", "parts", "code", "balance", "_jdf", "_jwrite", "writeStream"}:
            return self
        raise AttributeError(name)

    def schema(self) -> str:
        return "schema"

    def Handover(self, path: str, most_rows: int, most_bytes: int, schema: str) -> str:
        assert (most_rows > 0, most_bytes > 0, schema) == (True, True, "schema")
        self._path = path
        return path

    def outputMode(self, mode: str) -> Spark:
        return self._tell(mode=mode)

    def trigger(self, **trigger: str) -> Spark:
        return self._tell(**trigger)

    def option(self, name: str, value: str) -> Spark:
        return self._tell(**{name: value})

    def foreach(self, handover: str) -> Spark:
        return self._tell(handover=handover)

    def start(self) -> Spark:
        self.calls.append("start")
        self._on_start()
        if self._connects:
            self._thread.start()
        return self

    def stop(self) -> None:
        self.calls.append("stop")
        self._on_stop()

    def awaitTermination(self, _seconds: float) -> bool:
        return True

    def exception(self) -> Exception | None:
        return self._failure

    def end(self) -> None:
        self.has_rows.set()
        if self._thread.is_alive():
            self._thread.join(LONG)

    @property
    def folder(self) -> Path:
        return Path(self._path).parent

    def _tell(self, **told: object) -> Spark:
        self.told |= told
        return self

    def _run(self) -> None:
        with socket.socket(socket.AF_UNIX) as connection, suppress(OSError):
            connection.settimeout(LONG)
            connection.connect(self._path)
            connection.sendall(SCHEMA.serialize().to_pybytes())
            for data in self._messages:
                if not self._is_asked(connection):
                    return
                self.has_rows.wait(LONG)
                connection.sendall(data)
            while not self._ends and self._is_asked(connection):
                pass

    def _is_asked(self, connection: socket.socket) -> bool:
        asked = len(connection.recv(1))
        self.asked += asked
        self.is_left = not asked
        return bool(asked)


@pytest.fixture
def sparks() -> Iterator[list[Spark]]:
    """Those of the test, which have ended after it."""
    started: list[Spark] = []
    yield started
    for spark in started:
        spark.end()


@pytest.fixture
def opened(sparks: list[Spark]) -> Callable[..., RowQuery]:
    def query(spark: Spark, position: int = 0) -> RowQuery:
        sparks.append(spark)
        anything: Any = spark
        return RowQuery(anything, lambda: anything, position)

    return query


def offsets(batches: Iterable[pa.RecordBatch | None]) -> list[int]:
    return [offset for batch in batches if batch is not None for offset in batch["offset"].to_pylist()]


def pulled(query: RowQuery, times: int) -> Sequence[int]:
    with query:
        return offsets(query.pull(LONG) for _ in range(times))


def test_rows_come_in_order_as_they_were_sent_each_asked_for_once(opened: Callable[..., RowQuery]) -> None:
    spark = Spark(message(5, 6), message(7), message(9, 12))

    with opened(spark, 5) as query:
        batches = [query.pull(LONG) for _ in range(3)]

    assert offsets(batches) == [5, 6, 7, 9, 12]
    assert [batch.num_rows for batch in batches if batch is not None] == [2, 1, 2]
    assert batches[0] is not None
    assert batches[0].schema == SCHEMA
    assert batches[0]["key"].to_pylist() == [b"k5", b"k6"]
    spark.end()
    assert spark.asked == 3


def test_more_rows_than_a_socket_takes_at_once_come_as_a_whole(opened: Callable[..., RowQuery]) -> None:
    assert pulled(opened(Spark(message(*range(200_000)))), 1) == list(range(200_000))


def test_where_nothing_comes_in_time_there_is_nothing_and_it_is_not_asked_again(
    opened: Callable[..., RowQuery],
) -> None:
    spark = Spark(message(0), message(1), ends=False)
    spark.has_rows.clear()

    with opened(spark) as query:
        assert [query.pull(0.01), query.pull(0.01), query.pull(0)] == [None, None, None]
        spark.has_rows.set()
        assert offsets([query.pull(LONG), query.pull(LONG), query.pull(0.01), query.pull(0.01)]) == [0, 1]
    spark.end()

    # Once for each message, and once for what never came.
    assert spark.asked == 3


def test_a_connection_that_is_closed_within_a_message_ends_the_query_wherever_that_is(
    opened: Callable[..., RowQuery],
) -> None:
    whole, failure = message(1, 2), RuntimeError("the broker is away")

    for sent in range(len(whole)):
        with opened(Spark(message(0), whole[:sent], failure=failure)) as query:
            assert offsets([query.pull(LONG)]) == [0]
            with pytest.raises(QueryEndedError, match="the broker is away"):
                query.pull(LONG)


def test_where_spark_ends_the_query_without_a_failure_the_rows_before_are_had(opened: Callable[..., RowQuery]) -> None:
    with opened(Spark(message(0))) as query:
        assert offsets([query.pull(LONG)]) == [0]
        with pytest.raises(QueryEndedError, match="batch has come to its end"):
            query.pull(LONG)
        with pytest.raises(QueryEndedError):
            query.pull(LONG)


def test_a_batch_that_is_handed_over_twice_ends_the_query(opened: Callable[..., RowQuery]) -> None:
    with opened(Spark(message(0, 1), message(0, 1))) as query:
        query.pull(LONG)
        with pytest.raises(QueryEndedError, match="offset 0 after 1"):
            query.pull(LONG)


def test_a_batch_that_begins_within_the_one_before_ends_the_query(opened: Callable[..., RowQuery]) -> None:
    with opened(Spark(message(0, 1), message(1, 2))) as query:
        query.pull(LONG)
        with pytest.raises(QueryEndedError, match="offset 1 after 1"):
            query.pull(LONG)


def test_rows_from_below_the_position_end_the_query(opened: Callable[..., RowQuery]) -> None:
    with opened(Spark(message(6)), 7) as query, pytest.raises(QueryEndedError, match="offset 6 after 6"):
        query.pull(LONG)


def test_a_query_that_has_not_started_has_no_rows(opened: Callable[..., RowQuery]) -> None:
    with pytest.raises(QueryEndedError, match="not started"):
        opened(Spark()).pull(0)


def test_spark_is_told_to_run_in_real_time_and_keeps_its_scratch_where_only_this_user_may_look(
    opened: Callable[..., RowQuery],
) -> None:
    spark = Spark()

    with opened(spark):
        assert (spark.told["mode"], spark.told["realTime"]) == ("update", "24 hours")
        assert Path(str(spark.told["checkpointLocation"])).parent == spark.folder
        assert stat.S_IMODE(spark.folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("fails", [False, True], ids=["spark obeys", "spark cannot stop it"])
def test_on_leaving_the_query_is_stopped_the_connection_closed_and_the_folder_gone(
    opened: Callable[..., RowQuery], fails: bool
) -> None:
    def on_stop() -> None:
        if fails:
            raise ConnectionError("the JVM is gone")

    spark = Spark(ends=False, on_stop=on_stop)
    query = opened(spark)

    with query:
        assert spark.folder.is_dir()
    spark.end()

    assert spark.calls == ["start", "stop"]
    assert spark.is_left
    assert not spark.folder.exists()


def test_a_query_that_fails_before_it_reads_says_why(opened: Callable[..., RowQuery]) -> None:
    spark = Spark(connects=False, failure=RuntimeError("an error occurred\n: java.lang.Error: no such topic\n\tat x"))

    with pytest.raises(QueryEndedError) as caught, opened(spark):
        pass

    assert str(caught.value) == "an error occurred : java.lang.Error: no such topic"
    assert spark.calls == ["start", "stop"]
    assert not spark.folder.exists()


def test_a_query_that_does_not_begin_to_read_is_given_up(
    opened: Callable[..., RowQuery], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("balance_service.events.spark.row_query._CONNECT_SECONDS", 0.25)
    spark = Spark(connects=False)

    with pytest.raises(QueryEndedError, match="did not begin to read"), opened(spark):
        pass

    assert spark.calls == ["start", "stop"]


def test_a_query_that_spark_refuses_is_one_that_has_ended(opened: Callable[..., RowQuery]) -> None:
    def refuse() -> None:
        raise LookupError("no such format")

    spark = Spark(on_start=refuse)

    with pytest.raises(QueryEndedError, match="no such format"), opened(spark):
        pass

    assert spark.calls == ["start"]
    assert not spark.folder.exists()


def test_what_the_brokers_do_not_allow_is_said_with_where_to_read_on(opened: Callable[..., RowQuery]) -> None:
    deep = RuntimeError(
        "Job aborted\n\tat x\nCaused by: TopicAuthorizationException: Not authorized to access topics: [b]"
    )

    with (
        pytest.raises(QueryEndedError, match=r"not allow Spark to read: .*\[b\]; grant .* \(docs/security.md\)"),
        opened(Spark(connects=False, failure=deep)),
    ):
        pass


@pytest.fixture
def make_paths_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Path]]:
    """Has sockets get paths of so many bytes, in a folder that it returns."""
    with tempfile.TemporaryDirectory(dir="/tmp") as short:

        def make(length: int) -> Path:
            # A folder's name is the prefix and eight characters.
            deep = Path(short) / ("d" * (length - len(f"{short}//balance-rows-12345678/rows")))
            deep.mkdir()
            monkeypatch.setattr(tempfile, "tempdir", str(deep))
            return deep

        yield make


def test_a_path_that_is_too_long_for_a_socket_is_refused_with_what_to_set(
    opened: Callable[..., RowQuery], make_paths_of: Callable[[int], Path]
) -> None:
    folder, spark = make_paths_of(104), Spark()

    with pytest.raises(ConfigurationError, match="too long for a socket; set TMPDIR"), opened(spark):
        pass

    assert spark.calls == []
    assert list(folder.iterdir()) == []


def test_the_longest_path_that_is_not_refused_can_be_used(
    opened: Callable[..., RowQuery], make_paths_of: Callable[[int], Path]
) -> None:
    make_paths_of(103)
    spark = Spark(message(0))

    assert pulled(opened(spark), 1) == [0]
    assert len(f"{spark.folder}/rows") == 103


def test_rows_come_while_the_process_has_more_than_a_thousand_files_open(opened: Callable[..., RowQuery]) -> None:
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
