"""Parameters and bodies: what is not exactly right is refused before anything is done with it."""

from __future__ import annotations

import json
import re
import time
from decimal import Context, Decimal, localcontext
from typing import Any
from urllib.parse import quote

import pytest
from aiohttp.test_utils import make_mocked_request
from hypothesis import given
from hypothesis import strategies as st

from balance_service.http.parameters import BalanceQuery, add_funds, balance_query, checked_customer_id
from balance_service.http.problems import Problem

AMOUNT_RULE = "amount must be a number or a decimal string"


def query(raw: str) -> BalanceQuery:
    return balance_query(make_mocked_request("GET", f"/api/customers.getBalance?{raw}"))


def refused_query(raw: str) -> str:
    with pytest.raises(Problem) as caught:
        query(raw)
    assert caught.value.status == 400
    return caught.value.detail


def amount(literal: str) -> Decimal:
    """The amount of a command, as a JSON literal."""
    return add_funds(b'{"customerId": "c1", "amount": %s}' % literal.encode()).amount


def refused(body: bytes) -> str:
    with pytest.raises(Problem) as caught:
        add_funds(body)
    assert caught.value.status == 400
    return caught.value.detail


def refused_amount(literal: str) -> str:
    return refused(b'{"customerId": "c1", "amount": %s}' % literal.encode())


@pytest.mark.parametrize(
    ("raw", "customer_id"),
    [
        ("customerId=c1", "c1"),
        ("customerId=Zo%C3%AB", "Zoë"),
        ("customerId=a+b%2Bc", "a b+c"),
        ("customerId=a%26b%3Dc", "a&b=c"),
        ("other=1&customerId=c1", "c1"),
        ("customerId=%F0%9F%92%B0", "💰"),
        ("customerId=" + "c" * 256, "c" * 256),
        ("customerId=" + "%C3%AB" * 128, "ë" * 128),
    ],
)
def test_a_customer_id_is_any_text_of_up_to_256_bytes(raw: str, customer_id: str) -> None:
    assert query(raw) == BalanceQuery(customer_id, None)
    assert query(raw).key == customer_id.encode()


@pytest.mark.parametrize(
    ("raw", "detail"),
    [
        ("", "customerId is missing"),
        ("customerid=c1", "customerId is missing"),
        ("customerId=", "customerId must have 1 to 256 bytes of UTF-8"),
        ("customerId", "customerId must have 1 to 256 bytes of UTF-8"),
        ("customerId=" + "c" * 257, "customerId must have 1 to 256 bytes of UTF-8"),
        ("customerId=" + "%C3%AB" * 129, "customerId must have 1 to 256 bytes of UTF-8"),
        ("customerId=a&customerId=b", "customerId is given more than once"),
        ("customerId=a&customerId=a", "customerId is given more than once"),
        ("customerId=%FF", "the query is not UTF-8"),
        ("customerId=%C3", "the query is not UTF-8"),
        ("customerId=%ED%A0%80", "the query is not UTF-8"),
        ("customerId=c1&x=%FF", "the query is not UTF-8"),
        ("customerId=a%00b", "customerId must not contain control characters"),
        ("customerId=a%0Ab", "customerId must not contain control characters"),
        ("customerId=%7F", "customerId must not contain control characters"),
        ("customerId=%C2%85", "customerId must not contain control characters"),
        ("customerId=c1" + "&x=1" * 16, "the query has more than 16 parameters"),
    ],
)
def test_a_customer_id_that_cannot_be_a_key_is_refused(raw: str, detail: str) -> None:
    assert refused_query(raw) == detail


@given(st.text(max_size=300))
def test_a_customer_id_is_accepted_exactly_if_the_stream_would_accept_it(customer_id: str) -> None:
    try:
        size = len(customer_id.encode())
        ok = 1 <= size <= 256 and not re.search(r"[\x00-\x1f\x7f-\x9f]", customer_id)
    except UnicodeEncodeError:
        ok = False
    if ok:
        assert checked_customer_id(customer_id) == customer_id
        assert query(f"customerId={quote(customer_id, safe='')}").customer_id == customer_id
    else:
        with pytest.raises(Problem):
            checked_customer_id(customer_id)


