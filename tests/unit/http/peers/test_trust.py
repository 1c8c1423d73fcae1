"""Trust between peers: marks, proofs of answers, used marks, and the allow-list of addresses."""

from __future__ import annotations

import re
import string
import tracemalloc
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from balance_service.cluster.signatures import CLOCKS_AGREE_SECONDS
from balance_service.http.answer import Answer, Problem
from balance_service.http.peers.trust import MAX_ASKERS, WINDOW, PeerTrust, UsedMarks
from balance_service.http.peers.trust import Peer as Asked
from tests.support.api import GET_BALANCE as PATH
from tests.support.fakes import Clock

if TYPE_CHECKING:
    from collections.abc import Sequence


SECRET = "a secret of all instances"
TARGET = f"{PATH}?customerId=c1"
QUESTION = f"GET {TARGET}"


def trust(secret: str | None = SECRET, now: float = 1000.0, allow_list: Sequence[str] = ()) -> PeerTrust:
    return PeerTrust(secret, allow_list, Clock(now))


def mark_for(asked: PeerTrust, question: str = QUESTION, secret: str | None = SECRET, now: float = 1000.0) -> str:
    """Makes the mark of a query to `asked`."""
    return trust(secret, now).mark("peer:1", Asked("here:1", asked.incarnation), question)


def refusal(of: PeerTrust, mark: str, question: str = QUESTION) -> str:
    with pytest.raises(Problem) as caught:
        of.check(mark, question)
    assert caught.value.status == 403
    assert SECRET not in caught.value.detail
    assert "BALANCE_PEER_SECRET" in caught.value.detail
    return caught.value.detail


# --- marks


@pytest.mark.shows("peers")
def test_a_mark_of_a_peer_is_accepted_once() -> None:
    asked = trust()
    mark = mark_for(asked)

    asked.check(mark, QUESTION)

    assert "used before" in refusal(asked, mark)


def test_verifying_a_mark_does_not_use_it_up() -> None:
    asked = trust()
    mark = mark_for(asked)

    for _ in range(2):
        judged = asked.verified(mark, QUESTION)
    asked.use(judged)

    with pytest.raises(Problem, match="used before"):
        asked.use(asked.verified(mark, QUESTION))


def test_a_mark_is_valid_at_one_run_of_one_instance() -> None:
    mark = mark_for(trust())

    assert "another instance, or an earlier run" in refusal(trust(), mark)


def test_a_mark_contains_the_sender_and_the_time_but_not_the_secret() -> None:
    asked = trust()
    mark = mark_for(asked)

    assert re.fullmatch(rf"peer:1;run=[0-9a-f]{{32}};n=0;to={asked.incarnation};t=1000;hmac=[0-9a-f]{{64}}", mark)
    assert SECRET not in mark


def test_without_a_secret_any_mark_is_accepted_any_number_of_times() -> None:
    open_to_all = trust(secret=None)

    assert mark_for(open_to_all, secret=None) == f"peer:1;to={open_to_all.incarnation}"
    for mark in ("peer:1", "", "anything;at=all", mark_for(open_to_all), "peer:1"):
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


def test_without_a_secret_a_query_for_another_run_is_not_answered() -> None:
    """The address may have passed to an instance of another application."""
    before, now = trust(secret=None), trust(secret=None)

    with pytest.raises(Problem) as caught:
        now.check(mark_for(before, secret=None), QUESTION)

    assert caught.value.status == 421
    now.check("peer:1", QUESTION)
    now.check(mark_for(now, secret=None), QUESTION)


def test_a_proof_by_another_secret_is_refused() -> None:
    asked = trust()
    refusal(asked, mark_for(asked, secret="another secret altogether"))


@pytest.mark.shows("peers")
def test_a_proof_of_another_query_is_refused() -> None:
    asked = trust()
    refusal(asked, mark_for(asked), QUESTION + "2")
    refusal(asked, mark_for(asked), QUESTION.replace("GET", "POST"))


@given(st.data())
def test_a_modified_mark_is_refused(data: st.DataObject) -> None:
    asked = trust()
    mark = mark_for(asked)
    at = data.draw(st.integers(0, len(mark) - 1))
    other = data.draw(st.characters(min_codepoint=33, max_codepoint=126).filter(lambda c: c != mark[at]))

    refusal(asked, mark[:at] + other + mark[at + 1 :])
    asked.check(mark, QUESTION)


@pytest.mark.parametrize("late", [-CLOCKS_AGREE_SECONDS, -1, 0, 1, CLOCKS_AGREE_SECONDS])
def test_a_proof_is_valid_while_clocks_agree(late: int) -> None:
    asked = trust(now=1000 + late)
    asked.check(mark_for(asked), QUESTION)


@pytest.mark.parametrize("late", [-CLOCKS_AGREE_SECONDS - 1, CLOCKS_AGREE_SECONDS + 1, 10**9])
def test_an_expired_or_future_proof_is_refused(late: int) -> None:
    asked = trust(now=1000 + late)
    assert "clocks" in refusal(asked, mark_for(asked))


@given(st.text(st.characters(exclude_categories=[])), st.text(st.characters(exclude_categories=[])))
def test_every_malformed_mark_is_refused(mark: str, question: str) -> None:
    refusal(trust(), mark, question)


@given(st.text(string.ascii_letters + "\n;=", max_size=6), st.text(string.ascii_letters + "\n;=", max_size=6))
def test_a_signature_is_valid_for_one_query(question: str, other: str) -> None:
    asked = trust()
    mark = mark_for(asked, question)
    if question == other:
        asked.check(mark, other)
    else:
        refusal(asked, mark, other)


# --- answers


