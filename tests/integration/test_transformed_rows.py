"""The rows that the steps of a `transform` make of each event are those that Spark makes of the same code."""

from __future__ import annotations

import os
import re
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)

from balance_service.errors import ConfigurationError
from balance_service.settings import load_settings
from balance_service.spark.session import start_spark
from tests.integration.transformed import NOTHING, Transformed, mixed, outcomes, outcomes_of_spark, sent
from tests.support.shipped import jvm_scratch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pyspark.sql import DataFrame, SparkSession

    from tests.integration.transformed import Code

pytestmark = pytest.mark.timeout(600)

FIXED = [
    mixed(),
    mixed(**NOTHING),
    mixed(n=2**31 - 1, big=2**63 - 1, small=0, text="x"),
    mixed(n=-(2**31), big=-(2**63), small=-1, text=""),
    mixed(paid=Decimal("9999999999999999.99"), price=Decimal("-999999.9999"), text=None),
    mixed(ratio=float("nan"), share=float("inf"), text="1e3", tags=[]),
    mixed(ratio=-0.0, day=date(1, 1, 1), at=datetime(1, 1, 1, tzinfo=UTC), text="2024-02-30"),
    mixed(day=date(9999, 12, 31), text=" 5 ", place={"city": "", "since": None}, tags=["a", "a", "é"]),
    mixed(nums=[2**62, 2**62], counts={"": 0}, items=[], text="2024-02-29"),
    mixed(n=1, small=1, text="0", nums=[None], is_on=False),
]


def made(*steps: tuple[str, ...]) -> Code:
    """Returns code of steps: ("column", name, SQL), ("where", SQL), ("explode", name, SQL) and so on."""

    def code(events: DataFrame) -> DataFrame:
        for kind, *of in steps:
            match kind, of:
                case "column", (name, sql):
                    events = events.withColumn(name, F.expr(sql))
                case "where", (sql,):
                    events = events.where(F.expr(sql))
                case "posexplode" | "posexplode_outer", (name, sql):
                    generator = getattr(F, kind)(F.expr(sql))
                    events = events.select("*", generator.alias(f"{name}_pos", name))
                case "inline" | "inline_outer", (name, sql):
                    generator = getattr(F, kind)(F.expr(sql))
                    events = events.select("*", generator.alias(*(f"{name}_{one}" for one in _MEMBERS)))
                case "entries" | "entries_outer", (name, sql):
                    generator = getattr(F, kind.replace("entries", "explode"))(F.expr(sql))
                    events = events.select("*", generator.alias(f"{name}_key", f"{name}_value"))
                case _, (name, sql):
                    events = events.select("*", getattr(F, kind)(F.expr(sql)).alias(name))
        return events

    return code


_MEMBERS = ("code", "qty", "cost", "notes")


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    session = start_spark(load_settings(), jvm_scratch(), 1)
    yield session
    session.stop()


def reused(events: DataFrame) -> DataFrame:
    for _ in range(12):
        events = events.withColumn("big", F.col("big") % 1000 + F.col("big") % 7).withColumn("n", F.col("n") % 5 + 1)
    return events.withColumn("both", F.col("big") * F.col("n"))


def swapped(events: DataFrame) -> DataFrame:
    columns = [one for one in events.columns if one not in ("n", "small")]
    return events.select(*columns, F.col("small").alias("n"), F.col("n").alias("small")).where("n is not null")


def of_record(events: DataFrame) -> DataFrame:
    return events.select(
        "id",
        "_offset",
        F.col("_key").cast("string").alias("key"),
        *(F.col(f"_{name}").alias(name) for name in ("topic", "partition", "offset", "timestamp", "headers")),
    )


