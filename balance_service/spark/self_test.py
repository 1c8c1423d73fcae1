"""Checks whether Spark itself is the reason why queries fail, by a query that reads nothing from outside.

Task threads call. One of them at a time runs the query; the others continue.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import structlog

from balance_service.engine.database import has_room
from balance_service.errors import FatalError
from balance_service.spark.row_query import QueryEndedError, QueryInterruptedError, RowQuery
from balance_service.spark.session import require_jvm

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame, SparkSession

    from balance_service.process.scratch import Scratch

log = structlog.get_logger(__name__)

_ROW_SECONDS = 30.0
_BODY_BYTES = 1_000
_LOOK_EVERY_SECONDS = 0.5
_EVERY_SECONDS = 5.0
_MOST_FAILURES = 3
# Failed queries of one task in a row, and the seconds since the first, after which the self-test runs.
_DOUBTFUL_FAILURES, _DOUBTFUL_SECONDS = 3, 10.0


def one_record(spark: SparkSession, schema_id: int = 1) -> DataFrame:
    """Returns one record from a memory stream, the only source with real-time mode except Kafka's.

    Args:
        schema_id: of its value, whose fields are empty or zero.
    """
    from pyspark.sql.classic.dataframe import DataFrame as ClassicDataFrame

    jvm: Any = spark._jvm
    session: Any = spark._jsparkSession
    streams = jvm.org.apache.spark.sql.execution.streaming.sources.LowLatencyMemoryStream
    stream = streams.singlePartition(session, jvm.org.apache.spark.sql.Encoders.INT())
    stream.addData(jvm.scala.jdk.javaapi.CollectionConverters.asScala(jvm.java.util.List.of(1)))
    return ClassicDataFrame(stream.toDF(), spark).selectExpr(
        "cast(value as bigint) as offset",
        "current_timestamp() as timestamp",
        "cast('c' as binary) as key",
        f"unhex('00{schema_id:08x}{'00' * _BODY_BYTES}') as value",
        "cast(null as array<struct<key:string,value:binary>>) as headers",
        "0 as partition",
    )


class FailedQueries:
    """Counts the queries of one task that failed in a row."""

    def __init__(self) -> None:
        self._count = 0
        self._since = 0.0

    def add(self) -> bool:
        """Counts a failure. Returns whether there were so many, for so long, that a self-test is due."""
        now = time.monotonic()
        if not self._count:
            self._since = now
        self._count += 1
        return self._count >= _DOUBTFUL_FAILURES and now - self._since >= _DOUBTFUL_SECONDS

    def reset(self) -> None:
        """Resets the count: a query reads."""
        self._count = 0


class SelfTest:
    """Checks whether Spark itself is the reason why a task's queries fail.

    The query uses neither broker nor registry, so an outage, a missing grant or an unreadable record does not make it
    fail. A full disk does, and does not count as a failure of Spark.
    """

    def __init__(self, spark: SparkSession, scratch: Scratch) -> None:
        self._spark = spark
        self._scratch = scratch
        self._asking = threading.Lock()
        self._failures = 0
        self._next = 0.0

    def run(self, is_interrupted: Callable[[], bool]) -> None:
        """Runs the query, unless one is running or ran within the last five seconds.

        Raises:
            FatalError: the query has failed three times in a row, or Spark's JVM has ended.
        """
        if time.monotonic() < self._next or not self._asking.acquire(blocking=False):
            return
        try:
            self._query(is_interrupted)
            self._failures = 0
        except QueryInterruptedError:
            return
        except QueryEndedError as error:
            require_jvm(self._spark, error)
            self._failed(error)
        finally:
            self._next = time.monotonic() + _EVERY_SECONDS
            self._asking.release()

    def _query(self, is_interrupted: Callable[[], bool]) -> None:
        with RowQuery(self._spark, self._scratch, self._record, {0: 0}, is_interrupted) as query:
            deadline = time.monotonic() + _ROW_SECONDS
            while query.rows[0].pull(_LOOK_EVERY_SECONDS) is None:
                if is_interrupted():
                    raise QueryInterruptedError("the self-test was interrupted")
                if time.monotonic() > deadline:
                    raise QueryEndedError(f"Spark handed over no row within {_ROW_SECONDS:.0f} s")

    def _record(self, _positions: object) -> DataFrame:
        return one_record(self._spark)

    def _failed(self, error: QueryEndedError) -> None:
        if not has_room(self._scratch.files):
            return
        self._failures += 1
        log.error("Spark fails at a query that reads nothing from outside", error=str(error), times=self._failures)
        if self._failures >= _MOST_FAILURES:
            raise FatalError(f"Spark runs no query any more: {error}") from error