ANSWER = Answer(200, b'{"amount":12.34}', "application/json", {"Balance-Role": "active", "Balance-Position": "1:3"})


def test_the_proof_of_an_answer_is_valid_for_its_query() -> None:
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
def test_a_proof_covers_status_body_type_and_headers(changed: Answer) -> None:
    proof = trust().proof_of(ANSWER, "mark") or ""

    assert trust().is_proven(ANSWER, "mark", proof)
    assert not trust().is_proven(changed, "mark", proof)


def test_an_answer_signed_with_another_secret_is_not_proven() -> None:
    proof = trust("another secret altogether").proof_of(ANSWER, "mark") or ""

    assert not trust().is_proven(ANSWER, "mark", proof)


def test_without_a_secret_answers_need_no_proof() -> None:
    assert trust(secret=None).proof_of(ANSWER, "mark") is None
    assert trust(secret=None).is_proven(ANSWER, "mark", "")


def test_the_proof_of_a_mark_does_not_prove_an_answer() -> None:
    asked = trust()
    mark = mark_for(asked)

    assert not asked.is_proven(ANSWER, mark, mark[-64:])


# --- used marks


NEAR = st.integers(0, 40)
FAR = st.integers(0, 3 * WINDOW)


@settings(max_examples=300)
@given(st.lists(NEAR | FAR | st.integers(-40, 40).map(lambda n: WINDOW + n), max_size=60))
@example([0, WINDOW + 8, 0])
@example([WINDOW, WINDOW + 7, 8 * (WINDOW // 8) + 8, 0])
def test_each_mark_within_the_window_is_accepted_once(numbers: list[int]) -> None:
    used, seen = UsedMarks(), set[int]()
    for number in numbers:
        is_taken = used.take("asker", number, 0.0)

        assert not (is_taken and number in seen)
        if number > max(seen, default=0) - WINDOW:
            assert is_taken == (number not in seen)
        if is_taken:
            seen.add(number)


def test_each_sender_has_its_own_window() -> None:
    used = UsedMarks()

    assert [used.take(asker, 1, 0.0) for asker in ("a", "b", "a", "b")] == [True, True, False, False]


def test_a_window_is_dropped_long_after_its_marks_have_expired() -> None:
    used = UsedMarks()
    used.take("a", 1, 0.0)

    used.take("b", 1, 599.0)
    assert not used.take("a", 1, 599.0)
    # By now, the mark would be refused as expired.
    used.take("c", 1, 1300.0)
    assert used.take("a", 1, 1300.0)


def test_beyond_the_maximum_new_senders_are_refused() -> None:
    used = UsedMarks()
    for n in range(MAX_ASKERS):
        assert used.take(f"asker-{n}", 1, 0.0)

    assert not used.take("one more", 1, 0.0)
    assert used.take("asker-0", 2, 0.0)
    assert used.take("one more", 1, 700.0)


@pytest.mark.parametrize("step", [1, 9, 5 * WINDOW])
def test_memory_does_not_grow_with_the_number_of_marks(step: int) -> None:
    used = UsedMarks()
    used.take("a", 0, 0.0)
    tracemalloc.start()
    for n in range(1, 50_000):
        assert used.take("a", n * step, 0.0)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert grown < 64 << 10


# --- addresses


ALLOWED = ["peer-1.example.org", "*.Cluster.local", "10.1.0.0/16", "192.0.2.7", "fd00::/8", "localhost"]


@pytest.mark.parametrize(
    "address",
    [
        "peer-1.example.org:1",
        "PEER-1.Example.org:5051",
        "peer-1.example.org.:5051",
        "a.cluster.local:1",
        "b.a.CLUSTER.LOCAL:1",
        "10.1.255.255:65535",
        "192.0.2.7:80",
        "[fd12::1]:80",
        "[::ffff:10.1.0.1]:80",
        "localhost:1",
    ],
)
def test_a_host_on_the_allow_list_is_allowed(address: str) -> None:
    assert PeerTrust(allow_list=ALLOWED).allows(address)


@pytest.mark.parametrize(
    "address",
    [
        "example.org:1",
        "x.peer-1.example.org:1",
        "cluster.local:1",
        "evilcluster.local:1",
        "a.cluster.local.evil.org:1",
        "10.2.0.1:1",
        "192.0.2.8:1",
        "0xa010001:1",
        "167837697:1",
        "10.1.0.0.evil.org:1",
        "[::1]:1",
        "[::ffff:10.2.0.1]:80",
    ],
)
def test_a_host_that_is_not_on_the_allow_list_is_refused(address: str) -> None:
    assert not PeerTrust(allow_list=ALLOWED).allows(address)
    assert PeerTrust().allows(address)


@pytest.mark.parametrize(
    "address",
    [
        "",
        ":1",
        "localhost",
        "localhost:",
        "localhost:0",
        "localhost:65536",
        "localhost:\u0661",
        "bücher.cluster.local:80",
        "localhost:1/evil",
        "localhost:1?x",
        "localhost:1#x",
        "localhost:1@evil.org:80",
        "localhost@evil.org:80",
        "user:word@localhost:80",
        "localhost/@evil.org:80",
        "localhost\\@evil.org:80",
        "localhost%2f:80",
        "local host:80",
        "localhost:80\n",
        "localhost:80\r\nX: y",
        "http://localhost:80",
        "[::1:80",
        "::1:80",
        "[fe80::1%25eth0]:80",
        "x" * 254 + ":80",
    ],
)
@pytest.mark.parametrize("allow_list", [[], ALLOWED])
def test_an_address_that_is_not_host_and_port_is_refused(address: str, allow_list: list[str]) -> None:
    assert not PeerTrust(allow_list=allow_list).allows(address)
