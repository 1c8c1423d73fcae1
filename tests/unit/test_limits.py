"""What a client may cost: each limit at its edge, against a real server on a real socket."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from aiohttp import web

from balance_service.http import commands, queries
from balance_service.http.app import Handlers, bind, make_app, serve
from balance_service.http.limits import MAX_BODY_BYTES, MAX_HEADERS, MAX_HEADERS_BYTES, MAX_URL_BYTES, Limits
from balance_service.http.operations import Operations
from tests.unit.fakes import Nobody

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

QUICK = Limits(request_seconds=0.5, head_seconds=0.5, body_seconds=0.5, unsent_seconds=0.5)
QUESTION = b"GET " + queries.PATH.encode() + b"?customerId=c1 HTTP/1.1\r\nHost: x\r\n\r\n"
LIVE = b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"
COMMAND = b"POST " + commands.PATH.encode() + b" HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"


class Answering(Handlers):
    """Answers both routes of the API as it is told."""

    def __init__(self, answer: Callable[[web.Request], Awaitable[web.Response]]) -> None:
        super().__init__(Operations(Nobody({"filler": "x" * 100_000})))
        self._answer = answer

    async def get_balance(self, request: web.Request) -> web.Response:
        return await self._answer(request)

    async def add_funds(self, request: web.Request) -> web.Response:
        return await self._answer(request)


async def echo(request: web.Request) -> web.Response:
    return web.json_response({"bytes": len(await request.read())})


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def detail(self) -> str:
        assert self.headers["content-type"].startswith("application/problem+json"), self
        problem = json.loads(self.body)
        assert problem["status"] == self.status
        return str(problem["detail"])


@dataclass
class Client:
    """One connection, byte by byte."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    began: float = field(default_factory=time.monotonic)

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> Answer:
        head = (await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 10)).decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        body = await self.reader.readexactly(int(headers.get("content-length", "0")))
        return Answer(int(head[0].split()[1]), headers, body)

    async def ask(self, data: bytes) -> Answer:
        await self.send(data)
        return await self.answer()

    async def is_closed_within(self, seconds: float) -> bool:
        """Whether the server closes it, whatever it has sent before."""
        try:
            async with asyncio.timeout(seconds):
                while await self.reader.read(65536):
                    pass
        except ConnectionError:
            return True
        except TimeoutError:
            return False
        return True


@dataclass
class Server:
    port: int

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield Client(reader, writer)
        finally:
            writer.transport.abort()


@asynccontextmanager
async def serving(
    limits: Limits = QUICK, answer: Callable[[web.Request], Awaitable[web.Response]] = echo
) -> AsyncIterator[Server]:
    listener = bind("127.0.0.1", 0)
    server = await serve(make_app(Answering(answer), limits), listener, limits)
    try:
        yield Server(listener.getsockname()[1])
    finally:
        await server.cleanup()


def ask(data: bytes, limits: Limits = QUICK) -> Answer:
    """The answer to some bytes."""

    async def run() -> Answer:
        async with serving(limits) as server, server.client() as client:
            return await client.ask(data)

    return asyncio.run(run())


def question(url_bytes: int = 0, headers: Sequence[tuple[str, str]] = ()) -> bytes:
    url = (queries.PATH + "?customerId=c1&x=").ljust(url_bytes, "x")
    head = "".join(f"{name}: {value}\r\n" for name, value in (("Host", "x"), *headers))
    return f"GET {url} HTTP/1.1\r\n{head}\r\n".encode()


# --- sizes


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
    for path in (commands.PATH, queries.PATH, "/nope"):
        head = COMMAND.replace(commands.PATH.encode(), path.encode()) % too_much
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

    assert (answer.status, answer.detail) == (417, "of the header Expect only 100-continue is understood")


def test_a_client_that_asks_whether_to_go_on_is_told_to() -> None:
    async def run() -> tuple[Answer, Answer]:
        async with serving() as server, server.client() as client:
            asked = (COMMAND % 3).replace(b"\r\n\r\n", b"\r\nExpect: 100-Continue\r\n\r\n")
            return await client.ask(asked), await client.ask(b"end")

    interim, answer = asyncio.run(run())

    assert interim.status == 100
    assert (answer.status, json.loads(answer.body)) == (200, {"bytes": 3})


# --- time


def test_a_request_that_takes_too_long_is_a_503_problem() -> None:
    async def for_ever(_request: web.Request) -> web.Response:
        await asyncio.sleep(60)
        return web.Response()

    async def run() -> Answer:
        async with serving(QUICK, for_ever) as server, server.client() as client:
            return await client.ask(QUESTION)

    answer = asyncio.run(run())

    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert "more than 0.5 s" in answer.detail


def test_a_timeout_of_somebody_else_is_not_taken_for_the_requests_own() -> None:
    async def fails(_request: web.Request) -> web.Response:
        raise TimeoutError

    async def run() -> Answer:
        async with serving(QUICK, fails) as server, server.client() as client:
            return await client.ask(QUESTION)

    assert asyncio.run(run()).status == 500


@pytest.mark.parametrize("start", [b"", QUESTION], ids=["first request", "a later one"])
@pytest.mark.parametrize("head", [b"G", QUESTION[:-2]])
def test_a_head_that_does_not_end_is_answered_408_and_the_connection_closed(start: bytes, head: bytes) -> None:
    async def run() -> tuple[Answer, bool, float]:
        async with serving() as server, server.client() as client:
            if start:
                assert (await client.ask(start)).status == 200
            began = time.monotonic()
            await client.send(head)
            return await client.answer(), await client.is_closed_within(1), time.monotonic() - began

    answer, is_closed, seconds = asyncio.run(run())

    assert answer.status == 408
    assert "head" in answer.detail
    assert is_closed
    assert 0.5 < seconds < 2


