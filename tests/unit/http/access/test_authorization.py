"""Access control: scopes of the routes, and rate limits."""

from __future__ import annotations

import asyncio
import hashlib
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st

from balance_service.http.access.authentication import Authenticator, load_jwts, load_tokens
from balance_service.http.access.authorization import Access, RateLimit
from balance_service.http.answer import Problem
from balance_service.http.app import make_app, make_health_app
from balance_service.http.openapi import document
from balance_service.http.operations import Operations
from balance_service.http.peers.trust import FORWARDED_HEADER, Peer, PeerTrust
from balance_service.http.route import Handlers
from balance_service.http.server.reloading import Reloaded
from balance_service.http.streams.event_stream import Streams
from tests.support.api import ADD_FUNDS, GET_BALANCE
from tests.support.credentials import AUDIENCE, ISSUER, token, write_jwks
from tests.support.fakes import Clock, IdleInstance
from tests.support.shipped import ROUTES
from tests.unit.http.raw_http import answering

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
    from pathlib import Path


SECRET = "a secret of all instances"
TRUST = PeerTrust(SECRET)
HERE = Peer("here:1", TRUST.incarnation)
QUESTION = f"{GET_BALANCE}?customerId=c1"
READER, WRITER, OPERATOR = "reader-token", "writer-token", "operator-token"


def write_tokens(file: Path, **scopes: Sequence[str]) -> Path:
    entries = [
        {"name": name, "sha256": hashlib.sha256(f"{name}-token".encode()).hexdigest(), "scopes": list(granted)}
        for name, granted in scopes.items()
    ]
    file.write_text(json.dumps({"tokens": entries}))
    return file


def test_an_empty_list_of_tokens_admits_no_client(tmp_path: Path) -> None:
    async def run() -> list[int]:
        file = write_tokens(tmp_path / "tokens.json")
        access = Access(Authenticator(Reloaded([file], lambda: load_tokens(file))))
        app = make_app(answering(_answer), ROUTES, access=access)
        found = []
        async with TestServer(app) as server, aiohttp.ClientSession(server.make_url("/")) as client:
            for headers in ({}, bearer(""), bearer(READER)):
                async with client.get(QUESTION, headers=headers) as answer:
                    found.append(answer.status)
        return found

    assert asyncio.run(run()) == [401, 401, 401]


async def _answer(request: web.Request) -> web.Response:
    return web.json_response({}) if request.method == "GET" else web.Response(status=202)


@asynccontextmanager
async def serving(
    folder: Path, rate_limit: RateLimit | None = None, *, authorises: bool = True
) -> AsyncIterator[aiohttp.ClientSession]:
    file = write_tokens(
        folder / "tokens.json",
        reader=["balance:read"],
        writer=["balance:add", "balance:read"],
        operator=["balance:operations"],
    )
    jwks = write_jwks(folder / "jwks.json")
    authenticator = Authenticator(
        Reloaded([file], lambda: load_tokens(file)), Reloaded([jwks], lambda: load_jwts(jwks, ISSUER, AUDIENCE))
    )
    access = Access(authenticator if authorises else None, rate_limit)
    app = make_app(answering(_answer), ROUTES, trust=TRUST, access=access)
    async with TestServer(app) as server, aiohttp.ClientSession(server.make_url("/")) as client:
        yield client


def statuses(
    folder: Path, method: str, path: str, *headers: Mapping[str, str] | Sequence[tuple[str, str]]
) -> list[int]:
    async def run() -> list[int]:
        found = []
        async with serving(folder) as client:
            for given in headers:
                async with client.request(method, path, headers=given) as answer:
                    found.append(answer.status)
                    if answer.status >= 400:
                        assert answer.content_type == "application/problem+json"
                    if answer.status in (401, 403) and FORWARDED_HEADER not in given:
                        assert answer.headers["WWW-Authenticate"].startswith("Bearer "), path
        return found

    return asyncio.run(run())


