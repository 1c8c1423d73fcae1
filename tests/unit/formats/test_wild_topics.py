"""Records of public producers: both decoders read them alike, and a model makes of them what they mean.

See `tests/data/wild`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from balance_service.avro.codec import AvroReader
from balance_service.avro.schemas import full_name
from balance_service.model.placing import place_stages
from balance_service.spark.combine import PartitionRows
from balance_service.spark.decode import Decoder
from balance_service.spark.redrive import RECORDS
from balance_service.spark.session import any_session
from balance_service.testing import Driver
from balance_service.testing.fakes import FakeRegistry
from balance_service.testing.rows import InputEvent, encoded, rows_of
from tests.integration.decoding import Writers
from tests.support.wild import WILD, records_of, schema_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import SparkSession

    from balance_service.avro.schemas import Schema
    from balance_service.model.stage import Stage
    from tests.support.wild import Record

TOPICS = pytest.mark.parametrize("topic", WILD)
_SYNTAX = "it is not JSON"


@pytest.fixture(scope="module")
def spark() -> SparkSession:
    return any_session()


def read(stage: Stage, schema: Schema | None, record: Record) -> InputEvent:
    """Reads a record in Python, as `produce`, redrives and tables do."""
    if record.value is None or schema is None:
        kind = dict(record.headers).get(stage.told.header, b"").decode()
        return InputEvent("", {}, record.key, body=record.value, kind=kind)
    (name,) = stage.schemas
    reader = AvroReader(Writers(schema), stage.wanted_schemas[full_name(stage.schemas[name])])  # type: ignore[arg-type]
    return InputEvent(name, reader.decode_foreign(record.value), record.key)


def events_of(topic: str) -> list[InputEvent]:
    stage = place_stages(WILD[topic].model().stages, "driver", str)[0]
    return [read(stage, schema_of(topic), one) for one in records_of(topic)]


def by_spark(spark: SparkSession, topic: str, stage: Stage) -> PartitionRows:
    schema = schema_of(topic)
    decoder = Decoder(spark, WILD[topic].model(), stage, Writers(*([schema] if schema else [])))  # type: ignore[arg-type]
    decoder.resolve([1] if schema else [])
    records = [
        {
            "partition": 0,
            "offset": offset,
            "timestamp": 0,
            "key": one.key,
            "value": one.value,
            "headers": [{"key": name, "value": value} for name, value in one.headers] or None,
        }
        for offset, one in enumerate(records_of(topic))
    ]
    frame: Any = spark.createDataFrame(pa.Table.from_pylist(records, RECORDS))
    return PartitionRows(decoder.updates(frame).toArrow().drop_columns(["partition"]).sort_by("offset"))


def notes_of(rows: PartitionRows) -> Sequence[tuple[int, str, str]]:
    return [
        (note["offset"], note["cause"], note["record"] or _plain(note["detail"]))
        for note in rows.notes.to_pylist()
        if note["cause"] is not None
    ]


def updates_of(rows: PartitionRows) -> list[Any]:
    """Returns the updates without the bytes of the record, which the driver of Avro has without a frame."""
    found = [one._replace(record=None) for one in rows.single_updates(rows.updates)]
    return [one._replace(update={**one.update, "value": None}) for one in found]


def _plain(detail: str | None) -> str:
    # Two parsers describe an error of syntax in words of their own.
    return _SYNTAX if (detail or "").startswith(_SYNTAX) else detail or ""


@TOPICS
def test_both_decoders_read_the_records_alike(spark: SparkSession, topic: str) -> None:
    model = WILD[topic].model()
    stage = place_stages(model.stages, "driver", str)[0]
    given = {offset: encoded(one, stage) for offset, one in enumerate(events_of(topic))}

    in_python = PartitionRows(rows_of(model, stage, given, FakeRegistry()))
    in_spark = by_spark(spark, topic, stage)

    assert notes_of(in_spark) == notes_of(in_python)
    assert updates_of(in_spark) == updates_of(in_python)


@TOPICS
def test_a_model_makes_of_the_records_what_they_mean(topic: str) -> None:
    wild = WILD[topic]
    with Driver(wild.model) as driver:
        driver.given(*events_of(topic))
        read = driver.stages[0].events
        ignored = {at: one.detail for at, one in enumerate(read) if one.unreadable == "ignored"}

        assert ignored == wild.ignored
        assert {key: driver.view(key) for key in wild.states} == wild.states
        found = {letter.offset: letter for _, batch, _ in driver.stages[0].writer.commits for letter in batch}
        assert {at: one.cause for at, one in found.items()} == {at: cause for at, (cause, _) in wild.letters.items()}
        for at, (_, detail) in wild.letters.items():
            assert found[at].detail.startswith(detail)
