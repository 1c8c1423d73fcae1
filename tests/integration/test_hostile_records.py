"""Schemas and bytes that are made to stop a decoder: Spark's and Python's end soon, need little memory, and agree."""

from __future__ import annotations

import json
import time
import tracemalloc
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest

from balance_service.avro.codec import AvroReader
from balance_service.avro.frames import frame_header
from balance_service.errors import PoisonRecordError
from balance_service.read_models.balance import Balance
from balance_service.settings import load_settings
from balance_service.spark.session import start_spark
from tests.integration.decoding import Writers, causes, decoded
from tests.support.hostile import ADDED, FUNDS, added, corpus, generated
from tests.support.shipped import jvm_scratch
from tests.support.waiting import SHARED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

    from tests.support.hostile import Hostile

SEED, GENERATED = 20261127, 200
MOST_SECONDS = 2.0
"""Of processor time."""
MOST_BYTES = 64 << 20
HOSTILE = [*corpus(), *generated(SEED, GENERATED)]
READABLE = {
    "doubled over a fixed of no bytes",
    "doubled over null",
    "doubled over an empty record",
    "arrays of fixed of no bytes",
    "arrays of empty records",
    "arrays of records of nothing",
    "an array of 2^62 nulls",
    "a million blocks of no items",
    "ten thousand nulls with each number",
}
"""Records that are valid, though a decoder that reads what takes no bytes never ends."""


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    session = start_spark(load_settings(), jvm_scratch(), 1)
    yield session
    session.stop()


class Jvm:
    """Reads single records with Spark's decoder, and measures each."""

    def __init__(self, spark: SparkSession) -> None:
        jvm: Any = spark._jvm
        self.frames = jvm.parts.code.balance.Resolving([json.dumps(FUNDS)], False)
        self.threads = jvm.java.lang.management.ManagementFactory.getThreadMXBean()

    def read(self, schema_id: int, hostile: Hostile) -> tuple[str | None, Any]:
        """Returns the cause, or the amount."""
        before, began = self.threads.getCurrentThreadAllocatedBytes(), self.threads.getCurrentThreadCpuTime()
        self.frames.tell(schema_id, json.dumps(hostile.schema), ["parts.code.balance.events.FundsAdded"])
        row = self.frames.read(frame_header(schema_id) + hostile.body)
        seconds = (self.threads.getCurrentThreadCpuTime() - began) / 1e9
        size = self.threads.getCurrentThreadAllocatedBytes() - before
        assert seconds < MOST_SECONDS, hostile.name
        assert size < MOST_BYTES, hostile.name
        if not row.isNullAt(0):
            return str(row.getUTF8String(0)), None
        return None, Decimal(row.getStruct(3, 4).getDecimal(3, 38, 2).toString())


def read_by_python(schema_id: int, hostile: Hostile) -> tuple[str | None, Any]:
    """Returns the cause, or the amount, as the decoder of tables and of dead letters' records reads it."""
    reader = AvroReader(Writers(*[hostile.schema] * schema_id), FUNDS)  # type: ignore[arg-type]
    tracemalloc.start()
    began = time.thread_time()
    try:
        found = None, reader.decode_foreign(frame_header(schema_id) + hostile.body)["amount"]
    except PoisonRecordError as error:
        found = error.cause, None  # type: ignore[assignment]
    seconds, (_, size) = time.thread_time() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # The tracing of memory takes most of the time.
    assert seconds < 5 * MOST_SECONDS, hostile.name
    assert size < MOST_BYTES, hostile.name
    return found


@pytest.mark.shows("dead-letter")
def test_no_record_keeps_a_decoder_busy_or_takes_its_memory_and_both_decoders_agree(spark: SparkSession) -> None:
    jvm = Jvm(spark)
    found = {}

    for schema_id, hostile in enumerate(HOSTILE, 1):
        found[hostile.name] = (cause, amount) = jvm.read(schema_id, hostile)
        its_cause, its_amount = read_by_python(schema_id, hostile)
        # fastavro accepts some invalid bytes, and refuses schemas under which it may never end.
        if cause is None and its_cause is None:
            assert amount == its_amount, hostile.name

    assert {name for name, (cause, _) in found.items() if cause is None and not name.startswith("gen")} == READABLE
    assert {amount for name, (_, amount) in found.items() if name in READABLE} == {ADDED["amount"]}


@pytest.mark.shows("dead-letter")
def test_the_event_behind_each_hostile_record_counts(spark: SparkSession) -> None:
    schemas = [FUNDS, *(hostile.schema for hostile in HOSTILE)]
    records: list[tuple[bytes, int, bytes]] = []
    for schema_id, hostile in enumerate(HOSTILE, 2):
        records += [(b"c", schema_id, hostile.body), (b"c", 1, added())]
    decoded(spark, Balance(), [FUNDS], records[1:2])
    began = time.monotonic()

    rows = decoded(spark, Balance(), schemas, records)

    assert time.monotonic() - began < MOST_SECONDS * 10 * SHARED
    assert len(rows.updates) + len(causes(rows)) == 2 * len(HOSTILE)
    assert {1 + 2 * n for n in range(len(HOSTILE))} <= set(rows.updates["offset"].to_pylist())
