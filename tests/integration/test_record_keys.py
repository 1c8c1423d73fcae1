"""The records' own keys in Spark: encoded and refused as in Python, and re-keys in front of tables of numbers."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pytest
from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)

from balance_service.engine.outputs import SENDER_HEADER
from balance_service.model.record_keys import KEY_FORMAT_HEADER, KEY_FORMATS, KeyFormat, RecordKey
from balance_service.settings import load_settings
from balance_service.spark.columns import stored_key
from balance_service.spark.session import start_spark
from balance_service.testing import event
from balance_service.testing.fakes import FakeRegistry
from balance_service.testing.rows import encoded, rows_of
from tests.integration.decoding import decoded, written
from tests.support.composite import Purchase
from tests.support.record_keys import Labels, OrdersById, totals_of
from tests.support.shipped import jvm_scratch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

# Of all lengths that may be taken for another form, and both ends of each byte.
KEYS = [
    b"",
    b"\0",
    b"\x7f\xff\xff\xff",
    b"\x80\0\0\0",
    b"\xff\xff\xff\xff",
    *(struct.pack(">q", number) for number in (-1, 0, 1, 5, 2**63 - 1, -(2**63), 2**63 - 2**56)),
    b"123e4567-e89b-12d3-a456-426614174000",
    b"123E4567-E89B-12D3-A456-426614174000",
    b"\xff" * 16,
    b"a" * 128,
    b"a" * 129,
    b"a" * 257,
    "é".encode(),
    b"line\nbreak",
]


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    session = start_spark(load_settings(), jvm_scratch(), 1)
    yield session
    session.stop()


@pytest.mark.parametrize("form", KEY_FORMATS)
def test_spark_and_python_agree_on_each_key(spark: SparkSession, form: KeyFormat) -> None:
    model = totals_of(form)
    (stage,) = model.stages
    (schema,) = stage.schemas.values()
    events = [encoded(event("Order", {"amount": 1}, record_key=key), stage) for key in KEYS]
    records = [(key, 1, given.body) for key, given in zip(KEYS, events, strict=True)]

    rows = decoded(spark, model, [schema], [*records, (None, 1, events[0].body)])

    no_key = encoded(event("Order", {"amount": 1}), stage)
    expected = rows_of(model, stage, dict(enumerate([*events, no_key])), FakeRegistry())
    assert rows.updates["key"].to_pylist() == [key for key in expected["key"].to_pylist() if key is not None]
    notes = [note[0] for note in expected["note"].to_pylist() if note]
    assert rows.notes["cause"].to_pylist() == [note["cause"] for note in notes]
    assert rows.notes["detail"].to_pylist() == [note["detail"] for note in notes]
    assert rows.notes["record_key"].to_pylist() == [note["record_key"] for note in notes]
    assert rows.notes["cause"].to_pylist()[-1] == "key-null"


def test_a_number_that_this_service_sent_in_its_own_order_is_no_long(spark: SparkSession) -> None:
    (stage,) = OrdersById().stages
    five = struct.pack(">q", 5)
    named = F.lit(b"app-days:topic").cast("binary")
    none = F.lit(None).cast("binary")
    cases = [(none, none), (named, none), (named, F.lit(b"long").cast("binary"))]
    columns = [stored_key(stage, F.lit(bytearray(five)), *headers).alias(str(n)) for n, headers in enumerate(cases)]

    (found,) = spark.range(1).select(*columns).toArrow().to_pylist()

    assert [*found.values()] == [
        RecordKey.of_format("long").stored(five),
        None,
        RecordKey.of_format("long").stored(five),
    ]
    assert (SENDER_HEADER, KEY_FORMAT_HEADER) == ("sent-by", "key-format")


def test_a_re_key_in_front_of_a_table_of_longs_writes_longs(spark: SparkSession) -> None:
    stage = Labels().stages[0]
    (schema,) = stage.schemas.values()
    days = [-1, 0, 2**63 - 1, -(2**63), 2**63 - 2**56]
    bodies = [written(schema, {"card": "c", "day": day, "amount": 1}) for day in days]

    rows = decoded(spark, Labels(), [schema], [(b"any", 1, body) for body in bodies], stage)

    assert rows.updates["key"].to_pylist() == [struct.pack(">q", day) for day in days]
    assert Purchase.__name__ == schema["name"]
