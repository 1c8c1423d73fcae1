"""Read models whose events are dataclasses, on the real fold, commit and store."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, make_dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar

import pytest
from typing_extensions import TypeAliasType

from balance_service import (
    EVENT,
    ConfigurationError,
    Count,
    Emit,
    Event,
    Global,
    PoisonRecordError,
    ReadModel,
    RunningSum,
    Stream,
    Table,
    add,
    col,
    scale,
)
from balance_service.errors import TaskHaltedError
from balance_service.model.versions import declaration_of
from balance_service.testing import Driver, check_contract, event, row
from tests.support.models import ship

if TYPE_CHECKING:
    from nowhere import Unresolved  # type: ignore[import-not-found]

Money = Annotated[Decimal, scale(2)]


class Way(Enum):
    SHOP = 1
    WEB = 2


@dataclass
class Line:
    sku: str
    price: Money


@dataclass
class OrderPlaced:
    orderId: str  # noqa: N815
    customerId: str  # noqa: N815
    amount: Money
    placedAt: datetime  # noqa: N815
    way: Way = Way.SHOP
    lines: list[Line] = field(default_factory=list)
    gift: Line | None = None
    points: dict[str, int] = field(default_factory=dict)
    due: date | None = None


@dataclass
class Base:
    customerId: str  # noqa: N815


@dataclass
class Paid(Base):
    amount: Money


@dataclass
class Refunded(Base):
    amount: Money
    why: str = ""


@dataclass
class Total:
    customerId: str  # noqa: N815
    total: Money
    seen: list[str] = field(default_factory=list)


NOON = datetime(2026, 3, 2, 12, tzinfo=UTC)
SEEN: list[Any] = []


def order(amount: str, **more: Any) -> OrderPlaced:
    return OrderPlaced("o-1", "ada", Decimal(amount), NOON, **more)


def added(state: Total | None, customer: str, amount: Decimal, seen: str) -> Total:
    before = state or Total(customer, Decimal(0))
    return Total(customer, add(before.total, amount), [*before.seen, seen])


class Orders(ReadModel):
    name = "test-orders-of-dataclasses"
    source = Stream("orders", OrderPlaced)
    key = "customerId"
    state = Total

    def fold(self, state: Total | None, event: OrderPlaced) -> Total:
        if event.amount == 0:
            raise PoisonRecordError("amount-zero", "an order has an amount")
        SEEN.append(event)
        return added(state, event.customerId, event.amount, event.way.name)


class ByText(ReadModel):
    name = "test-orders-as-mappings"
    source = Stream("orders", OrderPlaced)
    key = "customerId"
    state = Total

    def fold(self, state: Total | None, event: Event) -> Total:
        return added(state, event["customerId"], event["amount"], f"{event.record} {event['way']}")


class Payments(ReadModel):
    name = "test-payments"
    source = Stream("payments", Paid, Refunded)
    key = "customerId"
    state = Total

    def fold(self, state: Total | None, event: Paid | Refunded) -> Total:
        amount = event.amount if isinstance(event, Paid) else -event.amount
        return added(state, event.customerId, amount, type(event).__name__)


class PaymentsByBase(Payments):
    name = "test-payments-by-base"

    def fold(self, state: Total | None, event: Base) -> Total:
        assert isinstance(event, Paid | Refunded)
        return super().fold(state, event)


class PaymentsInPart(Payments):
    name = "test-payments-in-part"

    def fold(self, state: Total | None, event: Paid | Event) -> Total:  # type: ignore[override]
        if isinstance(event, Paid):
            return super().fold(state, event)
        return added(state, event["customerId"], -event["amount"], event.record)


def test_the_fold_gets_an_instance_with_the_values_of_its_fields() -> None:
    sent = order(
        "5.50",
        way=Way.WEB,
        lines=[Line("a", Decimal("1.00"))],
        gift=Line("b", Decimal("0.00")),
        points={"x": 3},
        due=date(2026, 4, 1),
    )
    SEEN.clear()

    with Driver(Orders) as driver:
        driver.given(order("1.00")).when(sent).then({"total": Decimal("6.50"), "seen": ["SHOP", "WEB"]})

    assert [order("1.00"), sent] == SEEN
    assert type(SEEN[1].way) is Way


Payment = TypeAliasType("Payment", Paid | Refunded)


class PaymentsByAlias(Payments):
    name = "test-payments-by-alias"

    def fold(self, state: Total | None, event: Annotated[Payment, "of a customer"]) -> Total:
        return super().fold(state, event)


def test_an_event_whose_annotation_is_no_dataclass_is_a_mapping() -> None:
    with Driver(ByText) as driver:
        driver.when(order("5.50")).then({"total": Decimal("5.50"), "seen": ["OrderPlaced SHOP"]})


@pytest.mark.parametrize("model", [Payments, PaymentsByBase, PaymentsInPart, PaymentsByAlias])
def test_each_of_several_records_arrives_as_its_class_where_the_annotation_includes_it(model: type[ReadModel]) -> None:
    with Driver(model) as driver:
        driver.given(Paid("ada", Decimal("5.00"))).when(Refunded("ada", Decimal("2.00"))).then(
            {"total": Decimal("3.00"), "seen": ["Paid", "Refunded"]}
        )


def test_fields_and_instances_are_given_to_the_driver_alike() -> None:
    fields = {"customerId": "ada", "amount": Decimal("2.00")}
    with Driver(Payments) as driver:
        driver.given(event("Paid", fields), event(Paid("ada", Decimal("3.00")), record_key="bob"))
        assert driver.view("ada") == {"total": Decimal("2.00"), "seen": ["Paid"]}
        assert [one.cause for one in driver.dead_letters()] == ["key-is-not-customer-id"]


def test_an_instance_is_given_without_fields() -> None:
    with pytest.raises(TypeError, match=r"Base\(customerId='ada'\) has all fields of its event: give other ones by"):
        event(Base("ada"), {"customerId": "bob"})


def test_a_refused_event_is_a_dead_letter_with_the_models_sentence() -> None:
    with Driver(Orders) as driver:
        driver.given(order("1.00")).when(order("0.00")).then({"total": Decimal("1.00"), "seen": ["SHOP"]})
        assert [(one.cause, one.detail) for one in driver.dead_letters()] == [("amount-zero", "an order has an amount")]


def test_models_with_dataclass_events_keep_the_contract() -> None:
    for model in (Orders, Payments):
        check_contract(model, examples=10)


def test_an_answer_is_read_into_a_dataclass() -> None:
    with Driver(Orders) as driver:
        found = driver.when(order("1.50")).view("ada", into=Total)
        assert found == Total("ada", Decimal("1.50"), ["SHOP"])
        assert driver.view("bob", into=Total) is None


@dataclass
class Notice:
    orderId: str  # noqa: N815
    total: Annotated[Decimal, scale(2, precision=4)]


class Notices(Orders):
    name = "test-notices-of-dataclasses"
    emits = Emit("notices", Notice, each=EVENT)

    def emit(self, state: Total | None, event: OrderPlaced) -> list[Notice]:
        return [Notice(event.orderId, state.total)] if state else []


@dataclass
class Shipped:
    orderId: str  # noqa: N815
    express: bool


def hurried(event: Shipped) -> Notice:
    return Notice(event.orderId, Decimal(1 if event.express else 0))


class Express(ReadModel):
    name = "test-express-of-dataclasses"
    source = Stream("shipments", Shipped)
    emits = Emit("hurried", Notice, where=col("express") == True, make=hurried)  # noqa: E712


def test_records_to_send_are_instances_too() -> None:
    with Driver(Notices) as driver:
        driver.when(order("5.00"), order("2.50"))
        assert driver.emitted("notices", into=Notice) == [
            Notice("o-1", Decimal("5.00")),
            Notice("o-1", Decimal("7.50")),
        ]
    with Driver(Express) as driver:
        driver.when(Shipped("o-1", True), Shipped("o-2", False))
        assert driver.emitted("hurried") == [{"orderId": "o-1", "total": Decimal("1.00")}]


class Hurried:
    def __call__(self, event: Shipped) -> Notice:
        return hurried(event)


def noted(number: int, event: Shipped) -> Notice:
    return Notice(event.orderId, Decimal(number))


@pytest.mark.parametrize("make", [Hurried(), partial(noted, 1)], ids=["object", "partial"])
def test_any_callable_gets_instances_as_it_is_annotated(make: Any) -> None:
    declared = type("Declared", (Express,), {"emits": Emit("hurried", Notice, make=make), "__module__": __name__})
    with Driver(declared) as driver:
        driver.when(Shipped("o-1", True))
        assert driver.emitted("hurried") == [{"orderId": "o-1", "total": Decimal("1.00")}]


@dataclass
class Scaleless:
    total: Decimal


class NoticesByName(Orders):
    name = "test-notices-by-name"
    emits = Emit("notices", ship("NoticeByName", {"total": "string"}), each=EVENT)

    def emit(self, state: Total, event: OrderPlaced) -> Scaleless:
        return Scaleless(event.amount)


def test_a_class_that_can_be_no_record_halts_the_task_that_sends_its_instance() -> None:
    with Driver(NoticesByName) as driver, pytest.raises(TaskHaltedError, match=r"fails at offset 0 of .* with Config"):
        driver.given(order("1.00"))


def test_an_instance_that_does_not_fit_its_record_makes_the_event_a_dead_letter() -> None:
    with Driver(Notices) as driver:
        driver.when(order("999.00"))
        (refused,) = driver.dead_letters()

    assert refused.cause == "output-does-not-fit"
    assert refused.detail == (
        "the record to send does not fit its schema: "
        "Notice.total has a Decimal with more than 4 digits, or more than 2 after the point"
    )


@dataclass
class Customer:
    city: str


@dataclass
class OrderInCity:
    city: str
    amount: Money


@dataclass
class City:
    city: str
    orders: int
    total: Money


class Cities(ReadModel):
    name = "test-cities-of-dataclasses"
    source = (
        Stream("orders", OrderPlaced)
        .join(Global("customers", Customer), on="customerId", take={"city": "city"})
        .by("city", record=OrderInCity)
    )
    state = City
    orders = Count("OrderInCity")
    total = RunningSum("OrderInCity.amount")


def test_rows_and_joined_records_are_dataclasses_too() -> None:
    with Driver(Cities) as driver:
        driver.given(row("customers", "ada", Customer("Oslo"))).when(order("5.00"), order("1.00"))
        assert driver.view("Oslo") == {"orders": 2, "total": Decimal("6.00")}


@dataclass
class InNamespace:
    __namespace__ = "com.acme.shop"

    customerId: str  # noqa: N815
    line: Line
    lines: list[Line]
    note: str | None = None


def model_of(source: Stream, **attributes: Any) -> type[ReadModel]:
    given = {"name": "test-declared", "source": source, "key": "customerId", "state": Total, "__module__": __name__}
    return type("Declared", (ReadModel,), {**given, "fold": Orders.fold, **attributes})


def no_annotation(self: Any, state: Any, event: Any) -> Any: ...


def test_the_schema_has_the_name_and_the_namespace_of_the_class() -> None:
    (schema,) = model_of(Stream("orders", InNamespace), fold=no_annotation)().stages[0].schemas.values()
    (plain,) = Orders().stages[0].schemas.values()

    assert (schema["name"], schema["namespace"]) == ("InNamespace", "com.acme.shop")
    assert [one["type"]["namespace"] for one in schema["fields"] if one["name"] == "line"] == ["com.acme.shop"]
    assert schema["fields"][-1] == {"name": "note", "type": ["null", "string"], "default": None}
    # A class may move between modules.
    assert "namespace" not in json.dumps(plain)
    assert __name__ not in json.dumps(plain)


@dataclass
class Bought:
    __namespace__ = "tests"

    customerId: str  # noqa: N815


@dataclass
class Buyer:
    __namespace__ = "tests"

    city: str


@dataclass
class BoughtInCity:
    __namespace__ = "tests"

    city: str


def test_the_declaration_of_a_model_does_not_depend_on_how_its_records_are_named() -> None:
    def declared(event: str | type, row: str | type, joined: str | type) -> Any:
        joins = Stream("bought", event).join(Global("buyers", row), on="customerId", take={"city": "city"})
        given: dict[str, Any] = {
            "source": joins.by("city", record=joined),
            "state": City,
            "key": "city",
            "fold": no_annotation,
        }
        return declaration_of(model_of(**given, emits=Emit("told", joined), emit=no_annotation)())

    by_text = declared(
        ship("Bought", {"customerId": "string"}),
        ship("Buyer", {"city": "string"}),
        ship("BoughtInCity", {"city": "string"}),
    )

    assert declared(Bought, Buyer, BoughtInCity) == by_text
    assert str(Stream("orders", OrderPlaced)) == str(Stream("orders", "OrderPlaced"))


def of_text(self: Any, state: Any, event: Unresolved) -> Any: ...


def of_attribute(self: Any, state: Any, event: json.Unresolved) -> Any: ...  # type: ignore[name-defined]


def of_sentence(self: Any, state: Any, event: Any) -> Any: ...


of_sentence.__annotations__["event"] = "an event"


class Payable(Protocol):
    amount: Decimal


def of_protocol(self: Any, state: Any, event: Payable) -> Any: ...


Payments_ = TypeVar("Payments_", Paid, Refunded)


def of_variable(self: Any, state: Any, event: Payments_) -> Any: ...


OTHER_PLACED = make_dataclass("OrderPlaced", [("customerId", str)])
OTHER_CUSTOMER = make_dataclass("Customer", [("street", str)])
OTHER_NOTICE = make_dataclass("Notice", [("orderId", str)])


@dataclass
class Größe:
    customerId: str  # noqa: N815


class NoDataclass:
    customerId: str  # noqa: N815


@dataclass
class SetOf:
    customerId: str  # noqa: N815
    tags: set[str]


@dataclass
class OddNamespace:
    __namespace__ = "com..acme"

    customerId: str  # noqa: N815


@pytest.mark.parametrize(
    ("source", "attributes", "why"),
    [
        (
            Stream("orders", "FundsAdded"),
            {},
            "has a `fold` that takes events as OrderPlaced (",
        ),
        (
            Stream("orders", OrderPlaced, Paid),
            {},
            "which 'Paid' of the source is not: name the dataclass of each record in the source and in the annotation",
        ),
        (
            Stream("orders", OrderPlaced),
            {"fold": of_text},
            "has a `fold` that takes events of a type that cannot be resolved (name 'Unresolved' is not defined): "
            "define or import it at the top of the module, and not only under TYPE_CHECKING",
        ),
        (
            Stream("orders", OrderPlaced),
            {"fold": of_attribute},
            "has a `fold` that takes events of a type that cannot be resolved (module 'json' has no attribute",
        ),
        (
            Stream("orders", OrderPlaced),
            {"fold": of_sentence},
            "has a `fold` that takes events of a type that cannot be resolved (",
        ),
        (
            Stream("orders", OrderPlaced),
            {"fold": of_protocol},
            "which is neither a mapping nor the dataclass of a record of the source: name that dataclass, or annotate",
        ),
        (Stream("orders", Paid, Refunded), {"fold": of_variable}, "takes events as ~Payments_"),
        (
            Stream("orders", OrderPlaced, OTHER_PLACED),
            {},
            "names two records OrderPlaced, by OrderPlaced (",
        ),
        (
            Stream("orders", "OrderPlaced", OrderPlaced),
            {},
            "names two records OrderPlaced, by its schema and OrderPlaced (",
        ),
        (
            Stream("orders", OrderPlaced)
            .join(Global("customers", Customer), on="customerId", take={"city": "city"})
            .by("customerId", record=OrderInCity)
            .join(Table("streets", OTHER_CUSTOMER), on="customerId", take={"street": "street"}),
            {},
            "names two records Customer, by Customer (",
        ),
        (
            Stream("orders", OrderPlaced).select("amount"),
            {},
            "selects columns, but its `fold` takes whole events: annotate them as `Event`, or remove `select`",
        ),
        (Stream("orders", NoDataclass), {}, "cannot be a record: write `@dataclass` above it"),
        (Stream("orders", Größe), {}, "cannot be a record: it has a name that Avro does not allow: use ASCII letters"),
        (Stream("orders", SetOf), {}, "cannot be a record: its field 'tags' is of type set"),
        (
            Stream("orders", OddNamespace),
            {},
            "cannot be a record: it has the `__namespace__` 'com..acme': use names with dots between them",
        ),
    ],
)
def test_an_invalid_declaration_is_refused(source: Stream, attributes: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        model_of(source, **attributes)()

    assert why in str(refused.value)


def test_two_classes_of_one_name_to_emit_are_refused() -> None:
    emits = tuple(Emit(topic, record, make=hurried) for topic, record in (("a", Notice), ("b", OTHER_NOTICE)))
    declared = type("Declared", (Express,), {"emits": emits, "__module__": __name__})

    with pytest.raises(ConfigurationError, match=r"names two records Notice, by Notice \("):
        declared()


@pytest.mark.parametrize("fold", [of_text, of_attribute, of_sentence, of_protocol])
def test_an_annotation_that_only_a_type_checker_knows_leaves_the_events_of_a_schema_mappings(fold: Any) -> None:
    model_of(Stream("orders", "FundsAdded"), fold=fold)()


def test_an_object_that_names_no_record_is_refused() -> None:
    with pytest.raises(TypeError, match="is neither the simple name of a record nor a dataclass"):
        Stream("orders", order("1.00"))  # type: ignore[arg-type]


@dataclass
class Charged:
    customerId: str  # noqa: N815
    fee: Money = Decimal("0.25")
    mark: bytes = b"\xff"
    line: Line = field(default_factory=lambda: Line("none", Decimal("1.00")))


@dataclass
class Owed:
    customerId: str  # noqa: N815
    total: Money


class Fees(ReadModel):
    name = "test-fees"
    source = Stream("test-fees", Charged)
    key = "customerId"
    state = Owed
    total = RunningSum("Charged.fee")


def test_a_field_that_a_test_leaves_out_has_its_default() -> None:
    with Driver(Fees()) as driver:
        driver.when(event("Charged", {"customerId": "ada"}), event(Charged("ada", Decimal("1.00"))))

        assert driver.view("ada") == {"total": Decimal("1.25")}