def test_a_position_to_wait_for_is_a_partition_and_an_offset() -> None:
    assert query("customerId=c1&minPosition=3:42").min_position == (3, 42)
    assert query("customerId=c1&minPosition=0%3A0").min_position == (0, 0)


@pytest.mark.parametrize(
    "position",
    [
        "",
        "3",
        "3:",
        ":3",
        "a:1",
        "1:b",
        "-1:2",
        "1:-2",
        "1:2:3",
        "+1:2",
        "1_0:2",
        "٣:٤",
        "1:1e3",
        "1.0:2",
        "1: 2",
        "1:" + "9" * 19,
    ],
)
def test_a_position_of_another_form_is_refused(position: str) -> None:
    detail = refused_query(f"customerId=c1&minPosition={quote(position)}")

    assert detail == "minPosition must be partition:offset, such as 0:42"


def test_a_position_given_twice_is_refused() -> None:
    assert refused_query("customerId=c1&minPosition=0:1&minPosition=0:2") == "minPosition is given more than once"


@given(
    st.text(min_size=1, max_size=20).filter(str.isprintable),
    st.none() | st.tuples(st.integers(0, 99), st.integers(0, 10**18 - 1)),
)
def test_a_query_survives_being_passed_on(customer_id: str, position: tuple[int, int] | None) -> None:
    asked = BalanceQuery(customer_id, position)

    raw = "&".join(f"{name}={quote(value, safe='')}" for name, value in asked.parameters().items())

    assert query(raw) == asked


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
def test_an_amount_is_taken_to_the_cent(literal: str, exact: str) -> None:
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
def test_an_amount_that_is_no_money_is_refused(literal: str) -> None:
    assert refused_amount(literal).startswith(AMOUNT_RULE)


@pytest.mark.parametrize(
    "literal", ["Infinity", "-Infinity", "NaN", "1_000", "+1", "01", ".5", "1.", "0x10", "\u0661", ""]
)
def test_an_amount_that_is_no_json_makes_the_body_no_json(literal: str) -> None:
    assert refused_amount(literal).startswith("the body is not JSON")


def test_a_missing_or_null_amount_is_missing() -> None:
    assert refused(b'{"customerId": "c1"}') == "amount is missing"
    assert refused_amount("null") == "amount is missing"


def test_a_number_of_a_million_digits_is_refused_without_being_computed() -> None:
    began = time.monotonic()

    assert refused_amount("9" * 1_000_000).startswith(AMOUNT_RULE)
    assert refused_amount("1E+999999999").startswith(AMOUNT_RULE)
    assert refused_amount('"' + "9" * 1_000_000 + '"').startswith(AMOUNT_RULE)

    assert time.monotonic() - began < 2


@pytest.mark.parametrize(
    "body",
    [
        b'{"customerId": "c1", "amount": 1, "amount": 1000}',
        b'{"customerId": "c1", "customerId": "c2", "amount": 1}',
        b'{"customerId": "c1", "amount": 1, "x": {"y": 1, "y": 2}}',
    ],
)
def test_a_name_given_twice_is_refused_for_it_says_two_things(body: bytes) -> None:
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
def test_a_body_that_is_no_command_is_refused_with_the_reason(body: bytes, detail: str) -> None:
    assert refused(body).startswith(detail)


def test_a_command_may_carry_what_is_unknown_here() -> None:
    assert add_funds(b'{"amount": 1, "note": "x", "customerId": "c1"}').customer_id == "c1"


@given(st.integers(1, 10**18 - 1))
def test_every_amount_of_money_is_taken_exactly_as_number_and_as_string(cents: int) -> None:
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
def test_whatever_comes_is_an_exact_amount_or_refused(value: Any) -> None:
    body = json.dumps({"customerId": "c1", "amount": str(value) if isinstance(value, Decimal) else value})
    try:
        taken = add_funds(body.encode()).amount
    except Problem:
        assert refused(body.encode()).startswith("amount")
        return
    assert 0 < taken < 10**16
    assert taken == Decimal(str(json.loads(body, parse_float=Decimal)["amount"]))
    assert taken.as_tuple().exponent == -2


def test_the_callers_decimal_context_never_matters() -> None:
    with localcontext(Context(prec=3)):
        assert str(amount("9999999999999999.99")) == "9999999999999999.99"
        assert str(amount("99999999999999.99e2")) == "9999999999999999.00"
