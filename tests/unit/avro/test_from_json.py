"""JSON as records: exact, or refused with the field's name."""

from __future__ import annotations

import math
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balance_service.avro.codec import AvroCodec
from balance_service.avro.from_json import parsed_json, record_line, record_of
from balance_service.avro.schemas import load_schema
from balance_service.errors import InvalidInputError
from balance_service.model.json_view import exact_json
from balance_service.model.stage_checks import READ_TYPES
from balance_service.testing.fakes import FakeRegistry
from balance_service.testing.strategies import values_of

MONEY = {"type": "bytes", "logicalType": "decimal", "precision": 18, "scale": 2}
LINE = {"type": "record", "name": "Line", "fields": [{"name": "quantity", "type": "int"}]}
PLAIN: dict[str, Any] = {
    "boolean": "boolean",
    "int": "int",
    "long": "long",
    "float": "float",
    "double": "double",
    "string": "string",
    "bytes": "bytes",
    "fixed": {"type": "fixed", "name": "Two", "size": 2},
    "enum": {"type": "enum", "name": "Suit", "symbols": ["HEARTS", "SPADES"]},
    "decimal": MONEY,
    "uuid": {"type": "string", "logicalType": "uuid"},
    "date": {"type": "int", "logicalType": "date"},
    **{name: {"type": "long", "logicalType": name} for name in sorted(READ_TYPES) if "timestamp" in name},
}
NESTED: dict[str, Any] = {
    "array": {"type": "array", "items": MONEY},
    "map": {"type": "map", "values": ["null", "long"]},
    "record": LINE,
    "nullable": ["null", MONEY],
}


def schema_of(kind: Any, **more: Any) -> dict[str, Any]:
    return {"type": "record", "name": "R", "fields": [{"name": "f", "type": kind, **more}]}


def read(kind: Any, text: str) -> Any:
    return record_of(schema_of(kind), parsed_json(f'{{"f": {text}}}'))["f"]


def refusal(kind: Any, text: str) -> str:
    with pytest.raises(InvalidInputError) as refused:
        read(kind, text)
    return str(refused.value)


def test_every_type_of_the_shipped_events_can_be_given_as_json() -> None:
    assert PLAIN.keys() == READ_TYPES


@pytest.mark.parametrize("kind", [*PLAIN.values(), *NESTED.values()], ids=[*PLAIN, *NESTED])
@given(data=st.data())
def test_values_round_trip_through_json(kind: Any, data: st.DataObject) -> None:
    schema = schema_of(kind)
    codec = AvroCodec(FakeRegistry(), "s", schema)
    value = data.draw(values_of(kind))
    before = codec.encode({"f": value})

    after = codec.encode(record_of(schema, parsed_json(exact_json({"f": value}))))

    # NaN has more than one form.
    assert after == before or math.isnan(value)


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("9999999999999999.99", "9999999999999999.99"),
        ('"9999999999999999.99"', "9999999999999999.99"),
        ("0.10", "0.10"),
        ("5", "5.00"),
        ("-1.5", "-1.50"),
        ("1e3", "1000.00"),
        ("1.230", "1.23"),
        ('"007"', "7.00"),
    ],
)
def test_a_decimal_is_exact_as_a_number_and_as_a_string(text: str, amount: str) -> None:
    assert str(read(MONEY, text)) == amount


@pytest.mark.parametrize(
    "text",
    [
        *("1.234", "10000000000000000", "1e400", "1e-999999999", "1e999999999", "true", "null", "[1]"),
        *('"1e3"', '"NaN"', '"Infinity"', '"1_000"', '""', '" 1"', '"1."', '"0.001"'),
    ],
)
def test_a_decimal_that_would_lose_a_digit_or_is_malformed_is_refused(text: str) -> None:
    assert refusal(MONEY, text).startswith(
        "'f' must be a number or a string of digits, at most 16 before the point and 2 after, not "
    )


