"""Models with several sources: what is refused, their stages, topics and versions, and what the driver folds."""

from __future__ import annotations

from dataclasses import dataclass, make_dataclass
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import TypeAdapter

from balance_service.errors import ConfigurationError
from balance_service.http.model_routes import ModelDescription
from balance_service.kafka.topic_specs import FOREVER, MAX_MESSAGE_BYTES, prepare_topics
from balance_service.model.binding import bind_models
from balance_service.model.conditions import col
from balance_service.model.events import Emit
from balance_service.model.flow import flow_of, mermaid
from balance_service.model.folds import Count, RunningSum
from balance_service.model.generations import Generations, Switch
from balance_service.model.placing import hosted_stages, records_of_topic, stages_of, written_by
from balance_service.model.read_model import ReadModel
from balance_service.model.sources import declared_stages, sources_of
from balance_service.model.stage import rekeyed_topics
from balance_service.model.stream import Global, Stream
from balance_service.model.versions import Versions, declaration_of
from balance_service.settings import load_settings
from balance_service.testing import Driver, check_contract, event, row
from tests.support.fakes import InMemoryTopics

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass
class OrderPlaced:
    orderId: str  # noqa: N815
    customerId: str  # noqa: N815
    amount: int


@dataclass
class PaymentTaken:
    customerId: str  # noqa: N815
    amount: int
    method: str


@dataclass
class Refunded:
    paymentId: str  # noqa: N815
    amount: int


@dataclass
class Payment:
    customerId: str  # noqa: N815


@dataclass
class RefundOfCustomer:
    customerId: str  # noqa: N815
    amount: int


@dataclass
class Account:
    customerId: str  # noqa: N815
    ordered: int
    paid: int


@dataclass
class Entries:
    customerId: str  # noqa: N815
    entries: list[str]


ORDERS = Stream("orders", OrderPlaced)
PAYMENTS = Stream("payments", PaymentTaken, partitioner="crc32").where(col("method") != "voucher")
REFUNDS = (
    Stream("refunds", Refunded)
    .join(Global("taken", Payment), on="paymentId", take={"customerId": "customerId"})
    .by("customerId", record=RefundOfCustomer)
)
SHARED = "app-accounts-by-customerId"


class Accounts(ReadModel):
    name = "accounts"
    sources = (ORDERS, PAYMENTS)
    key = "customerId"
    state = Account
    ordered = RunningSum("OrderPlaced.amount")
    paid = RunningSum("PaymentTaken.amount")


class Journal(ReadModel):
    """What happened to a customer, in the order in which it is folded."""

    name = "journal"
    sources = (ORDERS, PAYMENTS, REFUNDS)
    key = "customerId"
    state = Entries

    def fold(self, state: Entries | None, event: Any) -> Entries:
        entries = [*(state.entries if state else []), f"{event.record} {event['amount']}"]
        return Entries(event["customerId"], entries)


def changed(**given: Any) -> type[ReadModel]:
    members = {
        name: value
        for name, value in vars(Accounts).items()
        if name in ("name", "sources", "key", "state", "ordered", "paid")
    }
    kept = {name: value for name, value in (members | given).items() if value is not None}
    return type("Changed", (ReadModel,), {"__module__": __name__, **kept})


SETTINGS = load_settings(application_id="app")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"source": ORDERS}, "has both `source` and `sources`: declare one of them"),
        ({"sources": None}, "has no `source`"),
        ({"sources": ORDERS}, r"has `sources` that are not streams, .*\(Stream\(…\), Stream\(…\)\)"),
        ({"sources": ()}, "has `sources` that are not streams"),
        ({"sources": (ORDERS, "payments")}, "has `sources` that are not streams"),
        ({"sources": (ORDERS, Stream("orders", PaymentTaken))}, "reads 'orders' twice: name all of its records in one"),
        ({"sources": (ORDERS, Stream("payments", PaymentTaken, tombstones=True))}, "reads 'payments' with tombstones"),
        ({"key": None}, "reads 'orders' without a key: name the `key`, by which all `sources` are re-keyed"),
        ({"sources": (ORDERS.by("orderId"), PAYMENTS)}, "re-keys 'orders' by 'orderId' and 'payments' by 'customerId'"),
        (
            {"sources": (ORDERS.by("customerId").where(col("amount") > 1), PAYMENTS)},
            "has a step after the last `.by` of 'orders', where the records of all `sources` are on one topic",
        ),
        ({"sources": (ORDERS.select("amount"), PAYMENTS)}, "selects columns of 'orders' and none of 'payments'"),
        (
            {"sources": (ORDERS, Stream("refunds", Refunded))},
            "continues by 'customerId', which must be a string, int or long; Refunded has no such column",
        ),
        ({"sources": (ORDERS.by("customerId"), PAYMENTS), "key": "orderId"}, "re-keys 'orders' by 'customerId' and"),
    ],
)
def test_sources_that_cannot_be_folded_together_are_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        changed(**given)()


