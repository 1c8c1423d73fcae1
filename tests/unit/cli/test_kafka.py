"""`balance-service schemas register` and `types`: the subjects that are registered, the classes that are written."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from balance_service.avro.registry import SchemaRegistry
from balance_service.avro.schemas import load_schema, subject_of
from balance_service.cli.init import write_project
from balance_service.cli.main import cli
from balance_service.errors import ConfigurationError, RetriableError
from balance_service.testing.fakes import FakeRegistry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from balance_service.avro.schemas import Schema

pytestmark = pytest.mark.usefixtures("no_environment")


class Registry(FakeRegistry):
    """Records the schema of each subject."""

    def __init__(self) -> None:
        super().__init__()
        self.subjects: dict[str, Schema] = {}

    def register(self, subject: str, schema: Schema) -> int:
        self.subjects[subject] = schema
        return super().register(subject, schema)

    def newest(self, topic: str, record: str) -> Schema | None:
        return self.records_of(topic).get(record)

    def records_of(self, topic: str) -> dict[str, Schema]:
        return {one["name"]: one for subject, one in self.subjects.items() if subject == subject_of(topic, one)}

    def all_records(self, chosen: Callable[[Sequence[str]], Iterable[str]]) -> list[Schema]:
        return [self.subjects[subject] for subject in chosen([*self.subjects])]

    def close(self) -> None: ...


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    registry = Registry()
    monkeypatch.setattr(SchemaRegistry, "from_settings", lambda *_: registry)
    return registry


HAS_ALL = "the newest schema of its topic has all fields of the dataclass"


def register(*models: str) -> Any:
    return CliRunner(env={"BALANCE_MODELS": ",".join(models)}).invoke(cli, ["schemas", "register"])


def test_the_schemas_of_topics_that_the_service_writes_are_registered(registry: Registry) -> None:
    done = register("balance", "symbols")

    assert done.exit_code == 0, done.output
    expected = {
        subject_of(topic, load_schema(name)): load_schema(name)
        for topic, names in {
            "balance": ["FundsAdded"],
            "symbols": ["Symbol"],
            "balance-service-balance-changelog": ["BalanceState", "IdempotencyMarker", "Position", "Letter"],
            "balance-service-application-servers": ["ApplicationServer"],
            "balance-service-dead-letter-decisions": ["DeadLetterDecision"],
        }.items()
        for name in names
    }
    assert registry.subjects.items() >= expected.items()


def test_each_subject_is_printed_once_with_its_id(registry: Registry) -> None:
    printed = register("balance", "activity").output.splitlines()

    assert printed == [
        f"{subject}: schema id {registry.schemas.index(schema) + 1}" for subject, schema in registry.subjects.items()
    ]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The project that `init` writes, as the working directory."""
    write_project(tmp_path / "web_shop")
    monkeypatch.chdir(tmp_path / "web_shop")
    yield tmp_path / "web_shop" / "web_shop"
    for name in [name for name in sys.modules if name.partition(".")[0] == "web_shop"]:
        del sys.modules[name]


PLACED: dict[str, Any] = {
    "type": "record",
    "name": "OrderPlaced",
    "fields": [
        {"name": "orderId", "type": "string"},
        {"name": "placedAt", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "customerId", "type": "string"},
        {
            "name": "amount",
            "type": {
                "type": "fixed",
                "name": "Amount",
                "size": 9,
                "logicalType": "decimal",
                "precision": 18,
                "scale": 2,
            },
        },
        {"name": "coupon", "type": ["null", "string"], "default": None},
    ],
}


FIELDS: list[Any] = PLACED["fields"]


def test_the_schemas_of_other_producers_are_not_registered(registry: Registry, project: Path) -> None:
    (project / "schemas").mkdir()
    (project / "schemas" / "OrderPlaced.avsc").write_text(json.dumps(PLACED))
    model = project / "orders.py"
    model.write_text(
        model.read_text().replace('"orders", OrderPlaced', '"orders", "OrderPlaced"').replace(": OrderPlaced", "")
    )

    done = register("web_shop.orders:Orders")

    assert done.exit_code == 0, done.output
    subjects = registry.subjects
    assert any(subject.startswith("balance-service-orders-changelog-") for subject in subjects)
    assert not any("OrderPlaced" in subject for subject in subjects)


