"""A Spark query in real-time mode over some partitions of a topic, and the rows of each.

Spark reads and decodes events as they arrive. `java/Handover.java` buffers the rows of each partition until they are
pulled. Spark's checkpoints are not used: a query starts at given positions, and is never resumed.
"""

from __future__ import annotations

import re
import select
import shutil
import socket
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa
import structlog

from balance_service.errors import BalanceServiceError, RetriableError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pyspark.sql import DataFrame, SparkSession

    from balance_service.process.scratch import Scratch

log = structlog.get_logger(__name__)

# The bounds of the buffer of a partition; further events stay in Kafka.
_MOST_ROWS = 32_768
_MOST_BYTES = 4 << 20
# A batch holds a slot of Spark for each partition. `SharedQueries` replaces a query before this time.
_BATCH = "24 hours"
_ASK = b"\1"
_COUNT_BYTES = 8
# `Handover` sends it in place of a number of rows.
_COMPLETED = -1
_CONNECT_SECONDS = 60.0
_LOOK_EVERY_SECONDS = 0.2
_END_SECONDS = 5.0
# `Handover` sends a batch that it has begun within milliseconds.
_SEND_SECONDS = 30.0
# The message of `Handover` in a second batch.
_SECOND_BATCH = "a query runs one batch only"
_BATCH_ENDED = "Spark's batch has come to its end"
# The text is in one of the inner causes.
_FORBIDDEN = re.compile(r"Not authorized to access topics: \[[^\]]*\]")


class QueryEndedError(RetriableError):
    """Spark hands over no more rows. Another query continues from the store's position."""


class BatchEndedError(QueryEndedError):
    """The query's only batch has lasted its full time."""


class QueryInterruptedError(QueryEndedError):
    """The query was cancelled during its start."""


