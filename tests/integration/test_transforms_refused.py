"""Transforms that cannot be applied to single events: refused when the model is bound, with what to write instead."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)
from pyspark.sql.window import Window

from balance_service.errors import ConfigurationError
from balance_service.model.folds import Count, RunningSum
from balance_service.model.read_model import ReadModel
from balance_service.model.stream import Stream
from balance_service.settings import load_settings
from balance_service.spark.session import start_spark
from tests.integration.transformed import MIXED, Transformed
from tests.support.shipped import jvm_scratch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame, SparkSession

    from tests.integration.transformed import Code

EACH_TIME = "whose value would be another in each rebuild: use the columns of the event, such as `_timestamp`"
SURROUNDINGS = "which does not depend on the event alone: use Spark's built-in functions of the event's columns"
PYTHON = "Spark's real-time mode runs no Python functions: use Spark's built-in functions, or a `fold`"


@pytest.fixture(scope="module", autouse=True)
def spark() -> Iterator[SparkSession]:
    session = start_spark(load_settings(), jvm_scratch(), 1)
    yield session
    session.stop()


def expression(sql: str) -> Code:
    return lambda events: events.withColumn("c", F.expr(sql))


def failing(_events: DataFrame) -> DataFrame:
    raise ZeroDivisionError("no amount of it")


def in_python(events: DataFrame) -> DataFrame:
    return events.withColumn("c", F.udf(lambda text: text, useArrow=False)("text"))


def in_pandas(events: DataFrame) -> DataFrame:
    pytest.importorskip("pandas")
    return events.withColumn("c", F.pandas_udf(lambda text: text, "string")("text"))  # type: ignore[call-overload]


def in_arrow(events: DataFrame) -> DataFrame:
    pytest.importorskip("pandas")
    return events.mapInArrow(lambda some: some, events.schema)


def setting(name: str, value: str) -> Code:
    def code(events: DataFrame) -> DataFrame:
        events.sparkSession.conf.set(name, value)
        return events

    return code


def numbered(events: DataFrame) -> DataFrame:
    return events.withColumn("c", F.row_number().over(Window.partitionBy("id").orderBy("n")))


REFUSED: dict[str, tuple[Any, str, str]] = {
    "an aggregate": (lambda e: e.groupBy("id").count(), "uses Aggregate", "declare folds"),
    "an aggregate without keys": (lambda e: e.agg(F.sum("n").alias("n")), "uses Aggregate", "declare folds"),
    "a join": (lambda e: e.join(e.select("id"), "id"), "uses Join", "use `Stream.join` with a `Table`"),
    "distinct": (lambda e: e.select("id").distinct(), "uses D", "the key of the model names what is counted once"),
    "dropDuplicates": (lambda e: e.dropDuplicates(["id"]), "uses D", "the key of the model names what is counted once"),
    "orderBy": (lambda e: e.orderBy("n"), "uses Sort", "a query of the model sorts"),
    "limit": (lambda e: e.limit(3), "uses GlobalLimit", "a query of the model sorts"),
    "offset": (lambda e: e.offset(3), "uses Offset", "a query of the model sorts"),
    "a window": (numbered, "uses Window", "a window is a part of a computed key"),
    "union": (lambda e: e.union(e), "uses Union", "declare several `sources`"),
    "sample": (lambda e: e.sample(0.5, 1), "uses Sample", "use a filter"),
    "repartition": (lambda e: e.repartition(2), "uses Repartition", "use projections, filters and `explode` only"),
    "a setting of values": (
        setting("spark.sql.ansi.enabled", "false"),
        "sets spark.sql.ansi.enabled in `transform`",
        "remove that",
    ),
    "any other setting": (
        setting("spark.sql.shuffle.partitions", "1"),
        "sets spark.sql.shuffle.partitions in `transform`",
        "remove that",
    ),
    "a setting in SQL": (
        lambda e: [e.sparkSession.sql("SET spark.sql.orderByOrdinal = false"), e][1],
        "sets spark.sql.orderByOrdinal in `transform`",
        "remove that",
    ),
    "a Python function": (in_python, "uses a Python function", PYTHON),
    "a pandas function": (in_pandas, "uses a Python function", PYTHON),
    "mapInArrow": (in_arrow, "uses ", PYTHON),
    "a subquery": (expression("(select 1)"), "has a subquery", "join events with the rows of a `Table`"),
    "another DataFrame": (
        lambda e: e.sparkSession.sql("select 'a' as id"),
        "reads another DataFrame",
        "the rows of a `Table`",
    ),
    "rows of another DataFrame": (
        lambda e: e.sparkSession.range(3).select(F.lit("a").alias("id")),
        "",
        "the rows of a `Table`",
    ),
    "no DataFrame": (lambda _e: None, "returns NoneType from `transform`", "which is to return a DataFrame"),
    "a column": (lambda e: e["id"], "returns Column from `transform`", "which is to return a DataFrame"),
    "code that raises": (failing, "has a `transform` that fails", "no amount of it"),
    "a column that is not there": (lambda e: e.select("id", "absent"), "that fails", "`absent` cannot be resolved"),
    "no columns": (lambda e: e.select("_offset"), "returns no column in `transform`", "select the key"),
    "two columns of one name": (
        lambda e: e.select("id", F.lit(1).alias("c"), F.lit(2).alias("c")),
        "two columns 'c'",
        "rename or drop",
    ),
    "two columns whose names differ in case": (
        lambda e: e.select("id", F.lit(1).alias("c"), F.lit(2).alias("C")),
        "two columns 'C'",
        "rename or drop",
    ),
    "a column without a name": (lambda e: e.select("id", F.col("n") + 1), "returns '(n + 1)'", "with `alias`"),
    "an interval": (expression("make_dt_interval(n)"), "returns 'c'", "whose type is interval"),
    "an interval of months": (expression("make_ym_interval(n, 1)"), "returns 'c'", "whose type is interval"),
    "a variant": (expression("parse_json(text)"), "whose type is variant", "cast it to a type that states can have"),
    "a literal that is the present time": (
        expression("timestamp 'now'"),
        "returns another plan each time",
        "use the columns of the event",
    ),
    "a constant of Python that changes": (
        lambda events: events.withColumn("c", F.lit(time.time_ns())),
        "returns another plan each time",
        "use the columns of the event",
    ),
    "a map of arrays": (expression("map_from_arrays(tags, tags)"), "uses map_from_arrays", "use an array of structs"),
    "a map of columns": (expression("map(text, n)"), "uses map", "use an array of structs"),
    "a format of an event": (expression("format_string(text, n)"), "uses format_string", "write a constant"),
    "a null": (expression("null"), "whose type is void", "cast it to a type"),
    "a collation": (expression("collate(text, 'UTF8_LCASE')"), "whose collation is", "cast it to a type"),
    "a member without a name": (expression("named_struct('a b', n)"), "whose member 'a b'", "cast it to a type"),
    "stack": (lambda e: e.select("id", F.expr("stack(2, n, small)").alias("c")), "uses stack", "use `explode`"),
    "json_tuple": (lambda e: e.select("id", F.json_tuple("text", "a").alias("c")), "uses json_tuple", "use `explode`"),
}
# What Spark computes from the machine, the session, the moment or chance.
ELSEWHERE = (
    *("now()", "current_timestamp()", "current_timestamp", "current_date()", "curdate()", "current_date"),
    *("localtimestamp()", "unix_timestamp()", "current_time()", "uuid()", "rand()", "rand(1)", "randn()", "random()"),
    *("uniform(1, 5)", "uniform(1, 5, 0)", "randstr(5)", "randstr(5, 0)", "shuffle(nums)", "shuffle(nums, 1)"),
    *("monotonically_increasing_id()", "spark_partition_id()", "input_file_name()", "input_file_block_start()"),
    *("input_file_block_length()", "current_user()", "user()", "session_user()", "current_database()"),
    *("current_schema()", "current_catalog()", "current_timezone()", "version()"),
    *("java_method('java.util.UUID', 'randomUUID')", "reflect('java.util.UUID', 'randomUUID')"),
    *("try_reflect('java.util.UUID', 'randomUUID')", "cast('now' as timestamp)", "to_date('today')"),
    *("cast(' Tomorrow UTC' as timestamp_ntz)", "aes_encrypt(photo, '0000111122223333')"),
    *("transform(nums, x -> x + rand())", "filter(nums, x -> x > unix_timestamp())", "if(is_on, now(), at)"),
    *("named_struct('a', array(uuid()))", "aggregate(nums, 0D, (a, x) -> a + randn(1))"),
)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_operation_on_single_events_is_refused(name: str) -> None:
    code, what, instead = REFUSED[name]

    with pytest.raises(ConfigurationError) as caught:
        Transformed(code)

    said = str(caught.value)
    assert said.startswith("the read model Transformed (")
    assert what in said
    assert instead in said


@pytest.mark.parametrize("sql", ELSEWHERE)
def test_what_an_event_does_not_determine_is_refused(sql: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Transformed(expression(sql))

    assert EACH_TIME in str(caught.value) or SURROUNDINGS in str(caught.value)


def test_a_filter_or_a_generator_may_not_depend_on_chance_either() -> None:
    with pytest.raises(ConfigurationError, match="another in each rebuild"):
        Transformed(lambda events: events.where(F.rand() > 0))
    with pytest.raises(ConfigurationError, match="another in each rebuild"):
        Transformed(lambda events: events.select("id", F.explode(F.array(F.rand()))).alias("c"))


@pytest.mark.parametrize(
    "sql", ["typeof(n)", "schema_of_json('[1]')", "pi()", "e()", "hash(n)", "cast('epoch' as date)"]
)
def test_what_is_the_same_everywhere_is_allowed(sql: str) -> None:
    assert Transformed(expression(sql)).stages[0].transform is not None


@dataclass(frozen=True)
class Summed:
    id: str
    total: int


def define(**changed: Any) -> type[ReadModel]:
    attributes: dict[str, Any] = {
        "name": "test-summed",
        "source": Stream("mixed", MIXED),
        "key": "id",
        "state": Summed,
        "total": RunningSum("twice"),
        "transform": lambda _self, events: events.withColumn("twice", F.expr("n * 2L")),
    }
    return type("Declared", (ReadModel,), {"__module__": __name__, **attributes, **changed})


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (
            {"total": RunningSum("absent")},
            "names 'absent', but the rows of its `transform` have no such column; it has id",
        ),
        ({"total": RunningSum("Mixed.n")}, "after a `transform`, a fold names a column of its rows"),
        ({"total": Count("Mixed.n")}, "after a `transform`, a fold names a column of its rows"),
        ({"key": "absent"}, "names 'absent', but the rows of its `transform` have no such column"),
        ({"key": "ratio"}, "has the key 'ratio', which must be a string"),
        ({"source": Stream("mixed", MIXED).select("id", "n")}, "has a `transform` and a `select`"),
        ({"source": Stream("mixed", MIXED, tombstones=True)}, "has a `transform` and a source with tombstones"),
    ],
)
def test_a_declaration_that_does_not_fit_its_rows_is_refused(changed: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        define(**changed)()

    assert why in str(caught.value)
    assert "Declared" in str(caught.value)


def test_a_declaration_that_fits_its_rows_is_bound() -> None:
    (stage,) = define()().stages

    assert stage.transform is not None
    assert {*stage.transform.names} == {"id", "twice"}
