"""Events under schemas that differ from the reader's: their values, and the causes and reasons of refusals."""

from __future__ import annotations

import struct
from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)
from structlog.testing import capture_logs

from balance_service.avro.frames import frame_header
from balance_service.avro.schemas import fields_of, load_schema
from balance_service.avro.writer_schema import WriterSchema
from balance_service.model.events import Emit
from balance_service.model.read_model import ReadModel
from balance_service.model.stream import Stream
from balance_service.read_models.balance import Balance
from balance_service.settings import load_settings
from balance_service.spark.decode import Decoder
from balance_service.spark.session import start_spark
from tests.integration.decoding import AT, SCORED, Writers, causes, decoded, evolved, update, written
from tests.support.models import MONEY, PLACE, WHEN, Session, ship
from tests.support.shipped import jvm_scratch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

    from balance_service.avro.schemas import Schema
    from balance_service.spark.combine import PartitionRows

FUNDS = load_schema("FundsAdded")
ADDED = {"id": "e", "occurredOn": AT, "customerId": "c", "amount": Decimal("1.00")}
SPENT = {"type": "record", "name": "FundsSpent", "namespace": "n", "fields": [{"name": "id", "type": "string"}]}
NODE = {
    "type": "record",
    "name": "Node",
    "fields": [{"name": "children", "type": {"type": "array", "items": "Node"}}, {"name": "of", "type": "null"}],
}
INCOMPATIBLE, UNSUPPORTED = "schema-incompatible", "schema-type-unsupported"
FIXED_MONEY = {"type": "fixed", "name": "Money", "size": 16, "logicalType": "decimal", "precision": 38, "scale": 2}


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    session = start_spark(load_settings(), jvm_scratch(), 1)
    yield session
    session.stop()


def funds(**changed: Any) -> Schema:
    """Returns another version of `FundsAdded`."""
    fields = fields_of(FUNDS) | changed
    return {**FUNDS, "fields": [{"name": name, "type": kind} for name, kind in fields.items()]}


def added(spark: SparkSession, schema: Any, *bodies: bytes) -> PartitionRows:
    """Decodes bodies under a schema of `FundsAdded`."""
    return decoded(spark, Balance(), [schema], [(b"c", 1, body) for body in bodies])


def scored(spark: SparkSession, value: dict[str, Any], **changed: Any) -> PartitionRows:
    """Decodes one `Scored` under another version of its schema."""
    schema = evolved(**changed)
    return decoded(spark, Session(), [schema], [(b"g", 1, written(schema, {**SCORED, **value}))])


def details(rows: PartitionRows) -> list[str]:
    return rows.notes["detail"].to_pylist()  # type: ignore[no-any-return]


def number(value: int) -> bytes:
    """Returns an Avro int or long below 64."""
    return bytes([value << 1])


def decimal(precision: int, scale: int) -> dict[str, Any]:
    return {"type": "bytes", "logicalType": "decimal", "precision": precision, "scale": scale}


# Records


@pytest.mark.parametrize("union", [[FUNDS, SPENT], ["null", SPENT, FUNDS]], ids=["of records", "with null"])
def test_a_record_in_a_union_is_read_by_its_name(spark: SparkSession, union: list[Any]) -> None:
    name = "parts.code.balance.events.FundsAdded"
    bodies = [written(union, (name, ADDED)), written(union, ("n.FundsSpent", {"id": "s"})), number(3)]

    rows = added(spark, union, *bodies)

    assert update(rows) == {"amount": Decimal("1.00")}
    assert causes(rows) == ["ignored", "body-undecodable"]
    assert rows.notes["record"].to_pylist() == ["n.FundsSpent", None]


def test_records_of_two_types_in_a_union_are_read(spark: SparkSession) -> None:
    union = [evolved(), load_schema("Ended")]
    bodies = [written(union, ("tests.Scored", SCORED)), written(union, ("tests.Ended", {"id": "g", "reason": None}))]

    rows = decoded(spark, Session(), [union], [(b"g", 1, body) for body in bodies])  # type: ignore[list-item]

    first, second = rows.single_updates(rows.updates)
    assert (first.update["Scored"], first.update["Ended"]) == (SCORED, None)
    assert (second.update["Scored"], second.update["Ended"]) == (None, {"id": "g", "reason": None})


