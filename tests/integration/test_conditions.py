"""Conditions give the same result on Spark columns and as functions of a row."""

from __future__ import annotations

import operator
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from balance_service.avro import arrow_rows
from balance_service.avro.schemas import fields_of, without_null
from balance_service.model.conditions import col
from balance_service.settings import load_settings
from balance_service.spark.columns import column_of
from balance_service.spark.session import start_spark
from balance_service.testing.rows import arrow_type
from balance_service.testing.strategies import values_of
from tests.support.shipped import jvm_scratch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from hypothesis.strategies import SearchStrategy
    from pyspark.sql import SparkSession

    from balance_service.avro.schemas import Schema
    from balance_service.model.conditions import Condition


# Each example has many events and conditions. Shrinking would take minutes; the message names the two that differ.
FEW = settings(
    max_examples=8,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)


def record(name: str, fields: Mapping[str, Any]) -> Schema:
    listed = [{"name": field, "type": kind} for field, kind in fields.items()]
    return {"type": "record", "name": name, "fields": listed}


def money(precision: int, scale: int) -> Any:
    return {"type": "bytes", "logicalType": "decimal", "precision": precision, "scale": scale}


def logical(name: str, kind: str = "long") -> Any:
    return {"type": kind, "logicalType": name}


PLAIN: dict[str, Any] = {
    "flag": "boolean",
    "small": "int",
    "large": "long",
    "single": "float",
    "double": "double",
    "text": "string",
    "kind": {"type": "enum", "name": "Kind", "symbols": ["small", "SMALL", "Large"]},
    "ref": logical("uuid", "string"),
    "raw": "bytes",
    "serial": {"type": "fixed", "name": "Serial", "size": 2},
    "cents": money(18, 2),
    "wide": money(38, 2),
    "whole": money(38, 0),
    "tiny": money(38, 38),
    "day": logical("date", "int"),
    "millis": logical("timestamp-millis"),
    "micros": logical("timestamp-micros"),
    "here": logical("local-timestamp-micros"),
}
NESTING: dict[str, Any] = {"tags": {"type": "array", "items": "string"}, "counts": {"type": "map", "values": "long"}}
DEEPER = record("Deeper", {"text": ["null", "string"], "cents": money(18, 2)})
PLACE = record("Place", {"text": "string", "deeper": ["null", DEEPER], "small": "int"})
EVERY = record(
    "Every",
    {
        **PLAIN,
        **NESTING,
        **{f"{name}OrNull": ["null", kind] for name, kind in (PLAIN | NESTING).items()},
        "place": PLACE,
        "placeOrNull": ["null", PLACE],
    },
)
# The shared fields differ in type, although a value of one could pass for one of the other.
ONE = record("One", {"text": "string", "number": "int", "amount": money(38, 0), "what": NESTING["tags"]})
OTHER = record("Other", {"text": ["null", "string"], "number": "long", "amount": money(38, 10), "what": "double"})

