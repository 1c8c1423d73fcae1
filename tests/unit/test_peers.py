"""Peers: whom an instance may ask, and how those who ask it prove that they are one of us."""

from __future__ import annotations

import asyncio
import re
import string
from typing import TYPE_CHECKING

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st

from balance_service.errors import RetriableError
from balance_service.http.answer import Answer
from balance_service.http.handlers import Handlers
from balance_service.http.operations import Operations
from balance_service.http.peers.proxy import FORWARDED_HEADER, Proxy
from balance_service.http.peers.trust import MARK_SECONDS, PeerTrust
from balance_service.http.queries import PATH
from balance_service.http.server.app import make_app
from balance_service.http.server.problems import Problem
from tests.support.fakes import Clock, Nobody

if TYPE_CHECKING:
    from collections.abc import Sequence

SECRET = "a secret of all instances"
QUESTION = f"{PATH}?customerId=c1"
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


def trust(secret: str | None = SECRET, now: float = 1000.0, allow_list: Sequence[str] = ()) -> PeerTrust:
    return PeerTrust(secret, allow_list, Clock(now))


def refusal(of: PeerTrust, mark: str, question: str = QUESTION) -> str:
    with pytest.raises(Problem) as caught:
        of.check(mark, question)
    assert caught.value.status == 403
    assert SECRET not in caught.value.detail
    assert "BALANCE_PEER_SECRET" in caught.value.detail
    return caught.value.detail


# --- marks


def test_a_mark_of_a_peer_is_accepted() -> None:
    trust().check(trust().mark("peer:1", QUESTION), QUESTION)


def test_a_mark_names_the_sender_and_the_time_and_not_the_secret() -> None:
    mark = trust().mark("peer:1", QUESTION)

    assert mark.startswith("peer:1;t=1000;hmac=")
    assert SECRET not in mark


def test_without_a_secret_a_mark_is_the_address_and_any_mark_passes() -> None:
    open_to_all = trust(secret=None)

    assert open_to_all.mark("peer:1", QUESTION) == "peer:1"
    for mark in ("peer:1", "", "anything;at=all", trust().mark("peer:1", QUESTION)):
        open_to_all.check(mark, QUESTION)


@pytest.mark.parametrize(
    "mark",
    [
        "",
        "peer:1",
        "peer:1;t=1000",
        "peer:1;t=1000;hmac=",
        "peer:1;t=1000;hmac=" + "0" * 63,
        "peer:1;t=-1;hmac=" + "0" * 64,
        "peer:1;t=1e3;hmac=" + "0" * 64,
        "peer:1;t=\u0661;hmac=" + "0" * 64,
        "peer:1;t=" + "9" * 5000 + ";hmac=" + "0" * 64,
        "\udcff;t=1000;hmac=" + "0" * 64,
    ],
)
def test_a_mark_without_a_proof_is_refused(mark: str) -> None:
    refusal(trust(), mark)


def test_a_proof_of_another_secret_is_refused() -> None:
    refusal(trust(), trust("another secret altogether").mark("peer:1", QUESTION))


def test_a_proof_of_another_question_is_refused() -> None:
    refusal(trust(), trust().mark("peer:1", QUESTION), QUESTION + "2")


def test_a_proof_under_another_name_is_refused() -> None:
    mark = trust().mark("peer:1", QUESTION)

    refusal(trust(), mark.replace("peer:1", "peer:2"))


def test_a_proof_under_another_time_is_refused() -> None:
    mark = trust().mark("peer:1", QUESTION)

    refusal(trust(), mark.replace("t=1000", "t=1001"))


@pytest.mark.parametrize("late", [-MARK_SECONDS, -1, 0, 1, MARK_SECONDS])
def test_a_proof_is_good_for_a_while_and_for_clocks_that_differ_a_little(late: int) -> None:
    trust(now=1000 + late).check(trust().mark("peer:1", QUESTION), QUESTION)