@pytest.mark.parametrize(
    ("schema", "name"),
    [
        ({**FUNDS, "namespace": "elsewhere"}, "elsewhere.FundsAdded"),
        ({key: part for key, part in FUNDS.items() if key != "namespace"}, "FundsAdded"),
        ("string", "string"),
    ],
    ids=["another namespace", "no namespace", "no record"],
)
def test_a_record_of_another_name_is_ignored_with_its_name(spark: SparkSession, schema: Any, name: str) -> None:
    rows = added(spark, schema, b"")

    assert (causes(rows), rows.notes["record"].to_pylist()) == (["ignored"], [name])


def test_a_record_that_is_cut_off_says_so(spark: SparkSession) -> None:
    assert details(added(spark, FUNDS, written(FUNDS, ADDED)[:-1])) == ["the record ends within a value"]


def test_a_schema_that_is_no_avro_is_ignored_unless_it_names_our_record(spark: SparkSession) -> None:
    broken = {**FUNDS, "fields": [{"name": "id", "type": "unknown"}]}

    rows = added(spark, broken, b"")

    assert causes(rows) == ["schema-incompatible"]
    assert details(rows)[0].startswith("the schema is not valid Avro: ")
    long = {**FUNDS, "fields": [{"name": "id", "type": "unknown" * 10_000}]}
    assert len(details(added(spark, long, b""))[0]) == 400
    assert causes(decoded(spark, Session(), [{**broken, "name": "Other"}], [(b"g", 1, b"")])) == ["ignored"]


@pytest.mark.shows("dead-letter")
@pytest.mark.parametrize(
    ("written", "cause", "problem"),
    [
        (
            WriterSchema.from_avro('{"type": "record", "name": "tests.Ended", "fields": [' + "[" * 5_000),
            INCOMPATIBLE,
            "is nested more than 300 levels deep",
        ),
        (
            WriterSchema.from_avro('["null", {"name": "Ended", "type": "record", "namespace": "tests"'),
            INCOMPATIBLE,
            "is not JSON: Expecting ',' delimiter: line 1 column 66 (char 65)",
        ),
        (
            WriterSchema.from_other_format("JSON", '{"title": "Ended"}'),
            UNSUPPORTED,
            "is JSON Schema, and only Avro is read",
        ),
        (
            WriterSchema.from_other_format("PROTOBUF", "message A {} message Ended {}"),
            UNSUPPORTED,
            "is Protobuf, and only Avro is read",
        ),
    ],
    ids=["too deep", "not JSON", "JSON Schema", "Protobuf"],
)
def test_a_record_under_a_schema_that_cannot_be_read_is_a_dead_letter_if_it_may_be_ours(
    spark: SparkSession, written: WriterSchema, cause: str, problem: str
) -> None:
    rows = decoded(spark, Session(), [written], [(b"g", 1, b"{}")])

    assert (causes(rows), details(rows)) == ([cause], [f"schema 1 {problem}"])
    assert [letter.value for letter in rows.uncombined().dead_letters] == [frame_header(1) + b"{}"]


@pytest.mark.parametrize(
    ("written", "name"),
    [
        (WriterSchema.from_avro('{"type": "record", "name": "n.Other", "fields": ['), "n.Other"),
        (WriterSchema.from_other_format("JSON", '{"title": "Other"}'), "Other"),
        (WriterSchema.from_other_format("PROTOBUF", "message Other {} message More {}"), "Other"),
    ],
    ids=["Avro", "JSON Schema", "Protobuf"],
)
@pytest.mark.parametrize("model", [Session(), Balance()], ids=["of several types", "of one type"])
def test_a_record_under_another_types_schema_that_cannot_be_read_is_ignored(
    spark: SparkSession, written: WriterSchema, name: str, model: ReadModel
) -> None:
    rows = decoded(spark, model, [written], [(b"g", 1, b"{}")])

    assert (causes(rows), rows.notes["record"].to_pylist()) == (["ignored"], [name])