def test_the_nearest_declaration_of_a_subclass_counts() -> None:
    class One(Journal):
        source = ORDERS

    assert sources_of(One) == (ORDERS,)
    assert [stage.name for stage in One().stages] == ["journal"]


def test_each_source_is_a_first_stage_that_writes_the_topic_of_the_model() -> None:
    orders, payments, last = stages_of(Accounts(), SETTINGS)

    assert [stage.name for stage in (orders, payments, last)] == [
        "accounts-by-customerId-from-orders",
        "accounts-by-customerId-from-payments",
        "accounts",
    ]
    assert [stage.source for stage in (orders, payments, last)] == ["orders", "payments", SHARED]
    assert orders.rekeyed == payments.rekeyed == SHARED
    assert (orders.changelog, orders.dead_letters) == (f"{SHARED}-from-orders-changelog", "orders-dead-letters")
    assert (orders.partitioner, payments.partitioner, last.partitioner) == ("murmur2", "crc32", "murmur2")
    assert (orders.records, payments.records) == (("OrderPlaced",), ("PaymentTaken",))
    assert last.records == ("OrderPlaced", "PaymentTaken")
    assert (last.key, last.conditions, [*map(str, payments.conditions)]) == (("customerId",), (), ["method != voucher"])
    assert not Accounts().keeps_order


def test_names_of_stages_do_not_depend_on_other_sources() -> None:
    of_one = changed(sources=(PAYMENTS,), ordered=Count("PaymentTaken"))()
    of_three = changed(sources=(PAYMENTS, REFUNDS, ORDERS))()

    assert [stage.name for stage in of_one.stages] == ["accounts-by-customerId-from-payments", "accounts"]
    assert [stage.name for stage in of_three.stages] == [
        "accounts-by-customerId-from-payments",
        "accounts-by-customerId-from-refunds",
        "accounts-by-customerId-from-orders",
        "accounts",
    ]


@pytest.mark.parametrize(
    ("stage", "model", "topics"),
    [
        ("m", "m", ()),
        ("m.g2", "m", ()),
        ("m-by-a", "m", ("m-by-a",)),
        ("m-by-a-b", "m", ("m-by-a-b",)),
        ("m-by-a-from-eu", "m", ("m-by-a", "m-by-a-from-eu")),
        ("m-by-a-b-from-eu", "m", ("m-by-a-b", "m-by-a-b-from-eu")),
        ("m-by-a-from-x-from-y", "m", ("m-by-a", "m-by-a-from-x", "m-by-a-from-x-from-y")),
        # A column is called `from`.
        ("m-by-from-from-eu", "m", ("m-by-from", "m-by-from-from-eu")),
        ("m-by-a-from-from-eu", "m", ("m-by-a", "m-by-a-from", "m-by-a-from-from-eu")),
        ("a-by-b-from-c-by-d", "a-by-b-from-c", ("a-by-b-from-c-by-d",)),
        ("a-by-b-from-c", "a-by-b-from-c", ()),
    ],
)
def test_the_topics_of_a_stage_are_found_by_its_name(stage: str, model: str, topics: tuple[str, ...]) -> None:
    assert rekeyed_topics(stage, model) == topics


def test_the_topics_of_all_re_keys_of_several_sources_are_found() -> None:
    two_steps = Stream("refunds", "Refunded").by("paymentId", "method").by("customerId", "day")
    one_step = Stream("sales", "Sold").by("customerId", "day")

    def schema_of(name: str, _topic: str | None) -> Any:
        return {"type": "record", "name": name, "fields": []}

    *early, _ = declared_stages("days", (two_steps, one_step), (), (), schema_of, several=True)

    assert [(stage.name, stage.rekeyed) for stage in early] == [
        ("days-by-paymentId-method-from-refunds", "-days-by-paymentId-method-from-refunds"),
        ("days-by-customerId-day-from-refunds", "-days-by-customerId-day"),
        ("days-by-customerId-day-from-sales", "-days-by-customerId-day"),
    ]
    assert all(stage.rekeyed[1:] in rekeyed_topics(stage.name, "days") for stage in early)