def bearer(text: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {text}"}


@pytest.mark.shows("tokens")
@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", QUESTION, [401, 200, 200, 403]),
        ("POST", ADD_FUNDS, [401, 403, 202, 403]),
        ("GET", "/metrics", [401, 403, 403, 200]),
        ("GET", "/api/status", [401, 403, 403, 200]),
        ("GET", "/openapi.json", [401, 200, 200, 200]),
        ("GET", "/health/live", [200, 200, 200, 200]),
        ("GET", "/health/ready", [200, 200, 200, 200]),
        ("GET", "/nothing-there", [401, 404, 404, 404]),
        ("GET", ADD_FUNDS, [401, 405, 405, 405]),
        ("GET", "/%61pi/status", [401, 403, 403, 200]),
        ("GET", "/health/../api/status", [401, 403, 403, 200]),
    ],
)
def test_each_route_requires_its_scope(tmp_path: Path, method: str, path: str, expected: list[int]) -> None:
    tokens = [{}, bearer(READER), bearer(WRITER), bearer(OPERATOR)]

    assert statuses(tmp_path, method, path, *tokens) == expected


class Ailing(IdleInstance):
    """An instance with a problem, and not ready for a reason if it has one."""

    def __init__(self, *reasons: str) -> None:
        super().__init__()
        self._reasons = reasons

    def unready(self) -> Sequence[str]:
        return self._reasons

    def problems(self) -> Sequence[str]:
        return ["TaskHalted: events-3 at kafka.internal:9092"]


def readiness(app: web.Application, given: str | None = None) -> str:
    async def run() -> str:
        headers = {} if given is None else bearer(given)
        async with (
            TestServer(app) as server,
            aiohttp.ClientSession(server.make_url("/")) as client,
            client.get("/health/ready", headers=headers) as response,
        ):
            return await response.text()

    return asyncio.run(run())


@pytest.mark.shows("tokens")
@pytest.mark.parametrize("reasons", [(), ("Kafka at kafka.internal:9092 does not answer",)])
def test_readiness_tells_strangers_neither_addresses_nor_errors(tmp_path: Path, reasons: tuple[str, ...]) -> None:
    file = write_tokens(tmp_path / "tokens.json", reader=["balance:read"])
    access = Access(Authenticator(Reloaded([file], lambda: load_tokens(file))))
    handlers = Handlers(Operations(Ailing(*reasons), Streams(10)))

    def apps(*, tells_strangers: bool) -> list[web.Application]:
        demanding = Access() if tells_strangers else access
        health = make_health_app(handlers, ROUTES, tells_strangers=tells_strangers)
        return [make_app(handlers, ROUTES, access=demanding), health]

    for stranger in (None, "another-token"):
        for app in apps(tells_strangers=False):
            told = readiness(app, stranger)
            assert "kafka.internal" not in told
            assert "/api/status, asked with a token, says why" in told
    assert all("kafka.internal" in readiness(app) for app in apps(tells_strangers=True))
    assert "kafka.internal" in readiness(make_app(handlers, ROUTES, access=access), READER)


@pytest.mark.shows("tokens")
def test_anything_but_one_accepted_token_is_refused(tmp_path: Path) -> None:
    good = f"Bearer {READER}"
    refused = ["", "Bearer", "Bearer ", "Basic cmVhZGVyOnRva2Vu", READER, f"Bearer {READER}x", f"Bearer {READER},x"]
    refused += ["Bearer \udcff", f"Bearer {READER} {READER}", f"Token {READER}", "Bearer " + "x" * 7000]
    refused += ["Bearer " + hashlib.sha256(READER.encode()).hexdigest()]

    found = statuses(tmp_path, "GET", QUESTION, *[{"Authorization": value} for value in refused])
    assert dict(zip(refused, found, strict=True)) == dict.fromkeys(refused, 401)

    several = [("Authorization", good), ("Authorization", good)]
    accepted = [{"Authorization": v} for v in (good, f"bearer {READER}", f"BEARER  {READER}", f"Bearer {token()}")]
    assert statuses(tmp_path, "GET", QUESTION, several, *accepted) == [400, 200, 200, 200, 200]
    assert statuses(tmp_path, "GET", f"{QUESTION}&access_token={READER}", {}) == [401]


