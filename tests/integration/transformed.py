"""The rows that a `transform` makes of events: the service's, and those that Spark makes of a plain DataFrame."""

from __future__ import annotations

import io
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any, NamedTuple

import fastavro
import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

from balance_service.avro.codec import parsed
from balance_service.model.read_model import ReadModel
from balance_service.model.record_folds import IGNORED
from balance_service.model.stream import Stream
from balance_service.model.transform import FRAMES, ROW, TRANSFORM_FAILED, TRANSFORM_TOO_LARGE
from balance_service.spark.combine import NOTE
from balance_service.testing import event
from balance_service.testing.fakes import FakeRegistry
from balance_service.testing.rows import arrow_type, encoded, rows_of
from tests.support.models import MONEY, PLACE, ship

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from balance_service.model.events import Event
    from balance_service.testing.rows import InputEvent

    Code = Callable[[DataFrame], DataFrame]

ITEM = {
    "type": "record",
    "name": "Item",
    "fields": [
        {"name": "code", "type": "string"},
        {"name": "qty", "type": "int"},
        {"name": "cost", "type": ["null", {**MONEY, "precision": 12, "scale": 3}]},
        {"name": "notes", "type": {"type": "array", "items": "string"}},
    ],
}
MIXED = ship(
    "Mixed",
    {
        "id": "string",
        "n": "int",
        "big": "long",
        "small": ["null", "int"],
        "ratio": "double",
        "share": "float",
        "paid": MONEY,
        "price": ["null", {**MONEY, "precision": 10, "scale": 4}],
        "at": {"type": "long", "logicalType": "timestamp-micros"},
        "local": ["null", {"type": "long", "logicalType": "local-timestamp-micros"}],
        "day": ["null", {"type": "int", "logicalType": "date"}],
        "text": ["null", "string"],
        "is_on": "boolean",
        "place": ["null", PLACE],
        "items": {"type": "array", "items": ITEM},
        "tags": ["null", {"type": "array", "items": "string"}],
        "nums": {"type": "array", "items": ["null", "long"]},
        "counts": {"type": "map", "values": "long"},
        "photo": ["null", "bytes"],
    },
)
AT = datetime(2026, 2, 28, 23, 59, 59, 999_999, UTC)
_ITEM = {"code": "a", "qty": 2, "cost": Decimal("1.500"), "notes": ["x", "y"]}
PLAIN: Mapping[str, Any] = {
    "id": "k",
    "n": 7,
    "big": 2**40,
    "small": 3,
    "ratio": 2.5,
    "share": 0.25,
    "paid": Decimal("12.34"),
    "price": Decimal("0.1250"),
    "at": AT,
    "local": datetime(2026, 3, 1, 0, 0, 0),  # noqa: DTZ001  (a local time has no zone)
    "day": date(2026, 2, 28),
    "text": "12",
    "is_on": True,
    "place": {"city": "Zürich", "since": AT.replace(microsecond=123_000)},
    "items": [_ITEM, {"code": "b", "qty": 0, "cost": None, "notes": []}],
    "tags": ["t", "u"],
    "nums": [1, None, -3],
    "counts": {"x": 1, "y": -2},
    "photo": b"\x00\xff",
}
NOTHING: Mapping[str, Any] = {
    **dict.fromkeys(("small", "price", "local", "day", "text", "place", "tags", "photo")),
    **dict.fromkeys(("n", "big", "ratio"), 0),
    "items": [],
    "nums": [],
    "counts": {},
    "is_on": False,
    "paid": Decimal(0),
}


@dataclass(frozen=True)
class Seen:
    id: str
    rows: int


class Outcome(NamedTuple):
    """What became of an event: its rows, none if it was dropped; or why it failed."""

    rows: list[Any]
    failure: str | None = None


class Transformed(ReadModel):
    """Folds all columns of the rows that some code makes."""

    name = "test-transformed"
    source = Stream("mixed", MIXED)
    key = "id"
    state = Seen

    def __init__(self, code: Code) -> None:
        self._code = code
        self.columns: StructType | None = None
        super().__init__()

    def transform(self, events: DataFrame) -> DataFrame:
        self.columns = events.schema
        return self._code(events)

    def fold(self, state: Seen | None, event: Event) -> Seen:
        return Seen(str(event["id"]), 1 if state is None else state.rows + 1)


