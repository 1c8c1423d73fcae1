"""The internals of aiohttp in use, and the order of answers on a connection.

A version of aiohttp with other internals fails in the first part, by name. Then `http/server/ahead_of_aiohttp.py` must
be changed, and the bound in `pyproject.toml`.
"""

from __future__ import annotations

import asyncio
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from aiohttp import EMPTY_PAYLOAD, web
from aiohttp.http import RawRequestMessage

from balance_service.http.server.ahead_of_aiohttp import AheadOfAiohttp
from balance_service.http.server.listening import bind
from tests.unit.http.raw_http import LIVE, Client, Server

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from aiohttp.web_protocol import RequestHandler

_ROOT = Path(__file__).parents[4]
BODY = b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"


def request(path: str, headers: str = "") -> bytes:
    return f"GET /{path} HTTP/1.1\r\nHost: x\r\n{headers}\r\n".encode()


# --- the internals of aiohttp in use


def test_the_dependency_is_bound_to_the_versions_of_aiohttp_whose_internals_were_checked() -> None:
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    bounds = [bound for bound in project["optional-dependencies"]["service"] if re.match(r"aiohttp\b", bound)]

    assert bounds == ["aiohttp>=3.14.5,<3.15"]
    assert aiohttp.__version__.startswith("3.14."), "check aiohttp/web_protocol.py again, then move the bound"


async def connected(handle: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]) -> RequestHandler:
    """Returns a connection of aiohttp that waits for its first request."""
    connection = web.Server(handle)()
    connection.connection_made(Transport())
    await asyncio.sleep(0)
    return connection


class Transport(asyncio.Transport):
    """Records written data. `unsent`: bytes of earlier data in the write buffer."""

    def __init__(self, unsent: int = 0) -> None:
        super().__init__()
        self.written = b""
        self._unsent = unsent

    def write(self, data: Any) -> None:
        self.written += data

    def writelines(self, list_of_data: Any) -> None:
        self.written += b"".join(list_of_data)

    def close(self) -> None:
        """Nothing to close."""

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return self._unsent


@pytest.mark.parametrize("name", ["_waiter", "_messages", "_parser"])
def test_a_connection_of_aiohttp_has(name: str) -> None:
    async def run() -> bool:
        return hasattr(await connected(answer_aiohttps), name)

    assert asyncio.run(run()), f"aiohttp {aiohttp.__version__} has no RequestHandler.{name}"


def test_aiohttp_waits_on_the_future_waiter_only_while_it_has_no_request() -> None:
    go_on = asyncio.Event()

    async def handle(_request: web.BaseRequest) -> web.StreamResponse:
        await go_on.wait()
        return web.Response()

    async def run() -> None:
        connection = await connected(handle)
        assert waits(connection), "RequestHandler._waiter is not there, or done, without a request"
        connection.data_received(LIVE)
        for _ in range(5):
            assert not waits(connection), "RequestHandler._waiter is there while a request is not answered"
            await asyncio.sleep(0)
        go_on.set()
        for _ in range(5):
            await asyncio.sleep(0)
        assert waits(connection), "RequestHandler._waiter is not there once all requests are answered"

    asyncio.run(run())


def waits(connection: RequestHandler) -> bool:
    return connection._waiter is not None and not connection._waiter.done()


@pytest.mark.parametrize(
    ("data", "is_body_empty"), [(LIVE, True), (BODY, False), (LIVE[:-2], None), (b"no HTTP\r\n\r\n", True)]
)
def test_aiohttp_queues_parsed_requests_in_messages(data: bytes, is_body_empty: bool | None) -> None:
    async def run() -> None:
        connection = await connected(answer_aiohttps)
        waiter = connection._waiter
        connection._waiter = None
        connection.data_received(data)
        for _ in range(5):
            await asyncio.sleep(0)
        assert waiter is not None
        assert not waiter.done(), "aiohttp begins with a request though RequestHandler._waiter is out of its sight"
        if is_body_empty is None:
            assert not connection._messages
            return
        ((message, body),) = connection._messages
        assert (body is EMPTY_PAYLOAD) == is_body_empty, "EMPTY_PAYLOAD does not say whether there is a body"
        assert isinstance(message, RawRequestMessage) == (b"no HTTP" not in data), "an error is taken for a request"

    asyncio.run(run())


# --- the order of answers


class Ahead:
    """Answers paths that begin with /ahead at once, and those with /later a moment later."""

    def answer(
        self, request: RawRequestMessage, connection: AheadOfAiohttp
    ) -> bytes | Coroutine[Any, Any, bytes] | None:
        if request.path.startswith("/ahead"):
            return raw_answer(request.path)
        return self._later(request.path) if request.path.startswith("/later") else None

    async def _later(self, path: str) -> bytes:
        await asyncio.sleep(0.1)
        return raw_answer(path)