def test_a_refusal_names_the_error_and_the_scope_needed(tmp_path: Path) -> None:
    async def run() -> tuple[str, str, str, str]:
        async with serving(tmp_path) as client:
            async with client.get(QUESTION) as answer:
                nothing = answer.headers["WWW-Authenticate"]
            async with client.get(QUESTION, headers=bearer(token(aud="others"))) as answer:
                wrong, detail = answer.headers["WWW-Authenticate"], (await answer.json())["detail"]
            async with client.get("/metrics", headers=bearer(READER)) as answer:
                return nothing, wrong, detail, answer.headers["WWW-Authenticate"]

    nothing, wrong, detail, insufficient = asyncio.run(run())

    assert nothing == 'Bearer realm="balance-service"'
    assert 'error="invalid_token", error_description="the token is for another audience"' in wrong
    assert detail == "the token is for another audience"
    assert 'error="insufficient_scope"' in insufficient
    assert 'scope="balance:operations"' in insufficient


def test_a_proven_mark_admits_forwarded_queries_only(tmp_path: Path) -> None:
    def mark(path: str, secret: str = SECRET) -> dict[str, str]:
        return {FORWARDED_HEADER: PeerTrust(secret).mark("peer:1", HERE, path)}

    marks = mark(f"GET {QUESTION}"), mark(f"GET {QUESTION}", SECRET + "x"), mark("GET /x")
    assert statuses(tmp_path, "GET", QUESTION, *marks) == [200, 403, 403]
    assert statuses(tmp_path, "GET", "/api/status", mark("GET /api/status")) == [401]
    assert statuses(tmp_path, "POST", ADD_FUNDS, mark(f"POST {ADD_FUNDS}")) == [401]


def test_a_mark_without_proof_admits_no_request(tmp_path: Path) -> None:
    async def run() -> int:
        tokens = write_tokens(tmp_path / "tokens.json", reader=["balance:read"])
        access = Access(Authenticator(Reloaded([tokens], lambda: load_tokens(tokens))))
        app = make_app(answering(_answer), ROUTES, trust=PeerTrust(), access=access)
        async with (
            TestServer(app) as server,
            aiohttp.ClientSession(server.make_url("/")) as client,
            client.get(QUESTION, headers={FORWARDED_HEADER: "peer:1"}) as answer,
        ):
            return answer.status

    assert asyncio.run(run()) == 401


def test_a_client_beyond_the_rate_limit_learns_when_to_retry_and_others_are_served(tmp_path: Path) -> None:
    async def run() -> tuple[list[int], str, list[int]]:
        async with serving(tmp_path, RateLimit(0.1, burst=2)) as client:
            found = []
            for _ in range(3):
                async with client.get(QUESTION, headers=bearer(READER)) as answer:
                    found.append(answer.status)
            pause = answer.headers["Retry-After"]
            others = []
            asker = PeerTrust(SECRET)
            marked = [{FORWARDED_HEADER: asker.mark("peer:1", HERE, f"GET {QUESTION}")} for _ in range(4)]
            for headers in (bearer(WRITER), {}, bearer("junk"), {}, *marked):
                async with client.get(QUESTION, headers=headers) as answer:
                    others.append(answer.status)
            for _ in range(3):
                async with client.get("/health/live") as answer:
                    others.append(answer.status)
        return found, pause, others

    found, pause, others = asyncio.run(run())

    assert found == [200, 200, 429]
    assert 1 <= int(pause) <= 10
    assert others == [200, 401, 401, 429, *[200] * 7]


def test_without_authentication_clients_are_distinguished_by_address(tmp_path: Path) -> None:
    async def run() -> list[int]:
        found = []
        async with serving(tmp_path, RateLimit(0.1, burst=2), authorises=False) as client:
            for headers in (bearer("a"), bearer("b"), bearer("c")):
                async with client.get(QUESTION, headers=headers) as answer:
                    found.append(answer.status)
        return found

    assert asyncio.run(run()) == [200, 200, 429]


