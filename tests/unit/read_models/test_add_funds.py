"""The body of addFunds: an exact amount of money in every form that JSON permits; anything else is refused."""

from __future__ import annotations

import json
import time
from decimal import Context, Decimal, localcontext
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balance_service.errors import InvalidInputError
from balance_service.read_models.add_funds import AddFunds

AMOUNT_RULE = "amount must be a number or a decimal string"


def amount(literal: str) -> Decimal:
    """The amount of a command, as a JSON literal."""
    return AddFunds.of_json(b'{"customerId": "c1", "amount": %s}' % literal.encode()).amount


def refused(body: bytes) -> str:
    with pytest.raises(InvalidInputError) as caught:
        AddFunds.of_json(body)
    return str(caught.value)


def refused_amount(literal: str) -> str:
    return refused(b'{"customerId": "c1", "amount": %s}' % literal.encode())


@pytest.mark.parametrize(
    ("literal", "exact"),
    [
        ("12.34", "12.34"),
        ("12", "12.00"),
        ("0.01", "0.01"),
        ("0.1", "0.10"),
        ("12.3400", "12.34"),
        ("9999999999999999.99", "9999999999999999.99"),
        ("1e2", "100.00"),
        ("1.5E+1", "15.00"),
        ("125e-2", "1.25"),
        ("1E15", "1000000000000000.00"),
        ("0.1e1", "1.00"),
        ('"12.34"', "12.34"),
        ('"12"', "12.00"),
        ('"0012.3"', "12.30"),
        ('"9999999999999999.99"', "9999999999999999.99"),
    ],
)
def test_an_amount_is_accepted_to_the_cent(literal: str, exact: str) -> None:
    assert str(amount(literal)) == exact


@pytest.mark.parametrize(
    "literal",
    [
        "0",
        "0.00",
        "-0",
        "-0.0",
        "-1",
        "0.001",
        "1.005",
        "0.0049",
        "10000000000000000",
        "10000000000000000.00",
        "99999999999999999",
        "1e16",
        "1e-3",
        "1E+1000000",
        "1E-1000000",
        "1e99999999999999999999",
        "true",
        "false",
        "[]",
        "{}",
        "[1]",
        '""',
        '" 1"',
        '"1 "',
        '"1\\n"',
        '"+1"',
        '"-1"',
        '"-0"',
        '"0"',
        '"0.001"',
        '"1e2"',
        '"1E+1000000"',
        '"Infinity"',
        '"-Infinity"',
        '"NaN"',
        '"sNaN"',
        '"1_000"',
        '"1,000"',
        '"1."',
        '".5"',
        '"0x10"',
        '"١٢"',
        '"\uff11\uff12"',
        '"1.\uff12"',
        '"10000000000000000"',
        '"12.345"',
        '"twelve"',
    ],
)
def test_an_invalid_amount_is_refused(literal: str) -> None:
    assert refused_amount(literal).startswith(AMOUNT_RULE)


@pytest.mark.parametrize(
    "literal", ["Infinity", "-Infinity", "NaN", "1_000", "+1", "01", ".5", "1.", "0x10", "\u0661", ""]
)
def test_an_amount_that_is_not_json_makes_the_body_invalid(literal: str) -> None:
    assert refused_amount(literal).startswith("the body is not JSON")


def test_a_null_amount_is_reported_as_missing() -> None:
    assert refused(b'{"customerId": "c1"}') == "amount is missing"
    assert refused_amount("null") == "amount is missing"


def test_a_number_of_a_million_digits_is_refused_without_computing_it() -> None:
    began = time.thread_time()

    assert refused_amount("9" * 1_000_000).startswith(AMOUNT_RULE)
    assert refused_amount("1E+999999999").startswith(AMOUNT_RULE)
    assert refused_amount('"' + "9" * 1_000_000 + '"').startswith(AMOUNT_RULE)

    assert time.thread_time() - began < 2


@pytest.mark.parametrize(
    "body",
    [
        b'{"customerId": "c1", "amount": 1, "amount": 1000}',
        b'{"customerId": "c1", "customerId": "c2", "amount": 1}',
        b'{"customerId": "c1", "amount": 1, "x": {"y": 1, "y": 2}}',
    ],
)
def test_a_repeated_name_is_refused_because_its_value_is_ambiguous(body: bytes) -> None:
    assert "more than once" in refused(body)


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        (b"", "the body is not JSON"),
        (b"{", "the body is not JSON"),
        (b"\xff\xfe\xfd", "the body is not JSON"),
        (b'{"customerId": "\xff", "amount": 1}', "the body is not JSON"),
        (b"[" * 10_000, "the body is not JSON"),
        (b"[]", "the body is not a JSON object"),
        (b"1", "the body is not a JSON object"),
        (b'"c1"', "the body is not a JSON object"),
        (b"null", "the body is not a JSON object"),
        (b"{}", "customerId is missing"),
        (b'{"customerId": null, "amount": 1}', "customerId is missing"),
        (b'{"customerId": 1, "amount": 1}', "customerId is not a string"),
        (b'{"customerId": ["c1"], "amount": 1}', "customerId is not a string"),
        (b'{"customerId": true, "amount": 1}', "customerId is not a string"),
        (b'{"customerId": "", "amount": 1}', "customerId must have 1 to 256 bytes of UTF-8"),
        (b'{"customerId": "\\ud800", "amount": 1}', "customerId is not UTF-8"),
        (b'{"customerId": "a\\u0000b", "amount": 1}', "customerId must not contain control characters"),
    ],
)
def test_an_invalid_body_is_refused_with_the_reason(body: bytes, detail: str) -> None:
    assert refused(body).startswith(detail)


def test_unknown_names_in_a_command_are_ignored() -> None:
    assert AddFunds.of_json(b'{"amount": 1, "note": "x", "customerId": "c1"}').customer_id == "c1"


@given(st.integers(1, 10**18 - 1))
def test_every_amount_is_exact_as_a_number_and_as_a_string(cents: int) -> None:
    digits = f"{cents // 100}.{cents % 100:02}"

    for literal in (digits, json.dumps(digits)):
        assert str(amount(literal)) == digits


@given(
    st.floats(allow_nan=False, allow_infinity=False)
    | st.integers()
    | st.decimals()
    | st.text()
    | st.booleans()
    | st.none()
    | st.lists(st.integers())
)
def test_any_value_is_an_exact_amount_or_is_refused(value: Any) -> None:
    body = json.dumps({"customerId": "c1", "amount": str(value) if isinstance(value, Decimal) else value})
    try:
        taken = AddFunds.of_json(body.encode()).amount
    except InvalidInputError:
        assert refused(body.encode()).startswith("amount")
        return
    assert 0 < taken < 10**16
    assert taken == Decimal(str(json.loads(body, parse_float=Decimal)["amount"]))
    assert taken.as_tuple().exponent == -2


def test_the_decimal_context_of_the_caller_has_no_effect() -> None:
    with localcontext(Context(prec=3)):
        assert str(amount("9999999999999999.99")) == "9999999999999999.99"
        assert str(amount("99999999999999.99e2")) == "9999999999999999.00"
