"""Values that a small event makes large, such as `repeat(text, n)`: a dead letter of that event, and the JVM lives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)

from balance_service.settings import load_settings
from balance_service.spark.session import start_spark
from tests.integration.transformed import Transformed, mixed, outcomes, outcomes_of_spark, sent
from tests.support.shipped import jvm_scratch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pyspark.sql import DataFrame, SparkSession

MOST_INT = 2**31 - 1
OF_INT: Mapping[str, Any] = {"n": MOST_INT}
OF_TEXT: Mapping[str, Any] = {"text": "1" * 20_000}
LONG = "transform(sequence(1, 10000), x -> 'a')"

HOSTILE: Mapping[str, Mapping[str, Any]] = {
    "size(sequence(1, n))": OF_INT,
    "size(sequence(n, 1))": OF_INT,
    "size(sequence(1L, big, 1L))": {"big": 2**62},
    "size(sequence(-big, big, 2L))": {"big": 2**62},
    "size(sequence(at, at + make_dt_interval(n), interval 1 second))": {"n": 100_000},
    "size(sequence(at, at + make_dt_interval(n), interval '0 00:01' day to minute))": {"n": 100_000},
    "size(sequence(date_add(day, -n), day))": {"n": 2_000_000},
    "length(repeat(text, n))": OF_INT,
    "size(array_repeat(n, n))": OF_INT,
    "size(array_repeat(text, n))": {"n": 2_000, **OF_TEXT},
    "size(array_repeat(items, n))": OF_INT,
    "size(array_repeat(place, n))": OF_INT,
    "length(space(n))": OF_INT,
    "length(lpad(text, n, 'ab'))": OF_INT,
    "length(rpad(text, n, 'ab'))": OF_INT,
    "length(lpad(photo, n, photo))": OF_INT,
    "size(array_insert(nums, n + 1, 1L))": {"n": 2**30},
    "size(array_insert(nums, -n - 1, 1L))": {"n": 2**30},
    "length(format_number(ratio, n))": OF_INT,
    "length(replace(text, '1', text))": OF_TEXT,
    "length(regexp_replace(text, '1', text))": OF_TEXT,
    f"length(array_join({LONG}, text))": OF_TEXT,
    f"length(concat_ws(text, {LONG}))": OF_TEXT,
    "size(transform(sequence(1, 10000), x -> text))": OF_TEXT,
    "length(aggregate(sequence(1, 40), text, (a, x) -> if(length(text) > 2, concat(a, a), a)))": OF_TEXT,
    # Of nested calls, each argument is bounded too.
    "length(concat(lpad(repeat('x', n), 3, 'y'), 'z'))": OF_INT,
}


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    session = start_spark(load_settings(), jvm_scratch(), 1)
    yield session
    session.stop()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("sql", HOSTILE)
def test_a_value_that_an_event_makes_large_is_its_dead_letter(spark: SparkSession, sql: str) -> None:
    def code(events: DataFrame) -> DataFrame:
        return events.withColumn("c", F.expr(sql)).drop("items", "counts")

    model = Transformed(code)
    plain = sent([mixed(big=5), mixed(big=5, text=None, place=None, photo=None)])
    first, hostile, last = outcomes(model, [plain[0], *sent([mixed(**HOSTILE[sql])]), plain[1]])

    assert hostile.failure is not None
    assert hostile.failure.startswith("[TRANSFORM_TOO_LARGE] "), hostile
    assert [first, last] == outcomes_of_spark(spark, model, code, plain)


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("spark")
def test_a_wide_column_beside_many_rows_is_a_dead_letter() -> None:
    def code(events: DataFrame) -> DataFrame:
        rows = events.select("id", "text", F.explode(F.sequence(F.lit(1), "n")).alias("number"))
        return rows.withColumn("id", F.concat("id", F.col("number").cast("string")))

    many, few = outcomes(Transformed(code), sent([mixed(n=9_000, **OF_TEXT), mixed(n=3)]))

    assert many.failure is not None
    assert many.failure.startswith("[TRANSFORM_TOO_LARGE] the rows or items of an array would have more than 16 MiB")
    assert len(few.rows) == 3
