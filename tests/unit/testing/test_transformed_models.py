"""Read models with a `transform` in the test driver, which runs it in Spark as the service does."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)

from balance_service import ConfigurationError, Count, Emit, ReadModel, RunningSum, Stream, col
from balance_service.model.transform import TRANSFORM_FAILED
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


@dataclass
class Basket:
    customer: str
    items: list[str]
    note: str = ""


@dataclass
class SoldItems:
    item: str
    count: int


class PerItem(ReadModel):
    name = "per-item"
    source = Stream("baskets", Basket)
    key = "item"
    state = SoldItems
    count = Count()

    def transform(self, events: DataFrame) -> DataFrame:
        return events.where(~F.col("note").rlike("^(a|b)*$") | (F.col("note") == "")).select(
            F.explode("items").alias("item")
        )


def test_an_event_that_is_sent_again_with_its_rows_in_another_order_counts_once() -> None:
    first, again = ({"customer": "c", "items": items} for items in (["x", "y", "x"], ["x", "x", "y"]))
    with Driver(PerItem) as driver:
        driver.given(event("Basket", first, idempotency_key="k"), event("Basket", again, idempotency_key="k"))

        assert (driver.view("x"), driver.view("y")) == ({"count": 2}, {"count": 1})
        assert driver.dead_letters() == []


def test_an_expression_that_overflows_the_stack_concerns_its_event() -> None:
    with Driver(PerItem) as driver:
        driver.given(Basket("c", ["x"]), Basket("c", ["x"], "ab" * 50_000), Basket("c", ["x"], "c"))

        assert driver.view("x") == {"count": 2}
        assert [one.cause for one in driver.dead_letters()] == [TRANSFORM_FAILED]


@dataclass
class Visits:
    customer: str
    visits: int


class Divided(ReadModel):
    """Its condition fails for an event without items."""

    name = "divided"
    source = Stream("baskets", Basket)
    key = "customer"
    state = Visits
    visits = Count()

    def transform(self, events: DataFrame) -> DataFrame:
        return events.where(F.lit(2) / F.size("items") >= 1)


def test_a_condition_that_fails_concerns_its_event() -> None:
    with Driver(Divided) as driver:
        driver.given(Basket("c", ["x"]), Basket("c", []), Basket("c", ["x", "y", "z"]), Basket("c", ["x", "y"]))

        assert driver.view("c") == {"visits": 2}
        assert [one.cause for one in driver.dead_letters()] == [TRANSFORM_FAILED]


class Passed(ReadModel):
    """Passes on all columns of its rows, whatever the re-key and the condition name."""

    name = "passed"
    source = Stream("baskets", Basket).by("buyer")
    emits = Emit("bought", where=col("size") > 1)

    def transform(self, events: DataFrame) -> DataFrame:
        return events.select(F.upper("customer").alias("buyer"), F.size("items").alias("size"), "note")


def test_rows_that_are_sent_as_they_are_have_all_their_columns() -> None:
    with Driver(Passed) as driver:
        driver.given(Basket("ann", ["x", "y"], "n"), Basket("bob", ["x"], "n"))

        assert driver.emitted("bought") == [{"buyer": "ANN", "size": 2, "note": "n"}]


class Since(ReadModel):
    name = "since"
    source = Stream("baskets", Basket)
    key = "customer"
    state = Visits
    visits = Count()

    def transform(self, events: DataFrame) -> DataFrame:
        return events.where(F.lit(datetime(2026, 1, 1)) > F.timestamp_seconds(F.size("items")))  # noqa: DTZ001


def test_a_time_without_a_zone_is_one_of_utc_on_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Since().stages[0].transform
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        there = Since().stages[0].transform
    finally:
        monkeypatch.undo()
        time.tzset()

    assert here is not None
    assert there is not None
    assert here.fingerprint == there.fingerprint
    assert '"timestamp":1767225600000000' in here.fingerprint


def test_a_key_that_the_rows_lack_is_refused_also_with_a_fold_of_its_own() -> None:
    def fold(self: ReadModel, state: object, event: object) -> object: ...

    attributes = {"__module__": __name__, "key": "absent", "fold": fold, "visits": None}
    with pytest.raises(ConfigurationError, match="names 'absent', but the rows of its `transform` have no such column"):
        type("Absent", (Since,), attributes)()


@dataclass
class Sale:
    buyer: str
    items: list[str]
    note: str = ""


@dataclass
class Item:
    buyer: str
    code: str
    count: int = 1


class Unfolded(ReadModel):
    """A branch of the events, unchanged, and a record for each item, without a re-key."""

    name = "unfolded"
    source = Stream("sales", Sale)
    emits = (Emit("large", where=col("size") > 1), Emit("items", Item, of="made"))

    def transform(self, events: DataFrame) -> DataFrame:
        item = F.transform(
            "items", lambda code: F.struct(F.right("buyer", F.lit(2)).alias("buyer"), code.alias("code"))
        )
        return events.select(F.size("items").alias("size"), item.alias("made"))


def test_each_record_of_an_array_is_sent_in_order_or_none_of_an_event() -> None:
    with Driver(Unfolded, combines_few=True) as driver:
        sales = [Sale("anna", ["x", "y"]), Sale("bob", []), Sale("eve", ["x"] * 10_001), Sale("carl", ["z"])]
        driver.given(*[event(sale, record_key=sale.buyer) for sale in sales])

        sent = [{"buyer": "na", "code": "x", "count": 1}, {"buyer": "na", "code": "y", "count": 1}]
        assert driver.emitted("items") == [*sent, {"buyer": "rl", "code": "z", "count": 1}]
        assert [sale["buyer"] for sale in driver.emitted("large") if sale] == ["anna"]
        assert [(made.offset, made.topic) for made in driver.last_stage.writer.sent] == [
            (0, "large"),
            (0, "items"),
            (0, "items"),
            (3, "items"),
        ]
        ((_, cause, detail),) = driver.dead_letters()
        assert cause == "output-does-not-fit"
        assert "10001 records are too many" in detail


@dataclass
class Money:
    buyer: str
    points: int


class Behind(ReadModel):
    """Its rows are made of the events that the re-key passed on."""

    name = "behind"
    source = Stream("sales", Sale).where(col("note") != "no").by("buyer", unchanged=True)
    state = Money
    points = RunningSum("points")

    def transform(self, events: DataFrame) -> DataFrame:
        return events.select("buyer", (F.size("items") * 2).cast("bigint").alias("points"))


def test_rows_are_made_behind_a_re_key_that_passes_events_on_unchanged() -> None:
    first, last = Behind().stages
    assert (first.transform, first.makes, first.records, last.records) == (None, None, ("Sale",), ("Sale",))
    assert first.columns == last.columns == frozenset({"buyer", "items", "note"})
    with Driver(Behind) as driver:
        driver.given(Sale("a", ["x", "y"]), Sale("a", ["x"], "no"), Sale("b", ["x"]), Sale("a", ["z"]))

        assert (driver.view("a"), driver.view("b")) == ({"points": 6}, {"points": 2})
        assert [driver.stages[0].writer.sent[0].value] == [driver.stages[0].events[0].body]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"source": Stream("sales", Sale).by("buyer", unchanged=True).by("points")}, "has several sources or re-keys"),
        ({"transform": lambda _, e: e.select(F.explode("items").alias("buyer"))}, "makes several rows of an event"),
        (
            {"transform": lambda _, e: e.select(F.upper("buyer").alias("buyer"))},
            "by 'buyer', which its `transform` comp",
        ),
    ],
)
def test_what_cannot_be_behind_a_re_key_is_refused(changed: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        type("Changed", (Behind,), {"__module__": __name__, "points": Count(), **changed})()


@pytest.mark.parametrize(
    ("emit", "why"),
    [
        (Emit("items", Item, of="size"), "of each of the event's 'size', which is no array of records in Row"),
        (Emit("items", Sale, of="made"), "with a 'items' of the event's 'made', whose records have none"),
        (Emit("items", Item, of="made", fields={"buyer": "size"}), "with two of `fields`, `of` and `make`"),
        (Emit("items", of="made"), "name both a record type and `fields`, `of` or `make`, or neither"),
    ],
)
def test_an_output_of_an_array_is_checked(emit: Emit, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        type("Changed", (Unfolded,), {"__module__": __name__, "emits": emit})()


@dataclass
class Bill:
    buyer: str
    lines: list[Item]


class Lines(ReadModel):
    name = "lines"
    source = Stream("bills", Bill)
    emits = Emit("lines", Item, of="lines", where=col("buyer") != "no")


@pytest.mark.parametrize("combines_few", [False, True])
def test_an_array_of_the_event_itself_is_sent_without_a_transform(*, combines_few: bool) -> None:
    with Driver(Lines, combines_few=combines_few) as driver:
        driver.given(Bill("a", [Item("x", "1"), Item("y", "2", 3)]), Bill("no", [Item("x", "1")]), Bill("b", []))

        sent = [{"buyer": "x", "code": "1", "count": 1}, {"buyer": "y", "code": "2", "count": 3}]
        assert driver.emitted("lines") == sent