@pytest.mark.parametrize(("model", "cause"), [(Session(), "ignored"), (Balance(), UNSUPPORTED)])
def test_a_record_that_no_schema_names_is_a_dead_letter_only_of_a_model_of_one_type(
    spark: SparkSession, model: ReadModel, cause: str
) -> None:
    schema = WriterSchema.from_other_format("JSON", "{}")

    assert causes(decoded(spark, model, [schema], [(b"g", 1, b"{}")])) == [cause]


class Renamed(ReadModel):
    """Reads `Added` records that were called `Plus`, and a column that was called `sum`."""

    name = "test-renamed"
    source = Stream("games", "Added")
    key = "id"
    state = "Tally"

    def fold(self, state: Any, event: Any) -> Any:
        """Returns the event."""
        return {"id": event["id"], "paid": event["paid"]}


def test_aliases_and_defaults_are_those_of_the_reader(spark: SparkSession) -> None:
    ship("Added", {"id": "string"})
    fields: list[dict[str, Any]] = [
        {"name": "id", "type": "string"},
        {"name": "paid", "type": MONEY, "aliases": ["sum"]},
        {"name": "fee", "type": MONEY, "default": "\u0001\u0000"},
        {"name": "place", "type": ["null", PLACE], "default": None},
        {"name": "tags", "type": {"type": "array", "items": "string"}, "default": ["a"]},
    ]
    load_schema("Added").update(aliases=["tests.Plus"], fields=fields)
    writer = {
        **load_schema("Added"),
        "name": "Plus",
        "aliases": [],
        "fields": [fields[0], {"name": "sum", "type": MONEY}],
    }

    rows = decoded(spark, Renamed(), [writer], [(b"g", 1, written(writer, {"id": "g", "sum": Decimal("1.20")}))])

    expected = {"id": "g", "paid": Decimal("1.20"), "fee": Decimal("2.56"), "place": None, "tags": ["a"]}
    assert update(rows)["Added"] == expected


def renamed(spark: SparkSession, fields: list[dict[str, Any]], writer: Schema, value: dict[str, Any]) -> PartitionRows:
    """Decodes one `Added` for a reader with these fields."""
    ship("Added", {"id": "string"})
    load_schema("Added").update(aliases=["tests.Plus"], fields=fields)
    return decoded(spark, Renamed(), [writer], [(b"g", 1, written(writer, value))])


ID: dict[str, Any] = {"name": "id", "type": "string"}
PAID: dict[str, Any] = {"name": "paid", "type": MONEY, "aliases": ["sum", "total"], "default": "\u0001\u0000"}


def writer_of(*fields: dict[str, Any]) -> Schema:
    return {"type": "record", "name": "Added", "namespace": "tests", "fields": [ID, *fields]}


@pytest.mark.parametrize(
    ("written_as", "expected"),
    [(("sum", "paid"), "2.00"), (("total", "sum"), "2.00"), (("total",), "1.00"), (("other",), "2.56")],
    ids=str,
)
def test_a_field_has_the_value_of_its_name_then_of_its_first_alias_then_its_default(
    spark: SparkSession, written_as: tuple[str, ...], expected: str
) -> None:
    writer = writer_of(*({"name": name, "type": MONEY} for name in written_as))
    value = {name: Decimal(n) for n, name in enumerate(written_as, 1)}

    assert str(update(renamed(spark, [ID, PAID], writer, {"id": "g", **value}))["Added"]["paid"]) == expected


def test_an_alias_takes_no_field_that_the_reader_has_by_its_name(spark: SparkSession) -> None:
    total = {"name": "total", "type": MONEY}
    writer = writer_of({"name": "total", "type": MONEY})

    found = update(renamed(spark, [ID, PAID, total], writer, {"id": "g", "total": Decimal(1)}))["Added"]

    assert (found["paid"], found["total"]) == (Decimal("2.56"), Decimal("1.00"))


