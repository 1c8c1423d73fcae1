"""Limits on the cost of a client, each at its edge, against a real server on a real socket."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import time
from dataclasses import replace

import pytest
from aiohttp import web
from aiohttp.compression_utils import ZLibDecompressor

from balance_service.http.answer import Problem
from balance_service.http.server.limits import (
    MAX_BODY_BYTES,
    MAX_HEADERS,
    MAX_HEADERS_BYTES,
    MAX_URL_BYTES,
    Limits,
    UnderWay,
)
from tests.support.api import ADD_FUNDS, GET_BALANCE
from tests.support.waiting import until
from tests.unit.http.raw_http import COMMAND, LIVE, QUESTION, QUICK, Answer, ask, question, serving


def test_a_url_has_at_most_4_kib() -> None:
    assert ask(question(MAX_URL_BYTES)).status == 200
    for size in (MAX_URL_BYTES + 1, 8 << 10, 100_000, 1 << 20):
        answer = ask(question(size))
        assert (answer.status, answer.detail) == (414, f"the URL has more than {MAX_URL_BYTES} characters"), size


@pytest.mark.parametrize("size", [8_001, 100_000, 1 << 20])
def test_a_header_that_is_too_long_is_a_431_problem(size: int) -> None:
    answer = ask(question(headers=[("X", "x" * size)]))

    assert answer.status == 431
    assert "a header has more than" in answer.detail


def test_all_headers_have_at_most_16_kib() -> None:
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


def test_a_connection_is_closed_before_the_end_of_a_body_that_is_too_long() -> None:
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
def test_malformed_http_is_a_400_problem_and_closes_the_connection(data: bytes) -> None:
    async def run() -> tuple[Answer, bool]:
        async with serving() as server, server.client() as client:
            return await client.ask(data), await client.is_closed_within(1)

    answer, is_closed = asyncio.run(run())

    assert (answer.status, is_closed) == (400, True)
    assert "not an HTTP request" in answer.detail


@pytest.mark.parametrize("path", [b"/health/live", b"/nope"])
@pytest.mark.parametrize("expect", [b"200-ok", b"100-continue\x9d\x82", b"\xff", b"x" * 5000, b""])
def test_an_unknown_expectation_is_a_417_problem(path: bytes, expect: bytes) -> None:
    answer = ask(b"GET " + path + b" HTTP/1.1\r\nHost: x\r\nExpect: " + expect + b"\r\n\r\n")

    assert (answer.status, answer.detail) == (417, "the header Expect supports only 100-continue")


def test_nothing_follows_the_answer_to_an_unknown_expectation() -> None:
    async def run() -> tuple[int, bool, Answer]:
        async with serving() as server, server.client() as client:
            refused = await client.ask(LIVE.replace(b"\r\n\r\n", b"\r\nExpect: 200-ok\r\n\r\n"))
            is_closed = await client.is_closed_within(3 * QUICK.head_seconds)
            return refused.status, is_closed, await client.ask(LIVE)

    status, is_closed, answer = asyncio.run(run())

    assert (status, is_closed, answer.status) == (417, False, 200)


def test_the_server_meets_the_expectation_100_continue() -> None:
    async def run() -> tuple[Answer, Answer]:
        async with serving() as server, server.client() as client:
            asked = (COMMAND % 3).replace(b"\r\n\r\n", b"\r\nExpect: 100-Continue\r\n\r\n")
            return await client.ask(asked), await client.ask(b"end")

    interim, answer = asyncio.run(run())

    assert interim.status == 100
    assert (answer.status, json.loads(answer.body)) == (200, {"bytes": 3})


# --- time and number


# Half a second and a sweep of all connections, on a busy machine.
SOON = 10.0
# More than the buffers of two sockets hold.
LARGE = 16 << 20


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


def test_a_timeout_inside_a_handler_is_not_the_timeout_of_the_request() -> None:
    async def fails(_request: web.Request) -> web.Response:
        raise TimeoutError

    async def run() -> Answer:
        async with serving(QUICK, fails) as server, server.client() as client:
            return await client.ask(QUESTION)

    assert asyncio.run(run()).status == 500


@pytest.mark.parametrize("start", [b"", QUESTION], ids=["first request", "a later one"])
@pytest.mark.parametrize("head", [b"G", QUESTION[:-2]])
def test_an_incomplete_head_is_answered_408_and_closes_the_connection(start: bytes, head: bytes) -> None:
    async def run() -> tuple[Answer, bool, float]:
        async with serving() as server:
            # The time of a first head begins when the connection is accepted.
            began = time.monotonic()
            async with server.client() as client:
                if start:
                    assert (await client.ask(start)).status == 200
                    began = time.monotonic()
                await client.send(head)
                return await client.answer(), await client.is_closed_within(SOON), time.monotonic() - began

    answer, is_closed, seconds = asyncio.run(run())

    assert answer.status == 408
    assert "head" in answer.detail
    assert is_closed
    assert 0.5 < seconds < SOON


def test_a_head_that_arrives_too_slowly_closes_the_connection() -> None:
    async def run() -> float:
        async with serving() as server, server.client() as client:
            began = time.monotonic()
            while not client.reader.at_eof() and time.monotonic() < began + 2 * SOON:
                try:
                    await client.send(b"G")
                    await asyncio.sleep(0.05)
                except ConnectionError:
                    break
            return time.monotonic() - began

    assert asyncio.run(run()) < SOON


def test_a_body_that_arrives_too_slowly_is_answered_408_and_closes_the_connection() -> None:
    async def run() -> tuple[Answer, bool]:
        async with serving() as server, server.client() as client:
            await client.send(COMMAND % 1000)

            async def dribble() -> None:
                while True:
                    await client.send(b"x")
                    await asyncio.sleep(0.05)

            dribbling = asyncio.ensure_future(dribble())
            answer = await client.answer()
            is_closed = await client.is_closed_within(SOON)
            dribbling.cancel()
            await asyncio.gather(dribbling, return_exceptions=True)
            return answer, is_closed

    answer, is_closed = asyncio.run(run())

    assert (answer.status, answer.headers["connection"]) == (408, "close")
    assert "body" in answer.detail
    assert is_closed


def test_an_idle_connection_stays_open_longer_than_the_timeout_of_a_head() -> None:
    body = b"x" * 100

    async def run() -> list[int]:
        async with serving(replace(QUICK, body_seconds=SOON)) as server, server.client() as client:
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


def test_a_client_that_does_not_read_answers_is_disconnected() -> None:
    async def run() -> bool:
        async with serving() as server, server.client() as client:
            client.writer.write(b"GET /api/status HTTP/1.1\r\nHost: x\r\n\r\n" * 200)
            await until(lambda: server.connections == 1, "it is connected")
            await until(lambda: server.connections == 0, "it is cut off")
            return await client.is_closed_within(SOON)

    assert asyncio.run(run())


def test_an_incomplete_head_after_an_unread_answer_does_not_keep_the_connection_open() -> None:
    async def large(_request: web.Request) -> web.Response:
        return web.Response(body=b"x" * LARGE)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        async with serving(replace(QUICK, unsent_seconds=SOON), large) as server:
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.setblocking(False)
                await loop.sock_connect(client, ("127.0.0.1", server.port))
                await loop.sock_sendall(client, QUESTION)
                await loop.sock_recv(client, 1)
                await loop.sock_sendall(client, b"G")
                await until(lambda: server.connections == 0, "it is cut off")

    asyncio.run(run())


def test_a_connection_without_a_request_is_closed_after_the_timeout_of_a_head() -> None:
    async def run() -> tuple[bytes, float]:
        async with serving() as server, server.client() as client:
            began = time.monotonic()
            return await asyncio.wait_for(client.reader.read(), SOON), time.monotonic() - began

    sent, seconds = asyncio.run(run())

    assert sent == b""
    assert 0.4 < seconds < SOON


@pytest.mark.parametrize(
    "request_before",
    [
        QUESTION,
        (COMMAND % 3) + b"end",
        COMMAND.replace(b"Content-Length: %d", b"Transfer-Encoding: chunked") + b"3\r\nend\r\n0\r\n\r\n",
    ],
    ids=["without a body", "with a body", "in chunks"],
)
def test_an_incomplete_head_in_one_segment_with_a_request_is_answered_408(request_before: bytes) -> None:
    async def run() -> tuple[int, int, bool]:
        async with serving(replace(QUICK, idle_seconds=60.0)) as server, server.client() as client:
            first = await client.ask(request_before + b"GET / HT")
            second = await client.answer()
            return first.status, second.status, await client.is_closed_within(SOON)

    assert asyncio.run(run()) == (200, 408, True)


@pytest.mark.parametrize("sent_before", [b"", LIVE], ids=["first", "after another request"])
@pytest.mark.parametrize("protocol", [b"h2c", b"foo"])
def test_a_request_after_a_protocol_upgrade_is_answered_or_the_connection_is_closed(
    protocol: bytes, sent_before: bytes
) -> None:
    upgrade = LIVE.replace(b"\r\n\r\n", b"\r\nConnection: Upgrade\r\nUpgrade: " + protocol + b"\r\n\r\n")

    async def run() -> tuple[Answer, bool, list[int]]:
        async with serving(replace(QUICK, idle_seconds=60.0)) as server:
            async with server.client() as client:
                if sent_before:
                    await client.ask(sent_before)
                answer = await client.ask(upgrade + LIVE)
                is_closed = await client.is_closed_within(SOON)
            async with server.client() as client:
                return answer, is_closed, [(await client.ask(data)).status for data in (upgrade, LIVE)]

    answer, is_closed, apart = asyncio.run(run())

    assert (answer.status, answer.headers["connection"], is_closed) == (200, "close", True)
    assert apart == [200, 200]


@pytest.mark.parametrize("data", [QUESTION, (COMMAND % 3) + b"end", LIVE], ids=["query", "command", "probe"])
def test_a_compressed_body_is_answered_415(data: bytes) -> None:
    answer = ask(data.replace(b"Host: x", b"Host: x\r\nContent-Encoding: gzip"))

    assert (answer.status, answer.detail) == (415, "no route takes a compressed body; send it without Content-Encoding")
    assert ask(data.replace(b"Host: x", b"Host: x\r\nContent-Encoding: identity")).status == 200


def test_a_compressed_body_is_never_decompressed(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = gzip.compress(bytes(1 << 20))
    head = (COMMAND % len(packed)).replace(b"Host: x", b"Host: x\r\nContent-Encoding: gzip")
    inflated: list[int] = []
    inflate, of_connections = ZLibDecompressor.decompress_sync, Limits().of_connections

    def counted(self: ZLibDecompressor, data: bytes, max_length: int = 0) -> bytes:
        inflated.append(len(data))
        return inflate(self, data, max_length)

    monkeypatch.setattr(ZLibDecompressor, "decompress_sync", counted)

    assert (ask(head + packed).status, inflated) == (415, [])
    # A server that decompresses is noticed.
    monkeypatch.setattr(Limits, "of_connections", of_connections | {"auto_decompress": True})
    ask(head + packed)
    assert inflated


def test_by_default_a_request_reaches_its_handler_within_10_s() -> None:
    limits = Limits()

    assert limits.head_seconds < 9
    assert limits.body_seconds + limits.of_connections["lingering_time"] < 9


# --- how many


def test_a_request_beyond_the_limit_is_answered_503_at_once_and_probes_200() -> None:
    limits = Limits(max_concurrent_requests=2)
    go_on, begun = asyncio.Event(), list[web.Request]()

    async def wait(request: web.Request) -> web.Response:
        begun.append(request)
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
            await until(lambda: len(begun) == 2, "two requests are under way")
            probes = [LIVE.replace(b"/health/live", path) for path in (b"/health/live", b"/health/ready", b"/metrics")]
            meanwhile = [await third.ask(data) for data in (QUESTION, *probes)]
            go_on.set()
            return meanwhile, [await first.answer(), await second.answer(), await third.ask(QUESTION)]

    meanwhile, later = asyncio.run(run())

    assert [answer.status for answer in meanwhile] == [503, 200, 200, 200]
    assert meanwhile[0].headers["retry-after"] == "1"
    assert "2 of its requests are in progress" in meanwhile[0].detail
    assert [answer.status for answer in later] == [200, 200, 200]


def test_a_request_without_its_whole_body_does_not_count_as_in_progress() -> None:
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


@pytest.mark.shows("floods")
def test_connections_use_at_most_half_of_the_files_the_process_may_open(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits(max_concurrent_requests=100_000)

    for files, most in ((1024, 512), (1, 1), (10**7, 400_100)):
        monkeypatch.setattr("resource.getrlimit", lambda _, files=files: (files, files))
        assert limits.max_connections == most
    monkeypatch.setattr("resource.getrlimit", lambda _: (-1, -1))
    assert limits.max_connections == 400_100


def test_the_server_stops_while_clients_are_connected() -> None:
    async def run() -> float:
        async with serving(Limits()) as server, server.client() as idle, server.client() as half:
            assert (await idle.ask(LIVE)).status == 200
            await half.send(b"GET")
            began = time.monotonic()
        return time.monotonic() - began

    assert asyncio.run(run()) < Limits().head_seconds / 2


def test_a_refused_request_is_reported() -> None:
    refused: list[str] = []

    async def run() -> None:
        under_way = UnderWay(Limits(max_concurrent_requests=0), lambda: refused.append("one"))
        with pytest.raises(Problem, match="BALANCE_MAX_CONCURRENT_REQUESTS is 0"):
            await under_way.run("a client", lambda: asyncio.sleep(0))

    asyncio.run(run())

    assert refused == ["one"]
