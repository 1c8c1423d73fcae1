"""`schemas types`: the dataclasses of schemas, which read what producers of these schemas write."""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from balance_service.avro.named_types import expanded
from balance_service.avro.resolution import difference
from balance_service.devtools.dataclasses_of import dataclasses_of
from balance_service.model.states import record_converter

ROOT = Path(__file__).parents[3]
MONEY = {"type": "bytes", "logicalType": "decimal", "precision": 18, "scale": 2}
LINE = {
    "type": "record",
    "name": "Line",
    "fields": [{"name": "sku", "type": "string"}, {"name": "price", "type": MONEY}],
}
PLACED = {
    "type": "record",
    "name": "OrderPlaced",
    "namespace": "com.acme",
    "doc": 'A "placed"\n order \\ of a customer.',
    "fields": [
        {"name": "orderId", "type": "string", "doc": "Unique."},
        {"name": "note", "type": ["null", "string"], "default": None},
        {"name": "amount", "type": MONEY},
        {"name": "count", "type": "int", "default": 1},
        {"name": "ratio", "type": "double", "default": 1},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "date", "type": {"type": "int", "logicalType": "date"}},
        {"name": "way", "type": {"type": "enum", "name": "Way", "symbols": ["SHOP", "WEB"]}, "default": "SHOP"},
        {"name": "lines", "type": {"type": "array", "items": LINE}, "default": []},
        {"name": "gift", "type": ["null", "Line"], "default": None},
        {"name": "prices", "type": {"type": "map", "values": MONEY}, "default": {}},
        {"name": "fee", "type": MONEY, "default": "\u0000"},
        {"name": "is_paid", "type": "boolean", "default": False},
        {"name": "city", "type": "string", "default": 'O"slo'},
    ],
}