def test_a_source_with_a_name_that_is_too_long_for_its_changelog_is_refused() -> None:
    model = changed(sources=(ORDERS, Stream("p" * 240, PaymentTaken)))()

    with pytest.raises(
        ConfigurationError, match="a topic name has at most 249 characters; shorten BALANCE_APPLICATION"
    ):
        stages_of(model, SETTINGS)


def test_records_are_decoded_by_the_subjects_of_the_topic_that_they_were_written_to() -> None:
    *_, last = stages_of(Journal(), SETTINGS)

    assert last.written_to == {
        "orders": ("OrderPlaced",),
        "payments": ("PaymentTaken",),
        "app-journal-by-customerId": ("RefundOfCustomer",),
    }
    eu_and_us = changed(sources=(Stream("eu", OrderPlaced), Stream("us", OrderPlaced, PaymentTaken)))()
    *_, last = stages_of(eu_and_us, SETTINGS)
    assert last.written_to == {"eu": ("OrderPlaced",), "us": ("OrderPlaced", "PaymentTaken")}


def in_registry(**fields: dict[str, str]) -> ReadModel:
    """Returns a model that reads a record `Sold` of two topics, whose schemas differ."""

    class Schemas:
        def find(self, name: str, topic: str | None = None) -> Any:
            given = fields[str(topic)]
            namespace = given.get("namespace", "com.acme")
            kinds = {column: kind for column, kind in given.items() if column != "namespace"}
            members = [{"name": column, "type": kind} for column, kind in kinds.items()]
            return {"type": "record", "name": name, "namespace": namespace, "fields": members}

    model = changed(sources=(Stream("eu", "Sold"), Stream("us", "Sold")), ordered=Count("Sold"), paid=Count("Sold"))
    return model(Schemas())  # type: ignore[arg-type]


def test_a_record_of_two_sources_has_one_schema() -> None:
    same = {"customerId": "string", "amount": "long"}
    model = in_registry(eu=same, us={**same, "note": "string"})

    assert [[*stage.schemas] for stage in model.stages] == [["Sold"]] * 3
    # What the last stage cannot read becomes a dead letter in the first.
    assert model.stages[0].schemas == model.stages[1].schemas == model.stages[2].schemas
    with pytest.raises(ConfigurationError, match="reads Sold from several sources, and they differ: 'amount' is a"):
        in_registry(eu=same, us={**same, "amount": "string"})
    with pytest.raises(
        ConfigurationError, match=r"one is com.acme.Sold, and the other com.else.Sold; fold them by two"
    ):
        in_registry(eu=same, us={**same, "namespace": "com.else"})
    other = make_dataclass("OrderPlaced", [("customerId", str)])
    with pytest.raises(ConfigurationError, match="names two records OrderPlaced"):
        changed(sources=(ORDERS, Stream("us", other)))


def test_each_source_has_its_schema_of_a_record_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Registry:
        url = "http://registry"

        def recorded(self, subject: str, propose: Callable[[], Any]) -> Any:
            asked.append((subject, propose()))
            return {"type": "record", "name": "Exported", "fields": [{"name": "customerId", "type": "string"}]}

        def newest(self, topic: str, name: str) -> str:
            return f"{name} of {topic}"

        def close(self) -> None: ...

    monkeypatch.setattr("balance_service.model.binding.SchemaRegistry.from_settings", lambda _settings: Registry())
    sold = {"ordered": Count("Exported"), "paid": Count("Exported")}
    bind_models([changed(sources=(Stream("eu", "Exported"), Stream("us", "Exported")), version=3, **sold)], SETTINGS)

    assert asked == [
        ("app-accounts-v3-Exported-from-eu", "Exported of eu"),
        ("app-accounts-v3-Exported-from-us", "Exported of us"),
    ]


def test_selected_columns_are_those_of_all_sources() -> None:
    model = changed(sources=(ORDERS.select("amount"), PAYMENTS.select("amount")))()

    assert [sorted(stage.columns or ()) for stage in model.stages] == [["amount", "customerId", "method"]] * 3
    with pytest.raises(ConfigurationError, match="selects 'method', but OrderPlaced has no such column"):
        changed(sources=(ORDERS.select("method"), PAYMENTS.select("amount")))()