HAND_WRITTEN: Mapping[str, Code] = {
    "nothing": lambda events: events,
    "columns of the record": of_record,
    "columns that are computed of each other": reused,
    "columns that are swapped": swapped,
    "a dropped column is not computed": lambda events: events.withColumn("bad", F.expr("n / small")).drop("bad"),
    "overflow": made(("column", "c", "n + 1"), ("column", "d", "n - 1")),
    "division": made(("column", "c", "big / small")),
    "cast": made(("column", "c", "cast(text as int)"), ("column", "d", "c + 1")),
    "a decimal without room": made(("column", "c", "cast(paid as decimal(6, 1))")),
    "a product of decimals": made(("column", "c", "paid * paid * paid * price")),
    "a date of a text": made(("column", "c", "to_date(text)"), ("column", "d", "year(c)")),
    "an item that is not there": made(("column", "c", "nums[1]"), ("column", "d", "element_at(tags, 2)")),
    "try": made(("column", "c", "try_divide(big, small)"), ("column", "d", "try_cast(text as int)")),
    "failures in branches that are not taken": made(
        ("column", "c", "case when small > 0 then n / small when small is null then -1 end"),
        ("column", "d", "if(small = 0, 0, n % small)"),
        ("column", "e", "coalesce(small, n / 0)"),
    ),
    "failures that are constant": made(("column", "c", "if(small is null, 1 / 0, 1)")),
    "expressions that Spark evaluates once": made(
        ("column", "c", "(n + 1) between 0 and (n + 1) * 2"),
        ("column", "d", "nullif(big % 3, small)"),
        ("column", "e", "(n + 1) in (small + 1, 2, 3)"),
    ),
    "filters before and after": made(
        ("where", "small is not null"), ("column", "c", "n div 2"), ("where", "c > 0"), ("where", "c < 100")
    ),
    "a filter that is null": made(("where", "small > 0"), ("where", "not (text = 'x')")),
    "everything filtered": made(("where", "n is null")),
    "explode": made(("explode", "tag", "tags"), ("column", "c", "concat(tag, n)")),
    "explode_outer": made(("explode_outer", "tag", "tags"), ("column", "c", "coalesce(tag, 'none')")),
    "posexplode": made(("posexplode", "num", "nums"), ("column", "c", "num_pos + num")),
    "posexplode_outer": made(("posexplode_outer", "num", "nums"), ("where", "num_pos is null or num_pos > 0")),
    "inline": made(("inline", "item", "items"), ("column", "c", "item_cost * item_qty")),
    "inline_outer": made(("inline_outer", "item", "items"), ("column", "c", "10 / item_qty")),
    "inline of items that are null": made(
        ("column", "maybe", "transform(items, x -> if(x.qty > 0, x, null))"), ("inline", "item", "maybe")
    ),
    "inline_outer of items that are null": made(
        ("column", "maybe", "transform(items, x -> if(x.qty > 0, x, null))"), ("inline_outer", "item", "maybe")
    ),
    "explode of a map": made(("entries", "of", "counts"), ("column", "c", "of_value * 2")),
    "explode_outer of a map": made(("entries_outer", "of", "counts"), ("where", "of_key is null or of_value > 0")),
    "explode of structs": made(("explode", "item", "items"), ("column", "c", "item.cost"), ("where", "item.qty > 0")),
    "generators of generators": made(
        ("explode", "item", "items"),
        ("explode_outer", "note", "item.notes"),
        ("column", "c", "concat_ws('-', note, item.code)"),
    ),
    "generators of null arrays in generators": made(
        ("column", "maybe", "transform(items, x -> if(x.qty > 0, x.notes, null))"),
        ("explode", "notes", "maybe"),
        ("explode", "note", "notes"),
    ),
    "outer generators of null arrays in generators": made(
        ("column", "maybe", "transform(items, x -> if(x.qty > 0, x.notes, null))"),
        ("explode_outer", "notes", "maybe"),
        ("explode_outer", "note", "notes"),
    ),
    "a product of two generators": made(
        ("posexplode", "num", "nums"), ("posexplode", "tag", "tags"), ("column", "c", "num_pos * 10 + tag_pos")
    ),
    "three generators": made(
        ("explode", "num", "nums"),
        ("explode_outer", "tag", "tags"),
        ("entries_outer", "of", "counts"),
        ("where", "num > 0"),
    ),
    "a failure in one of the rows": made(("explode", "num", "nums"), ("column", "c", "1 / (num - 1)")),
    "a failure in a generator": made(("explode", "num", "sequence(0, n % 10, small)")),
    "columns after a generator, several times": made(
        ("explode", "num", "nums"), ("column", "c", "num % 5"), ("column", "d", "c + c"), ("column", "e", "d * c - num")
    ),
    "columns of the event after a generator": made(
        ("column", "twice", "n % 10 * 2"),
        ("explode", "num", "nums"),
        ("column", "c", "twice + num % 3"),
        ("column", "twice", "c"),
    ),
    "functions of arrays": made(
        ("column", "c", "transform(nums, (x, i) -> coalesce(x % 3, 0) + i)"),
        ("column", "d", "filter(tags, x -> x > 't')"),
        ("column", "e", "aggregate(nums, 0L, (a, x) -> a + coalesce(x, 0L), a -> a * 2)"),
        ("column", "f", "exists(nums, x -> x > 0)"),
        ("column", "g", "zip_with(nums, tags, (x, y) -> concat_ws('', x, y))"),
        ("column", "h", "array_sort(nums, (a, b) -> cast(coalesce(b, 0) % 7 - coalesce(a, 0) % 7 as int))"),
        (
            "column",
            "i",
            "transform(items, x -> named_struct('code', x.code, 'all', aggregate(x.notes, '', (a, y) -> a || y)))",
        ),
    ),
    "functions of maps": made(
        ("column", "c", "transform_values(counts, (k, v) -> v * n % 100)"),
        ("column", "d", "map_filter(counts, (k, v) -> v > 0)"),
        ("column", "f", "element_at(counts, 'x')"),
    ),
    "structs": made(
        ("column", "c", "named_struct('n', n, 'in', named_struct('text', text, 'place', place))"),
        ("column", "d", "c.in.place.since"),
        ("column", "e", "if(is_on, place, null)"),
    ),
    "times": made(
        ("column", "c", "at - interval 1 second"),
        ("column", "d", "date_trunc('HOUR', at)"),
        ("column", "e", "local + interval 90 minutes"),
        ("column", "f", "timestamp_micros(unix_micros(at) div 600000000 * 600000000)"),
        ("column", "g", "date_format(at, 'yyyy-MM-dd HH:mm')"),
        ("column", "h", "datediff(day, to_date(at))"),
    ),
    "small numbers": made(("column", "c", "cast(n as tinyint)"), ("column", "d", "array(cast(small as smallint))")),
    "texts": made(
        ("column", "c", "regexp_extract(text, '([0-9]+)', 1)"),
        ("column", "d", "split(text, '')"),
        ("column", "e", "from_json('{\"a\": ' || text || '}', 'a int')"),
        ("column", "f", "base64(photo)"),
        ("column", "g", "to_json(place)"),
        ("column", "h", "upper(place.city)"),
    ),
}


