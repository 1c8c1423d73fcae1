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

from balance_service.cluster.signatures import CLOCKS_AGREE_SECONDS
from balance_service.errors import RetriableError
from balance_service.http.answer import Answer, Problem
from balance_service.http.app import make_app
from balance_service.http.handlers import Handlers
from balance_service.http.operations import Operations
from balance_service.http.peers.proxy import Proxy
from balance_service.http.peers.trust import FORWARDED_HEADER, PROOF_HEADER, PeerTrust
from balance_service.http.peers.trust import Peer as Asked
from tests.support.api import GET_BALANCE as PATH
from tests.support.fakes import Clock, Nobody
from tests.support.shipped import ROUTES

if TYPE_CHECKING:
    from collections.abc import Sequence

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


def trust(secret: str | None = SECRET, now: float = 1000.0, allow_list: Sequence[str] = ()) -> PeerTrust:
    return PeerTrust(secret, allow_list, Clock(now))


def mark_for(asked: PeerTrust, question: str = QUESTION, secret: str | None = SECRET, now: float = 1000.0) -> str:
    """Of a peer that asks this one."""
    return trust(secret, now).mark("peer:1", Asked("here:1", asked.incarnation), question)


def refusal(of: PeerTrust, mark: str, question: str = QUESTION) -> str:
    with pytest.raises(Problem) as caught:
        of.check(mark, question)
    assert caught.value.status == 403
    assert SECRET not in caught.value.detail
    assert "BALANCE_PEER_SECRET" in caught.value.detail
    return caught.value.detail


# --- marks


def test_a_mark_of_a_peer_is_accepted_once() -> None:
    asked = trust()
    mark = mark_for(asked)

    asked.check(mark, QUESTION)

    assert "used before" in refusal(asked, mark)


def test_a_mark_that_is_judged_is_not_used_by_that() -> None:
    asked = trust()
    mark = mark_for(asked)

    for _ in range(2):
        judged = asked.verified(mark, QUESTION)
    asked.use(judged)

    with pytest.raises(Problem, match="used before"):
        asked.use(asked.verified(mark, QUESTION))


def test_a_mark_is_for_one_instance_and_one_run_of_it() -> None:
    mark = mark_for(trust())

    assert "another instance, or an earlier run" in refusal(trust(), mark)


def test_a_mark_names_the_sender_and_the_time_and_not_the_secret() -> None:
    asked = trust()
    mark = mark_for(asked)

    assert re.fullmatch(rf"peer:1;run=[0-9a-f]{{32}};n=0;to={asked.incarnation};t=1000;hmac=[0-9a-f]{{64}}", mark)
    assert SECRET not in mark


def test_without_a_secret_a_mark_is_the_address_and_any_mark_passes_again_and_again() -> None:
    open_to_all = trust(secret=None)

    assert mark_for(open_to_all, secret=None) == "peer:1"
    for mark in ("peer:1", "", "anything;at=all", mark_for(trust()), "peer:1"):
        open_to_all.check(mark, QUESTION)


FORM = f"peer:1;run={'0' * 32};n=1;to=i;t=1000;hmac={'0' * 64}"


@pytest.mark.parametrize(
    "mark",
    [
        "",
        "peer:1",
        FORM.partition(";hmac")[0],
        FORM[:-1],
        FORM.replace("t=1000", "t=-1"),
        FORM.replace("t=1000", "t=1e3"),
        FORM.replace("t=1000", "t=\u0661"),
        FORM.replace("t=1000", "t=" + "9" * 5000),
        FORM.replace("n=1", "n=-1"),
        FORM.replace("n=1", "n=" + "9" * 5000),
        FORM.replace("peer:1", "\udcff"),
        FORM.replace("to=i;", ""),
    ],
)
def test_a_mark_without_a_proof_is_refused(mark: str) -> None:
    refusal(trust(), mark)


def test_a_proof_of_another_secret_is_refused() -> None:
    asked = trust()
    refusal(asked, mark_for(asked, secret="another secret altogether"))


def test_a_proof_of_another_question_is_refused() -> None:
    asked = trust()
    refusal(asked, mark_for(asked), QUESTION + "2")
    refusal(asked, mark_for(asked), QUESTION.replace("GET", "POST"))


@given(st.data())
def test_a_mark_of_which_a_character_is_changed_is_refused(data: st.DataObject) -> None:
    asked = trust()
    mark = mark_for(asked)
    at = data.draw(st.integers(0, len(mark) - 1))
    other = data.draw(st.characters(min_codepoint=33, max_codepoint=126).filter(lambda c: c != mark[at]))

    refusal(asked, mark[:at] + other + mark[at + 1 :])
    asked.check(mark, QUESTION)


@pytest.mark.parametrize("late", [-CLOCKS_AGREE_SECONDS, -1, 0, 1, CLOCKS_AGREE_SECONDS])
def test_a_proof_is_good_for_a_while_and_for_clocks_that_differ_a_little(late: int) -> None:
    asked = trust(now=1000 + late)
    asked.check(mark_for(asked), QUESTION)


@pytest.mark.parametrize("late", [-CLOCKS_AGREE_SECONDS - 1, CLOCKS_AGREE_SECONDS + 1, 10**9])
def test_a_proof_too_old_or_of_the_future_is_refused(late: int) -> None:
    asked = trust(now=1000 + late)
    assert "clocks" in refusal(asked, mark_for(asked))