def test_the_topic_has_the_most_partitions_and_takes_the_records_of_all_sources() -> None:
    topics: Any = InMemoryTopics()
    topics.create("orders", 2, FOREVER)
    topics.create("payments", 5, {**FOREVER, MAX_MESSAGE_BYTES: "9000000"})

    prepared = prepare_topics(topics, SETTINGS, stages_of(Accounts(), SETTINGS))

    assert prepared[SHARED].partitions == 5
    assert int(topics.configs[SHARED][MAX_MESSAGE_BYTES]) > 9_000_000
    # A source that is added later may have more partitions, but no larger records.
    topics.create("refunds", 9, FOREVER)
    added = changed(sources=(ORDERS, PAYMENTS, REFUNDS))()
    assert prepare_topics(topics, SETTINGS, stages_of(added, SETTINGS))[SHARED].partitions == 5
    topics.configs["refunds"][MAX_MESSAGE_BYTES] = "19000000"
    with pytest.raises(ConfigurationError, match=f"'{SHARED}' may refuse records of 'refunds' as too large"):
        prepare_topics(topics, SETTINGS, stages_of(added, SETTINGS))


@pytest.mark.parametrize("source", ["orders", "payments"])
def test_the_retention_of_every_source_is_checked(source: str) -> None:
    topics: Any = InMemoryTopics()
    topics.create(source, 1, {**FOREVER, "retention.ms": "86400000"})

    with pytest.raises(ConfigurationError, match=f"the source topic '{source}' has a finite retention.ms"):
        prepare_topics(topics, SETTINGS, stages_of(Accounts(), SETTINGS))


def test_a_lost_topic_is_not_created_again_if_one_source_has_been_read() -> None:
    topics: Any = InMemoryTopics()
    stages = stages_of(Accounts(), SETTINGS)
    prepare_topics(topics, SETTINGS, stages)
    del topics.partitions[SHARED]
    topics.ends[stages[1].changelog] = 1

    with pytest.raises(ConfigurationError, match=f"'{SHARED}' is gone, and with it .* '{stages[1].name}' passed on"):
        prepare_topics(topics, SETTINGS, stages)


def versions(*models: ReadModel, now: Generations) -> Versions:
    return Versions(models, load_settings(), lambda _model: now)


def test_a_new_version_may_add_sources_but_not_change_or_remove_them() -> None:
    former, added = Accounts(), changed(sources=(REFUNDS, PAYMENTS, ORDERS), version=2)()
    now = Generations("accounts").begun(declaration_of(former))

    versions(former, added, now=now).check_serving()
    versions(added, now=now).check_serving()
    # An instance that was not upgraded yet may start again after the switch.
    versions(former, now=Generations("accounts").begun(declaration_of(added))).check_serving()
    # Under one version, an instance without the class would pass over the new records.
    unversioned = changed(sources=(ORDERS, PAYMENTS, REFUNDS))()
    with pytest.raises(
        ConfigurationError,
        match=r"may have more `sources`, of records that the former one does not fold\): give",
    ):
        versions(unversioned, now=now).check_serving()
    unfiltered = changed(sources=(ORDERS, Stream("payments", PaymentTaken)), version=2)()
    without = changed(sources=(ORDERS, REFUNDS), paid=Count("RefundOfCustomer"), version=2)()
    # Its events would be in the states of the former version.
    elsewhere = Stream("orders-us", OrderPlaced)
    for other in (unfiltered, without, changed(sources=(ORDERS, PAYMENTS, elsewhere), version=2)()):
        with pytest.raises(ConfigurationError, match="neither can be built next to the other"):
            versions(other, now=now).check_serving()


def test_an_instance_without_the_class_of_a_generation_answers_for_it() -> None:
    former, added = Accounts(), changed(sources=(ORDERS, PAYMENTS, REFUNDS), version=2)()
    now = Generations("accounts").begun(declaration_of(former)).upgraded(declaration_of(added), Switch.NEVER, 60)
    here = versions(added, now=now)

    standing = here.read_model(here.live("accounts")[0])

    assert standing is not None
    assert (standing.version, standing.description()["sources"]) == (1, ["orders", "payments", "refunds"])
    assert standing.view_of({"customerId": "ada", "ordered": 1, "paid": 2}) == {"ordered": 1, "paid": 2}


def test_a_model_without_states_sends_the_records_of_all_sources() -> None:
    class All(ReadModel):
        name = "all"
        sources = (ORDERS, PAYMENTS)
        key = "customerId"
        emits = Emit("everything", where=col("amount") > 1)

    with Driver(All) as driver:
        driver.given(ordered(1), paid(2), ordered(3))
        sent = driver.emitted("everything")

    assert [record["amount"] for record in sent if record] == [2, 3]


def test_the_order_of_sources_does_not_matter_to_what_a_version_reads() -> None:
    one, other = changed(sources=(ORDERS, PAYMENTS))(), changed(sources=(PAYMENTS, ORDERS))()

    assert declaration_of(one).reads == declaration_of(other).reads
    assert declaration_of(one).fingerprint != declaration_of(changed(sources=(ORDERS, PAYMENTS, REFUNDS))()).fingerprint