def test_the_schema_of_an_event_that_a_dataclass_declares_is_registered(registry: Registry, project: Path) -> None:
    done = register("web_shop.orders:Orders")

    assert done.exit_code == 0, done.output
    found = registry.subjects["orders-OrderPlaced"]
    assert [field["name"] for field in found["fields"]] == ["orderId", "placedAt", "customerId", "amount"]
    assert f"orders-OrderPlaced: schema id {registry.schemas.index(found) + 1}" in done.output.splitlines()


def test_a_producers_schema_with_all_fields_of_the_dataclass_stays_the_newest(
    registry: Registry, project: Path
) -> None:
    registry.register("orders-OrderPlaced", PLACED)

    done = register("web_shop.orders:Orders")

    assert registry.subjects["orders-OrderPlaced"] == PLACED
    assert f"orders-OrderPlaced: {HAS_ALL}" in done.output.splitlines()


def test_a_second_run_says_that_nothing_is_left_to_register(registry: Registry, project: Path) -> None:
    register("web_shop.orders:Orders")
    registered = dict(registry.subjects)

    assert f"orders-OrderPlaced: {HAS_ALL}" in register("web_shop.orders:Orders").output.splitlines()
    assert registry.subjects == registered


def test_a_new_field_of_the_dataclass_is_registered_with_all_fields_of_the_producers(
    registry: Registry, project: Path
) -> None:
    registry.register("orders-OrderPlaced", PLACED)
    with (project / "events.py").open("a") as events:
        events.write("    gift: str | None = None\n")

    register("web_shop.orders:Orders")

    gift = {"name": "gift", "type": ["null", "string"], "default": None}
    assert registry.subjects["orders-OrderPlaced"] == {**PLACED, "fields": [*PLACED["fields"], gift]}


def test_a_dataclass_whose_field_has_another_type_than_the_producers_is_refused(
    registry: Registry, project: Path
) -> None:
    theirs = {**PLACED, "fields": [{**one, "type": "double"} if one["name"] == "amount" else one for one in FIELDS]}
    registry.register("orders-OrderPlaced", theirs)
    with (project / "events.py").open("a") as events:
        events.write("    gift: str | None = None\n")

    refused = register("web_shop.orders:Orders").exception

    assert isinstance(refused, ConfigurationError)
    assert "does not fit it: 'amount' is a double there and a decimal(38,2) here; correct the class" in str(refused)
    assert registry.subjects["orders-OrderPlaced"] == theirs


OTHER_CLASS = """
from dataclasses import dataclass

from balance_service import ReadModel, Stream


@dataclass
class OrderPlaced:
    customerId: str
    fee: int


class Fees(ReadModel):
    name = "fees"
    source = Stream("orders", OrderPlaced)
    key = "customerId"
    state = OrderPlaced

    def fold(self, state, event: OrderPlaced):
        return event
"""


def test_an_event_of_two_models_is_registered_with_the_fields_of_both_classes(
    registry: Registry, project: Path
) -> None:
    (project / "fees.py").write_text(OTHER_CLASS)

    done = register("web_shop.orders:Orders", "web_shop.fees:Fees")

    assert done.exit_code == 0, done.output
    found = [field["name"] for field in registry.subjects["orders-OrderPlaced"]["fields"]]
    assert found == ["orderId", "placedAt", "customerId", "amount", "fee"]


def test_classes_of_two_models_that_no_event_fits_are_refused(registry: Registry, project: Path) -> None:
    (project / "fees.py").write_text(OTHER_CLASS.replace("fee: int", "amount: int"))

    refused = register("web_shop.orders:Orders", "web_shop.fees:Fees").exception

    assert isinstance(refused, ConfigurationError)
    assert "declare OrderPlaced of topic 'orders' by classes that no event fits: 'amount' is a decimal" in str(refused)
    assert not any("OrderPlaced" in subject for subject in registry.subjects)


class Sent:
    """The records that are produced."""

    def __init__(self) -> None:
        self.values: list[bytes | None] = []

    def send(self, _key: bytes | None, value: bytes | None) -> None:
        self.values.append(value)

    def finish(self) -> int:
        return len(self.values)


