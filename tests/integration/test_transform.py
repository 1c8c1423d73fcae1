"""Read models whose columns are computed in Spark, from the source topic to their states."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any

import pytest
from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)

from balance_service.engine.state_directory import StateDirectory
from balance_service.hosting.engine import Engine
from balance_service.model.folds import Count, RunningSum
from balance_service.model.placing import hosted_stages
from balance_service.model.read_model import ReadModel
from balance_service.model.stream import Stream
from balance_service.model.transform import TRANSFORM_FAILED
from balance_service.model.value_types import scale
from balance_service.observability.metrics import Metrics
from balance_service.spark.jvm import launch_jvm
from tests.integration.engines import settings_for, startup_retries
from tests.integration.purchases import Till, invoice
from tests.integration.test_outputs import wait_until_caught_up
from tests.support.shipped import jvm_scratch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import DataFrame

    from balance_service.devtools.local.stack import LocalStack
    from balance_service.settings import Settings

pytestmark = pytest.mark.timeout(600)


@dataclass(frozen=True)
class StoreSales:
    storeId: str  # noqa: N815  (the column's name)
    cents: int
    invoices: int


@dataclass(frozen=True)
class ItemSales:
    item: str
    revenue: Annotated[Decimal, scale(2)]
    lines: int


class PerStore(ReadModel):
    """Counts the invoices of each store, whose id is the records' key. Its expression fails for an invoice of 13.00."""

    name = "per-store"
    source = Stream("pos", "PosInvoice")
    key = "storeId"
    state = StoreSales

    cents = RunningSum("cents")
    invoices = Count()

    def transform(self, events: DataFrame) -> DataFrame:
        amount = F.col("totalAmount")
        return (
            events.where(F.col("customerType") == "PRIME")
            .withColumn("unlucky", F.lit(1) / (amount - 13))
            .where(F.col("unlucky").isNotNull())
            .withColumn("cents", (amount * 100).cast("bigint"))
        )


class PerItem(ReadModel):
    """Counts the lines of each item: an invoice becomes a row for each of its lines."""

    name = "per-item"
    source = Stream("pos", "PosInvoice")
    key = "item"
    state = ItemSales

    revenue = RunningSum("amount")
    lines = Count()

    def transform(self, events: DataFrame) -> DataFrame:
        lines = events.select("customerCardNo", F.explode("lines").alias("line"))
        item = F.concat("line.itemCode", F.lit("-"), F.substring("customerCardNo", -1, 1))
        return lines.select(item.alias("item"), F.col("line.amount").alias("amount"))


@pytest.fixture
def till(stack: LocalStack, names: dict[str, str]) -> Iterator[Till]:
    with Till(stack, f"{names['application_id']}.pos") as till:
        yield till


@pytest.fixture
def settings(stack: LocalStack, names: dict[str, str], tmp_path: Path) -> Settings:
    return settings_for(stack, names, tmp_path / "state")


def of_topic(model: type[ReadModel], till: Till) -> type[ReadModel]:
    """Returns a model of the till's topic."""
    found: type[ReadModel] = type(model.__name__, (model,), {"source": Stream(till.topic, "PosInvoice")})
    return found


def started(settings: Settings, *models: type[ReadModel]) -> Engine:
    bound = [model() for model in models]
    launch_jvm(settings, jvm_scratch())
    directory = StateDirectory(settings.state_dir, settings.application_id)
    stages = hosted_stages(bound, settings)
    engine = Engine(settings, directory, stages, bound, Metrics(), startup_retries())
    engine.start()
    return engine


def states(engine: Engine, model: type[ReadModel]) -> dict[str, dict[str, Any]]:
    tasks = engine.stages_of(model.name)[-1]
    views = [task.view for task in tasks.all()]
    frames = [pair for view in views if view for pair in view.scan(b"", b"\xff", 1_000)]
    return {key.decode(): {**tasks.hosted.state(frame)} for key, frame in frames}


def sales(count: int, first: int = 1) -> list[dict[str, Any]]:
    kinds = ["PRIME", "PRIME", "REGULAR"]
    return [invoice(n, f"card-{n % 7}", f"{n}.00", kind=kinds[n % 3]) for n in range(first, first + count)]


@pytest.mark.shows("dead-letter")
def test_filters_columns_and_failures_concern_their_own_record(till: Till, settings: Settings) -> None:
    sold = sales(30)
    engine = started(settings, of_topic(PerStore, till))
    try:
        till.sell(*sold[:15])
        wait_until_caught_up(engine)
        till.sell(*sold[15:])
        wait_until_caught_up(engine)
        found = states(engine, PerStore)
        tasks = engine.stages_of(PerStore.name)[-1]
        views = [task.view for task in tasks.all()]
        letters = [letter for view in views if view for letter in tasks.hosted.processor.letters.page(view, 0, 10)]
    finally:
        engine.stop()

    counted = [one for one in sold if one["customerType"] == "PRIME" and one["totalAmount"] != 13]
    cents: Counter[str] = Counter()
    for one in counted:
        cents[one["storeId"]] += int(one["totalAmount"] * 100)
    numbers = Counter(one["storeId"] for one in counted)
    assert found == {store: {"storeId": store, "cents": cents[store], "invoices": numbers[store]} for store in numbers}
    (letter,) = letters
    assert letter.cause == TRANSFORM_FAILED
    assert letter.detail.startswith("[DIVIDE_BY_ZERO] Division by zero.")


@pytest.mark.shows("exactly-once")
def test_every_row_of_an_event_counts_once_under_its_own_key_across_a_restart(till: Till, settings: Settings) -> None:
    sold = sales(60)
    engine = started(settings, of_topic(PerItem, till))
    try:
        till.sell(*sold[:30])
        wait_until_caught_up(engine)
    finally:
        engine.stop()
    till.sell(*sold[30:])
    engine = started(settings, of_topic(PerItem, till))
    try:
        wait_until_caught_up(engine)
        found = states(engine, PerItem)
    finally:
        engine.stop()

    revenue: dict[str, Decimal] = {}
    numbers: Counter[str] = Counter()
    for one in sold:
        for line in one["lines"]:
            item = f"{line['itemCode']}-{one['customerCardNo'][-1]}"
            revenue[item] = revenue.get(item, Decimal(0)) + line["amount"]
            numbers[item] += 1
    assert found == {item: {"item": item, "revenue": revenue[item], "lines": numbers[item]} for item in revenue}
