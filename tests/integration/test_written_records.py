"""Records that Spark writes: the same bytes as fastavro's, for any schema and any values."""

from __future__ import annotations

import io
import itertools
import json
import re
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from py4j.protocol import Py4JJavaError
from pyspark.errors import IllegalArgumentException
from pyspark.sql.classic.column import Column as ClassicColumn
from pyspark.sql.pandas.types import from_arrow_schema

from balance_service.avro import arrow_rows
from balance_service.avro.codec import parsed
from balance_service.avro.frames import frame_header
from balance_service.avro.named_types import contracted
from balance_service.settings import load_settings
from balance_service.spark.session import start_spark
from balance_service.testing.rows import arrow_type
from balance_service.testing.strategies import values_of
from tests.integration.test_conditions import FEW, PLAIN, logical, money, record
from tests.support.shipped import jvm_scratch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyspark.sql import DataFrame, SparkSession

    from balance_service.avro.schemas import Schema

ID = 0x01_02_FF
LEAVES: list[Any] = [
    *(kind for kind in PLAIN.values() if not isinstance(kind, dict) or "name" not in kind),
    money(5, 2),
    logical("timestamp-nanos"),
    logical("local-timestamp-millis"),
    logical("local-timestamp-nanos"),
]
NUMBERED = itertools.count()


def named(kind: dict[str, Any]) -> Any:
    """A type of its own name."""
    return st.builds(lambda: {**kind, "name": f"N{next(NUMBERED)}"})


NAMED = [
    named({"type": "enum", "symbols": ["a", "B", "c"]}),
    named({"type": "fixed", "size": 3}),
    named({"type": "fixed", "size": 16, "logicalType": "uuid"}),
    named({"type": "fixed", "size": 6, "logicalType": "decimal", "precision": 12, "scale": 3}),
]


def nested(inner: Any) -> Any:
    nullable = inner.filter(lambda kind: not isinstance(kind, list))
    return (
        st.builds(lambda kind: {"type": "array", "items": kind}, inner)
        | st.builds(lambda kind: {"type": "map", "values": kind}, inner)
        | st.builds(lambda kind: ["null", kind], nullable)
        | st.builds(lambda kind: [kind, "null"], nullable)
        | st.builds(of_kinds, st.lists(inner, min_size=1, max_size=3))
    )


def of_kinds(kinds: Sequence[Any]) -> Schema:
    return record(f"R{next(NUMBERED)}", {f"f{number}": kind for number, kind in enumerate(kinds)})


SCHEMAS = st.lists(
    st.recursive(st.one_of(st.sampled_from(LEAVES), *NAMED), nested, max_leaves=3), min_size=1, max_size=8
).map(of_kinds)


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    session = start_spark(load_settings(), jvm_scratch(), 1)
    yield session
    session.stop()


def structs(spark: SparkSession, schema: Schema, events: Sequence[Any]) -> tuple[DataFrame, list[Any]]:
    """The values as a column of structs; and as Python reads them from Arrow."""
    rows = pa.Table.from_pylist([{"of": event} for event in events], pa.schema({"of": arrow_type(schema)}))
    types = from_arrow_schema(rows.schema, prefer_timestamp_ntz=True)
    return spark.createDataFrame(rows, types), [row["of"] for row in arrow_rows.rows_of(rows)]


def frames(spark: SparkSession, frame: DataFrame, schema: Schema, method: str = "of") -> list[Any]:
    text, kind = json.dumps(contracted(schema)), frame._jdf.schema().apply("of").dataType()
    jvm: Any = spark._jvm
    writing = jvm.parts.code.balance.Writing(text, frame_header(ID), kind)
    made = ClassicColumn(getattr(writing, method)(frame["of"]._jc))
    return frame.select(made.alias("made")).toArrow()["made"].to_pylist()  # type: ignore[no-any-return]


def by_fastavro(schema: Schema, value: Any) -> bytes:
    body = io.BytesIO(frame_header(ID))
    body.seek(0, io.SEEK_END)
    fastavro.schemaless_writer(body, parsed(schema), value)
    return body.getvalue()


def with_events(schema: Schema) -> Any:
    return st.tuples(st.just(schema), st.lists(values_of(schema), min_size=5, max_size=15))


