"""Every answer of every part of the server forbids caching; HEAD answers as GET does, without the body."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

import pytest

from balance_service.http.access.authorization import Access, Browsers
from balance_service.http.app import make_health_app, serve
from balance_service.http.operations import Operations
from balance_service.http.route import Handlers
from balance_service.http.server.limits import Limits
from balance_service.http.server.listening import bind
from balance_service.http.streams.event_stream import Streams
from tests.support.fakes import IdleInstance
from tests.support.shipped import ROUTES
from tests.unit.http.plain_queries import CUSTOMER, TARGET, question, serving

if TYPE_CHECKING:
    from tests.support.querying import Instance

HEADERS = (b"\r\nCache-Control: no-store\r\n", b"\r\nVary: Accept\r\n", b"\r\nX-Content-Type-Options: nosniff\r\n")
POST = b"POST /api/balance.addFunds HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n"
# The first document of all paths takes a second to make, and more on a busy machine.
_CLOSES_SECONDS = 30
PATHS = [
    TARGET,
    TARGET + "0",
    "/api/customers.getBalance",
    "/api/models/balance/count",
    "/api/models",
    "/health/live",
    "/health/ready",
    "/metrics",
    "/api/status",
    "/openapi.json",
]


@pytest.fixture
def instance(instance: Instance) -> Instance:
    """Has the state of CUSTOMER."""
    instance.put("12.34", CUSTOMER)
    return instance


async def heads(port: int, data: bytes) -> bytes:
    """The bytes that arrive until the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    answer = b""
    try:
        async with asyncio.timeout(_CLOSES_SECONDS):
            while part := await reader.read(1 << 16):
                answer += part
    finally:
        writer.transport.abort()
        await asyncio.sleep(0)
    return answer


def answer_to(instance: Instance, data: bytes, limits: Limits | None = None, access: Access | None = None) -> bytes:
    async def run() -> bytes:
        async with serving(instance, limits, access=access) as server:
            return await heads(server.port, data)

    return asyncio.run(run())


def asked(path: str, method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()


@pytest.mark.shows("browser")
@pytest.mark.parametrize(
    ("data", "status"),
    [
        (question(headers="Connection: close\r\n"), 200),
        (question() + asked("/nope"), 200),
        (asked("/nope"), 404),
        (asked(TARGET, "PUT"), 405),
        (asked("/metrics"), 200),
        (asked("/api/status"), 200),
        (asked("/openapi.json"), 200),
        (asked("/health/ready"), 200),
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (question(headers="Expect: something\r\nConnection: close\r\n"), 417),
        (question(headers=f"X: {'x' * 9_000}\r\n"), 431),
        (question("/" + "x" * 9_000), 414),
        (question(headers="Host: y\r\n"), 400),
        (POST + b"Connection: close\r\n\r\n{}", 415),
        (POST + b"Content-Type: application/json\r\nConnection: close\r\n\r\n{}", 503),
    ],
)
def test_every_answer_forbids_caching_and_type_sniffing(instance: Instance, data: bytes, status: int) -> None:
    answer = answer_to(instance, data, access=Access(browsers=Browsers(["x"])))

    assert answer.split()[1] == str(status).encode()
    count = len(re.findall(rb"HTTP/1\.[01] \d{3} ", answer))
    assert [answer.count(header) for header in HEADERS] == [count] * 3


def test_the_answer_to_a_slow_request_forbids_caching_and_type_sniffing(instance: Instance) -> None:
    limits = Limits(head_seconds=0.1, body_seconds=0.1)
    for data in (b"GET / HTTP/1.1\r\n", POST + b"Content-Type: application/json\r\nConnection: close\r\n\r\n"):
        answer = answer_to(instance, data, limits)

        assert answer.startswith(b"HTTP/1.1 408 ")
        assert [answer.count(header) for header in HEADERS] == [1] * 3


@pytest.mark.parametrize("path", ["/health/live", "/health/ready", "/metrics"])
def test_the_answers_of_the_health_port_forbid_caching_and_type_sniffing(path: str) -> None:
    async def run() -> bytes:
        listener = bind("127.0.0.1", 0)
        server = await serve(make_health_app(Handlers(Operations(IdleInstance(), Streams(10))), ROUTES), listener)
        try:
            return await heads(listener.getsockname()[1], asked(path))
        finally:
            await server.cleanup()

    answer = asyncio.run(run())

    assert [answer.count(header) for header in HEADERS] == [1] * 3


@pytest.mark.parametrize("path", PATHS)
def test_head_is_answered_as_get_without_the_body(instance: Instance, path: str) -> None:
    def head_of(method: str) -> tuple[bytes, bytes]:
        head, _, body = answer_to(instance, asked(path, method)).partition(b"\r\n\r\n")
        return re.sub(rb"Date: [^\r]*", b"Date: now", head), body

    (got, body), (head, nothing) = head_of("GET"), head_of("HEAD")

    assert (head, nothing) == (got, b"")
    assert f"Content-Length: {len(body)}".encode() in head
    assert body


def test_head_is_refused_where_only_post_is_accepted(instance: Instance) -> None:
    answer = answer_to(instance, asked("/api/balance.addFunds", "HEAD"))

    assert answer.startswith(b"HTTP/1.1 405 ")
    assert b"\r\nAllow: POST\r\n" in answer


def test_all_json_is_without_white_space(instance: Instance) -> None:
    answers = [answer_to(instance, asked(path)).partition(b"\r\n\r\n")[2] for path in [*PATHS, "/nope"]]

    assert b'{"amount":12.34}' in answers
    for answer in answers:
        # Strings may contain white space.
        assert not re.search(rb'[\]}"0-9el](?:, |: )["\[{0-9]', re.sub(rb'"(?:[^"\\]|\\.)*"', b'""', answer)), answer[
            :99
        ]
