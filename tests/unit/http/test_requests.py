"""A query whose parameters are not exactly valid is refused before the instance starts to answer it."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, cast
from urllib.parse import quote

import pytest
from aiohttp import web
from aiohttp.http_parser import HttpRequestParser, HttpRequestParserPy
from aiohttp.test_utils import make_mocked_request
from hypothesis import given
from hypothesis import strategies as st

from balance_service.errors import InvalidInputError
from balance_service.http.answer import problems
from balance_service.http.app import serve
from balance_service.http.dead_letters import ListParameters
from balance_service.http.key_target import KeyQuery
from balance_service.http.requests import KeyParameters
from balance_service.http.server.listening import bind
from balance_service.model.keys import checked_key
from tests.support.api import GET_BALANCE as PATH
from tests.support.querying import balance_query
from tests.unit.http.raw_http import Answer, Server

if TYPE_CHECKING:
    from unittest.mock import Mock


def query(raw: str) -> KeyQuery:
    request = make_mocked_request("GET", f"{PATH}?{raw}")
    cast("Mock", request.match_info.route).configure_mock(**{"resource.canonical": PATH})
    return balance_query(request)


def refused_query(raw: str) -> str:
    with pytest.raises(InvalidInputError) as caught:
        query(raw)
    return str(caught.value)


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
def test_a_customer_id_is_text_of_up_to_256_bytes(raw: str, customer_id: str) -> None:
    assert query(raw) == KeyQuery(
        key=customer_id.encode(), path=PATH, parameters={"customerId": customer_id}, noun="customer"
    )


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
def test_an_invalid_customer_id_is_refused_with_the_reason(raw: str, detail: str) -> None:
    assert refused_query(raw) == detail


@given(st.text(max_size=300))
def test_a_query_accepts_the_same_customer_ids_as_the_stream(customer_id: str) -> None:
    try:
        size = len(customer_id.encode())
        ok = 1 <= size <= 256 and not re.search(r"[\x00-\x1f\x7f-\x9f]", customer_id)
    except UnicodeEncodeError:
        ok = False
    if ok:
        assert checked_key(customer_id, "customerId") == customer_id
        assert query(f"customerId={quote(customer_id, safe='')}").key.decode() == customer_id
    else:
        with pytest.raises(InvalidInputError):
            checked_key(customer_id, "customerId")


def test_min_position_is_a_partition_and_an_offset() -> None:
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
def test_a_malformed_min_position_is_refused(position: str) -> None:
    detail = refused_query(f"customerId=c1&minPosition={quote(position)}")

    assert detail == "minPosition must be partition:offset, such as 0:42"


def test_a_repeated_min_position_is_refused() -> None:
    assert refused_query("customerId=c1&minPosition=0:1&minPosition=0:2") == "minPosition is given more than once"


@given(
    st.text(min_size=1, max_size=20).filter(str.isprintable),
    st.none() | st.tuples(st.integers(0, 99), st.integers(0, 10**18 - 1)),
    st.none() | st.integers(0, 10**18 - 1),
    st.none() | st.integers(0, 10**12 - 1),
    st.none() | st.integers(1, 10**9 - 1),
)
def test_a_forwarded_query_is_equal_to_the_original(
    customer_id: str,
    position: tuple[int, int] | None,
    max_lag: int | None,
    max_age_ms: int | None,
    generation: int | None,
) -> None:
    wanted = "" if position is None else f"&minPosition={position[0]}:{position[1]}"
    wanted += "" if max_lag is None else f"&maxLag={max_lag}"
    wanted += "" if max_age_ms is None else f"&maxAge={max_age_ms // 1000}.{max_age_ms % 1000:03}"
    wanted += "" if generation is None else f"&generation={generation}"
    asked = query(f"customerId={quote(customer_id, safe='')}{wanted}")

    raw = "&".join(f"{name}={quote(value, safe='')}" for name, value in asked.parameters.items())

    assert query(raw) == asked
    assert (asked.key, asked.min_position, asked.max_lag) == (customer_id.encode(), position, max_lag)
    assert asked.max_age == (None if max_age_ms is None else max_age_ms / 1000)
    assert asked.parameters.get("generation") == (None if generation is None else str(generation))
    # The key parameter is one of the fields; each further one needs a strategy here.
    assert set(KeyParameters.model_fields) == {"key", "min_position", "max_lag", "max_age", "generation"}


async def read(request: web.Request) -> web.Response:
    parameters = KeyParameters if "key" in request.match_info else ListParameters
    return web.json_response({"read": str(parameters.of(request))})


def answered(target: bytes) -> Answer:
    async def run() -> Answer:
        app = web.Application(middlewares=[problems])
        app.router.add_get("/letters", read)
        app.router.add_get("/keys/{key}", read)
        listener = bind("127.0.0.1", 0)
        server = await serve(app, listener)
        try:
            async with Server(listener.getsockname()[1]).client() as client:
                return await client.ask(b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n" % target)
        finally:
            await server.cleanup()

    return asyncio.run(run())


# The parser in C refuses every byte beyond ASCII. The parser in Python runs where aiohttp has no wheel.
@pytest.mark.parametrize("parser", [HttpRequestParser, HttpRequestParserPy], ids=["as installed", "in Python"])
@pytest.mark.parametrize(
    "target", [b"/letters?cause=\x80", b"/letters?x=\xc3&cause=a", b"/letters?\xff=a", b"/keys/\x80", b"/keys/%80"]
)
def test_a_request_that_is_not_utf_8_is_answered_400_by_either_parser(
    monkeypatch: pytest.MonkeyPatch, parser: type[HttpRequestParserPy], target: bytes
) -> None:
    monkeypatch.setattr("aiohttp.web_protocol.HttpRequestParser", parser)

    answer = answered(target)

    assert answer.status == 400
    assert "UTF-8" in answer.detail or "not an HTTP request" in answer.detail
