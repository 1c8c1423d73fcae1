"""Read models with a `transform` in the test driver, which runs it in Spark as the service does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)

from balance_service import Count, ReadModel, RunningSum, Stream, col
from balance_service.testing import Driver, event

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True)
class Paid:
    customer: str
    amount: int
    country: str = "NO"


@dataclass(frozen=True)
class Refunded:
    customer: str
    amount: int


@dataclass(frozen=True)
class Total:
    customer: str
    total: int


@dataclass(frozen=True)
class Number:
    parity: str
    events: int


class Balances(ReadModel):
    name = "balances"
    source = Stream("payments", Paid, Refunded)
    key = "customer"
    state = Total
    total = RunningSum("signed")

    def transform(self, events: DataFrame) -> DataFrame:
        return events.select(
            F.coalesce("Paid.customer", "Refunded.customer").alias("customer"),
            F.coalesce(F.col("Paid.amount"), -F.col("Refunded.amount")).alias("signed"),
        )


class Doubled(ReadModel):
    """Its source has a condition on a column that the `transform` does not read."""

    name = "doubled"
    source = Stream("paid", Paid).where(col("country") == "NO")
    key = "customer"
    state = Total
    total = RunningSum("twice")

    def transform(self, events: DataFrame) -> DataFrame:
        return events.select("customer", (F.col("amount") * 2).alias("twice"))


class Offsets(ReadModel):
    """Reads no column of its events."""

    name = "offsets"
    source = Stream("paid", Paid)
    key = "parity"
    state = Number
    events = Count()

    def transform(self, events: DataFrame) -> DataFrame:
        return events.select((F.col("_offset") % 2).cast("string").alias("parity"))


def test_events_of_several_types_are_a_column_each() -> None:
    with Driver(Balances) as driver:
        driver.given(
            *(event(one, record_key="any") for one in (Paid("ada", 9), Refunded("ada", 2), Refunded("bob", 1)))
        )

        assert [driver.view(customer) for customer in ("ada", "bob")] == [{"total": 7}, {"total": -1}]
        assert driver.dead_letters() == []


def test_a_condition_of_the_source_is_one_of_the_events() -> None:
    with Driver(Doubled) as driver:
        driver.given(Paid("ada", 9), Paid("ada", 4, "SE")).when(Paid("ada", 1)).then({"total": 20})
    with Driver(Doubled, after_joins=True) as driver:
        driver.when(event("Row", {"customer": "ada", "twice": 4})).then({"total": 4})


def test_rows_may_be_made_without_a_column_of_the_event() -> None:
    with Driver(Offsets) as driver:
        driver.given(*(event(Paid("ada", 1), record_key="any") for _ in range(3)))

        assert [driver.view(parity) for parity in ("0", "1")] == [{"events": 2}, {"events": 1}]
