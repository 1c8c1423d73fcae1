"""Pages of listed origins read answers, errors and streams, and preflights say so; other pages get neither."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from aiohttp import ClientResponse, ClientSession
from multidict import CIMultiDict, CIMultiDictProxy

from balance_service.http.access.authentication import Authenticator, load_tokens
from balance_service.http.access.authorization import Access, Browsers
from balance_service.http.route import accepts_events
from balance_service.http.server.reloading import Reloaded
from tests.unit.http.streaming import KEY, Owner, stage, write_tokens

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

LISTED, OTHER = "https://ops.example.com", "https://evil.example"
TOKEN = "a-token-of-at-least-thirty-two-characters"
CROSS_SITE = {"Sec-Fetch-Site": "cross-site"}
BEARING = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def owner(tmp_path: Path) -> Owner:
    file = tmp_path / "tokens.json"
    write_tokens(file, TOKEN)
    authenticator = Authenticator(Reloaded([file], lambda: load_tokens(file)))
    return Owner(tmp_path / "store", access=Access(authenticator, browsers=Browsers(None, [LISTED])))


@asynccontextmanager
async def asked(owner: Owner, method: str, path: str, headers: dict[str, str]) -> AsyncIterator[ClientResponse]:
    async with (
        stage(owner),
        ClientSession() as session,
        session.request(method, f"http://{owner.address}{path}", headers=headers) as answer,
    ):
        yield answer


@pytest.mark.parametrize("site", ["cross-site", "same-site", None])
@pytest.mark.parametrize(("token", "status"), [(BEARING, 404), ({}, 401)])
@pytest.mark.shows("browser")
def test_a_page_of_a_listed_origin_reads_answers_and_errors(
    owner: Owner, site: str | None, token: dict[str, str], status: int
) -> None:
    async def run() -> None:
        headers = {"Origin": LISTED, **token} | ({} if site is None else {"Sec-Fetch-Site": site})
        async with asked(owner, "GET", KEY, headers) as answer:
            assert answer.status == status
            assert answer.headers["Access-Control-Allow-Origin"] == LISTED
            assert "Balance-Position" in answer.headers["Access-Control-Expose-Headers"]
            assert answer.headers["Vary"] == "Accept, Origin"
            assert "Access-Control-Allow-Credentials" not in answer.headers

    asyncio.run(run())


def test_a_page_of_a_listed_origin_reads_streams(owner: Owner) -> None:
    async def run() -> None:
        headers = {"Origin": LISTED, "Accept": "text/event-stream", **CROSS_SITE, **BEARING}
        async with asked(owner, "GET", KEY, headers) as answer:
            assert (answer.status, answer.content_type) == (200, "text/event-stream")
            assert answer.headers["Access-Control-Allow-Origin"] == LISTED

    asyncio.run(run())


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.shows("browser")
def test_a_preflight_of_a_listed_origin_is_answered_without_a_token(owner: Owner, method: str) -> None:
    async def run() -> None:
        headers = {"Origin": LISTED, "Access-Control-Request-Method": method, **CROSS_SITE}
        async with asked(owner, "OPTIONS", KEY, headers) as answer:
            assert answer.status == 204
            assert answer.headers["Access-Control-Allow-Origin"] == LISTED
            assert method in answer.headers["Access-Control-Allow-Methods"]
            allowed = answer.headers["Access-Control-Allow-Headers"].split(", ")
            assert {"Authorization", "Content-Type", "Idempotency-Key", "Last-Event-ID"} <= set(allowed)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("method", "headers", "statuses"),
    [
        ("GET", {"Origin": OTHER, **CROSS_SITE, **BEARING}, {403}),
        ("GET", {"Origin": OTHER, **BEARING}, {403}),
        ("OPTIONS", {"Origin": OTHER, "Access-Control-Request-Method": "GET"}, {401, 403, 405}),
        ("OPTIONS", {"Origin": LISTED, **BEARING}, {405}),
    ],
)
@pytest.mark.shows("browser")
def test_other_origins_are_refused_and_get_no_leave_to_read(
    owner: Owner, method: str, headers: dict[str, str], statuses: set[int]
) -> None:
    async def run() -> None:
        async with asked(owner, method, KEY, headers) as answer:
            assert answer.status in statuses
            assert answer.headers.get("Access-Control-Allow-Origin") in (None, LISTED)
            assert headers["Origin"] == LISTED or "Access-Control-Allow-Origin" not in answer.headers

    asyncio.run(run())


@pytest.mark.parametrize(
    ("accept", "is_stream"),
    [
        (None, False),
        ("", False),
        ("application/json", False),
        ("*/*", False),
        ("text/*", False),
        ("text/event-stream", True),
        ("Text/Event-Stream", True),
        ("text/event-stream;charset=utf-8", True),
        ("text/event-stream, */*", True),
        ("text/event-stream, */*;q=0.1", True),
        ("text/event-stream;q=0.1, */*", False),
        ("application/json, text/event-stream", False),
        ("text/event-stream, application/json", False),
        ("application/json;q=1.0, text/event-stream;q=0.1", False),
        ("application/json;q=0.5, text/event-stream", True),
        ("application/*, text/event-stream", False),
        ("application/json;q=0, text/event-stream;q=0.5", True),
        ("application/json, text/event-stream;q=0", False),
        ("text/event-stream;q=0", False),
        ("text/event-stream; Q=0.000", False),
        ("text/event-stream;q=0, */*", False),
        ("text/event-stream;q=none", True),
        ("text/event-streams", False),
    ],
)
def test_the_header_accept_is_weighed(accept: str | None, *, is_stream: bool) -> None:
    headers = CIMultiDict() if accept is None else CIMultiDict({"Accept": accept})

    assert accepts_events(CIMultiDictProxy(headers)) is is_stream


def test_two_headers_accept_are_one_list() -> None:
    headers = CIMultiDict([("Accept", "application/json"), ("Accept", "text/event-stream;q=0.5")])

    assert not accepts_events(CIMultiDictProxy(headers))
