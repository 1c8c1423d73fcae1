"""Records that a model without states makes of columns: Spark's are those of the test driver."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balance_service.avro.schemas import load_schema
from balance_service.model.conditions import col
from balance_service.model.events import Emit, OfState
from balance_service.model.folds import Count
from balance_service.model.read_model import ReadModel
from balance_service.model.stream import Stream
from balance_service.settings import load_settings
from balance_service.spark.combine import PartitionRows
from balance_service.spark.session import start_spark
from balance_service.testing import event
from balance_service.testing.fakes import FakeRegistry
from balance_service.testing.rows import encoded, rows_of
from balance_service.testing.strategies import values_of
from tests.integration.decoding import causes, decoded
from tests.integration.test_conditions import FEW
from tests.support.models import KIND, MONEY, PLACE, ship
from tests.support.shipped import jvm_scratch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyspark.sql import SparkSession

    from balance_service.testing.rows import InputEvent

FINE_MONEY = {**MONEY, "precision": 19, "scale": 4}
EVERY = {
    "id": "string",
    "score": "double",
    "level": "long",
    "paid": FINE_MONEY,
    "at": {"type": "long", "logicalType": "timestamp-micros"},
    "day": ["null", {"type": "int", "logicalType": "date"}],
    "place": PLACE,
    "city": ["string", "null"],
    "kind": KIND,
    "tags": {"type": "array", "items": "string"},
    "counts": ["null", {"type": "map", "values": "long"}],
    "photo": "bytes",
    "ratio": "double",
    "ref": "string",
    "serial": {"type": "fixed", "name": "Serial", "size": 16, "logicalType": "uuid"},
}
ship("Every", EVERY)
ship("Id", {"id": ["null", "string"]})
SCORED = load_schema("Scored")


class Sending(ReadModel):
    """Makes records of columns of each type, of any event, and sends some events unchanged."""

    name = "test-sending"
    source = Stream("games", "Scored", "Ended")
    emits = (
        Emit("ids", "Id", fields={"id": "id"}),
        Emit("ended", where=col("id") == "g"),
    )


class Copying(ReadModel):
    """Makes records of columns of each type."""

    name = "test-copying"
    source = Stream("games", "Scored")
    emits = (
        Emit("every", "Every", fields={name: "place.city" if name == "city" else name for name in EVERY}),
        Emit("ids", "Id", where=col("level") > 0, fields={"id": "id"}),
    )


ship("Games", {"id": "string", "games": "long"})
ship("Part", {"id": "string", "games": "long", "city": "string", "level": ["null", "long"]})


class Counting(ReadModel):
    """Sends the state between columns of the event."""

    name = "test-counting"
    source = Stream("games", "Scored")
    key = "id"
    state = "Games"
    emits = Emit(
        "parts", "Part", fields={"id": "id", "games": OfState("games"), "city": "place.city", "level": "level"}
    )

    games = Count("Scored")


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    session = start_spark(load_settings(), jvm_scratch(), 1)
    yield session
    session.stop()


def by_both(spark: SparkSession, model: ReadModel, given_as: Sequence[InputEvent]) -> tuple[Any, Any]:
    """The rows of Spark, and those of the driver."""
    (stage,) = model.stages
    schemas = [*map(load_schema, stage.records)]
    events = [encoded(one, stage) for one in given_as]
    framed = [(b"k", stage.records.index(one.record) + 1, one.body) for one in events]
    found = decoded(spark, model, schemas, framed)
    return found, PartitionRows(rows_of(model, stage, dict(enumerate(events)), FakeRegistry()))


def sent(rows: PartitionRows) -> Any:
    return [(row["offset"], row["#0+0"], row["#1+0"]) for row in rows.updates.to_pylist()]


GAMES = st.fixed_dictionaries({field["name"]: values_of(field["type"]) for field in SCORED["fields"]}) | st.builds(
    lambda level: {"level": level, "paid": Decimal("12.34")}, st.integers(-2, 2)
)


def test_spark_makes_the_records_that_the_driver_makes(spark: SparkSession) -> None:
    @FEW
    @given(st.lists(GAMES, min_size=5, max_size=25))
    def check(games: list[dict[str, Any]]) -> None:
        found, expected = by_both(spark, Copying(), [event("Scored", game) for game in games])

        assert sent(found) == sent(expected)
        assert causes(found) == causes(expected)

    check()


def test_spark_sends_the_events_of_several_records_that_the_driver_sends(spark: SparkSession) -> None:
    events = [event(record, {"id": name}) for record in ("Scored", "Ended") for name in ("g", "h")]

    found, expected = by_both(spark, Sending(), events)

    assert sent(found) == sent(expected)
    assert [whole for _, _, whole in sent(found)] == [True, None, True, None]


def test_spark_makes_the_parts_of_a_record_that_the_driver_makes(spark: SparkSession) -> None:
    games = [event("Scored", {"id": "k", "level": level, "place": {"city": "é", "since": None}}) for level in (7, None)]

    found, expected = by_both(spark, Counting(), games)

    parts = ["#0+0", "#0+2", "games"]
    assert found.updates.select(parts).to_pylist() == expected.updates.select(parts).to_pylist()
    assert found.updates["#0+0"].to_pylist() == [b"\x02k"] * 2
    assert "Scored" not in found.updates.column_names


def test_an_unfit_record_is_one_dead_letter_and_its_neighbours_are_made(spark: SparkSession) -> None:
    fits = {"id": "g", "level": 1, "paid": Decimal("1.00")}
    games = [event("Scored", {**fits, **changed}) for changed in ({}, {"level": None}, {"id": "h"})]

    found, expected = by_both(spark, Copying(), games)

    assert causes(found) == causes(expected) == ["output-does-not-fit"]
    why = "the record to send does not fit its schema: level is null, but long is expected"
    assert found.notes["detail"].to_pylist() == expected.notes["detail"].to_pylist() == [why]
    assert [at for at, *_ in sent(found)] == [0, 2]
    assert sent(found) == sent(expected)
