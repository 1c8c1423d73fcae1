"""What a client may cost: each limit at its edge, against a real server on a real socket."""

from __future__ import annotations

import asyncio
import json

import pytest

from balance_service.http.server.limits import MAX_BODY_BYTES, MAX_HEADERS, MAX_HEADERS_BYTES, MAX_URL_BYTES
from tests.support.api import ADD_FUNDS, GET_BALANCE
from tests.unit.http.raw_http import COMMAND, LIVE, QUICK, Answer, ask, question, serving


def test_a_url_has_at_most_4_kib() -> None:
    assert ask(question(MAX_URL_BYTES)).status == 200
    for size in (MAX_URL_BYTES + 1, 8 << 10, 100_000, 1 << 20):
        answer = ask(question(size))
        assert (answer.status, answer.detail) == (414, f"the URL has more than {MAX_URL_BYTES} characters"), size


@pytest.mark.parametrize("size", [8_001, 100_000, 1 << 20])
def test_one_header_too_long_is_a_431_problem(size: int) -> None:
    answer = ask(question(headers=[("X", "x" * size)]))

    assert answer.status == 431
    assert "a header has more than" in answer.detail


def test_all_headers_together_have_at_most_16_kib() -> None:
    fits = [(f"X{n:04}", "x" * 995) for n in range(MAX_HEADERS_BYTES // 1000)]

    assert ask(question(headers=fits)).status == 200
    answer = ask(question(headers=[*fits, ("Y", "y" * 500)]))
    assert (answer.status, answer.detail) == (431, f"the headers have more than {MAX_HEADERS_BYTES} bytes")


def test_there_are_at_most_64_headers() -> None:
    fits = [(f"X{n}", "x") for n in range(MAX_HEADERS - 1)]

    assert ask(question(headers=fits)).status == 200
    assert ask(question(headers=[*fits, *fits])).status == 431


def test_a_body_has_at_most_16_kib_on_every_route() -> None:
    assert json.loads(ask(COMMAND % MAX_BODY_BYTES + b"x" * MAX_BODY_BYTES).body) == {"bytes": MAX_BODY_BYTES}
    too_much = MAX_BODY_BYTES + 1
    for path in (ADD_FUNDS, GET_BALANCE, "/nope"):
        head = COMMAND.replace(ADD_FUNDS.encode(), path.encode()) % too_much
        answer = ask(head + b"x" * too_much)
        assert (answer.status, answer.detail[:20]) == (413, "Maximum request body"), path


def test_a_connection_whose_body_is_too_long_is_closed_before_all_of_it_has_come() -> None:
    async def run() -> tuple[Answer, bool]:
        async with serving() as server, server.client() as client:
            answer = await client.ask(COMMAND % (1 << 30) + b"x" * (MAX_BODY_BYTES + 1))
            return answer, await client.is_closed_within(4)

    answer, is_closed = asyncio.run(run())

    assert (answer.status, answer.headers["connection"], is_closed) == (413, "close", True)


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n\r\n\r\nx\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"G\xffT / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: b\x00c\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
def test_what_is_not_http_is_a_400_problem_and_the_end_of_the_connection(data: bytes) -> None:
    async def run() -> tuple[Answer, bool]:
        async with serving() as server, server.client() as client:
            return await client.ask(data), await client.is_closed_within(1)

    answer, is_closed = asyncio.run(run())

    assert (answer.status, is_closed) == (400, True)
    assert "not an HTTP request" in answer.detail


@pytest.mark.parametrize("path", [b"/health/live", b"/nope"])
@pytest.mark.parametrize("expect", [b"200-ok", b"100-continue\x9d\x82", b"\xff", b"x" * 5000, b""])
def test_an_expectation_that_nobody_knows_is_a_417_problem(path: bytes, expect: bytes) -> None:
    answer = ask(b"GET " + path + b" HTTP/1.1\r\nHost: x\r\nExpect: " + expect + b"\r\n\r\n")

    assert (answer.status, answer.detail) == (417, "the header Expect supports only 100-continue")


def test_nothing_is_sent_after_the_answer_to_an_expectation_that_nobody_knows() -> None:
    async def run() -> tuple[int, bool, Answer]:
        async with serving() as server, server.client() as client:
            refused = await client.ask(LIVE.replace(b"\r\n\r\n", b"\r\nExpect: 200-ok\r\n\r\n"))
            is_closed = await client.is_closed_within(3 * QUICK.head_seconds)
            return refused.status, is_closed, await client.ask(LIVE)

    status, is_closed, answer = asyncio.run(run())

    assert (status, is_closed, answer.status) == (417, False, 200)


def test_a_client_that_asks_whether_to_go_on_is_told_to() -> None:
    async def run() -> tuple[Answer, Answer]:
        async with serving() as server, server.client() as client:
            asked = (COMMAND % 3).replace(b"\r\n\r\n", b"\r\nExpect: 100-Continue\r\n\r\n")
            return await client.ask(asked), await client.ask(b"end")

    interim, answer = asyncio.run(run())

    assert interim.status == 100
    assert (answer.status, json.loads(answer.body)) == (200, {"bytes": 3})