def mixed(**fields: Any) -> dict[str, Any]:
    """Returns the fields of an event."""
    return {**PLAIN, **fields}


def outcomes(read_model: ReadModel, given: Sequence[InputEvent]) -> list[Outcome]:
    """Returns what the first stage makes of each event."""
    stage = read_model.stages[0]
    assert stage.transform is not None
    events = [encoded(one, stage) for one in given]
    schema = parsed(stage.transform.schema)
    found = []
    for row in rows_of(read_model, stage, dict(enumerate(events)), FakeRegistry()).to_pylist(maps_as_pydicts="strict"):
        (note,) = row[NOTE] or [{"cause": None}]
        if note["cause"] == IGNORED:
            found.append(Outcome([]))
        elif note["cause"] in (TRANSFORM_FAILED, TRANSFORM_TOO_LARGE):
            found.append(Outcome([], note["detail"]))
        else:
            assert note["cause"] is None, note
            frames = row[FRAMES] if stage.passes_on else []
            rows = [fastavro.schemaless_reader(io.BytesIO(one[5:]), schema, None) for one in frames]
            found.append(Outcome(told(rows if stage.passes_on else [row[ROW]])))
    return found


def outcomes_of_spark(
    spark: SparkSession, read_model: Transformed, code: Code, given: Sequence[InputEvent]
) -> list[Outcome]:
    """Returns what Spark itself makes of each event, by the code on a DataFrame of events that has no steps of ours."""
    assert read_model.columns is not None
    (stage, *_), columns = read_model.stages, read_model.columns
    types = {one["name"]: arrow_type(one["type"]) for one in stage.schemas[MIXED]["fields"]}
    of_record = {
        "_key": pa.binary(),
        "_headers": pa.list_(pa.struct({"key": pa.string(), "value": pa.binary()})),
        "_timestamp": pa.timestamp("us", "UTC"),
        "_topic": pa.string(),
        "_partition": pa.int32(),
        "_offset": pa.int64(),
    }
    events = [
        {
            **encoded(one, stage).values,
            "_key": one.record_key,
            "_headers": None,
            "_timestamp": one.timestamp_ms * 1000,
            "_topic": stage.source,
            "_partition": 0,
            "_offset": offset,
        }
        for offset, one in enumerate(given)
    ]
    events = [{**one, "counts": [*one["counts"].items()]} for one in events]
    schema = pa.schema(types | of_record)
    names = stage.transform.names if stage.transform is not None else ()

    # Compiling code for a few records takes longer than all else.
    spark.conf.set("spark.sql.codegen.wholeStage", "false")
    spark.conf.set("spark.sql.codegen.factoryMode", "NO_CODEGEN")

    def run(first: int, count: int) -> list[Outcome]:
        frame: Any = spark.createDataFrame(pa.Table.from_pylist(events[first : first + count], schema), columns)
        try:
            table = code(frame).select("_offset", *(f"`{name}`" for name in names)).toArrow()
            rows = table.to_pylist(maps_as_pydicts="strict")
        # Python has no times beyond the years 1 to 9999.
        except (PySparkException, Py4JJavaError, OverflowError) as error:
            if count == 1:
                return [Outcome([], error.getMessage() if isinstance(error, PySparkException) else "")]
            return [*run(first, count // 2), *run(first + count // 2, count - count // 2)]
        of_event: list[list[Any]] = [[] for _ in range(count)]
        for row in rows:
            of_event[row.pop("_offset") - first].append(told(row))
        return [Outcome(some) for some in of_event]

    try:
        return run(0, len(given))
    finally:
        spark.conf.unset("spark.sql.codegen.wholeStage")
        spark.conf.unset("spark.sql.codegen.factoryMode")


def sent(fields: Sequence[Mapping[str, Any]]) -> list[InputEvent]:
    return [event(MIXED, one, record_key="k", timestamp_ms=1_700_000_000_000 + n) for n, one in enumerate(fields)]


def told(value: Any) -> Any:
    """Returns a value that is equal for equal values of Spark, also for those that Python compares in another way."""
    if isinstance(value, dict):
        return {name: told(member) for name, member in value.items()}
    if isinstance(value, list):
        return [*map(told, value)]
    if isinstance(value, float):
        return repr(value)
    return value if not isinstance(value, datetime) or value.tzinfo is None else value.astimezone(UTC)
