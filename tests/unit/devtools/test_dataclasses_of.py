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
from balance_service.model.converters import record_converter

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


def test_all_shipped_schemas_have_classes_in_one_module(module: ModuleType) -> None:
    schemas = [json.loads(file.read_text(encoding="utf-8")) for file in sorted((ROOT / "schemas").glob("*.avsc"))]

    assert run(module, *schemas) == []


def test_a_field_may_have_the_name_of_a_type(module: ModuleType) -> None:
    inner = record("Address", Address="string")
    day = {"type": "int", "logicalType": "date"}

    assert run(module, record("Odd", str="string", date=day, list={"type": "array", "items": "string"}, at=inner)) == []

    kinds = {one.name: one.type for one in fields(module.Odd)}
    assert kinds == {"str": str, "date": date, "list": list[str], "at": module.Address}
    assert dataclasses_of([record("Odd", date=day)]).text.splitlines()[2:] == [
        "from dataclasses import dataclass",
        "from datetime import date as date_",
        "",
        "",
        "@dataclass",
        "class Odd:",
        "    date: date_",
    ]


def test_no_field_has_the_other_name_of_a_type(module: ModuleType) -> None:
    way = {"type": "enum", "name": "Way", "symbols": ["WEB"]}
    schema = record("Odd", str="string", str_="string", _str="string", Way=way, Way_="string", z="string")
    for field in schema["fields"]:
        field["default"] = "WEB"

    assert run(module, schema) == []

    kinds = {one.name: one.type for one in fields(module.Odd)}
    assert kinds == {**dict.fromkeys(("str", "str_", "_str", "Way_", "z"), str), "Way": module.Way}
    assert module.Odd().Way is module.Way.WEB
    assert run(module, record("Odd", way=record("Way_", Way_="string"))) == [
        "'Odd' has no field with a type of Python; 'Odd.way' is called 'Way_', a name that its class cannot have"
    ]


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
        ({**MONEY, "precision": "4"}, "is of the type 'decimal', which no field of a dataclass has"),
        ({**MONEY, "scale": 19}, "is of the type 'decimal', which no field of a dataclass has"),
        ({**MONEY, "scale": "2) or print(1"}, "is of the type 'decimal', which no field of a dataclass has"),
        ({**MONEY, "scale": True}, "is of the type 'decimal', which no field of a dataclass has"),
        ({"type": "fixed", "name": "Id", "size": 8, "logicalType": "uuid"}, "is of the type 'fixed', which no field"),
        ({"type": "enum", "name": "E", "symbols": []}, "has no symbols, or one of them twice"),
        ({"type": "enum", "name": "E", "symbols": ["A", "A"]}, "has no symbols, or one of them twice"),
        ({"type": "enum", "name": "E", "symbols": ["A"], "default": "A"}, "has a default for unknown symbols, which"),
        ({"type": "enum", "name": "E", "symbols": ["A"], "aliases": ["F"]}, "is 'E', which has aliases, and no class"),
        ({**record("Line", x="string"), "aliases": ["Row"]}, "is 'Line', which has aliases, and no class can have"),
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


def test_a_field_with_aliases_is_left_out(module: ModuleType) -> None:
    # Without them, events that have the field under its former name would be read as its default.
    schema = record("Order", id="string", amount="long")
    schema["fields"][1] |= {"aliases": ["total"], "default": 0}

    assert run(module, schema) == ["'Order.amount' has aliases, which no field of a dataclass can have"]
    assert [one.name for one in fields(module.Order)] == ["id"]


@pytest.mark.parametrize(
    ("kind", "python"),
    [
        ({"type": "string", "logicalType": "order-id"}, "str"),
        ({"type": "string", "logicalType": "timestamp-millis"}, "str"),
        ({"type": "long", "logicalType": "date"}, "int"),
        ({"type": {"type": "long"}, "logicalType": "timestamp-millis"}, "datetime"),
        ({"type": "long", "logicalType": "timestamp-nanos"}, "datetime"),
        ({"type": "fixed", "name": "Id", "size": 16, "logicalType": "uuid"}, "str"),
        ({"type": "array", "items": "string", "logicalType": "set"}, "list[str]"),
        ({"type": "array", "items": record("Pair", key="string"), "logicalType": "map"}, "list[Pair]"),
        ({"type": "map", "values": "long", "logicalType": "counts"}, "dict[str, int]"),
        ({**record("Line", sku="string"), "logicalType": "line"}, "Line"),
        ({"type": "enum", "name": "Way", "symbols": ["WEB"], "logicalType": "way"}, "Way"),
    ],
)
def test_a_logical_type_counts_only_on_its_own_plain_type(module: ModuleType, kind: Any, python: str) -> None:
    schema = record("Order", id=kind)

    assert run(module, schema) == []
    assert f"\n    id: {python}\n" in dataclasses_of([schema]).text
    record_converter(module.Order)