@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_rows_are_those_of_spark(spark: SparkSession, name: str) -> None:
    code = HAND_WRITTEN[name]
    read_model, events = Transformed(code), sent(FIXED)

    found = outcomes(read_model, events)

    expected = outcomes_of_spark(spark, read_model, code, events)
    assert [one.rows for one in found] == [one.rows for one in expected]
    assert [*map(error_class, found)] == [*map(error_class, expected)]


def error_class(outcome: Any) -> str | None:
    if outcome.failure is None:
        return None
    match = re.match(r"\[[A-Z0-9_.]+\]", outcome.failure)
    return match[0] if match else "another"


# What expressions of a type are made of; `{type}` is another expression. Each may fail, as ANSI has it.
FORMS: Mapping[str, tuple[str, ...]] = {
    "int": (
        *("({int} + {int})", "({int} * {int})", "-({int})", "({int} % {int})", "cast({str} as int)", "length({str})"),
        *("size({longs})", "if({bool}, {int}, {int})", "coalesce({int}, {int})", "nullif({int}, {int})"),
        *("case when {bool} then {int} when {bool} then {int} end", "greatest({int}, {int})", "cast({long} as int)"),
        *("items[{int}].qty", "year({date})", "datediff({date}, {date})", "try_add({int}, {int})", "month({ts})"),
    ),
    "long": (
        *("({long} + {int})", "({long} * {long})", "({long} div {int})", "cast({double} as bigint)", "{longs}[{int}]"),
        *("aggregate({longs}, 0L, (a, x) -> a + coalesce(x, {long}))", "element_at({longs}, {int})", "counts[{str}]"),
        *(
            "coalesce({long}, {int})",
            "unix_micros({ts})",
            "floor({double})",
            "cast({dec} as bigint)",
            "array_max({longs})",
        ),
    ),
    "double": ("({int} / {int})", "({double} * {double})", "cast({str} as double)", "abs({double})", "sqrt({int})"),
    "dec": (
        *("cast({dec} + {dec} as decimal(20, 2))", "cast({dec} * {int} as decimal(12, 3))", "round({dec}, 1)"),
        *(
            "cast({dec} / {dec} as decimal(18, 4))",
            "coalesce({dec}, {dec})",
            "items[{int}].cost",
            "cast({long} as decimal(9))",
        ),
    ),
    "str": (
        *("concat({str}, {str})", "cast({int} as string)", "upper({str})", "substring({str}, {int}, 2)", "place.city"),
        *("if({bool}, {str}, {str})", "concat_ws('-', {strs})", "element_at({strs}, {int})", "coalesce({str}, 'none')"),
        *("date_format({ts}, 'yyyy-MM-dd')", "cast({date} as string)", "cast({dec} as string)", "get({strs}, {int})"),
    ),
    "bool": (
        *("{int} > {int}", "{str} = {str}", "{int} between {int} and {int}", "{str} is null", "({bool} and {bool})"),
        *(
            "({bool} or {bool})",
            "not {bool}",
            "{long} in ({int}, {long})",
            "exists({longs}, x -> x > {int})",
            "{dec} < {dec}",
        ),
        *("array_contains({strs}, {str})", "{double} <=> {double}", "{date} < {date}"),
    ),
    "date": ("to_date({ts})", "date_add({date}, {int} % 50)", "coalesce({date}, date'2024-02-29')", "to_date({str})"),
    "ts": (
        "({ts} + interval 1 hour)",
        "date_trunc('DAY', {ts})",
        "timestamp_seconds({int})",
        "coalesce(place.since, {ts})",
    ),
    "longs": (
        *("transform({longs}, x -> x + {int})", "filter({longs}, x -> x > {int})", "if({bool}, {longs}, null)"),
        *(
            "array({long}, {int})",
            "map_values(counts)",
            "transform(items, x -> cast(x.qty as bigint))",
            "slice({longs}, 1, 2)",
        ),
        *("transform({longs}, (x, i) -> x div (i - {int}))",),
    ),
    "strs": (
        *(
            "split({str}, '')",
            "transform(items, x -> concat(x.code, {str}))",
            "array_distinct({strs})",
            "map_keys(counts)",
        ),
        *("flatten(transform(items, x -> transform(x.notes, y -> concat(x.code, y))))", "array({str}, {str})"),
    ),
    "items": (
        "filter({items}, x -> x.qty > {int})",
        "transform({items}, x -> if(x.qty > 0, x, null))",
        "reverse({items})",
    ),
}
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "int": ("n", "small", "0", "1", "2147483647"),
    "long": ("big", "n", "3L"),
    "double": ("ratio", "share", "0.5D"),
    "dec": ("paid", "price", "1.25"),
    "str": ("text", "id", "'7'", "''"),
    "bool": ("is_on", "true"),
    "date": ("day", "date'2024-02-29'"),
    "ts": ("at", "timestamp'2024-02-29 12:00:00'"),
    "longs": ("nums", "array(1L, null, 3L)"),
    "strs": ("tags", "array('a', '5')"),
    "items": ("items",),
}
# Columns have these types again, whatever Spark makes of the parts.
CASTS = {"int": "int", "long": "bigint", "double": "double", "dec": "decimal(20,4)", "str": "string", "bool": "boolean"}
_PART = re.compile(r"\{(\w+)\}")


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[str, ...]]:
    """Draws columns, filters and generators, each of the columns before it."""
    columns = {kind: [*names] for kind, names in COLUMNS.items()}

    def expression(kind: str, depth: int) -> str:
        if depth == 0 or draw(st.integers(0, 3)) == 0:
            return draw(st.sampled_from(columns[kind]))
        return _PART.sub(lambda part: expression(part[1], depth - 1), draw(st.sampled_from(FORMS[kind])))

    found: list[tuple[str, ...]] = []
    for number in range(draw(st.integers(1, 6))):
        what = draw(st.sampled_from(["column"] * 5 + ["where", "explode", "inline"]))
        name, is_outer = f"c{number}", draw(st.booleans())
        match what:
            case "column":
                kind = draw(st.sampled_from([*FORMS]))
                # Also in place of a column that other ones were computed of.
                name = draw(st.sampled_from([name, *([columns["int"][0]] if kind == "int" else [])]))
                sql = expression(kind, 3)
                found.append(("column", name, f"cast({sql} as {CASTS[kind]})" if kind in CASTS else sql))
                columns[kind].append(name)
            case "where":
                found.append(("where", expression("bool", 2)))
            case "explode":
                kind = draw(st.sampled_from(["longs", "strs"]))
                how = draw(st.sampled_from(["explode", "posexplode"]))
                found.append((f"{how}_outer" if is_outer else how, name, expression(kind, 2)))
                columns["long" if kind == "longs" else "str"].append(name)
            case _:
                found.append(("inline_outer" if is_outer else "inline", name, expression("items", 1)))
                columns["int"].append(f"{name}_qty")
                columns["strs"].append(f"{name}_notes")
    return found


