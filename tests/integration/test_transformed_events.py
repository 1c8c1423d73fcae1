"""What becomes of events whose rows are passed on, in the test driver and in the service: the same."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import fastavro
import pytest
from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)

from balance_service.avro.schemas import full_name, load_schema
from balance_service.kafka.messages import IDEMPOTENCY_HEADER
from balance_service.model.folds import Count, Latest
from balance_service.model.read_model import ReadModel
from balance_service.model.stream import Stream
from balance_service.settings import load_settings
from balance_service.spark.session import start_spark
from balance_service.testing import Driver, event
from tests.integration.engines import settings_for
from tests.integration.test_outputs import wait_until_caught_up
from tests.integration.test_transform import started
from tests.integration.transformed import MIXED, mixed
from tests.support.kafka import Writer
from tests.support.models import ENDED, SCORED
from tests.support.shipped import jvm_scratch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from balance_service.devtools.local.stack import LocalStack

pytestmark = pytest.mark.timeout(600)

WIDE = 1_000


@dataclass(frozen=True)
class Numbers:
    num: int
    rows: int
    last: str | None


class PerNumber(ReadModel):
    """Counts rows by number: an event has a row for each of its numbers, or `n` rows if it is above 100."""

    name = "per-number"
    source = Stream("mixed", MIXED)
    key = "num"
    state = Numbers

    rows = Count()
    last = Latest("text")

    def transform(self, events: DataFrame) -> DataFrame:
        numbers = F.expr("if(n > 100, sequence(1L, cast(n as bigint)), nums)")
        rows = events.select("text", "small", F.explode(numbers).alias("num"))
        # Numbers from 9 on make rows that are `small` times as wide; -1 fails.
        wide = F.expr("if(num >= 9, small, if(num = -1, 1 div (num + 1), 1))")
        return rows.withColumn("text", F.repeat("text", wide.cast("int")))


EVENTS: Sequence[tuple[Mapping[str, Any], str | None]] = [
    (mixed(nums=[1, 2, 1], n=1), "once"),
    (mixed(nums=[1, 2, 1], n=1), "once"),
    (mixed(nums=[], n=1), None),
    (mixed(nums=[3, None], n=1), None),
    (mixed(nums=[4, 2**63 - 1], n=1, small=1), None),
    (mixed(nums=[1], n=10_001), None),
    (mixed(nums=[9] * 5, n=1, text="x" * WIDE, small=1_000), None),
    (mixed(nums=[8, 9], n=1, text="x" * WIDE, small=2_000), None),
    (mixed(nums=[7, 0], n=1, text="7"), None),
    (mixed(nums=[4, -1], n=1), None),
    (mixed(nums=[5], n=1, text="5"), None),
    (mixed(nums=[5, 5], n=1, text="55"), "twice"),
]
LETTERS = [
    (3, "field-null"),
    (4, "key-reserved"),
    (5, "transform-too-large"),
    (6, "transform-too-large"),
    (7, "output-does-not-fit"),
    (9, "transform-failed"),
]
FOUND = {1: (2, "12"), 2: (1, "12"), 7: (1, "7"), 0: (1, "7"), 5: (3, "55")}


@pytest.fixture
def spark() -> Iterator[SparkSession]:
    session = start_spark(load_settings(), jvm_scratch(), 1)
    yield session
    session.stop()


def driven(model: type[ReadModel]) -> tuple[dict[int, tuple[int, Any]], list[tuple[int, str, str]]]:
    """Returns the states and the dead letters of the events in the test driver."""
    with Driver(model) as driver:
        for fields, once in EVENTS:
            driver.given(event(MIXED, fields, record_key="k", idempotency_key=once))
        views = {number: driver.view(str(number)) for number in range(11)}
        first = driver.stages[0]
        letters = [(letter.offset, letter.cause, letter.detail) for letter in first.letters()]
        assert not driver.stages[1].letters()
    return {number: (view["rows"], view["last"]) for number, view in views.items() if view is not None}, letters


@pytest.mark.usefixtures("spark")
def test_an_event_is_counted_with_all_of_its_rows_or_is_one_letter() -> None:
    found, letters = driven(PerNumber)

    assert found == FOUND
    assert [(offset, cause) for offset, cause, _ in letters] == LETTERS


def test_the_service_and_the_driver_agree(stack: LocalStack, names: dict[str, str], tmp_path: Path) -> None:
    topic = f"{names['application_id']}.mixed"
    model: type[ReadModel] = type("PerNumber", (PerNumber,), {"source": Stream(topic, MIXED)})
    found, letters = driven(model)
    schema = load_schema(MIXED)
    with Writer(stack, topic) as writer:
        frame = b"\0" + writer.register(f"{topic}-{full_name(schema)}", schema).to_bytes(4, "big")
        engine = started(settings_for(stack, names, tmp_path / "state"), model)
        try:
            for fields, once in EVENTS:
                body = io.BytesIO()
                fastavro.schemaless_writer(body, fastavro.parse_schema(schema), fields)
                headers = [] if once is None else [(IDEMPOTENCY_HEADER, once.encode())]
                writer.send("k", frame + body.getvalue(), headers=headers)
            assert writer.producer.flush(20) == 0
            wait_until_caught_up(engine)
            first, last = engine.stages_of(model.name)
            views = [task.view for task in last.all() if task.view is not None]
            counted = [last.hosted.state(frame) for view in views for _, frame in view.scan(b"", b"\xff", 1_000)]
            found_letters = [
                [
                    (letter.cause, letter.detail.replace(names["application_id"], "driver"))
                    for task in tasks.all()
                    if task.view is not None
                    for letter in tasks.hosted.processor.letters.page(task.view, 0, 100)
                ]
                for tasks in (first, last)
            ]
        finally:
            engine.stop()

    assert {one["num"]: (one["rows"], one["last"]) for one in counted} == found == FOUND
    assert found_letters == [[(cause, detail) for _, cause, detail in letters], []]


@dataclass(frozen=True)
class Either:
    id: str
    rows: int
    level: int | None
    reason: str | None


class PerGame(ReadModel):
    """Rows of two record types, in one column each."""

    name = "per-game"
    source = Stream("games", SCORED, ENDED)
    key = "id"
    state = Either

    rows = Count()
    level = Latest("level")
    reason = Latest("reason")

    def transform(self, events: DataFrame) -> DataFrame:
        return events.select(
            F.coalesce("Scored.id", "Ended.id").alias("id"), F.col("Scored.level").alias("level"), "Ended.reason"
        )


@pytest.mark.usefixtures("spark")
def test_records_of_several_types_are_columns_of_structs() -> None:
    with Driver(PerGame) as driver:
        driver.given(event(SCORED, {"id": "g", "level": 3}), event(ENDED, {"id": "g", "reason": "over"}))
        driver.when(event(SCORED, {"id": "h"})).then({"rows": 1, "level": None, "reason": None})
        assert driver.view("g") == {"rows": 2, "level": 3, "reason": "over"}


@dataclass(frozen=True)
class Origin:
    id: str
    last_key: str | None
    once: str | None
    millis: int | None
    topic: str | None
    part: int | None
    position: int | None


class OfRecord(ReadModel):
    """The last record of each event, from the columns of Kafka's record."""

    name = "of-record"
    source = Stream("games", ENDED)
    key = "id"
    state = Origin
    last_key = Latest("sent_key")
    once = Latest("sent_once")
    millis = Latest("sent_millis")
    topic = Latest("sent_topic")
    part = Latest("sent_partition")
    position = Latest("sent_offset")

    def transform(self, events: DataFrame) -> DataFrame:
        return events.select(
            "id",
            F.col("_key").cast("string").alias("sent_key"),
            F.expr(f"cast(filter(_headers, h -> h.key = '{IDEMPOTENCY_HEADER}')[0].value as string)").alias(
                "sent_once"
            ),
            F.unix_millis("_timestamp").alias("sent_millis"),
            F.col("_topic").alias("sent_topic"),
            F.col("_partition").alias("sent_partition"),
            F.col("_offset").alias("sent_offset"),
        )


