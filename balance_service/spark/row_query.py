"""A Spark query in real-time mode over one partition, and its rows.

Spark reads and decodes events as they arrive. `java/Handover.java` buffers the rows until they are pulled. Spark's
checkpoints are not used: a query starts at a given position, and is never resumed. One thread owns a query.
"""

from __future__ import annotations

import re
import select
import shutil
import socket
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa
import structlog

from balance_service.errors import BalanceServiceError, RetriableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame, SparkSession

    from balance_service.process.scratch import Scratch

log = structlog.get_logger(__name__)

# The bounds of the buffer; further events stay in Kafka.
_MOST_ROWS = 32_768
_MOST_BYTES = 4 << 20
# A batch holds one of Spark's slots. When it ends after this time, `TaskRunner` starts another query.
_BATCH = "24 hours"
_ASK = b"\1"
_CONNECT_SECONDS = 60.0
_LOOK_EVERY_SECONDS = 0.2
_END_SECONDS = 5.0
# The message of `Handover` in a second batch.
_SECOND_BATCH = "a query runs one batch only"
# The text is in one of the inner causes.
_FORBIDDEN = re.compile(r"Not authorized to access topics: \[[^\]]*\]")


class QueryEndedError(RetriableError):
    """Spark hands over no more rows. Another query continues from the store's position."""


class BatchEndedError(QueryEndedError):
    """The query's only batch has lasted its full time."""


class QueryInterruptedError(QueryEndedError):
    """The query was cancelled during its start."""


class RowQuery:
    """The rows of one partition, in offset order, each once, while the context is open.

    Every method raises QueryEndedError once Spark has ended the query.
    """

    def __init__(
        self,
        spark: SparkSession,
        scratch: Scratch,
        rows: Callable[[], DataFrame],
        position: int,
        is_interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        """Args:
        scratch: for its socket and its checkpoint.
        rows: makes the plan of `Decoder.updates` for a streaming source.
        position: the first offset of that source.
        is_interrupted: whether to cancel the start, by a QueryInterruptedError.
        """
        self._spark = spark
        self._scratch = scratch
        self._rows = rows
        self._next = position
        self._is_interrupted = is_interrupted
        self._cleanup = ExitStack()
        self._query: Any = None
        self._connection: socket.socket | None = None
        self._batches: Any = None
        self._asked = False

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException as error:
            self._cleanup.close()
            if isinstance(error, Exception) and not isinstance(error, BalanceServiceError):
                # Spark and py4j raise many types of errors.
                raise QueryEndedError(in_short(error)) from error
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def pull(self, timeout_seconds: float) -> pa.RecordBatch | None:
        """Returns all rows that have arrived since the last pull; None if none arrives in time."""
        if self._connection is None:
            raise QueryEndedError("the query has not started")
        try:
            if not self._asked:
                self._connection.sendall(_ASK)
                self._asked = True
            if not _is_readable(self._connection, timeout_seconds):
                return None
            rows: pa.RecordBatch = self._batches.read_next_batch()
        except (OSError, pa.ArrowInvalid, StopIteration) as error:
            raise self._ended() from error
        self._asked = False
        first, last = rows["offset"][0].as_py(), rows["offset"][-1].as_py()
        if first < self._next:
            raise QueryEndedError(f"Spark handed over offset {first} after {self._next - 1}")
        self._next = last + 1
        return rows

    def _start(self) -> None:
        path = self._scratch.new_socket()
        checkpoint = self._scratch.new_folder()
        self._cleanup.callback(shutil.rmtree, checkpoint, ignore_errors=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            try:
                listener.listen(1)
                self._begin(str(path), str(checkpoint))
                self._wait_for(listener)
                self._connection = self._cleanup.enter_context(listener.accept()[0])
            finally:
                path.unlink(missing_ok=True)
        # The stream begins with the schema, which pyarrow reads without a timeout.
        self._wait_for(self._connection)
        file = self._cleanup.enter_context(self._connection.makefile("rb"))
        self._batches = pa.ipc.open_stream(file)

    def _begin(self, path: str, checkpoint: str) -> None:
        jvm: Any = self._spark._jvm
        frame: Any = self._rows()
        handover = jvm.parts.code.balance.Handover(path, _MOST_ROWS, _MOST_BYTES, frame._jdf.schema())
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

    def _wait_for(self, waiting: socket.socket) -> None:
        deadline = time.monotonic() + _CONNECT_SECONDS
        while not _is_readable(waiting, _LOOK_EVERY_SECONDS):
            if self._is_interrupted():
                raise QueryInterruptedError("the query was interrupted while it started")
            if not self._query.isActive:
                raise self._ended()
            if time.monotonic() > deadline:
                raise QueryEndedError(f"Spark did not begin to read within {_CONNECT_SECONDS:.0f} s")

    def _ended(self) -> QueryEndedError:
        try:
            if not self._query.awaitTermination(_END_SECONDS):
                return QueryEndedError("Spark hands over no more rows, though it has not ended the query")
            failure = self._query.exception()
        except Exception as error:
            failure = error
        if failure is None or _SECOND_BATCH in str(failure):
            return BatchEndedError("Spark's batch has come to its end")
        return QueryEndedError(in_short(failure))


def _is_readable(waiting: socket.socket, timeout_seconds: float) -> bool:
    # `select` supports no file descriptor above 1,023.
    poll = select.poll()
    poll.register(waiting, select.POLLIN)
    return bool(poll.poll(timeout_seconds * 1000))


def in_short(error: Exception) -> str:
    """Returns the message of an error of Spark or py4j, without the stack trace."""
    forbidden = _FORBIDDEN.search(str(error))
    if forbidden is not None:
        return f"the brokers do not allow Spark to read: {forbidden[0]}; grant this user Read there (docs/security.md)"
    # py4j names the Java exception in the second line.
    lines = str(error).strip().splitlines()[:2]
    return " ".join(line.strip() for line in lines) if lines else type(error).__name__