def test_nested_types_and_members_of_unions_have_aliases(spark: SparkSession) -> None:
    kind = {"type": "enum", "name": "Kind", "aliases": ["Sort"], "symbols": ["A", "B"]}
    place = {**PLACE, "aliases": ["Spot"], "fields": [{"name": "city", "type": "string", "aliases": ["town"]}]}
    fields = [ID, {"name": "kind", "type": kind}, {"name": "place", "type": ["null", place]}, {**PAID}]
    spot = {"type": "record", "name": "Spot", "fields": [{"name": "town", "type": "string"}]}
    sort = {"type": "enum", "name": "Sort", "symbols": ["A", "B"]}
    writer = writer_of({"name": "kind", "type": sort}, {"name": "place", "type": ["null", spot]})

    found = update(renamed(spark, fields, writer, {"id": "g", "kind": "B", "place": {"town": "Bern"}}))["Added"]

    assert (found["kind"], found["place"]) == ("B", {"city": "Bern"})


def test_of_a_nested_union_of_records_only_the_one_of_the_readers_name_is_read(spark: SparkSession) -> None:
    city = [{"name": "city", "type": "string"}]
    place: Any = {"type": "record", "name": "Place", "fields": city}
    spot: Any = {"type": "record", "name": "Spot", "fields": city}
    ship("Added", {"id": "string"})
    load_schema("Added").update(fields=[ID, {"name": "place", "type": ["null", place]}])
    writer = writer_of({"name": "place", "type": ["null", place, spot]})
    bodies = [written(writer, {"id": "g", "place": (f"tests.{name}", {"city": "Bern"})}) for name in ("Place", "Spot")]

    rows = decoded(spark, Renamed(), [writer], [(b"g", 1, body) for body in bodies])

    assert update(rows)["Added"]["place"] == {"city": "Bern"}
    assert causes(rows) == ["schema-incompatible"]


@pytest.mark.parametrize(
    ("kind", "data", "cause"),
    [
        ("boolean", b"\x02", "body-undecodable"),
        ("boolean", b"\xff", "body-undecodable"),
        # In microseconds, these days do not fit into 64 bits, and what is left of them is in range.
        ({"type": "int", "logicalType": "date"}, written("int", 213_503_982), "time-out-of-range"),
        ({"type": "int", "logicalType": "date"}, written("int", -213_503_983), "time-out-of-range"),
    ],
    ids=str,
)
def test_a_value_that_is_none_of_its_type_is_a_dead_letter(
    spark: SparkSession, kind: Any, data: bytes, cause: str
) -> None:
    fields = [ID, {"name": "value", "type": kind}]
    ship("Added", {"id": "string"})
    load_schema("Added").update(fields=fields)

    rows = decoded(spark, Renamed(), [writer_of(*fields[1:])], [(b"g", 1, b"\x02g" + data)])

    assert causes(rows) == [cause]


def test_a_default_of_the_wrong_type_in_the_writers_schema_does_not_matter(spark: SparkSession) -> None:
    writer = writer_of({"name": "paid", "type": MONEY})
    wrong = {**writer, "fields": [writer["fields"][0], {**writer["fields"][1], "default": 7}]}

    ship("Added", {"id": "string"})
    load_schema("Added").update(fields=[ID, PAID])
    body = written(writer, {"id": "g", "paid": Decimal("1.20")})

    assert str(update(decoded(spark, Renamed(), [wrong], [(b"g", 1, body)]))["Added"]["paid"]) == "1.20"


# Columns that the reader lacks


