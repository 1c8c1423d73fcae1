"""The search for a read model's schemas: next to its module and packages, in this package, in the registry."""

from __future__ import annotations

import importlib
import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from balance_service.avro.schemas import fields_of, type_name
from balance_service.errors import ConfigurationError
from balance_service.model.keys import ColumnKey
from balance_service.model.schemas import Schemas

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from balance_service.avro.schemas import Schema
    from balance_service.model.read_model import ReadModel

_MODEL = """
from balance_service import Count, ReadModel, Stream

class Orders(ReadModel):
    name = "orders"
    source = Stream("orders", "OrderPlaced")
    key = "customerId"
    state = "OrdersPlaced"

    orders = Count("OrderPlaced")
"""


def record(name: str, **fields: Any) -> Schema:
    kinds = {"customerId": "string", **fields}
    return {"type": "record", "name": name, "fields": [{"name": field, "type": kind} for field, kind in kinds.items()]}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path with the module `shop.sales.orders`, whose modules are unloaded after the test."""
    (tmp_path / "shop" / "sales").mkdir(parents=True)
    for package in ("shop", "shop/sales"):
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "shop" / "sales" / "orders.py").write_text(_MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "shop"]:
        del sys.modules[name]


def orders() -> type[ReadModel]:
    importlib.invalidate_caches()
    model: type[ReadModel] = importlib.import_module("shop.sales.orders").Orders
    return model


def put(folder: Path, schema: Schema) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{schema['name']}.avsc").write_text(json.dumps(schema))


@pytest.mark.parametrize("place", ["shop/sales", "shop", ""], ids=["its module", "its package", "the outermost"])
def test_a_schema_is_found_next_to_the_module_and_each_of_its_packages(folder: Path, place: str) -> None:
    put(folder / place / "schemas", record("OrderPlaced", place="string"))
    put(folder / place / "schemas", record("OrdersPlaced", orders="long"))

    model = orders()()

    assert model.state_fields == {"customerId": "string", "orders": "long"}
    assert [field["name"] for field in model.stages[0].schemas["OrderPlaced"]["fields"]] == ["customerId", "place"]


def test_the_nearest_file_wins_and_any_file_precedes_shipped_schemas(folder: Path) -> None:
    for place, mark in (("shop/sales", "near"), ("shop", "far")):
        put(folder / place / "schemas", record("FundsAdded", **{mark: "string"}))

    found = Schemas.beside(orders()).find("FundsAdded")

    assert [field["name"] for field in found["fields"]] == ["customerId", "near"]


def test_a_shipped_schema_is_found_by_any_model(folder: Path) -> None:
    assert Schemas.beside(orders()).find("FundsAdded")["namespace"] == "parts.code.balance.events"


def test_the_registry_is_asked_last_for_records_of_a_stream(folder: Path) -> None:
    put(folder / "schemas", record("OrdersPlaced", orders="long"))
    asked: list[tuple[str, str]] = []

    def in_registry(topic: str, name: str) -> Schema:
        asked.append((topic, name))
        return record(name, registered="string")

    model = orders()(Schemas.beside(orders(), in_registry))

    assert asked == [("orders", "OrderPlaced")]
    assert "registered" in {field["name"] for field in model.stages[0].schemas["OrderPlaced"]["fields"]}


def test_the_error_for_a_missing_schema_names_the_searched_places(folder: Path) -> None:
    put(folder / "schemas", record("OrdersPlaced", orders="long"))
    with pytest.raises(ConfigurationError) as offline:
        orders()()
    with pytest.raises(ConfigurationError) as online:
        orders()(Schemas.beside(orders(), lambda _topic, _name: "the registry has none"))

    told = str(offline.value)
    assert f"the read model Orders ({folder}/shop/sales/orders.py:4) names the schema OrderPlaced: " in told
    assert f"there is no OrderPlaced.avsc in {folder}/shop/sales/schemas or {folder}/shop/schemas" in told
    assert "`balance-service schemas pull orders`" in told
    assert "and the registry has none; write that file, or register the schema" in str(online.value)


def test_the_registry_is_not_asked_for_a_state(folder: Path) -> None:
    put(folder / "schemas", record("OrderPlaced"))

    with pytest.raises(ConfigurationError, match=r"there is no OrdersPlaced\.avsc in .*; write that file"):
        orders()(Schemas.beside(orders(), lambda _topic, name: record(name)))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"type": "record",\n "name": }', r"OrderPlaced\.avsc:2: .*; correct the JSON"),
        ('["null", "string"]', "is not an Avro record; a schema file holds one record"),
        ('{"type": "record", "name": "a.OrderSent", "fields": []}', "holds the record a.OrderSent; name the file"),
    ],
    ids=["no JSON", "no record", "another record"],
)
def test_a_file_without_the_records_schema_is_refused(folder: Path, text: str, why: str) -> None:
    put(folder / "schemas", record("OrdersPlaced", orders="long"))
    (folder / "schemas" / "OrderPlaced.avsc").write_text(text)

    with pytest.raises(ConfigurationError, match=why):
        orders()()


JAVA = {"type": "string", "avro.java.string": "String"}


@pytest.mark.parametrize("key", ["string", {"type": "string"}, JAVA], ids=str)
def test_a_key_is_a_string_in_each_form_of_the_type(folder: Path, key: Any) -> None:
    put(folder / "schemas", record("OrdersPlaced", customerId=JAVA, orders={"type": "long"}))
    put(folder / "schemas", record("OrderPlaced", customerId=key, price={"type": "long"}))

    assert orders()().key_type == ColumnKey("customerId", is_number=False)


def test_a_key_that_may_be_null_is_refused(folder: Path) -> None:
    put(folder / "schemas", record("OrdersPlaced", orders="long"))
    put(folder / "schemas", record("OrderPlaced", customerId=["null", JAVA]))

    with pytest.raises(ConfigurationError, match=r"must be a string; OrderPlaced has one of type string\?"):
        orders()()


def test_a_model_reads_a_type_that_is_used_twice_and_times_of_connect(folder: Path) -> None:
    row = record("Row", at={"type": "long", "connect.name": "io.debezium.time.Timestamp"})
    put(folder / "schemas", record("OrdersPlaced", orders="long"))
    put(folder / "schemas", record("OrderPlaced", before=["null", row], after=["null", "Row"]))
    row_type = "Row{customerId string, at timestamp-millis}?"

    fields = fields_of(orders()().stages[0].schemas["OrderPlaced"])

    assert {name: type_name(kind) for name, kind in fields.items()} == {
        "customerId": "string",
        "before": row_type,
        "after": row_type,
    }


def test_a_schema_that_defines_one_name_in_two_ways_is_refused(folder: Path) -> None:
    put(folder / "schemas", record("OrdersPlaced", orders="long"))
    put(folder / "schemas", record("OrderPlaced", before=record("Row"), after=record("Row", at="long")))

    with pytest.raises(ConfigurationError, match=r"OrderPlaced in .*/OrderPlaced\.avsc .*: it defines Row in two ways"):
        orders()()