@pytest.mark.parametrize(
    ("kind", "text", "rule"),
    [
        ("string", "1", "a string, not 1"),
        ("boolean", "1", "true or false, not 1"),
        ("int", "1.0", "a whole number of 32 bits, not 1.0"),
        ("int", "2147483648", "a whole number of 32 bits"),
        ("long", "-9223372036854775809", "a whole number of 64 bits"),
        ("long", "true", "a whole number of 64 bits, not true"),
        ("long", "1e5", "a whole number of 64 bits, not 1e5"),
        ("long", '{"Amount": [1.50, 1e5]}', 'a whole number of 64 bits, not {"Amount": [1.50, 1e5]}'),
        ("long", '"1"', 'a whole number of 64 bits, not "1"'),
        ("double", "1e400", "a number that a double holds, not 1e400"),
        ("double", '"1"', "a number that a double holds"),
        ("double", "true", "a number that a double holds"),
        ("double", "[1]", "a number that a double holds"),
        ("float", "1e39", "a number that a float holds"),
        ("bytes", '"*"', "base64"),
        ("bytes", "5", "base64, not 5"),
        (PLAIN["fixed"], '"AA=="', "2 bytes in base64"),
        (PLAIN["enum"], '"CLUBS"', "one of HEARTS, SPADES"),
        (PLAIN["enum"], "[]", "one of HEARTS, SPADES"),
        (PLAIN["uuid"], '"1"', "a UUID"),
        (PLAIN["uuid"], "1", "a UUID"),
        (PLAIN["date"], '"tomorrow"', "a date such as 2026-02-28"),
        (PLAIN["timestamp-millis"], '"2026-01-01T00:00:00"', "a time such as 2026-02-28T12:30:00.123Z"),
        (PLAIN["timestamp-millis"], '"2026-01-01T00:00:00.1234Z"', "a time such as 2026-02-28T12:30:00.123Z"),
        (PLAIN["timestamp-micros"], '"2026-01-01T00:00:00.1234567Z"', "a time such as 2026-02-28T12:30:00.123456Z"),
        (PLAIN["timestamp-millis"], "1767225600000", "a time such as 2026-02-28T12:30:00.123Z"),
        (PLAIN["local-timestamp-millis"], '"2026-01-01T00:00:00Z"', "a time such as 2026-02-28T12:30:00.123,"),
        (NESTED["array"], "{}", "a JSON array"),
        (NESTED["map"], "[]", "a JSON object"),
        (LINE, "[]", "a JSON object"),
    ],
)
def test_a_value_of_another_type_is_refused_with_its_field_and_the_rule(kind: Any, text: str, rule: str) -> None:
    assert refusal(kind, text).startswith(f"'f' must be {rule}")


def test_a_field_within_a_record_is_named_by_its_path() -> None:
    lines = {"type": "array", "items": LINE}

    assert refusal(lines, '[{"quantity": 1}, {"quantity": "two"}]').startswith("'f[1].quantity' must be")
    assert refusal(lines, "[{}]") == "'f[0].quantity' is missing"
    assert refusal(lines, '[{"quantity": 1, "colour": 2}]') == ("'f[0].colour' is no field of Line, which has quantity")
    assert refusal({"type": "map", "values": "int"}, '{"a": "b"}').startswith("'f.a' must be")


def test_text_that_is_not_utf8_is_refused() -> None:
    assert refusal("string", r'"\ud800"') == "'f' is not UTF-8"
    assert refusal({"type": "map", "values": "int"}, r'{"\ud800": 1}') == "'f' is not UTF-8"


def test_an_unsupported_type_is_named() -> None:
    assert refusal(["null", "int", "string"], "1") == "'f' is of type int | string, which has no JSON form"


def test_only_fields_with_a_default_may_be_missing() -> None:
    assert record_of(schema_of("int", default=1), {}) == {}
    with pytest.raises(InvalidInputError, match="'f' is missing"):
        record_of(schema_of(["null", "int"]), {})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not JSON: Expecting value at character 1"),
        ('{"f": 1', "not JSON: "),
        ("{'f': 1}", "not JSON: "),
        ('{"f": NaN}', "not JSON: NaN is not a JSON number"),
        ('{"f": 1, "f": 2}', "not JSON: an object has the field 'f' twice"),
        ("9" * 5000, "not JSON: "),
        ("[" * 100_000, "not JSON: "),
    ],
)
def test_malformed_json_is_refused_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        parsed_json(text)

    assert str(refused.value).startswith(why)