@pytest.mark.parametrize(
    ("fields", "values"),
    [
        ({"tree": NODE}, {"tree": {"children": [{"children": []}, {"children": [{"children": []}]}]}}),
        ({"AMOUNT": "string", "CustomerID": "string"}, {"AMOUNT": "x", "CustomerID": "y"}),
        ({"fee": decimal(64, 2)}, {"fee": Decimal(1)}),
        ({"a-b": {"type": "map", "values": ["null", "double", FIXED_MONEY]}}, {"a-b": {"x": 1.5, "y": None}}),
    ],
    ids=["recursive", "names in other case", "64 digits", "map of a union"],
)
def test_a_column_that_the_reader_lacks_is_passed_over(
    spark: SparkSession, fields: dict[str, Any], values: dict[str, Any]
) -> None:
    schema = {**FUNDS, "fields": [*({"name": n, "type": t} for n, t in fields.items()), *FUNDS["fields"]]}
    body = b"".join(
        written({"type": "record", "name": "F", "fields": [f]}, values) for f in schema["fields"][: len(fields)]
    )

    assert update(added(spark, schema, body + written(FUNDS, ADDED))) == {"amount": Decimal("1.00")}


def test_forged_records_are_undecodable_and_end_no_query(spark: SparkSession) -> None:
    empty: Any = {"type": "record", "name": "E0", "fields": []}
    for level in range(1, 61):
        fields = [{"name": "a", "type": empty}, {"name": "b", "type": f"E{level - 1}"}]
        empty = {"type": "record", "name": f"E{level}", "fields": fields}
    wild = [
        {"name": "tree", "type": NODE},
        {"name": "empty", "type": {"type": "array", "items": empty}},
        {"name": "text", "type": "string"},
    ]
    schema = {**FUNDS, "fields": [*wild, *FUNDS["fields"]]}
    rest = written(FUNDS, ADDED)
    deep = number(1) * 100_000
    millions = number(0) + b"\xfe\xff\x7f" + number(0) + number(0)
    gigabyte = number(0) + number(0) + b"\x80\x80\x80\x80\x08"

    rows = added(spark, schema, deep + rest, gigabyte + rest, millions + rest)

    assert causes(rows) == ["body-undecodable"] * 2
    assert "nested more than" in details(rows)[0]
    assert update(rows) == {"amount": Decimal("1.00")}


# Decimals


@pytest.mark.shows("exact")
@pytest.mark.parametrize(
    ("kind", "written_as", "expected"),
    [
        (decimal(18, 4), "2.5000", "2.50"),
        (decimal(9, 0), "7", "7.00"),
        (decimal(38, 2), "123456789012345678901234567890123456.78", "123456789012345678901234567890123456.78"),
        (decimal(64, 2), "-12.34", "-12.34"),
        (decimal(64, 30), "1." + "5" + "0" * 29, "1.50"),
        (FIXED_MONEY, "-0.01", "-0.01"),
        (["null", decimal(18, 4)], "2.5000", "2.50"),
        ("long", 5, "5.00"),
    ],
    ids=repr,
)
def test_an_amount_of_another_scale_is_the_same_amount(
    spark: SparkSession, kind: Any, written_as: Any, expected: str
) -> None:
    amount = Decimal(written_as) if isinstance(written_as, str) else written_as
    schema = funds(amount=kind)

    assert str(update(added(spark, schema, written(schema, {**ADDED, "amount": amount})))["amount"]) == expected


@pytest.mark.shows("exact")
@pytest.mark.parametrize(
    ("kind", "amount"),
    [(decimal(18, 4), "2.5001"), (decimal(64, 2), "1" + "0" * 37), (decimal(64, 63), "0." + "0" * 62 + "1")],
    ids=repr,
)
def test_an_amount_that_would_lose_digits_is_refused(spark: SparkSession, kind: Any, amount: str) -> None:
    schema = funds(amount=kind)
    rows = added(spark, schema, written(schema, {**ADDED, "amount": Decimal(amount)}))

    assert causes(rows) == ["decimal-loses-digits"]
    assert details(rows)[0].startswith("FundsAdded.amount ")


def test_an_amount_with_more_digits_than_its_writer_declares_is_refused(spark: SparkSession) -> None:
    schema = funds(amount=decimal(4, 2))
    bodies = [
        written(funds(amount="bytes"), {**ADDED, "amount": n.to_bytes(9, "big")[-size:]})
        for n, size in ((9_999, 2), (10_000, 2), (9_999, 9), (10_000, 9))
    ]

    rows = added(spark, schema, *bodies)

    assert rows.updates["amount"].to_pylist() == [Decimal("99.99")] * 2
    assert causes(rows) == ["decimal-loses-digits"] * 2