EVENTS = st.lists(
    st.builds(
        mixed,
        n=st.sampled_from([0, 1, 2, -3, 2**31 - 1]),
        big=st.sampled_from([0, 5, -(2**62), 2**63 - 1]),
        small=st.sampled_from([None, 0, 1, 2]),
        ratio=st.sampled_from([0.0, 2.5, float("nan"), 1e300]),
        paid=st.sampled_from([Decimal("0.00"), Decimal("12.34"), Decimal("9999999999999999.99")]),
        price=st.sampled_from([None, Decimal("0.0000"), Decimal("-1.5000")]),
        day=st.sampled_from([None, date(2024, 2, 29), date(1999, 12, 31)]),
        text=st.sampled_from([None, "", "7", "x", "2024-02-29"]),
        is_on=st.booleans(),
        tags=st.sampled_from([None, [], ["7"], ["a", "x"]]),
        nums=st.sampled_from([[], [None], [1, 2], [2**62, None]]),
        place=st.sampled_from([None, {"city": "1", "since": None}]),
        items=st.sampled_from([[], mixed()["items"]]),
    ),
    min_size=3,
    max_size=6,
)


# The same few by default; `TRANSFORMS=100` draws others.
@settings(
    max_examples=int(os.environ.get("TRANSFORMS", "3")),
    derandomize="TRANSFORMS" not in os.environ,
    database=None,
    suppress_health_check=[*HealthCheck],
)
@given(drawn=steps(), fields=EVENTS)
def test_rows_of_any_code_are_those_of_spark(
    spark: SparkSession, drawn: list[tuple[str, ...]], fields: list[Any]
) -> None:
    code, events = made(*drawn), sent(fields)
    try:
        read_model = Transformed(code)
    except ConfigurationError as error:
        # Spark itself refuses some, such as a literal without room.
        if "that fails: [" not in str(error):
            raise
        reject()

    found = outcomes(read_model, events)

    expected = outcomes_of_spark(spark, read_model, code, events)
    is_filtered = any(kind == "where" for kind, *_ in drawn)
    for one, other in zip(found, expected, strict=True):
        # Spark moves filters, so an event or a row that one drops may fail before.
        if not is_filtered or (one.failure is None and other.failure is None):
            assert (one.rows, one.failure is None) == (other.rows, other.failure is None), (drawn, one, other)
        elif not read_model.stages[0].passes_on:
            assert not one.rows
            assert not other.rows