class RowQuery:
    """A query and the rows of its partitions while the context is open. Threads may share it."""

    def __init__(
        self,
        spark: SparkSession,
        scratch: Scratch,
        plan: Callable[[Mapping[int, int]], DataFrame],
        positions: Mapping[int, int],
        is_interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        """Args:
        scratch: for its sockets and its checkpoint.
        plan: makes the plan of `Decoder.updates` for a streaming source that begins at these positions.
        positions: the first offset of each partition.
        is_interrupted: whether to cancel the start, by a QueryInterruptedError.
        """
        self._spark = spark
        self._scratch = scratch
        self._plan = plan
        self._is_interrupted = is_interrupted
        self._cleanup = ExitStack()
        self._query: Any = None
        self._ending = threading.Lock()
        self._end: QueryEndedError | None = None
        self.rows = {partition: PartitionStream(self, position) for partition, position in positions.items()}
        """The rows of each partition."""

    def __enter__(self) -> Self:
        """Starts the query. Returns when Spark has opened every partition.

        Raises:
            QueryEndedError: Spark cannot start the query.
        """
        try:
            self._start()
        except BaseException as error:
            self.close()
            if isinstance(error, Exception) and not isinstance(error, BalanceServiceError):
                # Spark and py4j raise many types of errors.
                raise QueryEndedError(in_short(error)) from error
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops the query. Idempotent."""
        self._cleanup.close()

    @property
    def has_ended(self) -> bool:
        """Whether Spark has ended the query. Asks the JVM."""
        if self._end is None and self._query is not None:
            try:
                return not self._query.isActive
            except Exception:  # py4j raises many types of errors.
                return True
        return self._end is not None

    @property
    def is_over(self) -> bool:
        """Whether the end of the query is known here. Does not ask the JVM."""
        return self._end is not None

    def ended(self) -> QueryEndedError:
        """Returns why Spark ended the query; waits for the end for up to five seconds."""
        with self._ending:
            if self._end is None:
                try:
                    if not self._query.awaitTermination(_END_SECONDS):
                        return QueryEndedError("Spark hands over no more rows, though it has not ended the query")
                    failure = self._query.exception()
                except Exception as error:
                    failure = error
                is_full_time = failure is None or _SECOND_BATCH in str(failure)
                self._end = BatchEndedError(_BATCH_ENDED) if is_full_time else QueryEndedError(in_short(failure))
            return type(self._end)(str(self._end))

    def completed(self) -> QueryEndedError:
        """Notes that Spark has completed the batch, which the query outlives by the time of its last checkpoint."""
        with self._ending:
            self._end = self._end or BatchEndedError(_BATCH_ENDED)
            return type(self._end)(str(self._end))

    def _start(self) -> None:
        path = self._scratch.new_socket()
        checkpoint = self._scratch.new_folder()
        self._cleanup.callback(shutil.rmtree, checkpoint, ignore_errors=True)
        for partition, stream in self.rows.items():
            stream.listen(f"{path}.{partition}")
            self._cleanup.callback(stream.close)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            try:
                listener.listen(len(self.rows))
                self._begin(str(path), str(checkpoint))
                for _ in self.rows:
                    self._wait_for(listener)
                    listener.accept()[0].close()
            finally:
                path.unlink(missing_ok=True)

    def _begin(self, path: str, checkpoint: str) -> None:
        jvm: Any = self._spark._jvm
        frame: Any = self._plan({partition: stream.position for partition, stream in self.rows.items()})
        if frame.columns[-1] != "partition":
            # `Handover` would write columns as if they were others, which ends the JVM.
            raise ValueError(f"the last column of a plan is `partition`, not `{frame.columns[-1]}`")
        sent = frame.drop("partition")
        handover = jvm.parts.code.balance.Handover(
            path, _MOST_ROWS, _MOST_BYTES, frame._jdf.schema(), sent._jdf.schema()
        )
        writer = frame.writeStream.outputMode("update").trigger(realTime=_BATCH)
        writer = writer.option("checkpointLocation", checkpoint)
        writer._jwrite.foreach(handover)
        self._query = writer.start()
        self._cleanup.callback(self._stop)

    def _stop(self) -> None:
        try:
            self._query.stop()
        except Exception as error:
            log.warning("a query could not be stopped", error=in_short(error))

    def _wait_for(self, listener: socket.socket) -> None:
        deadline = time.monotonic() + _CONNECT_SECONDS
        while not _is_readable(listener, _LOOK_EVERY_SECONDS):
            if self._is_interrupted():
                raise QueryInterruptedError("the query was interrupted while it started")
            if not self._query.isActive:
                raise self.ended()
            if time.monotonic() > deadline:
                raise QueryEndedError(f"Spark did not begin to read within {_CONNECT_SECONDS:.0f} s")


class PartitionStream:
    """The rows of one partition, in offset order, each once. One thread pulls and closes it.

    Closed once, for good: the query hands over no more rows of the partition, and its other partitions go on.
    """

    def __init__(self, query: RowQuery, position: int) -> None:
        self.position = position
        """The first offset."""
        self.next = position
        """The offset after the last row that was pulled."""
        self.is_closed = False
        self._query = query
        self._count = 0
        self._opened = ExitStack()
        self._path = Path()
        self._listener = socket.socket(socket.AF_UNIX)
        self._connection: socket.socket | None = None
        self._file: Any = None
        self._batches: Any = None
        self._asked = False

    @property
    def has_rows(self) -> bool:
        """Whether Spark has read a row of the partition."""
        return self._connection is not None or _is_readable(self._listener, 0)

    def listen(self, path: str) -> None:
        """Listens at this path for `Handover`, which connects when it has the first row."""
        self._path = Path(path)
        self._opened.callback(self._listen_no_more)
        self._listener.bind(path)
        self._listener.listen(1)

    def pull(self, timeout_seconds: float) -> pa.RecordBatch | None:
        """Returns all rows that have arrived since the last pull; None if none arrives in time.

        Raises:
            QueryEndedError: Spark has ended the query, or handed over the wrong rows.
        """
        try:
            connection = self._connection or self._accepted(timeout_seconds)
            if connection is None:
                return None
            if not self._asked:
                connection.sendall(_ASK)
                self._asked = True
            if not _is_readable(connection, timeout_seconds):
                return None
            before = int.from_bytes(self._file.read(_COUNT_BYTES), signed=True)
            if before == _COMPLETED:
                raise self._query.completed()
            rows: pa.RecordBatch = self._batches.read_next_batch()
        except (OSError, pa.ArrowInvalid, StopIteration) as error:
            raise self._query.ended() from error
        self._asked = False
        first, last = rows["offset"][0].as_py(), rows["offset"][-1].as_py()
        if before != self._count or first < self.next:
            raise QueryEndedError(
                f"Spark handed over offset {first} after {self.next - 1}, and {before} rows before it "
                f"where {self._count} have arrived"
            )
        self._count, self.next = before + rows.num_rows, last + 1
        return rows

    def close(self) -> None:
        """Gives the rows up. Idempotent."""
        self.is_closed = True
        self._opened.close()

    def _accepted(self, timeout_seconds: float) -> socket.socket | None:
        """Accepts the connection; None if `Handover` does not connect in time."""
        if self._query.is_over:
            raise ConnectionError("the query has ended")
        if not _is_readable(self._listener, timeout_seconds):
            return None
        self._connection = self._opened.enter_context(self._listener.accept()[0])
        self._connection.settimeout(_SEND_SECONDS)
        self._file = self._opened.enter_context(self._connection.makefile("rb"))
        self._listen_no_more()
        # `Handover` sends the schema at once.
        self._batches = pa.ipc.open_stream(self._file)
        return self._connection

    def _listen_no_more(self) -> None:
        self._listener.close()
        self._path.unlink(missing_ok=True)


def _is_readable(waiting: socket.socket, timeout_seconds: float) -> bool:
    # `select` supports no file descriptor above 1,023.
    poll = select.poll()
    poll.register(waiting, select.POLLIN)
    return bool(poll.poll(timeout_seconds * 1000))


def in_short(error: Exception) -> str:
    """Returns the message of an error of Spark or py4j, without the stack trace."""
    forbidden = _FORBIDDEN.search(str(error))
    if forbidden is not None:
        grant = "grant this user Read there (docs/how-to/secure.md)"
        return f"the brokers do not allow Spark to read: {forbidden[0]}; {grant}"
    # py4j names the Java exception in the second line.
    lines = str(error).strip().splitlines()[:2]
    return " ".join(line.strip() for line in lines) if lines else type(error).__name__