def test_a_decimal_of_a_million_digits_takes_no_time(spark: SparkSession) -> None:
    schema = funds(amount=decimal(2_000_000_000, 1_999_999_999))
    head = written(funds(amount="bytes"), {**ADDED, "amount": b""})[:-1]

    rows = added(spark, schema, head + b"\x80\x80\x7a" + b"\x01" * 1_000_000, head + b"\x02\x00", head + b"\x00")

    assert causes(rows) == ["decimal-loses-digits", "body-undecodable"]
    assert update(rows) == {"amount": Decimal("0.00")}


@pytest.mark.parametrize(
    "kind", ["double", "string", "bytes", WHEN, {"type": "bytes", "logicalType": "unknown"}], ids=repr
)
def test_an_amount_without_an_exact_meaning_is_refused(spark: SparkSession, kind: Any) -> None:
    with capture_logs() as logs:
        rows = added(spark, funds(amount=kind), b"")

    assert causes(rows) == ["schema-incompatible"]
    assert details(rows)[0].startswith("FundsAdded.amount is written as ")
    assert details(rows)[0].endswith(", which is not read as decimal")
    assert [entry["reason"] for entry in logs] == details(rows)


class Whole(ReadModel):
    """Receives whole invoices."""

    name = "test-whole"
    source = Stream("pos", "PosInvoice")
    emits = Emit("sold", "PosInvoice", make=dict)


@pytest.mark.parametrize("items", [decimal(18, 4), {**FIXED_MONEY, "scale": 4}], ids=["bytes", "fixed"])
def test_a_nested_amount_of_another_scale_is_the_same_amount(spark: SparkSession, items: Any) -> None:
    schema = load_schema("PosInvoice")
    lines = fields_of(schema)["lines"]["items"]
    prices = [{**field, "type": items} if field["name"] == "unitPrice" else field for field in lines["fields"]]
    fields = [
        {**field, "type": {"type": "array", "items": {**lines, "fields": prices}}}
        if field["name"] == "lines"
        else field
        for field in schema["fields"]
    ]
    writer = {**schema, "fields": fields}
    line = {"itemCode": "i", "description": "d", "quantity": 1, "amount": Decimal(1)}
    invoices = [invoice([{**line, "unitPrice": Decimal(price)}]) for price in ("2.5000", "2.5001")]

    rows = decoded(spark, Whole(), [writer], [(b"s", 1, written(writer, fields)) for fields in invoices])

    assert str(update(rows)["PosInvoice"]["lines"][0]["unitPrice"]) == "2.50"
    assert causes(rows) == ["decimal-loses-digits"]


def invoice(lines: list[dict[str, Any]]) -> dict[str, Any]:
    texts = ("invoiceNumber", "storeId", "customerCardNo", "customerType", "deliveryType")
    return {
        **dict.fromkeys(texts, "x"),
        "totalAmount": Decimal(1),
        "customerName": None,
        "address": None,
        "lines": lines,
    }


# Text, times and nulls


def connect(name: str, plain: str = "long") -> dict[str, Any]:
    return {"type": plain, "connect.version": 1, "connect.name": name}


@pytest.mark.parametrize(("name", "per_second"), [("Timestamp", 10**3), ("MicroTimestamp", 10**6)])
def test_a_time_of_debezium_is_read_in_the_unit_that_its_name_tells(
    spark: SparkSession, name: str, per_second: int
) -> None:
    rows = scored(spark, {"at": 1_767_323_045 * per_second}, at=connect(f"io.debezium.time.{name}"))

    assert update(rows)["Scored"]["at"] == datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def test_a_time_of_debezium_is_a_number_to_a_model_that_reads_numbers(spark: SparkSession) -> None:
    rows = scored(spark, {"level": 5}, level=connect("io.debezium.time.Date", "int"))

    assert update(rows)["Scored"]["level"] == 5