@pytest.mark.parametrize(
    ("one", "other", "are_the_same"),
    [
        ("10.0.0.1", "10.0.0.2", False),
        ("10.0.0.1", "::ffff:10.0.0.1", True),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", False),
        ("2001:db8::1", "2001:db8::ffff:2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
    ],
)
def test_an_ipv4_address_or_an_ipv6_network_is_one_client(one: str, other: str, *, are_the_same: bool) -> None:
    @web.middleware
    async def seem_to_come_from(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        return await handler(request.clone(remote=request.headers["From"]))

    async def run() -> list[int]:
        app = make_app(answering(_answer), ROUTES, access=Access(None, RateLimit(0.1, burst=1)))
        app.middlewares.insert(0, seem_to_come_from)
        found = []
        async with TestServer(app) as server, aiohttp.ClientSession(server.make_url("/")) as client:
            for address in (one, other):
                async with client.get(QUESTION, headers={"From": address}) as answer:
                    found.append(answer.status)
        return found

    assert asyncio.run(run()) == [200, 429 if are_the_same else 200]


def test_the_openapi_document_lists_scopes_and_refusals() -> None:
    secured = document(ROUTES, authorises=True, limits_rate=True)

    assert secured["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
    for path, methods in secured["paths"].items():
        for operation in methods.values():
            is_open = path.startswith("/health/")
            assert ("security" in operation) != is_open
            assert {"401", "403", "429"}.isdisjoint(operation["responses"]) == is_open, path
    asked = secured["paths"][GET_BALANCE]["get"]
    assert asked["security"] == [{"bearer": ["balance:read"]}]
    assert "Balance-Forwarded" in asked["responses"]["403"]["description"]


@pytest.mark.shows("tokens")
def test_only_probes_need_no_token() -> None:
    assert {route.path for route in ROUTES if route.is_open} == {"/health/live", "/health/ready"}
    assert "securitySchemes" not in document(ROUTES)["components"]


# --- the rate limit alone


def is_taken(limit: RateLimit, client: str = "c") -> bool:
    try:
        limit.take(client)
    except Problem as problem:
        return problem.status != 429
    return True


def test_after_a_burst_requests_are_admitted_at_the_rate() -> None:
    clock = Clock()
    limit = RateLimit(2.0, burst=3, now=clock)

    assert [is_taken(limit) for _ in range(4)] == [True, True, True, False]
    clock.now += 0.5
    assert [is_taken(limit) for _ in range(2)] == [True, False]
    clock.now += 60
    assert [is_taken(limit) for _ in range(4)] == [True, True, True, False]


def test_clients_have_separate_buckets() -> None:
    limit = RateLimit(1.0, burst=1, now=Clock())

    assert [is_taken(limit, client) for client in "aab"] == [True, False, True]


@pytest.mark.parametrize(("rate", "seconds"), [(1.0, 1), (0.1, 10), (0.01, 100), (50.0, 1)])
def test_retry_after_is_when_the_next_request_is_admitted(rate: float, seconds: int) -> None:
    clock = Clock()
    limit = RateLimit(rate, burst=1, now=clock)
    limit.take("c")

    with pytest.raises(Problem) as caught:
        limit.take("c")

    assert caught.value.headers["Retry-After"] == str(seconds)
    clock.now += seconds
    assert is_taken(limit)


def test_the_number_of_buckets_is_bounded() -> None:
    limit = RateLimit(1.0, burst=1, now=Clock(), max_clients=100)

    for number in range(10_000):
        assert is_taken(limit, f"client {number}")

    assert len(limit) == 100
    assert not is_taken(limit, "client 9999")
    assert is_taken(limit, "client 0")


@given(st.integers(1, 10), st.integers(1, 8), st.lists(st.integers(0, 8), max_size=60))
def test_the_rate_limit_equals_a_token_bucket(rate: int, burst: int, eighths: list[int]) -> None:
    """Compares with a textbook token bucket in exact arithmetic: time in eighths of an interval."""
    clock = Clock(0.0)
    limit = RateLimit(float(rate), burst, now=clock)
    tokens = burst * 8
    waited = 0
    for pause in eighths:
        waited += pause
        clock.now = waited / 8 / rate
        tokens = min(burst * 8, tokens + pause)
        expected = tokens >= 8
        tokens -= 8 if expected else 0
        assert is_taken(limit) == expected