def test_a_long_value_is_not_repeated_in_full() -> None:
    assert len(refusal("int", f'"{"x" * 10_000}"')) < 200


def test_only_an_object_is_a_record() -> None:
    with pytest.raises(InvalidInputError, match=r"R must be a JSON object, not \[1\]"):
        record_of(schema_of("int"), [1])


def test_an_invoice_is_parsed() -> None:
    line = '{"itemCode": "i", "description": "d", "quantity": 2, "unitPrice": 0.10, "amount": "0.20"}'
    invoice = parsed_json(
        '{"invoiceNumber": "n", "storeId": "s", "customerCardNo": "1", "customerType": "PRIME", '
        f'"deliveryType": "TAKEAWAY", "totalAmount": 0.20, "customerName": "Zoë", "lines": [{line}]}}'
    )

    record = record_of(load_schema("PosInvoice"), invoice)

    assert record["lines"][0]["amount"] == record["totalAmount"] == Decimal("0.20")
    assert AvroCodec(FakeRegistry(), "s", load_schema("PosInvoice")).encode(record)


def test_times_are_parsed_in_any_zone() -> None:
    half_past = datetime(2026, 2, 28, 12, 30, tzinfo=UTC)

    assert read(PLAIN["timestamp-millis"], '"2026-02-28T13:30:00+01:00"') == half_past
    assert read(PLAIN["local-timestamp-micros"], '"2026-02-28T12:30:00"') == half_past.replace(tzinfo=None)
    assert read(PLAIN["date"], '"2026-02-28"') == date(2026, 2, 28)


BALANCE = '{"customerId": "c", "amount": 0.10}'


def test_a_line_without_separator_has_no_key() -> None:
    line = record_line(f"{BALANCE}\n".encode(), load_schema("BalanceState"), None)

    assert line == (None, {"customerId": "c", "amount": Decimal("0.10")})


@pytest.mark.parametrize(
    ("separator", "line", "key"),
    [
        ("|", f"c|{BALANCE}", "c"),
        (": ", f"c: {BALANCE}", "c"),
        ("\t", f"c \t{BALANCE}", "c "),
        ("{", f"Zoë{{{BALANCE}", "Zoë"),
        ("|", "c|" + BALANCE.replace('"c"', '"a|b"'), "c"),
    ],
)
def test_the_key_of_a_line_ends_at_the_first_separator(separator: str, line: str, key: str) -> None:
    assert record_line(line.encode(), load_schema("BalanceState"), separator)[0] == key.encode()


@pytest.mark.parametrize(
    ("separator", "line", "why"),
    [
        ("|", BALANCE.encode(), r"no key separator '\|'"),
        ("|", b"|" + BALANCE.encode(), r"no key before '\|'"),
        ("|", b"c|", "not JSON: Expecting value"),
        ("|", b"c|null", "BalanceState must be a JSON object, not null"),
        (None, b"c|" + BALANCE.encode(), "not JSON: Expecting value at character 1"),
        (None, b'{"customerId": "c"}', "'amount' is missing"),
        (None, b"\xff" + BALANCE.encode(), "not UTF-8 from byte 1 on"),
    ],
)
def test_the_message_for_an_invalid_line_says_why(separator: str | None, line: bytes, why: str) -> None:
    with pytest.raises(InvalidInputError, match=why):
        record_line(line, load_schema("BalanceState"), separator)


def test_null_after_a_key_is_a_tombstone_if_tombstones_are_taken() -> None:
    schema = load_schema("Player")

    assert record_line(b"1|null\n", schema, "|", takes_tombstones=True) == (b"1", None)
    with pytest.raises(InvalidInputError, match="Player must be a JSON object, not null"):
        record_line(b"null", schema, None, takes_tombstones=True)