def test_a_time_of_day_is_not_read_as_a_time(spark: SparkSession) -> None:
    rows = scored(spark, {"at": 5}, at=connect("io.debezium.time.MicroTime"))

    assert causes(rows) == ["schema-incompatible"]


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (["string", "long"], "Acme", "Acme"),
        (["long", "null", "string"], "Acme", "Acme"),
        ("bytes", "Zürich".encode(), "Zürich"),
        ({"type": "string", "avro.java.string": "String"}, "é", "é"),
    ],
    ids=repr,
)
def test_text_is_read_from_text_only(spark: SparkSession, kind: Any, value: Any, expected: str) -> None:
    place = {**PLACE, "fields": [{"name": "city", "type": kind}, PLACE["fields"][1]]}

    rows = scored(spark, {"place": {"city": value, "since": None}}, place=place)

    assert update(rows)["Scored"]["place"]["city"] == expected


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (["string", "long"], 7),
        ({"type": "array", "items": "string"}, ["a"]),
        ({"type": "map", "values": "string"}, {"a": "b"}),
        (NODE, {"children": []}),
        ({"type": "enum", "name": "City", "symbols": ["BERN"]}, "BERN"),
        ("double", 1e22),
        ("boolean", True),
        (WHEN, AT),
    ],
    ids=repr,
)
def test_text_is_no_rendering_of_other_types(spark: SparkSession, kind: Any, value: Any) -> None:
    place = {**PLACE, "fields": [{"name": "city", "type": kind}, PLACE["fields"][1]]}

    rows = scored(spark, {"place": {"city": value, "since": None}}, place=place)

    assert causes(rows) == ["schema-incompatible"]
    assert details(rows)[0].startswith("Scored.place.city is written as ")


@pytest.mark.parametrize(
    "body",
    [{"city": b"\xff", "since": None, "tags": [], "counts": {}}, {"tags": [b"\xff"]}, {"counts": {b"\xff": 1}}],
    ids=["within a record", "within an array", "as the key of a map"],
)
def test_text_that_is_not_utf_8_is_refused_in_nested_values_too(spark: SparkSession, body: dict[str, Any]) -> None:
    text = next(iter(body))
    value = {**SCORED, "place": {"city": "Q" if text == "city" else "x", "since": None}}
    value |= {"tags": ["Q"] if text == "tags" else [], "counts": {"Q": 1} if text == "counts" else {}}
    good = written(evolved(), value)

    rows = decoded(spark, Session(), [evolved()], [(b"g", 1, good.replace(b"\x02Q", b"\x02\xff"))])

    assert causes(rows) == ["text-malformed"]


def test_a_key_that_occurs_twice_in_a_map_has_its_last_value(spark: SparkSession) -> None:
    body = written(evolved(), {**SCORED, "counts": {"a": 1, "b": 2}}).replace(b"\x02b", b"\x02a")

    assert update(decoded(spark, Session(), [evolved()], [(b"g", 1, body)]))["Scored"]["counts"] == {"a": 2}


@pytest.mark.parametrize("kind", ["long", "int", {"type": "long", "logicalType": "timestamp-millis"}], ids=repr)
def test_a_number_is_a_time_in_the_unit_of_the_reader_unless_its_writer_says_another(
    spark: SparkSession, kind: Any
) -> None:
    micros = scored(spark, {"at": 5 if isinstance(kind, str) else AT.replace(microsecond=5_000)}, at=kind)

    at = update(micros)["Scored"]["at"]
    assert at == (AT.replace(microsecond=5_000) if isinstance(kind, dict) else at.replace(microsecond=5))


@pytest.mark.parametrize(
    "kind",
    [
        {"type": "int", "logicalType": "date"},
        {"type": "long", "logicalType": "local-timestamp-micros"},
        {"type": "long", "logicalType": "time-micros"},
        "double",
        "string",
    ],
    ids=repr,
)
def test_a_time_is_not_read_from_another_kind_of_time(spark: SparkSession, kind: Any) -> None:
    rows = decoded(spark, Session(), [evolved(at=kind)], [(b"g", 1, b"")])

    assert causes(rows) == ["schema-incompatible"]
    assert details(rows)[0].endswith(", which is not read as timestamp-micros")