@pytest.mark.parametrize(
    ("kind", "default"),
    [
        ({"type": "int", "logicalType": "date"}, 0),
        ("string", None),
        ("long", 2**63),
        (MONEY, "\u0100"),
        ({**MONEY, "precision": 2}, "\u0001\u0000"),
    ],
)
def test_a_default_that_no_field_can_have_is_left_out(module: ModuleType, kind: Any, default: Any) -> None:
    schema = record("Order", id="string", day=kind)
    schema["fields"][1]["default"] = default

    assert run(module, schema) == ["'Order.day' has a default that is left out"]
    record_converter(module.Order)


def test_a_schema_that_cannot_be_read_is_left_out_alone(module: ModuleType) -> None:
    twice = record("Twice", a=record("Line", x="int"), b=record("Line", y="int"))
    nothing = {"type": "record", "name": "Nothing", "fields": []}
    hyphen = record("Hyphen", namespace="com.my-company", id="string")

    left_out = run(module, twice, nothing, {"type": "record", "name": "Odd", "fields": [{}]}, hyphen, PLACED)

    assert left_out == [
        "'Twice' cannot be read as a schema: ValueError('it defines Line in two ways')",
        "'Odd' cannot be read as a schema: KeyError('type')",
        "'Nothing' has no field with a type of Python",
        "'com.my-company.Hyphen' is in the namespace 'com.my-company', which no dataclass can name",
    ]
    assert len(fields(module.OrderPlaced)) == len(PLACED["fields"])


def test_names_from_the_registry_never_become_code(module: ModuleType) -> None:
    evil = 'x: int\nraise SystemExit("run")\n    y'
    schema = record("Order", id="string", **{evil: "string", "class": "string"})
    schema["fields"][0] |= {"doc": '"""\nraise SystemExit'}

    left_out = run(module, schema, record(f"N\n{evil}", id="string"))

    assert [one.name for one in fields(module.Order)] == ["id"]
    assert len(left_out) == 3
    assert not any("\n" in sentence for sentence in left_out)


def test_namespaces_from_the_registry_never_become_code(module: ModuleType) -> None:
    space = 'b"\nraise SystemExit\n#'
    line, other = (record("Line", namespace=space, **{name: "string"}) for name in "xy")

    left_out = run(
        module,
        record("Order", id="string", line=line),
        record("Order", namespace=space, id="string"),
        record("Bill", id="string", line=other),
    )

    assert len(left_out) == 2
    assert not any("\n" in sentence for sentence in left_out)


def test_records_share_a_type_that_has_another_namespace_or_documentation(module: ModuleType) -> None:
    price, documented = record("Price", value="long"), {**record("Price", value="long"), "doc": "A price."}

    assert run(module, record("A", namespace="a", price=price), record("B", namespace="b", price=documented)) == []

    assert {one.type for owner in (module.A, module.B) for one in fields(owner)} == {module.Price}
    # Its events are found by its full name.
    assert run(module, record("A", namespace="a", price=price), {**documented, "namespace": "b"}) == [
        "'b.Price' is 'b.Price', and another record or enum, 'a.Price', has that name"
    ]


def test_a_record_without_a_field_says_why(module: ModuleType) -> None:
    first, second = record("A", price=record("Price", value="long")), record("B", price=record("Price", value="string"))

    assert run(module, first, second) == [
        "'B' has no field with a type of Python; "
        "'B.price' is 'Price', and another record or enum, 'Price', has that name"
    ]


def test_of_two_records_with_one_name_the_second_is_left_out(module: ModuleType) -> None:
    same, other = record("Order", namespace="a", id="string"), record("Order", namespace="b", id="string")

    assert run(module, same, same, other) == [
        "'b.Order' is 'b.Order', and another record or enum, 'a.Order', has that name"
    ]