def test_tools_know_every_source() -> None:
    model = Journal()

    assert [written_by(topic, [Journal], SETTINGS) for topic in ("orders", "payments")] == ["murmur2", "crc32"]
    assert [*records_of_topic("payments", [model], SETTINGS).records] == ["PaymentTaken"]
    assert records_of_topic("payments", [model], SETTINGS).partitioner == "crc32"
    assert not records_of_topic("orders", [model], SETTINGS).tombstones
    described = model.description()
    assert (described["source"], described["sources"]) == ("orders", ["orders", "payments", "refunds"])
    assert TypeAdapter(ModelDescription).validate_python(described) == described
    assert [stage.name for stage in hosted_stages([model], SETTINGS)][-1] == "journal"


def test_the_flow_has_an_arrow_from_each_source() -> None:
    assert mermaid(flow_of(Accounts(), stages_of(Accounts(), SETTINGS))).splitlines() == [
        "flowchart LR",
        '    n0[("orders")]',
        '    n1["accounts-by-customerId-from-orders"]',
        "    n0 --> n1",
        f'    n2[("{SHARED}")]',
        '    n1 -->|"by customerId"| n2',
        '    n3[("payments")]',
        '    n4["accounts-by-customerId-from-payments"]',
        '    n3 -->|"method != voucher"| n4',
        '    n4 -->|"by customerId"| n2',
        '    n5["accounts"]',
        "    n2 --> n5",
        '    n6[["State"]]',
        "    n5 --- n6",
    ]


def ordered(amount: int, customer: str = "ada") -> OrderPlaced:
    return OrderPlaced("o-1", customer, amount)


def paid(amount: int, customer: str = "ada", method: str = "card") -> PaymentTaken:
    return PaymentTaken(customer, amount, method)


def test_the_driver_finds_the_source_of_an_event_by_its_record() -> None:
    with Driver(Accounts) as driver:
        driver.given(ordered(5), paid(3), paid(9, method="voucher")).when(ordered(2)).then({"ordered": 7, "paid": 3})
        driver.when(paid(4, "bob")).then({"ordered": 0, "paid": 4})
        driver.redeliver().restart().rebuild()
        assert (driver.view("ada"), driver.counted) == ({"ordered": 7, "paid": 3}, 2)
        with pytest.raises(
            ValueError, match=r"give `event\(record, fields\)` .* with one of OrderPlaced, PaymentTaken"
        ):
            driver.given({"customerId": "ada"})


def test_events_of_several_sources_are_folded_in_the_order_in_which_they_are_given() -> None:
    refund = Refunded("p-1", 1)
    with Driver(Journal) as driver:
        driver.given(ordered(1), paid(2), refund, ordered(3), row("taken", "p-1", Payment("ada")), paid(4))
        entries = ["OrderPlaced 1", "PaymentTaken 2", "RefundOfCustomer 1", "OrderPlaced 3", "PaymentTaken 4"]
        assert driver.view("ada") == {"entries": entries}
        driver.rebuild()
        assert driver.view("ada") == {"entries": entries}


def test_a_refused_record_of_one_source_arrives_once_it_can_be_read() -> None:
    late = event(paid(2), unreadable="schema-id-unknown")
    with Driver(Journal) as driver:
        driver.given(ordered(1), late, ordered(3))
        assert [one.cause for one in driver.dead_letters()] == ["schema-id-unknown"]
        driver.mend("schema-id-unknown").advance(minutes=10)
        assert driver.view("ada") == {"entries": ["OrderPlaced 1", "OrderPlaced 3", "PaymentTaken 2"]}


def test_a_record_of_several_sources_is_of_the_first_unless_it_names_its_topic() -> None:
    large = Stream("us", OrderPlaced, PaymentTaken).where(col("amount") > 10)
    with Driver(changed(sources=(Stream("eu", OrderPlaced), large))) as driver:
        driver.given(ordered(5), event(ordered(6), topic="us"), event(ordered(20), topic="us")).when(paid(11))
        driver.then({"ordered": 25, "paid": 11})


def test_after_the_joins_events_of_a_joined_source_are_joined_records() -> None:
    with Driver(Journal, after_joins=True) as driver:
        driver.given(ordered(1), RefundOfCustomer("ada", 2), paid(3))
        assert driver.view("ada") == {"entries": ["OrderPlaced 1", "RefundOfCustomer 2", "PaymentTaken 3"]}


@pytest.mark.parametrize("model", [Accounts, Journal])
def test_the_contract_holds_for_several_sources(model: type[ReadModel]) -> None:
    check_contract(model, examples=10, seconds=60)
