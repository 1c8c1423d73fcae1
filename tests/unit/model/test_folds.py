"""Every standard fold, with and without a condition: batches, single events and a plain recount agree."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import ROUND_HALF_UP, Context, Decimal
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import balance_service
from balance_service import (
    Average,
    Count,
    Debezium,
    Distinct,
    Earliest,
    Emit,
    Greatest,
    Latest,
    Least,
    Range,
    ReadModel,
    RunningSum,
    Stream,
    Top,
    Upsert,
    col,
    scale,
)
from balance_service.engine.batch import updates_in
from balance_service.errors import ConfigurationError
from balance_service.model.standard_fold import Combine, Parts, StandardFold
from balance_service.model.versions import declaration_of
from balance_service.read_models.activity import Activity
from balance_service.read_models.balance import Balance
from balance_service.spark.combine import PartitionRows
from balance_service.testing import Driver, event
from balance_service.testing.contract import combined_equals_single
from balance_service.testing.fakes import FakeRegistry
from balance_service.testing.rows import encoded, rows_of
from tests.support.models import MONEY, WIDE_MONEY, ship

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from balance_service.model.standard_fold import Combination, Form
    from balance_service.testing import InputEvent

Money = Annotated[Decimal, scale(2)]
MICROS = {"type": "long", "logicalType": "timestamp-micros"}
ENDS = {
    "type": "record",
    "name": "Ends",
    "fields": [{"name": "least", "type": WIDE_MONEY}, {"name": "greatest", "type": WIDE_MONEY}],
}
REACH = {
    "type": "record",
    "name": "Reach",
    "fields": [{"name": "least", "type": "double"}, {"name": "greatest", "type": "double"}],
}
RANK = {
    "type": "record",
    "name": "RankOfSale",
    "fields": [{"name": "units", "type": ["null", "long"]}, {"name": "note", "type": ["null", "string"]}],
}
SOLD = ship(
    "Sold",
    {
        "shop": "string",
        "price": ["null", MONEY],
        "units": ["null", "int"],
        "weight": ["null", "double"],
        "product": ["null", "string"],
        "at": ["null", MICROS],
        "note": ["null", "string"],
    },
)
CLOSED = ship("Closed", {"shop": "string", "reason": "string"})
LIMIT = 2
RICH = (col("price") >= Decimal("5.00")) & ~col("note").is_null()
MONEY_39 = Context(prec=60)


def rounded(values: Sequence[Any], digits: int) -> Decimal | None:
    if not values:
        return None
    exact = sum(map(Fraction, values), Fraction(0)) / len(values) * 10**digits
    if not _halved(exact, digits):
        return Decimal(0).scaleb(-digits)
    return Decimal(exact.numerator).scaleb(-digits) if exact.denominator == 1 else _halved(exact, digits)


def _halved(exact: Fraction, digits: int) -> Decimal:
    # 60 digits tell on which side of a half the number is: its denominator is the number of some events.
    shown = MONEY_39.divide(Decimal(exact.numerator), Decimal(exact.denominator))
    return shown.quantize(Decimal(1), ROUND_HALF_UP, MONEY_39).scaleb(-digits, MONEY_39)


def extreme(of: Callable[..., Any]) -> Callable[[Sequence[Any]], Any]:
    return lambda values: of(values) if values else None


def ends(values: Sequence[Any]) -> Any:
    return {"least": min(values), "greatest": max(values)} if values else None


def top(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    ranked = sorted(events, key=lambda one: -one["units"])
    return [{"units": one["units"], "note": one["note"]} for one in ranked[:LIMIT]]


# Fold, Avro type of the field, and a recount: the values of the column, or for `Top` the events → the answer.
FOLDS: Mapping[str, tuple[Callable[..., StandardFold], Any, Callable[[Any], Any]]] = {
    "count": (lambda **more: Count("Sold", **more), "long", len),
    "sum": (lambda **more: RunningSum("Sold.price", **more), WIDE_MONEY, lambda values: sum(values, Decimal("0.00"))),
    "units": (lambda **more: RunningSum("Sold.units", **more), "long", sum),
    "mean": (
        lambda **more: Average("Sold.price", **more),
        ["null", {**WIDE_MONEY, "scale": 4}],
        lambda values: rounded(values, 4),
    ),
    "perSale": (
        lambda **more: Average("Sold.units", **more),
        ["null", {**WIDE_MONEY, "scale": 0}],
        lambda values: rounded(values, 0),
    ),
    "most": (lambda **more: Greatest("Sold.weight", **more), ["null", "double"], extreme(max)),
    "furthest": (
        lambda **more: Range("Sold.weight", **more),
        ["null", REACH],
        ends,
    ),
    "last": (lambda **more: Greatest("Sold.at", **more), ["null", MICROS], extreme(max)),
    "least": (lambda **more: Least("Sold.product", **more), ["null", "string"], extreme(min)),
    "range": (lambda **more: Range("Sold.price", **more), ["null", ENDS], ends),
    "first": (
        lambda **more: Earliest("Sold.note", **more),
        ["null", "string"],
        lambda values: next(iter(values), None),
    ),
    "latest": (
        lambda **more: Latest("Sold.at", **more),
        ["null", MICROS],
        lambda values: next(iter(values[::-1]), None),
    ),
    "top": (lambda **more: Top("Sold.units", LIMIT, **more), {"type": "array", "items": RANK}, top),
    "products": (
        lambda **more: Distinct("Sold.product", LIMIT, **more),
        "long",
        lambda values: min(len(set(values)), LIMIT + 1),
    ),
    "prices": (
        lambda **more: Distinct("Sold.price", 10_000, **more),
        "long",
        lambda values: len(set(values)),
    ),
    "times": (lambda **more: Distinct("Sold.at", 3, **more), "long", lambda values: min(len(set(values)), 4)),
}


def model_of(names: Sequence[str], *, where: bool) -> ReadModel:
    state = ship(f"State{len(names)}{where}", {"shop": "string", **{name: FOLDS[name][1] for name in names}})
    attributes = {
        "name": "test-folds",
        "source": Stream("sales", "Sold", "Closed"),
        "key": "shop",
        "state": state,
        "folds": {name: FOLDS[name][0](**({"where": RICH} if where else {})) for name in names},
    }
    made: ReadModel = type("Folded", (ReadModel,), attributes)()
    return made


# The events of a model are folded one by one if one of its folds does not combine; a single sum is added in columns.
ALONE = [("most", "furthest"), ("sum",)]
TOGETHER = [tuple(name for name in FOLDS if name not in ALONE[0]), *ALONE]
MODELS = [(names, where, model_of(names, where=where)) for names in TOGETHER for where in (False, True)]
PRICES = [None, *map(Decimal, ("0.00", "0.01", "4.99", "5.00", "5.01", "7.00"))]


def histories(*, prices: Sequence[Decimal | None], least: int) -> st.SearchStrategy[list[InputEvent]]:
    sales = st.fixed_dictionaries(
        {
            "shop": st.sampled_from(["a", "b"]),
            "price": st.sampled_from(prices),
            "units": st.none() | st.integers(least, 7),
            "weight": st.none() | st.sampled_from([-1.5, 0.25, 9.0]),
            "product": st.sampled_from([None, "ä", "b", "z", "zz"]),
            "at": st.none() | st.integers(0, 4).map(lambda n: datetime(2026, 1, 1, 0, 0, n, 7, tzinfo=UTC)),
            "note": st.sampled_from([None, "x", "y"]),
        }
    )
    closings = st.just({"shop": "a", "reason": "late"})
    events = sales.map(lambda fields: event("Sold", fields)) | closings.map(lambda fields: event("Closed", fields))
    return st.lists(events, max_size=50)


# The events of a key with summands of both signs are folded one by one.
EVENTS = histories(prices=PRICES, least=0) | histories(prices=[*PRICES, Decimal("-3.00")], least=-3)


def recount(name: str, events: Sequence[InputEvent], *, where: bool) -> dict[str, Any]:
    make, _, answer = FOLDS[name]
    column = make().column.partition(".")[2]
    by_shop: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for one in events:
        counted = by_shop[one.fields["shop"]]
        fields = one.fields
        if one.record != "Sold" or (column and fields[column] is None):
            continue
        if not where or (fields["price"] is not None and fields["price"] >= 5 and fields["note"] is not None):
            counted.append(fields)
    takes_events = name in ("count", "top")
    return {
        shop: answer(found if takes_events else [one[column] for one in found])
        for shop, found in sorted(by_shop.items())
    }


@pytest.mark.parametrize(("names", "where", "model"), MODELS, ids=lambda value: str(value)[:20])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(events=EVENTS, cut=st.integers(0, 50))
def test_batches_single_events_and_a_recount_agree(
    names: Sequence[str], where: bool, model: ReadModel, events: list[InputEvent], cut: int
) -> None:
    expected = {name: recount(name, events, where=where) for name in names}
    found, shops = [], sorted({one.fields["shop"] for one in events})
    for batches in ([events[:cut], events[cut:]], [[one] for one in events]):
        with Driver(model, combines_few=len(batches) == 2) as driver:
            for batch in batches:
                driver.given(*batch)
            assert driver.dead_letters() == []
            views = {name: {shop: driver.view(shop)[name] for shop in shops} for name in names}
            found.append((views, driver.states()))

    (combined, states), (singly, states_of_single_events) = found
    for name in names:
        # Equal decimals may have other digits.
        assert repr(combined[name]) == repr(expected[name]), name
        assert repr(singly[name]) == repr(expected[name]), name
    assert states == states_of_single_events


def test_a_key_whose_events_add_nothing_has_no_combined_update() -> None:
    names, _, model = MODELS[0]
    (stage,) = model.stages
    fields = ({"shop": "a"}, {"shop": "b", "price": Decimal("5.00")}, {"shop": "b", "price": Decimal("1.00")})
    events = [encoded(event("Sold", one), stage) for one in fields]

    part = PartitionRows(rows_of(model, stage, dict(enumerate(events)), FakeRegistry())).combined(
        model.combine, few_rows=0
    )

    ((a, b),) = ([one.update for one in updates_in(some, [0, 1])] for some in part.slices())
    assert all(a[name] in (None, []) for name in names if name != "count")
    assert b["mean"] == {"sum": Decimal("6.00"), "count": 2}
    assert b["range"] == {"least": Decimal("1.00"), "greatest": Decimal("5.00")}
    assert sorted(b["prices"]) == [Decimal("1.00"), Decimal("5.00")]


def test_every_standard_fold_is_counted_here() -> None:
    public = [getattr(balance_service, name) for name in balance_service.__all__]
    folds = {kind for kind in public if isinstance(kind, type) and issubclass(kind, StandardFold)}

    # The others are of the whole state.
    assert {type(make()) for make, _, _ in FOLDS.values()} == folds - {Upsert, Debezium}


class NewsOf(StandardFold):
    """The number of values and the last one, which no fold of the package has."""

    keeps_order = True

    def form(self, kept: Any) -> Form:
        return {"last": self.field, "count": 1}

    def combination(self, kind: Any) -> Combination:
        return Parts({"last": Combine.LAST, "count": Combine.SUM})

    def step(self, stored: Any) -> Callable[[Any, Any], Any]:
        def news(value: Any, update: Any) -> Any:
            if update is None:
                return value
            return {"last": update["last"], "count": update["count"] + (value["count"] if value else 0)}

        return news

    def stored(self, written: Any, kept: Any, name: str) -> Any:
        fields = [{"name": "last", "type": "string"}, {"name": "count", "type": "long"}]
        return {"type": "record", "name": "News", "fields": fields}

    def answer(self, kept: Any) -> Callable[[Any], Any]:
        return lambda value: f"{value['count']}: {value['last']}"


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(notes=st.lists(st.sampled_from([None, "x", "y", "z"]), max_size=40), cut=st.integers(0, 40))
def test_a_new_fold_is_one_class(notes: list[str | None], cut: int) -> None:
    ship("StateOfNews", {"shop": "string", "news": ["null", "string"]})
    attributes = {"name": "test-news", "source": Stream("sales", "Sold"), "key": "shop", "state": "StateOfNews"}
    model = type("News", (ReadModel,), {**attributes, "news": NewsOf("Sold.note", where=~(col("note") == "z"))})()
    events = [event("Sold", {"shop": "a", "note": note}) for note in notes]
    counted = [note for note in notes if note in ("x", "y")]

    with Driver(model, combines_few=True) as driver:
        driver.given(*events[:cut]).given(*events[cut:])

        assert model.keeps_order
        assert driver.view("a") == ({"news": f"{len(counted)}: {counted[-1]}" if counted else None} if events else None)
    combined_equals_single(model, [events])


# --- declarations


@dataclass
class Spending:
    customerId: str  # noqa: N815
    mean: Money | None
    products: int = 0


@dataclass
class MeanSent:
    customerId: str  # noqa: N815
    mean: Money | None


def spending(**changed: Any) -> ReadModel:
    attributes = {
        "name": "spending",
        "source": Stream("balance", "FundsAdded"),
        "key": "customerId",
        "state": Spending,
        "mean": Average("FundsAdded.amount"),
        "products": Distinct("FundsAdded.id", 2),
        **changed,
    }
    made: ReadModel = type("Changed", (ReadModel,), {"__module__": __name__, **attributes})()
    return made


def added(amount: str, number: int = 0) -> InputEvent:
    return event("FundsAdded", {"customerId": "ada", "amount": Decimal(amount), "id": str(number)})


@pytest.mark.parametrize(
    ("amounts", "mean"),
    [
        (["0.01", "0.02"], "0.02"),
        (["-0.01", "-0.02"], "-0.02"),
        (["0.01", "0.00", "0.00"], "0.00"),
        (["-0.01", "0.00", "0.00"], "0.00"),
        (["9999999999999999.99"] * 3, "9999999999999999.99"),
    ],
)
def test_an_average_is_rounded_once_with_halves_away_from_zero(amounts: list[str], mean: str) -> None:
    with Driver(spending()) as driver:
        driver.given(*map(added, amounts))

        assert str(driver.view("ada")["mean"]) == mean


def test_a_distinct_count_beyond_its_limit_is_one_more_than_the_limit() -> None:
    with Driver(spending()) as driver:
        for number, count in [(1, 1), (1, 1), (2, 2), (3, 3), (4, 3), (1, 3)]:
            driver.given(added("1.00", number))
            assert driver.view("ada")["products"] == count


def test_answers_have_the_declared_types_and_a_view_of_the_models_own_receives_them() -> None:
    def view(_model: ReadModel, state: Spending) -> Any:
        return {"shown": f"{state.mean} of {state.products}"}

    assert spending().description()["fields"] == {"mean": "decimal(38,2)?", "products": "long"}
    with Driver(spending(view=view, fields={"shown": "string"})) as driver:
        driver.when(added("1.00", 1), added("2.00", 2)).then({"shown": "1.50 of 2"})


def test_a_model_that_emits_its_state_sends_what_it_keeps() -> None:
    several = Distinct("FundsAdded.id", 3)
    with Driver(spending(emits=Emit("spendings"), products=several)) as driver:
        driver.given(added("1.00", 6), added("2.00", 5), added("1.00", 4), added("1.00", 3))

        sent = [(one["mean"], one["products"]) for one in driver.emitted("spendings") if one]

    assert sent == [
        ({"sum": Decimal("1.00"), "count": 1}, {"values": ["6"], "isMore": False}),
        ({"sum": Decimal("3.00"), "count": 2}, {"values": ["5", "6"], "isMore": False}),
        ({"sum": Decimal("4.00"), "count": 3}, {"values": ["4", "5", "6"], "isMore": False}),
        ({"sum": Decimal("5.00"), "count": 4}, {"values": [], "isMore": True}),
    ]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"mean": Average("FundsAdded.id")}, "an average is one of numbers, not of string"),
        ({"products": Average("FundsAdded.amount")}, "an average is a decimal, whose digits say how it is rounded"),
        ({"mean": Distinct("FundsAdded.id", 5)}, "a distinct count is a long"),
        ({"products": Distinct("FundsAdded.id", 0)}, "the limit of a distinct count is 1 to 10,000, not 0"),
        ({"products": Distinct("FundsAdded.id", 10_001)}, "the limit of a distinct count is 1 to 10,000, not 10001"),
        ({"mean": Range("FundsAdded.amount")}, "a range is a record with the fields 'least' and 'greatest'"),
        (
            {"products": Count("FundsAdded", where=col("amonut") > 1)},
            "has a condition on 'amonut', but FundsAdded has no such column",
        ),
        (
            {"products": Count("FundsAdded", where=col("amount") > 1.5)},
            "'amount' is of type decimal(18,2), and 1.5 is one of float, double",
        ),
    ],
)
def test_a_fold_that_does_not_fit_is_refused(changed: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        spending(**changed)
    assert why in str(refused.value)


@pytest.mark.parametrize("fold", [RunningSum, Average])
def test_a_sum_of_doubles_is_refused_with_the_ways_out(fold: type[StandardFold]) -> None:
    state = ship(f"Weighed{fold.__name__}", {"shop": "string", "weight": ["null", "double"]})
    attributes = {"name": "weighed", "source": Stream("sales", "Sold"), "key": "shop", "state": state}

    with pytest.raises(ConfigurationError) as refused:
        type("Weighed", (ReadModel,), {**attributes, "weight": fold("Sold.weight")})()

    for part in ("of double is not exact", "send decimals", "whole numbers of the smallest unit", "write a `fold`"):
        assert part in str(refused.value)


def test_a_condition_must_be_a_condition() -> None:
    with pytest.raises(TypeError, match="is not a condition"):
        Count("Sold", where=True)  # type: ignore[arg-type]


def test_a_fold_with_a_condition_may_be_empty_so_its_field_must_be_nullable() -> None:
    mean: Any = dataclass(type("Mean", (), {"__annotations__": {"customerId": str, "mean": Money}}))
    always = {"mean": Average("FundsAdded.amount"), "products": None, "state": mean}

    assert spending(**always).field_types == {"mean": "decimal(38,2)"}
    with pytest.raises(ConfigurationError, match="make the field nullable"):
        spending(**{**always, "mean": Average("FundsAdded.amount", where=col("amount") > 1)})


def test_a_condition_reads_its_columns_also_if_they_are_not_selected() -> None:
    source = Stream("balance", "FundsAdded").select("amount")
    many = Count("FundsAdded", where=col("id") == "1")

    with Driver(spending(source=source, products=many)) as driver:
        driver.when(added("1.00", 1), added("2.00", 2)).then({"mean": Decimal("1.50"), "products": 1})


@dataclass
class Counted:
    customerId: str  # noqa: N815
    all: int


def test_a_condition_is_in_the_fingerprint_and_its_absence_changes_no_fingerprint() -> None:
    def fingerprint(**more: Any) -> str:
        fold = {"mean": None, "products": None, "state": Counted, "all": Count("FundsAdded", **more)}
        return declaration_of(spending(**fold)).fingerprint

    one, other = fingerprint(where=col("amount") > 1), fingerprint(where=col("amount") > 2)
    assert len({fingerprint(), one, other}) == 3
    assert repr(Count("FundsAdded")) == "Count(column='FundsAdded')"
    assert repr(Top("A.b", 3)) == "Top(column='A.b', most=3)"


def test_the_fingerprints_of_shipped_models_stay_as_their_generations_have_them() -> None:
    assert declaration_of(Balance()).fingerprint == (
        "events:18829089654fb8dc folds:14a93feb981aa7d6 keepsOrder:6d82de1806614694 last:87ad52bb0f21ec25 "
        "made:155c3d27951926d7 outputs:4bd2f79353faa31c partitioner:2e4db5f987998246 reads:bd5221b2af7ee220 "
        "state:d62bd2ea017f1335 transform:9c846de7d7661af5"
    )
    assert declaration_of(Activity()).fingerprint == (
        "events:18829089654fb8dc folds:00253e22b8506881 keepsOrder:6d82de1806614694 last:87ad52bb0f21ec25 "
        "made:155c3d27951926d7 outputs:4bd2f79353faa31c partitioner:2e4db5f987998246 reads:bd5221b2af7ee220 "
        "state:2e668731ab8b6c04 transform:9c846de7d7661af5"
    )


def test_the_digits_of_an_average_are_no_part_of_the_fingerprint_as_only_answers_have_them() -> None:
    finer: Any = dataclass(
        type(
            "Spending",
            (),
            {"__annotations__": {"customerId": str, "mean": Annotated[Decimal, scale(4)] | None, "products": int}},
        )
    )
    finer.products = 0

    coarse, fine = spending(), spending(state=finer)
    assert declaration_of(fine).fingerprint == declaration_of(coarse).fingerprint
    assert fine.field_types["mean"] == "decimal(38,4)?"


def test_without_its_class_a_generation_with_an_average_has_no_answers() -> None:
    assert declaration_of(spending()).own_view


def test_fields_of_other_folds_are_stored_as_declared() -> None:
    names, _, model = MODELS[0]
    stored = {field["name"]: field["type"] for field in model.state_schema["fields"]}

    as_declared = {name for name in names if stored[name] == FOLDS[name][1]}
    assert {*names} - as_declared == {"mean", "perSale", "products", "prices", "times"}
