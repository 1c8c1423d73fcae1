"""Change events of Debezium: Spark reads them as the test driver does, with its columns of any type and names."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from balance_service.avro.frames import frame_header
from balance_service.avro.schemas import load_schema
from balance_service.model.placing import place_stages
from balance_service.settings import load_settings
from balance_service.spark.combine import PartitionRows
from balance_service.spark.session import start_spark
from balance_service.testing import event, tombstone
from balance_service.testing.fakes import FakeRegistry
from balance_service.testing.rows import encoded, rows_of
from tests.integration.decoding import decoded, written
from tests.support.debezium import UNAVAILABLE
from tests.support.shipped import jvm_scratch
from tests.unit.model.test_debezium import Customers, Flat, OfMysql, Rekeyed, Table, row

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

    from balance_service.model.read_model import ReadModel
    from balance_service.testing import InputEvent


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    session = start_spark(load_settings(), jvm_scratch(), 1)
    yield session
    session.stop()


def events_of(table: Table) -> list[InputEvent]:
    events = [
        table.change("r"),
        table.change("u", note=UNAVAILABLE, tags=None, photo=None),
        table.change("d"),
        table.tombstone(),
        table.change("c", "z", opens=None),
    ]
    if table.model is not Flat:
        events += [table.change("m"), table.change("x"), event(table.record, {"op": "u", "after": None})]
        events.append(event(table.record, {"op": "t", "after": None, "before": None}))
        events.append(event(table.record, {"op": "d", "after": None, "before": row("b")}, record_key="b"))
    return events


def told(rows: PartitionRows) -> Any:
    notes = rows.notes.to_pylist()
    wanted = ("offset", "cause", "detail", "record", "record_key", "value")
    updates = [one._replace(record=None) for one in rows.single_updates(rows.updates)]
    return updates, [{name: note[name] for name in wanted} for note in notes]


@pytest.mark.parametrize("model", [Customers, OfMysql, Flat, Rekeyed])
def test_spark_reads_change_events_as_the_driver_does(spark: SparkSession, model: type[ReadModel]) -> None:
    table, bound = Table(model), model()
    first, *_ = stages = place_stages(bound.stages, "driver", str)
    schema = load_schema(table.record)
    given = [encoded(one, first) for one in events_of(table)]
    for stage in stages:
        records = []
        for one in given:
            key = one.record_key if isinstance(one.record_key, bytes) else None
            body = written(schema, one.values) if one.record else None
            records.append((key, 1 if one.record else None, body))
        found = decoded(spark, bound, [schema], records, stage)
        driven = PartitionRows(rows_of(bound, stage, dict(enumerate(given)), FakeRegistry()))
        updates, notes = told(found)
        expected, expected_notes = told(driven)

        for note in expected_notes:
            note["value"] = note["value"] and frame_header(1) + note["value"]
        if stage.by is None:
            assert updates == expected
        else:
            assert [one.key for one in updates] == [one.key for one in expected] == [b"a"] * 3 + [b"z", b"b"]
            # The next stage reads what this one passes on.
            passed = {one.offset: one.key for one in updates}
            given = [replace(one, record_key=passed[at]) for at, one in enumerate(given) if at in passed]
        shown = [(note["offset"], note["cause"], note["detail"] or "") for note in notes]
        assert shown == [(note["offset"], note["cause"], note["detail"] or "") for note in expected_notes]


def test_a_tombstone_and_a_truncation_have_their_causes(spark: SparkSession) -> None:
    bound = Customers()
    (stage,) = bound.stages
    truncation = encoded(event(bound.source.records[0], {"op": "t"}), stage)
    body = written(load_schema(bound.source.records[0]), truncation.values)
    rows = decoded(spark, bound, [load_schema(bound.source.records[0])], [(None, 1, body), (b"a", None, None)])

    assert rows.notes["cause"].to_pylist() == ["table-truncated"]
    assert rows.updates["key"].to_pylist() == [b"a"]
    assert tombstone("a").body is None
