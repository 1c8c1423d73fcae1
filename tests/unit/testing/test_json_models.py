"""Read models of JSON topics in the test driver, in `try` and in the contract suite."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated

import pytest
from click.testing import CliRunner

from balance_service import EPOCH_MILLIS, ConfigurationError, Count, Emit, ReadModel, RunningSum, Stream, Table, scale
from balance_service.cli.try_model import try_model
from balance_service.model.versions import declaration_of
from balance_service.testing import Driver, check_contract, row
from balance_service.testing.rows import InputEvent

if TYPE_CHECKING:
    from pathlib import Path

Money = Annotated[Decimal, scale(2)]


@dataclass
class Order:
    customer: str
    amount: Money
    at: Annotated[datetime, EPOCH_MILLIS]
    notes: list[str] = field(default_factory=list)
    score: float = 0.0


@dataclass
class Cancelled:
    __kind__ = "order.cancelled"

    customer: str
    amount: Money


@dataclass
class Total:
    customer: str
    orders: int
    total: Money


@dataclass
class Customer:
    customer: str
    name: str


@dataclass
class NamedOrder:
    customer: str
    amount: Money
    name: str


@dataclass
class OfName:
    name: str
    orders: int
    total: Money


@dataclass
class Sent:
    customer: str
    total: Money


class Totals(ReadModel):
    name = "totals"
    source = Stream("orders", Order, format="json")
    key = "customer"
    state = Total
    orders = Count("Order")
    total = RunningSum("Order.amount")


class Kinds(ReadModel):
    name = "kinds"
    source = Stream("orders", Order, Cancelled, format="json", type="kind")
    key = "customer"
    state = Total
    orders = Count("Order")
    total = RunningSum("Cancelled.amount")


class Joined(ReadModel):
    name = "joined"
    source = (
        Stream("orders", Order, format="json")
        .by("customer")
        .join(Table("customers", Customer, format="json"), on="customer", take={"name": "name"})
        .by("name", record=NamedOrder)
    )
    key = "name"
    state = OfName
    orders = Count("NamedOrder")
    total = RunningSum("NamedOrder.amount")


class Sends(ReadModel):
    name = "sends"
    source = Stream("orders", Order, format="json")
    key = "customer"
    state = Total
    emits = Emit("totals", Sent, fields={"customer": "customer", "total": "amount"}, format="json")
    orders = Count("Order")
    total = RunningSum("Order.amount")


class SendsStates(ReadModel):
    name = "sends-states"
    source = Stream("orders", Order, format="json")
    key = "customer"
    state = Total
    emits = Emit("totals", format="json")
    orders = Count("Order")
    total = RunningSum("Order.amount")


AT = datetime(2026, 3, 2, tzinfo=UTC)


def of_bytes(value: bytes) -> InputEvent:
    return InputEvent("", {}, body=value)


def test_a_json_topic_is_folded_as_its_documents_say() -> None:
    with Driver(Totals()) as driver:
        driver.given(
            Order("ada", Decimal("1.10"), AT),
            of_bytes(b'{"customer": "ada", "amount": "2.2", "at": 1772409600000, "more": {"x": 1}}'),
            of_bytes(b'{"customer": "ada", "amount": 1.001, "at": 1772409600000}'),
            of_bytes(b'{"customer": "ada", "amount": 1}'),
            of_bytes(b'{"customer": "ada", "amount": 1, "amount": 2, "at": 1}'),
        )

        assert driver.view("ada") == {"orders": 2, "total": Decimal("3.30")}
        assert [(one.cause, one.detail) for one in driver.dead_letters()] == [
            ("decimal-loses-digits", "amount has more digits than decimal(38,2)"),
            ("field-missing", "at is missing, and has no default"),
            ("json-malformed", "amount is there twice"),
        ]


def test_the_field_of_a_document_tells_its_record() -> None:
    with Driver(Kinds()) as driver:
        driver.given(
            Order("ada", Decimal("1.10"), AT),
            Cancelled("ada", Decimal("3.00")),
            of_bytes(b'{"kind": "order.cancelled", "customer": "ada", "amount": 4}'),
            of_bytes(b'{"kind": "order.shipped", "customer": "ada"}'),
            of_bytes(b'{"customer": "ada"}'),
        )

        assert driver.view("ada") == {"orders": 1, "total": Decimal("7.00")}
        assert [one.cause for one in driver.dead_letters()] == ["json-misfit"]


def test_a_json_topic_is_joined_with_a_json_table() -> None:
    with Driver(Joined()) as driver:
        driver.given(row("customers", "ada", Customer("ada", "Ada")), Order("ada", Decimal("1.10"), AT))

        assert driver.view("Ada") == {"orders": 1, "total": Decimal("1.10")}


def test_an_output_is_json() -> None:
    with Driver(Sends()) as driver:
        driver.given(Order("ada", Decimal("1.10"), AT))

        assert driver.emitted("totals") == [{"customer": "ada", "total": Decimal("1.10")}]
        assert [output.value for output in driver.last_stage.sent("totals")] == [b'{"customer":"ada","total":1.10}']


def test_a_state_is_sent_as_json() -> None:
    with Driver(SendsStates()) as driver:
        driver.given(Order("ada", Decimal("1.10"), AT), Order("ada", Decimal("2.00"), AT))

        values = [output.value for output in driver.last_stage.sent("totals")]
        assert values[-1] == b'{"customer":"ada","orders":2,"total":3.10}'


@pytest.mark.parametrize("model", [Totals, Kinds, Joined, Sends, SendsStates])
def test_a_model_of_json_keeps_the_contract(model: type[ReadModel]) -> None:
    check_contract(model())


def test_try_folds_the_lines_of_a_json_topic(tmp_path: Path) -> None:
    lines = tmp_path / "orders.jsonl"
    lines.write_text(
        '{"customer": "ada", "amount": 1.10, "at": 1772409600000}\n'
        'ada|{"customer": "ada", "amount": "2.20", "at": 1772409600000, "unknown": 1}\n'
        '{"customer": "ada", "amount": 1.001, "at": 1772409600000}\n'
        "not JSON\n"
    )
    done = CliRunner().invoke(try_model, [f"{__name__}:Totals", "--events", str(lines)])

    assert done.exit_code == 0, done.output
    assert ["ada", "2", "3.30"] in [line.split() for line in done.output.splitlines()]
    assert "decimal-loses-digits" in done.output
    assert "json-malformed" in done.output
    assert "4 events: 2 applied, 2 dead letters" in done.output


def test_the_format_is_part_of_the_declaration() -> None:
    class OfAvro(Totals):
        source = Stream("orders", Order)

    assert declaration_of(Totals()).fingerprint != declaration_of(OfAvro()).fingerprint


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (Stream("orders", Order, Cancelled, format="json"), "name the `type`, the field or the header"),
        (Stream("orders", Order, type="kind"), "names the type 'kind' of 'orders', which only a JSON topic has"),
        (Stream("orders", Order, format="xml"), "has 'orders' with the format 'xml': it must be one of avro, json"),  # type: ignore[arg-type]
    ],
)
def test_a_format_that_cannot_be_read_is_refused(source: Stream, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        type("Refused", (ReadModel,), {"name": "refused", "source": source, "key": "customer", "state": Total})