def test_produce_writes_all_fields_of_the_producers(
    registry: Registry, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = Sent()
    monkeypatch.setattr("balance_service.devtools.produce.BulkProducer", lambda *_: sent)
    monkeypatch.setattr("balance_service.devtools.produce.Topics", lambda *_: SimpleNamespace(find=lambda _: True))
    registry.register("orders-OrderPlaced", PLACED)
    line = {"orderId": "o", "placedAt": "2026-03-02T09:15:00Z", "customerId": "ada", "amount": 1, "coupon": "spring"}

    done = CliRunner(env={"BALANCE_MODELS": "web_shop.orders:Orders"}).invoke(
        cli, ["produce", "orders", "--key-separator", "|"], input=f"ada|{json.dumps(line)}\n"
    )

    assert done.exit_code == 0, done.output
    assert registry.subjects["orders-OrderPlaced"] == PLACED
    assert (sent.values[0] or b"").endswith(b"spring")


def test_a_dataclass_that_would_read_no_event_is_refused_with_the_line_that_corrects_it(
    registry: Registry, project: Path
) -> None:
    theirs = {**PLACED, "namespace": "com.acme"}
    registry.register("orders-com.acme.OrderPlaced", theirs)

    refused = register("web_shop.orders:Orders").exception

    assert isinstance(refused, ConfigurationError)
    assert 'so no event would be read: write `__namespace__ = "com.acme"` in the class' in str(refused)
    assert registry.subjects["orders-com.acme.OrderPlaced"] == theirs
    assert "orders-OrderPlaced" not in registry.subjects


POSITION = load_schema("Position")


def types(*given: str) -> Any:
    return CliRunner().invoke(cli, ["schemas", "types", *given])


def test_the_classes_of_a_topic_are_written(registry: Registry) -> None:
    registry.register("orders-com.acme.OrderPlaced", {**PLACED, "namespace": "com.acme"})
    registry.register("shipments-Shipped", {**PLACED, "name": "Shipped"})

    written = types("orders")

    assert written.exit_code == 0, written.output
    assert "class OrderPlaced:" in written.stdout
    assert '__namespace__ = "com.acme"' in written.stdout
    assert "class Shipped:" not in written.stdout


def test_without_a_topic_the_classes_of_all_other_applications_are_written(registry: Registry) -> None:
    for topic, record in (
        ("orders", "OrderPlaced"),
        # Of topics whose names begin like those of the application.
        ("balance-service-shipments", "Shipped"),
        ("balance-service-orders", "Paid"),
        ("balance-service-bills-v2", "Bill"),
        # The registry records under its version the schemas that a model reads.
        ("balance-service-orders-v1", "Former"),
        ("balance-service-orders-changelog", "State"),
        ("balance-service-orders-by-city-changelog", "Other"),
        ("balance-service-orders-by-city", "OrderInCity"),
        # Of several sources.
        ("balance-service-carts-by-city", "CartInCity"),
        ("balance-service-carts-by-city-day", "CartOfDay"),
        # Of one with two re-keys, the first one.
        ("balance-service-carts-by-cart-from-us", "CartAlone"),
        ("balance-service-carts-v1-Filled", "from-us"),
        ("balance-service-generations", "Whole"),
    ):
        registry.register(f"{topic}-{record}", {**PLACED, "name": record})
    carts = ("carts.g2", "carts-by-city-from-eu.carts", "carts-by-city-day-from-eu.carts", "carts-by-cart-from-us")
    for stage in ("orders", "orders-by-city", *carts):
        registry.register(subject_of(f"balance-service-{stage}-changelog", POSITION), POSITION)

    written = types()

    found = [line for line in written.stdout.splitlines() if line.startswith("class")]
    assert found == ["class OrderPlaced:", "class Shipped:", "class Paid:", "class Bill:"]


def test_the_classes_of_a_file_need_no_registry(registry: Registry, tmp_path: Path) -> None:
    registry.is_up = False
    odd = {"name": "hash", "type": {"type": "fixed", "name": "Hash", "size": 8}}
    file = tmp_path / "OrderPlaced.avsc"
    file.write_text(json.dumps({**PLACED, "fields": [*PLACED["fields"], odd]}))

    written = types(str(file))

    assert "class OrderPlaced:" in written.stdout
    said = "'OrderPlaced.hash' is of the type 'fixed', which no field of a dataclass has"
    assert f"    # {said}\n" in written.stdout
    assert written.stderr == f"left out: {said}\n"


def test_a_topic_without_records_and_a_file_that_is_missing_are_refused(registry: Registry) -> None:
    assert "has no record under the subjects orders-NAMESPACE.NAME or orders-value" in str(types("orders").exception)
    assert "nowhere.avsc cannot be read" in str(types("nowhere.avsc").exception)
    assert "has no record of another application" in str(types().exception)


def test_a_registry_that_does_not_answer_is_reported(registry: Registry) -> None:
    registry.is_up = False

    assert isinstance(register("balance").exception, RetriableError)