def record(name: str, *, namespace: str = "", **kinds: Any) -> dict[str, Any]:
    of = {"namespace": namespace} if namespace else {}
    return {"type": "record", "name": name, **of, "fields": [{"name": n, "type": k} for n, k in kinds.items()]}


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module that written text can be run as."""
    made = ModuleType("written_types")
    monkeypatch.setitem(sys.modules, "written_types", made)
    return made


def run(module: ModuleType, *schemas: Any) -> list[str]:
    """Runs the text in a module; returns what it leaves out."""
    written = dataclasses_of(schemas)
    exec(compile(written.text, "written_types.py", "exec", dont_inherit=True), module.__dict__)
    return written.left_out


def test_the_text_is_that_of_a_module_that_a_person_would_write() -> None:
    of_line = {**record("Line", sku="string", price=MONEY), "doc": "A line."}

    written = dataclasses_of(
        [record("Order", namespace="com.acme", id="string", line=of_line, note=["null", "string"])]
    )

    assert written.left_out == []
    assert written.text == (
        '"""Records of Kafka topics, written by `balance-service schemas types`."""\n'
        "\n"
        "from dataclasses import dataclass\n"
        "from decimal import Decimal\n"
        "from typing import Annotated\n"
        "\n"
        "from balance_service import scale\n"
        "\n"
        "\n"
        "@dataclass\n"
        "class Line:\n"
        '    """A line."""\n'
        "\n"
        '    __namespace__ = "com.acme"\n'
        "\n"
        "    sku: str\n"
        "    price: Annotated[Decimal, scale(2, precision=18)]\n"
        "\n"
        "\n"
        "@dataclass\n"
        "class Order:\n"
        '    __namespace__ = "com.acme"\n'
        "\n"
        "    id: str\n"
        "    line: Line\n"
        "    note: str | None\n"
    )


def test_the_classes_read_what_producers_write(module: ModuleType) -> None:
    assert run(module, PLACED) == []

    schema = record_converter(module.OrderPlaced).schema
    assert difference(expanded(PLACED), expanded(schema)) == ""
    assert (schema["name"], schema["namespace"]) == ("OrderPlaced", "com.acme")
    assert module.OrderPlaced.__doc__ == 'A "placed" order \\ of a customer.'
    day = date(2026, 1, 1)
    made = module.OrderPlaced(orderId="o", amount=Decimal("1.00"), at=datetime(2026, 1, 1), date=day)  # noqa: DTZ001
    assert (made.count, made.ratio, made.way, made.lines) == (1, 1.0, module.Way.SHOP, [])
    assert (made.prices, made.fee, made.city, made.note) == ({}, Decimal("0.00"), 'O"slo', None)


@pytest.mark.parametrize("file", sorted((ROOT / "schemas").glob("*.avsc")), ids=lambda file: file.stem)
def test_every_shipped_schema_has_a_class(module: ModuleType, file: Path) -> None:
    schema = json.loads(file.read_text(encoding="utf-8"))

    assert run(module, schema) == []

    assert difference(expanded(schema), expanded(record_converter(getattr(module, file.stem)).schema)) == ""


def test_a_field_may_have_the_name_of_a_type(module: ModuleType) -> None:
    inner = record("Address", Address="string")
    day = {"type": "int", "logicalType": "date"}

    assert run(module, record("Odd", str="string", date=day, list={"type": "array", "items": "string"}, at=inner)) == []

    kinds = {one.name: one.type for one in fields(module.Odd)}
    assert kinds == {"str": str, "date": date, "list": list[str], "at": module.Address}
    assert "    date: _date\n" in dataclasses_of([record("Odd", date=day)]).text


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ({"type": "fixed", "name": "Hash", "size": 8}, "is of the type 'fixed', which no field of a dataclass has"),
        (["string", "long"], "is of the type 'union', which no field of a dataclass has"),
        ({"type": "int", "logicalType": "time-millis"}, "is of the type 'time-millis', which no field"),
        ({"type": "long", "logicalType": "local-timestamp-millis"}, "is of the type 'local-timestamp-millis', which"),
        ({**MONEY, "precision": 39}, "is of the type 'decimal', which no field of a dataclass has"),
        (
            {"type": "enum", "name": "E", "symbols": ["None"]},
            "has the symbol 'None', which no member of an Enum can be",
        ),
        (record("date", x="string"), "is called 'date', a name that its class cannot have"),
        (record("Deep", up=["null", "Order"]), "has no field with a type of Python"),
    ],
)
def test_a_field_without_a_type_is_left_out_with_a_comment(module: ModuleType, kind: Any, why: str) -> None:
    schema = record("Order", id="string", odd=kind)
    (left_out,) = run(module, schema)

    assert left_out.startswith(f"'Order.odd' {why}")
    assert [one.name for one in fields(module.Order)] == ["id"]
    assert f"    # {left_out}\n" in dataclasses_of([schema]).text


def test_a_logical_type_that_nobody_knows_is_its_plain_type(module: ModuleType) -> None:
    run(module, record("Order", id={"type": "string", "logicalType": "order-id"}))

    assert [one.type for one in fields(module.Order)] == [str]


def test_a_default_that_is_not_simple_is_left_out(module: ModuleType) -> None:
    schema = record("Order", id="string")
    schema["fields"].append({"name": "day", "type": {"type": "int", "logicalType": "date"}, "default": 0})

    assert run(module, schema) == ["'Order.day' has a default that is left out"]


def test_names_from_the_registry_never_become_code(module: ModuleType) -> None:
    evil = 'x: int\nraise SystemExit("run")\n    y'
    schema = record("Order", namespace='a"\nraise SystemExit', id="string", **{evil: "string", "class": "string"})
    schema["fields"][0] |= {"doc": '"""\nraise SystemExit'}

    left_out = run(module, schema, record(f"N\n{evil}", id="string"))

    assert [one.name for one in fields(module.Order)] == ["id"]
    assert len(left_out) == 3
    assert not any("\n" in sentence for sentence in left_out)


def test_of_two_records_with_one_name_the_second_is_left_out(module: ModuleType) -> None:
    same, other = record("Order", namespace="a", id="string"), record("Order", namespace="b", id="string")

    assert run(module, same, same, other) == [
        "'b.Order' is b.Order, and another record or enum, a.Order, has that name"
    ]