@pytest.mark.usefixtures("spark")
def test_the_columns_of_the_record_are_those_of_kafka() -> None:
    with Driver(OfRecord) as driver:
        driver.given(event(ENDED, {"id": "a"}, record_key="a"))
        found = driver.when(
            event(ENDED, {"id": "g"}, record_key="g", timestamp_ms=1_700_000_000_123, idempotency_key="t")
        ).view("g")

    millis = 1_700_000_000_123
    assert found == {"last_key": "g", "once": "t", "millis": millis, "topic": "games", "part": 0, "position": 1}


@dataclass(frozen=True)
class Counted:
    id: str
    rows: int


class OfKey(ReadModel):
    """Counts records by their keys, which are in no column of the events."""

    name = "of-key"
    source = Stream("games", ENDED)
    key = "id"
    state = Counted

    rows = Count()

    def transform(self, events: DataFrame) -> DataFrame:
        return events.select(F.col("_key").cast("string").alias("id"))


@pytest.mark.usefixtures("spark")
def test_rows_may_be_made_of_the_record_alone() -> None:
    with Driver(OfKey) as driver:
        driver.given(event(ENDED, {"id": "a"}, record_key="k"), event(ENDED, {"id": "b"}, record_key="k"))
        assert driver.view("k") == {"rows": 2}