_TEXTS = ["", "a", "A", "home", "HOME", "HÖME", "höme", "PRİME", "ß", "\uffff", "\U00010000", "0"]
_FLOATS = [0.0, -0.0, float("nan"), float("inf"), float("-inf"), 0.1, 0.10000000149011612, 1.0]
_DAYS = [date(1, 1, 1), date(1500, 3, 1), date(1582, 10, 4), date(1582, 10, 10), date(1970, 1, 1), date(9999, 12, 31)]
_MOMENTS = [datetime(day.year, day.month, day.day, 2, 30, 0, 1, UTC) for day in _DAYS]
_ZURICH = ZoneInfo("Europe/Zurich")
_NIGHT = datetime(2026, 10, 25, 0, 30, tzinfo=UTC)
# Values of rows and of literals; some are close to each other.
KNOWN: dict[str, list[Any]] = {
    "string": _TEXTS,
    "uuid": _TEXTS,
    "enum": ["small", "SMALL", "Large"],
    "int": [0, 1, -1, 2**31 - 1, -(2**31)],
    "long": [0, 1, 2**31, 2**63 - 1, -(2**63)],
    "float": _FLOATS,
    "double": _FLOATS,
    "bytes": [b"", b"\x00", b"\x00\x00", b"\xff", b"a"],
    "fixed": [b"\x00\x00", b"\xff\x00"],
    "date": _DAYS,
    "timestamp-millis": [*(at.replace(microsecond=0) for at in _MOMENTS), _NIGHT],
    "timestamp-micros": [*_MOMENTS, _NIGHT],
    "local-timestamp-micros": [at.replace(tzinfo=None) for at in _MOMENTS],
}
_AMOUNTS = [
    "0",
    "-0.0",
    "1",
    "0.01",
    "0.005",
    "-0.005",
    "1E-38",
    "1E-60",
    "1E+36",
    "1E+38",
    "1E+60",
    "-1E+36",
    "-1E+38",
]
_JUST_BELOW = ["999999999999999999999999999999999999.99", "-999999999999999999999999999999999999.995", "0.9999"]
COMPARED: dict[str, list[Any]] = KNOWN | {
    "boolean": [True, False],
    "decimal": [*map(Decimal, [*_AMOUNTS, *_JUST_BELOW]), 0, 1, 10**40],
    # Includes an hour that occurs twice, and a zone where the first moment falls into year 0.
    "timestamp-millis": [
        *_MOMENTS,
        _NIGHT.astimezone(_ZURICH),
        datetime.min.replace(tzinfo=timezone(timedelta(hours=5))),
    ],
    "timestamp-micros": [*_MOMENTS, _NIGHT.astimezone(_ZURICH)],
}
_ORDERED_NOT = ("boolean", "enum", "bytes", "fixed")
_TEXT_TYPES = ("string", "uuid", "enum")


