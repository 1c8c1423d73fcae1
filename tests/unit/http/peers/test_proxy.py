"""The proxy: queries to peers over HTTP, and the reasons to refuse an answer."""

from __future__ import annotations

import asyncio
import re

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from balance_service.errors import RetriableError
from balance_service.http.answer import Answer
from balance_service.http.app import make_app
from balance_service.http.operations import Operations
from balance_service.http.peers.proxy import Proxy
from balance_service.http.peers.trust import FORWARDED_HEADER, PROOF_HEADER, PeerTrust
from balance_service.http.peers.trust import Peer as Asked
from balance_service.http.route import Handlers
from balance_service.http.streams.event_stream import Streams
from tests.support.api import GET_BALANCE as PATH
from tests.support.fakes import IdleInstance
from tests.support.shipped import ROUTES

SECRET = "a secret of all instances"
TARGET = f"{PATH}?customerId=c1"
QUESTION = f"GET {TARGET}"
AWKWARD_IDS = [
    "a b",
    "a+b",
    "a&b=c",
    "50%",
    "%41",
    "a%2Bb",
    "ö",
    "客户",
    "👩\u200d👧",
    "a#b?c/d",
    "'\"\\",
    "[]{}|^`",
    "~!*();:@$,",
]


def get(
    peer: web.Application, asker: PeerTrust, customer_id: str, address: str | None = None, incarnation: str = "i"
) -> tuple[Answer | str, str]:
    """Asks a peer through the proxy; returns its answer or the reason for the failure, and its address."""

    async def run() -> tuple[Answer | str, str]:
        proxy = Proxy(asker)
        try:
            async with TestServer(peer) as server:
                asked = address or f"{server.host}:{server.port}"
                try:
                    named = Asked(asked, incarnation)
                    return await proxy.get(named, PATH, {"customerId": customer_id}, "asker:1", 5), asked
                except RetriableError as error:
                    return str(error), asked
        finally:
            await proxy.close()

    return asyncio.run(run())


def peer(accepts: PeerTrust) -> web.Application:
    """The application of an instance that is starting: it answers 503 to trusted peers."""
    return make_app(Handlers(Operations(IdleInstance(), Streams(10))), ROUTES, trust=accepts)


@pytest.mark.parametrize("customer_id", AWKWARD_IDS)
def test_a_proof_covers_the_query_exactly_as_received(customer_id: str) -> None:
    asked = PeerTrust(SECRET)
    answer, _ = get(peer(accepts=asked), PeerTrust(SECRET), customer_id, incarnation=asked.incarnation)

    assert isinstance(answer, Answer), answer
    assert answer.status == 503
    assert b"starting" in answer.body


def test_a_peer_with_another_secret_is_unavailable_and_the_setting_is_named() -> None:
    asked = PeerTrust("another secret altogether")
    reason, address = get(peer(accepts=asked), PeerTrust(SECRET), "c1", incarnation=asked.incarnation)

    assert reason == (
        f"the peer at {address} does not accept the proof that this instance is its peer; give all instances the "
        "same BALANCE_PEER_SECRET, an address of their own, and clocks that agree"
    )


def test_a_restarted_peer_is_unavailable_under_its_earlier_run() -> None:
    reason, _ = get(peer(accepts=PeerTrust(SECRET)), PeerTrust(SECRET), "c1", incarnation="earlier")

    assert "does not accept the proof" in str(reason)


def test_a_peer_with_a_secret_refuses_a_peer_without_one() -> None:
    reason, _ = get(peer(accepts=PeerTrust(SECRET)), PeerTrust(), "c1")

    assert "BALANCE_PEER_SECRET" in str(reason)


def test_the_answer_of_a_peer_without_the_secret_is_refused() -> None:
    reason, address = get(peer(accepts=PeerTrust()), PeerTrust(SECRET), "c1")

    assert reason == (
        f"the peer at {address} does not prove that its answer is a peer's; give all instances the same "
        "BALANCE_PEER_SECRET"
    )


def test_a_replayed_answer_is_refused() -> None:
    trusted, proofs = PeerTrust(SECRET), []

    def repeating() -> web.Application:
        async def answer(request: web.Request) -> web.Response:
            given = Answer(200, b"{}", "application/json", {})
            proofs.append(trusted.proof_of(given, request.headers[FORWARDED_HEADER]) or "")
            return web.Response(body=b"{}", content_type="application/json", headers={PROOF_HEADER: proofs[0]})

        app = web.Application()
        app.router.add_get(PATH, answer)
        return app

    first, second = (get(repeating(), PeerTrust(SECRET), "c1")[0] for _ in range(2))

    assert isinstance(first, Answer)
    assert "does not prove" in str(second)


@pytest.mark.parametrize("path", [TARGET, "/health/live", "/nope"])
def test_an_unproven_mark_is_a_403_problem_on_every_route(path: str) -> None:
    async def run() -> tuple[int, str, str]:
        async with TestServer(peer(accepts=PeerTrust(SECRET))) as server:
            url = server.make_url(path)
            async with ClientSession() as client, client.get(url, headers={FORWARDED_HEADER: "peer:1"}) as answer:
                return answer.status, answer.content_type, await answer.text()

    status, content_type, text = asyncio.run(run())

    assert (status, content_type) == (403, "application/problem+json")
    assert "BALANCE_PEER_SECRET" in text


@pytest.mark.shows("peers")
def test_an_address_that_is_not_allowed_is_refused_before_any_connection() -> None:
    asked: list[web.Request] = []

    async def keep(request: web.Request) -> web.Response:
        asked.append(request)
        return web.json_response({})

    app = web.Application()
    app.router.add_get("/{tail:.*}", keep)

    reason, address = get(app, PeerTrust(None, ["10.0.0.0/8"]), "c1")

    assert address in str(reason)
    assert "BALANCE_PEER_ALLOW_LIST" in str(reason)
    assert not asked


def test_a_long_address_is_truncated_in_the_reason() -> None:
    reason, _ = get(peer(accepts=PeerTrust()), PeerTrust(), "c1", address="x" * 100_000)

    assert len(str(reason)) < 500


@pytest.mark.parametrize("value", [b"x" * 16_001, b"0:\t1", b"0:\x011", b"0:\x7f", b"\xc3\xa9", b"\xff", b""])
def test_an_answer_with_headers_that_are_not_an_instances_is_refused(value: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n"
        writer.write(head + b"Balance-Position: " + value + b"\r\n\r\n{}")
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async def run() -> str:
        server = await asyncio.start_server(answer, "127.0.0.1")
        proxy = Proxy()
        try:
            address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            with pytest.raises(RetriableError) as caught:
                await proxy.get(Asked(address, "i"), PATH, {"customerId": "c1"}, "asker:1", 5)
            return str(caught.value)
        finally:
            await proxy.close()
            server.close()

    reason = asyncio.run(run())

    assert re.search("headers that are not (an instance|HTTP)'s", reason)