@pytest.mark.parametrize("late", [-MARK_SECONDS - 1, MARK_SECONDS + 1, 10**9])
def test_a_proof_too_old_or_of_the_future_is_refused(late: int) -> None:
    assert "clocks" in refusal(trust(now=1000 + late), trust().mark("peer:1", QUESTION))


@given(st.text(st.characters(exclude_categories=[])), st.text(st.characters(exclude_categories=[])))
def test_no_mark_is_ever_anything_but_accepted_or_refused(mark: str, question: str) -> None:
    refusal(trust(), mark, question)


@given(st.text(string.ascii_letters + "\n;=", max_size=6), st.text(string.ascii_letters + "\n;=", max_size=6))
def test_what_was_signed_for_one_question_serves_no_other(question: str, other: str) -> None:
    mark = trust().mark("peer:1", question)
    if question == other:
        trust().check(mark, other)
    else:
        refusal(trust(), mark, other)


# --- over the wire


def get(
    peer: web.Application, asker: PeerTrust, customer_id: str, address: str | None = None
) -> tuple[Answer | str, str]:
    """Ask a peer through the proxy: its answer, or why there is none; and the peer's address."""

    async def run() -> tuple[Answer | str, str]:
        proxy = Proxy(asker)
        try:
            async with TestServer(peer) as server:
                asked = address or f"{server.host}:{server.port}"
                try:
                    return await proxy.get(asked, PATH, {"customerId": customer_id}, "asker:1", 5), asked
                except RetriableError as error:
                    return str(error), asked
        finally:
            await proxy.close()

    return asyncio.run(run())


def peer(accepts: PeerTrust) -> web.Application:
    """The real application of an instance that is starting: 503 to whom it trusts."""
    return make_app(Handlers(Operations(Nobody())), trust=accepts)


@pytest.mark.parametrize("customer_id", AWKWARD_IDS)
def test_a_proof_covers_the_question_exactly_as_it_arrives(customer_id: str) -> None:
    answer, _ = get(peer(accepts=PeerTrust(SECRET)), PeerTrust(SECRET), customer_id)

    assert isinstance(answer, Answer), answer
    assert answer.status == 503
    assert b"starting" in answer.body


def test_a_peer_with_another_secret_is_unavailable_and_the_reason_names_the_setting() -> None:
    reason, address = get(peer(accepts=PeerTrust("another secret altogether")), PeerTrust(SECRET), "c1")

    assert reason == (
        f"the owner at {address} does not accept the proof that this instance is its peer; give all instances the "
        "same BALANCE_PEER_SECRET, and clocks that agree"
    )


def test_a_peer_with_a_secret_does_not_serve_one_without() -> None:
    reason, _ = get(peer(accepts=PeerTrust(SECRET)), PeerTrust(), "c1")

    assert "BALANCE_PEER_SECRET" in str(reason)


def test_a_peer_without_a_secret_serves_one_with() -> None:
    answer, _ = get(peer(accepts=PeerTrust()), PeerTrust(SECRET), "c1")

    assert isinstance(answer, Answer)


@pytest.mark.parametrize("path", [QUESTION, "/health/live", "/nope"])
def test_an_unproven_mark_is_a_403_problem_wherever_it_is_sent(path: str) -> None:
    async def run() -> tuple[int, str, str]:
        async with TestServer(peer(accepts=PeerTrust(SECRET))) as server:
            url = server.make_url(path)
            async with ClientSession() as client, client.get(url, headers={FORWARDED_HEADER: "peer:1"}) as answer:
                return answer.status, answer.content_type, await answer.text()

    status, content_type, text = asyncio.run(run())

    assert (status, content_type) == (403, "application/problem+json")
    assert "BALANCE_PEER_SECRET" in text


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


def test_a_hostile_address_is_told_of_at_bounded_length() -> None:
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
                await proxy.get(address, PATH, {"customerId": "c1"}, "asker:1", 5)
            return str(caught.value)
        finally:
            await proxy.close()
            server.close()

    reason = asyncio.run(run())

    assert re.search("headers that are not (an instance|HTTP)'s", reason)