def test_a_head_that_dribbles_is_cut_off_too() -> None:
    async def run() -> float:
        async with serving() as server, server.client() as client:
            began = time.monotonic()
            while not client.reader.at_eof() and time.monotonic() < began + 5:
                try:
                    await client.send(b"G")
                    await asyncio.sleep(0.05)
                except ConnectionError:
                    break
            return time.monotonic() - began

    assert asyncio.run(run()) < 2


def test_a_body_that_dribbles_is_answered_408_and_the_connection_closed() -> None:
    async def run() -> tuple[Answer, bool]:
        async with serving() as server, server.client() as client:
            await client.send(COMMAND % 1000)

            async def dribble() -> None:
                while True:
                    await client.send(b"x")
                    await asyncio.sleep(0.05)

            dribbling = asyncio.ensure_future(dribble())
            answer = await client.answer()
            is_closed = await client.is_closed_within(4)
            dribbling.cancel()
            await asyncio.gather(dribbling, return_exceptions=True)
            return answer, is_closed

    answer, is_closed = asyncio.run(run())

    assert (answer.status, answer.headers["connection"]) == (408, "close")
    assert "body" in answer.detail
    assert is_closed


def test_an_idle_connection_outlasts_the_time_of_a_head() -> None:
    body = b"x" * 100

    async def run() -> list[int]:
        async with serving() as server, server.client() as client:
            statuses = []
            for data in (QUESTION, COMMAND % len(body), LIVE, QUESTION):
                await client.send(data)
                if b"POST" in data:
                    await asyncio.sleep(0.2)
                    await client.send(body)
                statuses.append((await client.answer()).status)
                await asyncio.sleep(1.2)
            return statuses

    assert asyncio.run(run()) == [200, 200, 200, 200]


def test_a_client_that_reads_no_answers_is_cut_off() -> None:
    async def run() -> bool:
        async with serving() as server, server.client() as client:
            client.writer.write(b"GET /api/status HTTP/1.1\r\nHost: x\r\n\r\n" * 200)
            await asyncio.sleep(2.5)
            return await client.is_closed_within(1)

    assert asyncio.run(run())


def test_of_the_defaults_no_request_costs_a_connection_more_than_10_s_before_it_is_handled() -> None:
    limits = Limits()

    assert limits.head_seconds < 9
    assert limits.body_seconds + limits.of_connections["lingering_time"] < 9


# --- how many


def test_a_request_too_many_is_answered_503_at_once_and_probes_still_200() -> None:
    limits = Limits(max_concurrent_requests=2)
    go_on = asyncio.Event()

    async def wait(_request: web.Request) -> web.Response:
        await go_on.wait()
        return web.json_response({})

    async def run() -> tuple[list[Answer], list[Answer]]:
        async with (
            serving(limits, wait) as server,
            server.client() as first,
            server.client() as second,
            server.client() as third,
        ):
            for client in (first, second):
                await client.send(QUESTION)
            await asyncio.sleep(0.2)
            probes = [LIVE.replace(b"/health/live", path) for path in (b"/health/live", b"/health/ready", b"/metrics")]
            meanwhile = [await third.ask(data) for data in (QUESTION, *probes)]
            go_on.set()
            return meanwhile, [await first.answer(), await second.answer(), await third.ask(QUESTION)]

    meanwhile, later = asyncio.run(run())

    assert [answer.status for answer in meanwhile] == [503, 200, 200, 200]
    assert meanwhile[0].headers["retry-after"] == "1"
    assert "2 requests are under way" in meanwhile[0].detail
    assert [answer.status for answer in later] == [200, 200, 200]


def test_a_request_whose_body_is_still_to_come_takes_nobodys_place() -> None:
    async def run() -> tuple[Answer, Answer]:
        async with (
            serving(Limits(max_concurrent_requests=1)) as server,
            server.client() as slow,
            server.client() as quick,
        ):
            await slow.send(COMMAND % 3)
            await asyncio.sleep(0.2)
            meanwhile = await quick.ask(QUESTION)
            return meanwhile, await slow.ask(b"end")

    assert [answer.status for answer in asyncio.run(run())] == [200, 200]


def test_a_connection_too_many_is_closed_at_once_and_room_is_made_again() -> None:
    limits = Limits(max_concurrent_requests=1)
    assert limits.max_connections == 104

    async def run() -> tuple[bool, int]:
        async with serving(limits) as server:
            open_ones = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(limits.max_connections)]
            async with server.client() as client:
                is_closed = await client.is_closed_within(1)
            for _, writer in open_ones:
                writer.transport.abort()
            await asyncio.sleep(0.2)
            async with server.client() as client:
                return is_closed, (await client.ask(LIVE)).status

    assert asyncio.run(run()) == (True, 200)


def test_connections_never_take_most_of_the_files_the_process_may_open(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits(max_concurrent_requests=100_000)

    for files, most in ((1024, 512), (1, 1), (10**7, 400_100)):
        monkeypatch.setattr("resource.getrlimit", lambda _, files=files: (files, files))
        assert limits.max_connections == most
    monkeypatch.setattr("resource.getrlimit", lambda _: (-1, -1))
    assert limits.max_connections == 400_100


def test_the_server_stops_while_clients_are_connected() -> None:
    async def run() -> float:
        async with serving() as server, server.client() as idle, server.client() as half:
            assert (await idle.ask(LIVE)).status == 200
            await half.send(b"GET")
            began = time.monotonic()
        return time.monotonic() - began

    assert asyncio.run(run()) < 3
