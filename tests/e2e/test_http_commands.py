"""Commands to the letter: what is taken, to the cent, and what is refused and not written."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.e2e.http_api import add, assert_problem, body_of, post, read
from tests.support.api import ADD_FUNDS

if TYPE_CHECKING:
    import httpx

_MAX_BODY_BYTES = 16 << 10


@pytest.mark.parametrize(
    ("amount", "balance"),
    [
        ("1", "1.00"),
        ('"1"', "1.00"),
        ("12.34", "12.34"),
        ('"12.34"', "12.34"),
        ("0.01", "0.01"),
        ("1e2", "100.00"),
        ("25E-2", "0.25"),
        ("1.500", "1.50"),
        ('"007.50"', "7.50"),
    ],
)
def test_an_amount_may_be_a_number_or_a_decimal_string(
    http: httpx.Client, customer: str, amount: str, balance: str
) -> None:
    answer = read(http, customer, add(http, customer, amount))

    assert answer.text == f'{{"amount":{balance}}}'


def test_an_amount_that_is_not_money_is_refused_and_not_written(http: httpx.Client, customer: str) -> None:
    amounts = ["0", "0.00", "-1", "-0.01", "0.001", "1.234", "12345678901234567", "1e16", "1e400", "1e-400"]
    amounts += ["true", "null", "[]", "{}", "[1]", "NaN", "Infinity", "-Infinity"]
    strings = [
        "",
        "0",
        "-1",
        "+1",
        " 1",
        "1 ",
        "1e2",
        "1_000",
        "1,5",
        ".5",
        "1.",
        "abc",
        "NaN",
        "Infinity",
        "٣",
    ]
    strings += ["0.001", "12345678901234567", "1\n", "0x10"]
    amounts += [json.dumps(text) for text in strings]

    statuses = {amount: post(http, body_of(customer, amount)).status_code for amount in amounts}
    statuses["missing"] = post(http, json.dumps({"customerId": customer}).encode()).status_code

    assert set(statuses.values()) == {400}, statuses
    assert read(http, customer, add(http, customer, "1")).text == '{"amount":1.00}'


def test_a_command_is_answered_202_with_an_empty_body_and_a_position(http: httpx.Client, customer: str) -> None:
    first, second = (post(http, body_of(customer, "1")) for _ in range(2))

    assert (first.status_code, first.content) == (202, b"")
    partition, offset = first.headers["Balance-Position"].split(":")
    assert second.headers["Balance-Position"] == f"{partition}:{int(offset) + 1}"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"junk",
        b"customerId=c1&amount=1",
        b'{"customerId": "c1", "amount": 1',
        b'{"customerId": "c\xff", "amount": 1}',
        pytest.param(b"[" * 8000, id="nested too deep"),
        b"null",
        b'["c1", 1]',
        b'{"amount":1}',
        b'{"customerId": null, "amount": 1}',
        b'{"customerId": 1, "amount": 1}',
        b'{"customerId": ["c1"], "amount": 1}',
        b'{"customerId": "", "amount": 1}',
        b'{"customerId": "\\ud800", "amount": 1}',
        b'{"customerId": "a\\u0000b", "amount": 1}',
        b'{"customerId": "a\\u0085b", "amount": 1}',
    ],
)
def test_a_body_that_is_no_command_is_a_400(http: httpx.Client, body: bytes) -> None:
    assert_problem(post(http, body), 400)


def test_a_compressed_body_is_a_415(http: httpx.Client) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    answer = http.post(ADD_FUNDS, content=b"not gzip", headers=headers)

    assert_problem(answer, 415, "Content-Encoding")


def test_a_body_has_at_most_16_kib(http: httpx.Client, customer: str) -> None:
    fits = body_of(customer, "1").ljust(_MAX_BODY_BYTES)

    assert post(http, fits).status_code == 202
    assert_problem(post(http, fits + b" "), 413)
    assert_problem(http.post(ADD_FUNDS, content=iter([fits, b" "]), headers={"Content-Type": "application/json"}), 413)


@pytest.mark.parametrize("method", ["GET", "PUT", "PATCH", "DELETE", "OPTIONS"])
def test_a_command_takes_post_only(http: httpx.Client, method: str) -> None:
    answer = http.request(method, ADD_FUNDS)

    assert_problem(answer, 405, "Allow")
    assert answer.headers["Allow"] == "POST"


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded", "text/json"])
def test_a_body_that_is_not_said_to_be_json_is_a_415(
    http: httpx.Client, customer: str, content_type: str | None
) -> None:
    headers = {} if content_type is None else {"Content-Type": content_type}

    assert_problem(http.post(ADD_FUNDS, content=body_of(customer, "1"), headers=headers), 415, "application/json")