@given(st.text(st.characters(exclude_categories=[])), st.text(st.characters(exclude_categories=[])))
def test_no_mark_is_ever_anything_but_accepted_or_refused(mark: str, question: str) -> None:
    refusal(trust(), mark, question)


@given(st.text(string.ascii_letters + "\n;=", max_size=6), st.text(string.ascii_letters + "\n;=", max_size=6))
def test_what_was_signed_for_one_question_serves_no_other(question: str, other: str) -> None:
    asked = trust()
    mark = mark_for(asked, question)
    if question == other:
        asked.check(mark, other)
    else:
        refusal(asked, mark, other)


# --- answers


ANSWER = Answer(200, b'{"amount":12.34}', "application/json", {"Balance-Role": "active", "Balance-Position": "1:3"})


def test_an_answer_is_proven_for_the_query_that_it_was_given_to() -> None:
    asked, asker = trust(), trust()
    one, other = (asker.mark("peer:1", Asked("here:1", asked.incarnation), QUESTION) for _ in range(2))
    proof = asked.proof_of(ANSWER, one) or ""

    assert asker.is_proven(ANSWER, one, proof)
    assert not asker.is_proven(ANSWER, other, proof)
    assert not asker.is_proven(ANSWER, one, "")


@pytest.mark.parametrize(
    "changed",
    [
        ANSWER._replace(status=404),
        ANSWER._replace(body=b'{"amount":12.35}'),
        ANSWER._replace(content_type="application/problem+json"),
        ANSWER._replace(headers={**ANSWER.headers, "Balance-Role": "standby"}),
        ANSWER._replace(headers={**ANSWER.headers, "Balance-Epoch": "9"}),
        ANSWER._replace(headers={"Balance-Role": "active"}),
        ANSWER._replace(headers={"Balance-Role": "active", "Balance-Lag": "1:3"}),
    ],
)
def test_whatever_counts_of_an_answer_is_proven(changed: Answer) -> None:
    proof = trust().proof_of(ANSWER, "mark") or ""

    assert trust().is_proven(ANSWER, "mark", proof)
    assert not trust().is_proven(changed, "mark", proof)


def test_a_proof_of_another_secret_proves_no_answer() -> None:
    proof = trust("another secret altogether").proof_of(ANSWER, "mark") or ""

    assert not trust().is_proven(ANSWER, "mark", proof)


def test_without_a_secret_answers_have_no_proof_and_need_none() -> None:
    assert trust(secret=None).proof_of(ANSWER, "mark") is None
    assert trust(secret=None).is_proven(ANSWER, "mark", "")


def test_the_proof_of_a_mark_is_not_that_of_an_answer() -> None:
    asked = trust()
    mark = mark_for(asked)

    assert not asked.is_proven(ANSWER, mark, mark[-64:])


# --- over the wire


def get(
    peer: web.Application, asker: PeerTrust, customer_id: str, address: str | None = None, incarnation: str = "i"
) -> tuple[Answer | str, str]:
    """Ask a peer through the proxy: its answer, or why there is none; and the peer's address."""

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
    """The real application of an instance that is starting: 503 to whom it trusts."""
    return make_app(Handlers(Operations(Nobody())), ROUTES, trust=accepts)


@pytest.mark.parametrize("customer_id", AWKWARD_IDS)
def test_a_proof_covers_the_question_exactly_as_it_arrives(customer_id: str) -> None:
    asked = PeerTrust(SECRET)
    answer, _ = get(peer(accepts=asked), PeerTrust(SECRET), customer_id, incarnation=asked.incarnation)

    assert isinstance(answer, Answer), answer
    assert answer.status == 503
    assert b"starting" in answer.body


def test_a_peer_with_another_secret_is_unavailable_and_the_reason_names_the_setting() -> None:
    asked = PeerTrust("another secret altogether")
    reason, address = get(peer(accepts=asked), PeerTrust(SECRET), "c1", incarnation=asked.incarnation)

    assert reason == (
        f"the owner at {address} does not accept the proof that this instance is its peer; give all instances the "
        "same BALANCE_PEER_SECRET, and clocks that agree"
    )


def test_a_peer_that_was_started_again_meanwhile_is_unavailable() -> None:
    reason, _ = get(peer(accepts=PeerTrust(SECRET)), PeerTrust(SECRET), "c1", incarnation="earlier")

    assert "does not accept the proof" in str(reason)


def test_a_peer_with_a_secret_does_not_serve_one_without() -> None:
    reason, _ = get(peer(accepts=PeerTrust(SECRET)), PeerTrust(), "c1")

    assert "BALANCE_PEER_SECRET" in str(reason)


def test_what_a_peer_without_the_secret_answers_is_not_believed() -> None:
    reason, address = get(peer(accepts=PeerTrust()), PeerTrust(SECRET), "c1")

    assert reason == (
        f"the owner at {address} does not prove that its answer is a peer's; give all instances the same "
        "BALANCE_PEER_SECRET"
    )


def test_an_answer_that_was_given_to_another_query_is_not_believed() -> None:
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
                await proxy.get(Asked(address, "i"), PATH, {"customerId": "c1"}, "asker:1", 5)
            return str(caught.value)
        finally:
            await proxy.close()
            server.close()

    reason = asyncio.run(run())

    assert re.search("headers that are not (an instance|HTTP)'s", reason)