def raw_answer(path: str) -> bytes:
    return f"HTTP/1.1 200 OK\r\nContent-Length: {len(path)}\r\nX-Ahead: yes\r\n\r\n{path}".encode()


async def answer_aiohttps(request: web.BaseRequest) -> web.StreamResponse:
    """Answers with the path, a moment later for /slow."""
    if request.path.startswith("/slow"):
        await asyncio.sleep(0.1)
    return web.Response(text=request.path)


def exchange(*segments: bytes) -> list[tuple[str, bool]]:
    """Returns the path of each answer, in order, and whether it was sent ahead of aiohttp."""
    count = sum(segment.count(b" HTTP/1.1\r\n") for segment in segments)

    async def converse(client: Client) -> list[tuple[str, bool]]:
        for segment in segments:
            await client.send(segment)
            await asyncio.sleep(0.01)
        answers = [await client.answer() for _ in range(count)]
        return [(answer.body.decode(), "x-ahead" in answer.headers) for answer in answers]

    async def run() -> list[tuple[str, bool]]:
        server = web.Server(answer_aiohttps)
        loop = asyncio.get_running_loop()
        listener = bind("127.0.0.1", 0)
        port = listener.getsockname()[1]
        listening = await loop.create_server(lambda: AheadOfAiohttp(server, Ahead().answer, loop=loop), sock=listener)
        try:
            async with Server(port).client() as client:
                return await converse(client)
        finally:
            listening.close()
            await server.shutdown(1)

    return asyncio.run(run())


@pytest.mark.parametrize(
    "paths",
    [
        ["slow1", "ahead2", "ahead3"],
        ["later1", "ahead2", "later3", "slow4", "ahead5"],
        ["slow1", "later2", "slow3", "later4"],
        ["other1", "ahead2", "slow3", "ahead4"],
    ],
)
@pytest.mark.parametrize("are_together", [False, True], ids=["one by one", "all at once"])
def test_answers_are_sent_in_the_order_of_requests(paths: Sequence[str], are_together: bool) -> None:
    requests = [request(path) for path in paths]
    answers = exchange(b"".join(requests)) if are_together else exchange(*requests)

    assert [path for path, _ in answers] == [f"/{path}" for path in paths]


async def answered(*requests: bytes, unsent: int = 0) -> bytes:
    """Returns the bytes sent in answer to requests within one iteration of the event loop."""
    connection = AheadOfAiohttp(web.Server(answer_aiohttps), Ahead().answer, loop=asyncio.get_running_loop())
    transport = Transport(unsent)
    connection.connection_made(transport)
    await asyncio.sleep(0)
    for data in requests:
        connection.data_received(data)
    await asyncio.sleep(0.1)
    return transport.written


def test_two_requests_in_one_iteration_of_the_event_loop_are_answered_in_order() -> None:
    written = asyncio.run(answered(request("other1"), request("ahead2")))

    assert re.findall(rb"/\w+\d", written) == [b"/other1", b"/ahead2"]


@pytest.mark.parametrize("unsent", [0, 1])
def test_aiohttp_answers_a_client_that_leaves_answers_unread(unsent: int) -> None:
    written = asyncio.run(answered(request("ahead"), unsent=unsent))

    assert (b"X-Ahead" in written) == (not unsent)


def test_single_requests_are_always_answered_ahead() -> None:
    # More than the queue of aiohttp holds, so that a request that is not removed from it is noticed.
    alone = [request(f"ahead{n}") for n in range(100)]
    together = request("slow") + request("ahead") + request("other")

    answers = exchange(*alone, together)

    assert [is_ahead for _, is_ahead in answers] == [True] * 100 + [False] * 3


def test_a_single_request_in_segments_is_answered_ahead() -> None:
    whole = request("ahead1")

    assert exchange(whole[:9], whole[9:30], whole[30:], request("ahead2")) == [("/ahead1", True), ("/ahead2", True)]


@pytest.mark.parametrize(
    "body",
    [
        request("ahead", "Content-Length: 2\r\n") + b"{}",
        request("ahead", "Transfer-Encoding: chunked\r\n") + b"0\r\n\r\n",
        request("ahead", "Connection: Upgrade\r\nUpgrade: websocket\r\nContent-Length: 2\r\n") + b"{}",
    ],
)
def test_a_request_with_a_body_is_not_answered_ahead_but_the_next_one_is(body: bytes) -> None:
    assert exchange(body, request("ahead2")) == [("/ahead", False), ("/ahead2", True)]
