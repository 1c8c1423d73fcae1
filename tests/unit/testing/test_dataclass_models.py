"""Read models with dataclass states, on the real fold, commit and store."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from typing import Annotated, Any

from balance_service import EVENT, Emit, Event, Greatest, ReadModel, RunningSum, Stream, add, scale
from balance_service.avro.codec import AvroCodec
from balance_service.errors import PoisonRecordError
from balance_service.testing import Driver, check_contract, event
from balance_service.testing.fakes import FakeRegistry

Money = Annotated[Decimal, scale(2)]


@dataclass
class Total:
    customerId: str  # noqa: N815  (as the events have it)
    amount: Money


class Totals(ReadModel):
    """As `Balance`, with a dataclass."""

    name = "test-totals-of-a-dataclass"
    source = Stream("balance", "FundsAdded")
    key = "customerId"
    state = Total

    amount = RunningSum("FundsAdded.amount")


@dataclass
class Last:
    customerId: str  # noqa: N815
    latest: datetime
    greatest: Money


class Lasts(ReadModel):
    """Standard folds; one column has microseconds in the dataclass."""

    name = "test-lasts"
    source = Stream("balance", "FundsAdded")
    key = "customerId"
    state = Last

    latest = Greatest("FundsAdded.occurredOn")
    greatest = Greatest("FundsAdded.amount")


@dataclass
class Purse:
    customerId: str  # noqa: N815
    total: Money = Decimal("0.00")
    latest: list[Money] = field(default_factory=list)


class Purses(ReadModel):
    """Its own fold changes the given instance."""

    name = "test-purses"
    source = Stream("balance", "FundsAdded")
    key = "customerId"
    state = Purse
    emits = Emit("told", "BalanceState", each=EVENT)
    fields = {"shown": "string"}  # noqa: RUF012

    def fold(self, purse: Purse | None, funds: Event) -> Purse | None:
        purse = purse or Purse(funds["customerId"])
        if funds["amount"] < 0:
            return None
        purse.total = add(purse.total, funds["amount"])
        if purse.total > 1000:
            raise PoisonRecordError("too-much", "a purse holds 1000")
        purse.latest = [*purse.latest, funds["amount"]][-2:]
        return purse

    def view(self, purse: Purse) -> dict[str, Any]:
        return {"shown": f"{purse.total} of {len(purse.latest)}"}

    def emit(self, purse: Purse | None, funds: Event) -> dict[str, Any] | None:
        return None if purse is None else {"customerId": purse.customerId, "amount": purse.total}


def funds(amount: str, day: int = 1) -> Any:
    on = datetime(2026, 1, day, tzinfo=UTC)
    return event("FundsAdded", {"customerId": "ada", "amount": Decimal(amount), "occurredOn": on})


def test_models_with_dataclass_states_keep_the_contract() -> None:
    for model in (Totals, Lasts, Purses):
        check_contract(model, examples=10)


def test_sums_of_a_dataclass_are_added_in_columns() -> None:
    model = Totals()

    assert model.acceleration(AvroCodec(FakeRegistry(), "states", model.state_schema)) is not None


def test_a_field_in_microseconds_holds_a_time_in_milliseconds() -> None:
    with Driver(Lasts) as driver:
        driver.given(funds("1.00", day=7), funds("2.00", day=3)).then(
            {"latest": datetime(2026, 1, 7, tzinfo=UTC), "greatest": Decimal("2.00")}
        )


def test_fold_view_and_emit_get_instances() -> None:
    with Driver(Purses) as driver:
        driver.given(funds("1.50"), funds("2.00"), funds("0.25")).then({"shown": "3.75 of 2"})
        driver.when(funds("999.00")).then({"shown": "3.75 of 2"})

        assert [refused.cause for refused in driver.dead_letters()] == ["too-much"]
        assert [record["amount"] for record in driver.emitted("told") if record] == [
            Decimal("1.50"),
            Decimal("3.50"),
            Decimal("3.75"),
        ]

        driver.when(funds("-1.00")).then(None)
        assert len(driver.emitted("told")) == 3


def test_a_refused_event_discards_the_instance_that_the_fold_has_changed() -> None:
    with Driver(Purses) as driver:
        driver.given(funds("600.00"), funds("600.00"), funds("300.00")).then({"shown": "900.00 of 2"})