SIGNS: dict[str, Callable[[Any, Any], Condition]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def simple(kind: Any) -> str:
    return kind if isinstance(kind, str) else kind.get("logicalType", kind["type"])


def known_decimals(kind: Any) -> list[Decimal]:
    units = (0, 1, -1, 50, 100, 10 ** kind["precision"] - 1, -(10 ** kind["precision"]) + 1)
    return [Decimal((unit < 0, Decimal(abs(unit)).as_tuple().digits, -kind["scale"])) for unit in units]


def values(kind: Any) -> SearchStrategy[Any]:
    inner, is_nullable = without_null(kind)
    name = simple(inner)
    if name == "record":
        found = st.fixed_dictionaries({field: values(inside) for field, inside in fields_of(inner).items()})
    elif name == "decimal":
        found = values_of(inner) | st.sampled_from(known_decimals(inner))
    else:
        found = values_of(inner) | st.sampled_from(KNOWN[name]) if name in KNOWN else values_of(inner)
    return found | st.none() if is_nullable else found


def literals(kind: Any) -> SearchStrategy[Any]:
    return st.sampled_from(COMPARED[simple(kind)]) | values_of(kind)


def paths(schema: Schema, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields all fields of a record, including nested ones."""
    for name, kind in fields_of(schema).items():
        inner, _ = without_null(kind)
        yield f"{prefix}{name}", inner
        if simple(inner) == "record":
            yield from paths(inner, f"{prefix}{name}.")


@st.composite
def asked(draw: st.DrawFn, fields: Sequence[tuple[str, Any]]) -> Condition:
    """Draws a condition on one field."""
    path, kind = draw(st.sampled_from(fields))
    column, name = col(path), simple(kind)
    if name in ("record", "array", "map"):
        return column.is_null()
    if name in _TEXT_TYPES and draw(st.booleans()):
        column = column.lower()
    signs = ["==", "!=", "isin", "null", *([] if name in _ORDERED_NOT else ["<", "<=", ">", ">="])]
    sign = draw(st.sampled_from(signs))
    if sign == "null":
        return column.is_null()
    # Spark builds a set from more than ten values.
    if sign == "isin":
        return column.isin(*draw(st.lists(literals(kind), min_size=1, max_size=14)))
    return SIGNS[sign](column, draw(literals(kind)))


def conditions(fields: Sequence[tuple[str, Any]]) -> SearchStrategy[Condition]:
    def joined(inner: SearchStrategy[Condition]) -> SearchStrategy[Condition]:
        return (
            st.builds(lambda one, other: one & other, inner, inner)
            | st.builds(lambda one, other: one | other, inner, inner)
            | st.builds(lambda one: ~one, inner)
        )

    return st.recursive(asked(fields), joined, max_leaves=6)


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    session = start_spark(load_settings(), jvm_scratch(), 1)
    yield session
    session.stop()


def assert_same(
    spark: SparkSession, schemas: Sequence[Schema], events: Sequence[tuple[str, Any]], asked: Sequence[Condition]
) -> None:
    """Checks that each condition gives the same result for each event on Spark and as a function."""
    types = pa.schema({schema["name"]: arrow_type(schema) for schema in schemas})
    rows = pa.Table.from_pylist([{name: event} for name, event in events], types)
    columns = [column_of(condition, schemas).alias(f"c{number}") for number, condition in enumerate(asked)]
    on_spark = spark.createDataFrame(rows).select(*columns).toArrow()
    verdicts = zip(*(column.to_pylist() for column in on_spark.columns), strict=True)
    # Uses the values from Arrow: a float has fewer digits than in Python.
    for (name, _), row, found in zip(events, arrow_rows.rows_of(rows), verdicts, strict=True):
        for condition, verdict in zip(asked, found, strict=True):
            assert condition.verdict(row[name]) is verdict, f"{condition} of {row[name]}"


EVERY_CONDITION = conditions([*paths(EVERY)])
SHARED = conditions([("text", "string"), ("number", "int"), ("amount", money(38, 2)), ("what", NESTING["tags"])])


@FEW
@given(st.lists(values(EVERY), min_size=5, max_size=20), st.lists(EVERY_CONDITION, min_size=10, max_size=60))
def check_every(spark: SparkSession, events: list[Any], asked: list[Condition]) -> None:
    assert_same(spark, [EVERY], [("Every", event) for event in events], asked)


def test_spark_and_the_function_agree_on_every_event(spark: SparkSession) -> None:
    for condition in (condition for path, kind in paths(EVERY) for condition in compared(path, kind)):
        for part in condition.predicates:
            assert part.misfit(part.field.type_in(EVERY)) == ""

    check_every(spark)


def compared(path: str, kind: Any) -> Iterator[Condition]:
    """Yields comparisons of a field with all known values of its type."""
    for value in COMPARED.get(simple(kind), ()):
        yield from (col(path) == value, ~(col(path) != value), col(path).isin(value))
        if simple(kind) not in _ORDERED_NOT:
            yield from (col(path) < value, col(path) <= value, col(path) > value, col(path) >= value)
        if simple(kind) in _TEXT_TYPES:
            yield col(path).lower() == value


@pytest.mark.parametrize("name", PLAIN)
def test_spark_and_the_function_agree_on_close_and_extreme_values(spark: SparkSession, name: str) -> None:
    kind = PLAIN[name]
    known = known_decimals(kind) if simple(kind) == "decimal" else KNOWN.get(simple(kind), [True, False])
    schema = record("Near", {name: ["null", kind]})

    asked = [*compared(name, kind), col(name).isin(*COMPARED[simple(kind)])]
    assert_same(spark, [schema], [("Near", {name: value}) for value in [*known, None]], asked)


def test_a_condition_on_several_records_applies_to_the_record_of_the_row(spark: SparkSession) -> None:
    events = st.tuples(st.just("One"), values(ONE)) | st.tuples(st.just("Other"), values(OTHER))

    @FEW
    @given(st.lists(events, min_size=5, max_size=20), st.lists(SHARED, min_size=10, max_size=60))
    def check(events: list[tuple[str, Any]], asked: list[Condition]) -> None:
        assert_same(spark, [ONE, OTHER], events, asked)

    check()
