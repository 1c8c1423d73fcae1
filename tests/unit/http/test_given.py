"""What a request gives: bytes that are not UTF-8 are refused, whichever of aiohttp's parsers has let them through."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from aiohttp.http_parser import HttpRequestParser, HttpRequestParserPy

from balance_service.http.answer import problems
from balance_service.http.given import Given
from balance_service.http.letter_parameters import CAUSE
from balance_service.http.parameters import KEY
from balance_service.http.server.app import serve
from balance_service.http.server.listening import bind
from tests.unit.http.raw_http import Answer, Server


async def read(request: web.Request) -> web.Response:
    given = Given(request)
    value = given.required(KEY) if "key" in request.match_info else given.optional(CAUSE)
    return web.json_response({"read": value})


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


# The one in C refuses every byte beyond ASCII. The other is used where there is no wheel of aiohttp.
@pytest.mark.parametrize("parser", [HttpRequestParser, HttpRequestParserPy], ids=["as installed", "in Python"])
@pytest.mark.parametrize(
    "target", [b"/letters?cause=\x80", b"/letters?x=\xc3&cause=a", b"/letters?\xff=a", b"/keys/\x80", b"/keys/%80"]
)
def test_bytes_that_are_not_utf_8_are_a_400_problem(
    monkeypatch: pytest.MonkeyPatch, parser: type[HttpRequestParserPy], target: bytes
) -> None:
    monkeypatch.setattr("aiohttp.web_protocol.HttpRequestParser", parser)

    answer = answered(target)

    assert answer.status == 400
    assert "UTF-8" in answer.detail or "not an HTTP request" in answer.detail