def test_a_null_within_a_nested_value_is_a_null_of_that_field(spark: SparkSession) -> None:
    place = {**PLACE, "fields": [{"name": "city", "type": ["null", "string"]}, PLACE["fields"][1]]}
    nullable = {"type": "array", "items": ["null", "string"]}

    assert details(rows := scored(spark, {"place": {"city": None, "since": None}}, place=place)) == [
        "Scored.place.city is null"
    ]
    assert causes(rows) == ["field-null"]
    assert details(rows := scored(spark, {"tags": ["a", None]}, tags=nullable)) == ["Scored.tags[] is null"]
    assert causes(rows) == ["field-null"]
    assert update(scored(spark, {"tags": ["a"]}, tags=nullable))["Scored"]["tags"] == ["a"]


def test_a_null_counts_though_the_other_member_of_its_union_is_not_read(spark: SparkSession) -> None:
    schema = evolved(level=["null", "string"])
    bodies = [written(schema, {**SCORED, "level": level}) for level in (None, "high")]

    rows = decoded(spark, Session(), [schema], [(b"g", 1, body) for body in bodies])

    assert update(rows)["Scored"]["level"] is None
    assert details(rows) == ["Scored.level is written as string, which is not read as int"]


def test_a_field_without_default_that_the_writer_lacks_is_named(spark: SparkSession) -> None:
    rows = decoded(spark, Session(), [evolved(photo=None)], [(b"g", 1, b"")])

    assert details(rows) == ["Scored.photo is missing, and has no default"]


# Ids


def test_a_plan_reads_ids_that_were_resolved_after_it_was_made(spark: SparkSession) -> None:
    decoder = Decoder(spark, Balance(), Balance().stages[-1], Writers(FUNDS, funds(note="string")))  # type: ignore[arg-type]
    bodies = [written(FUNDS, ADDED), written(funds(note="string"), {**ADDED, "note": "n"})]
    frames = [F.lit(struct.pack(">bI", 0, n + 1) + body) for n, body in enumerate(bodies)]
    # Not a table of literals: Spark would decode it once, while it makes the plan.
    records = spark.range(2).select(
        F.lit(0).alias("partition"),
        F.col("id").alias("offset"),
        F.timestamp_millis(F.lit(0)).alias("timestamp"),
        F.lit(b"c").alias("key"),
        F.element_at(F.array(*frames), F.col("id").cast("int") + 1).alias("value"),
        F.lit(None).cast("array<struct<key:string,value:binary>>").alias("headers"),
    )
    plan = decoder.updates(records)
    notes = [None if note is None else note[0]["schema_id"] for note in plan.toArrow()["note"].to_pylist()]
    assert notes == [1, 2]

    decoder.resolve([2, 1])

    assert plan.toArrow()["amount"].to_pylist() == [Decimal("1.00")] * 2


def test_each_record_is_read_by_the_schema_of_its_own_id(spark: SparkSession) -> None:
    schemas = [FUNDS, funds(amount=decimal(38, 4)), {**FUNDS, "fields": FUNDS["fields"][::-1]}, funds(note="string")]
    records = [
        (b"c", 1 + n % 4, written(schemas[n % 4], {**ADDED, "note": "n", "amount": Decimal(n)})) for n in range(12)
    ]

    rows = decoded(spark, Balance(), schemas, records)

    assert [update["amount"] for update in rows.updates.to_pylist()] == [Decimal(n) for n in range(12)]


def test_more_ids_than_are_kept_are_read(spark: SparkSession) -> None:
    frames: Any = spark._jvm.parts.code.balance.Resolving(['"string"'], False)  # type: ignore[union-attr]
    for schema_id in range(2_500):
        assert frames.tell(schema_id, '"string"', []) is None

    causes = {str(frames.read(struct.pack(">bI", 0, n % 2_500)).getUTF8String(0)) for n in range(2_600)}

    assert causes == {"ignored"}