def test_spark_writes_what_fastavro_writes(spark: SparkSession) -> None:
    @FEW
    @given(st.lists(SCHEMAS.flatmap(with_events), min_size=1, max_size=4))
    def check(many: list[tuple[Schema, list[Any]]]) -> None:
        for schema, events in many:
            frame, read = structs(spark, schema, events)
            for written, event in zip(frames(spark, frame, schema), read, strict=True):
                expected = by_fastavro(schema, event)
                # Not every NaN has the same bits.
                assert written == expected or "nan" in repr(event), f"{event} under {schema}"
                assert len(written) == len(expected)

    check()


AMOUNTS = record("Amounts", {"small": "int", "part": "float", "amount": money(38, 2), "text": ["null", "string"]})


def test_values_are_promoted_and_missing_fields_have_their_default(spark: SparkSession) -> None:
    frame, read = structs(
        spark, AMOUNTS, [{"small": -5, "part": 0.1, "amount": Decimal("-1.28"), "text": None} for _ in range(2)]
    )
    kinds = {"small": "long", "part": "double", "amount": money(9, 4), "text": ["string", "null"]}
    schema = record("Amounts", kinds | {"tags": {"type": "array", "items": "string"}})
    schema["fields"][-1]["default"] = ["a", "é"]

    assert frames(spark, frame, schema) == [by_fastavro(schema, {**one, "tags": ["a", "é"]}) for one in read]


@pytest.mark.parametrize(
    ("kind", "value", "wanted", "why"),
    [
        (money(38, 2), Decimal("-1000.00"), money(5, 2), "f is -1000.00, but decimal(5,2) is expected"),
        (
            money(38, 2),
            Decimal("9.00"),
            {"type": "fixed", "name": "F", "size": 1, "logicalType": "decimal", "precision": 2, "scale": 2},
            "f is 9.00, but decimal(2,2) is expected",
        ),
        (["null", "string"], None, "string", "f is null, but string is expected"),
        ("string", "C", {"type": "enum", "name": "E", "symbols": ["A", "B"]}, "f is C, but E[A, B] is expected"),
        (
            "string",
            "x" * 80,
            {"type": "enum", "name": "E", "symbols": ["A"]},
            f"f is {'x' * 60}…, but E[A] is expected",
        ),
        ("bytes", b"abc", {"type": "fixed", "name": "F", "size": 2}, "f is 3 bytes, but fixed of 2 is expected"),
        (
            "string",
            "no",
            {"type": "fixed", "name": "F", "size": 16, "logicalType": "uuid"},
            "f is no, but uuid is expected",
        ),
        (
            {"type": "array", "items": ["null", "int"]},
            [1, None],
            {"type": "array", "items": "int"},
            "f[] is null, but int is expected",
        ),
    ],
)
def test_a_value_that_does_not_fit_names_the_field_and_why(
    spark: SparkSession, kind: Any, value: Any, wanted: Any, why: str
) -> None:
    given_as, schema = record("R", {"f": kind}), record("R", {"f": wanted})
    frame, _ = structs(spark, given_as, [{"f": value}])

    assert frames(spark, frame, schema, "tried") == [{"frame": None, "misfit": why}]


def test_what_fits_beside_it_is_written(spark: SparkSession) -> None:
    frame, read = structs(spark, record("R", {"f": ["null", "string"]}), [{"f": None}, {"f": "a"}])
    schema = record("R", {"f": "string"})

    _, second = frames(spark, frame, schema, "tried")

    assert second == {"frame": by_fastavro(schema, read[1]), "misfit": None}
    with pytest.raises(Py4JJavaError) as caught:
        frames(spark, frame, schema)
    assert "f is null, but string is expected" in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "wanted", "why"),
    [
        ("string", "long", "f is string, which is not written as long"),
        ("long", "int", "f is bigint, which is not written as int"),
        (money(38, 4), money(38, 2), "f is decimal(38,4), which is not written as decimal"),
        ("long", logical("timestamp-millis"), "f is bigint, which is not written as timestamp-millis"),
        ("string", ["string", "long"], "f is a union of several types, which is not written"),
    ],
)
def test_types_that_do_not_fit_are_refused_before_the_first_record(
    spark: SparkSession, kind: Any, wanted: Any, why: str
) -> None:
    frame, _ = structs(spark, record("R", {"f": kind}), [])

    with pytest.raises(IllegalArgumentException, match=re.escape(why)):
        frames(spark, frame, record("R", {"f": wanted}))


def test_a_field_without_a_column_needs_a_default(spark: SparkSession) -> None:
    frame, _ = structs(spark, record("R", {"f": "int"}), [])

    with pytest.raises(IllegalArgumentException, match="other has neither a column nor a default"):
        frames(spark, frame, record("R", {"f": "int", "other": "int"}))
