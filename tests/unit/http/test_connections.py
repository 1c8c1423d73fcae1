"""Connections to peers that misbehave: an answer has one form or is refused, and no query gets another's answer."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import TYPE_CHECKING

import h11
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from yarl import URL

from balance_service.errors import RetriableError
from balance_service.http.answer import Answer
from balance_service.http.peers import connections as peer_connections
from balance_service.http.peers.connections import (
    MAX_BODY_BYTES,
    AnswerReader,
    PeerConnections,
    Received,
    UnexpectedAnswerError,
)
from balance_service.http.peers.proxy import Proxy
from balance_service.http.peers.trust import Peer as TrustedPeer
from tests.support.waiting import until
from tests.unit.http.odd_peer import BODY, LENGTH, PATH, REFUSED, SECONDS, TYPE, Act, Asker, Peer, answer, own, run

if TYPE_CHECKING:
    from collections.abc import Sequence


ANSWER = (
    b"HTTP/1.1 200 OK\r\nBalance-Application-Server: 127.0.0.1:5051\r\nBalance-Role: active\r\n"
    b"Balance-Position: 1:3\r\nBalance-Epoch: 2\r\nContent-Type: application/json\r\nContent-Length: 17\r\n"
    b"Date: Sat, 21 Nov 2026 15:36:45 GMT\r\nServer: Python/3.11 aiohttp/3.14.5\r\n\r\n" + BODY
)


def read(*segments: bytes) -> Answer | None:
    received = received_of(*segments)
    return None if received is None else received.answer


def received_of(*segments: bytes) -> Received | None:
    reader = AnswerReader()
    for segment in segments[:-1]:
        assert reader.feed(segment) is None
    return reader.feed(segments[-1])


def test_an_answer_is_its_status_body_and_the_headers_that_may_be_passed_on() -> None:
    assert read(ANSWER) == Answer(
        200,
        BODY,
        "application/json",
        {
            "Balance-Application-Server": "127.0.0.1:5051",
            "Balance-Role": "active",
            "Balance-Position": "1:3",
            "Balance-Epoch": "2",
        },
    )


@given(st.sets(st.integers(1, len(ANSWER) - 1), max_size=20))
@example(set(range(1, len(ANSWER))))
def test_it_is_the_same_in_whatever_pieces_it_comes(cuts: set[int]) -> None:
    segments = [ANSWER[a:b] for a, b in pairwise([0, *sorted(cuts), len(ANSWER)])]

    assert read(*segments) == read(ANSWER)


def test_one_answer_after_the_other_is_read() -> None:
    reader = AnswerReader()
    for body in (b"{}", BODY, b""):
        assert reader.feed(answer(body=body)[:9]) is None
        got = reader.feed(answer(body=body)[9:])
        assert got is not None
        assert got.answer.body == body


@pytest.mark.parametrize("size", [0, 1, 30, len(ANSWER) - 1, len(ANSWER)])
def test_it_knows_whether_it_is_within_an_answer(size: int) -> None:
    reader = AnswerReader()
    reader.feed(ANSWER[:size])

    assert reader.is_within == (0 < size < len(ANSWER))


def test_header_names_are_taken_in_any_case_and_parameters_of_the_type_left_out() -> None:
    lower = answer("balance-role:active  ", "content-type: Application/JSON; charset=utf-8", "content-length:\t17")

    assert read(lower) == Answer(200, BODY, "application/json", {"Balance-Role": "active"})


@pytest.mark.parametrize("value", ["close", "Close", "upgrade", "keep-alive, close", ""])
def test_after_an_answer_that_says_so_nothing_more_is_asked(value: str) -> None:
    reader = AnswerReader()

    assert reader.feed(answer("Content-Type: application/json", "Content-Length: 17", f"Connection: {value}"))
    assert reader.is_last


@pytest.mark.parametrize(("sent", "reason"), REFUSED.values(), ids=REFUSED)
def test_whatever_leaves_a_choice_or_is_no_instances_is_refused(sent: bytes, reason: str) -> None:
    with pytest.raises(UnexpectedAnswerError, match=reason):
        read(sent)


@pytest.mark.parametrize("size", [0, 1, MAX_BODY_BYTES])
def test_a_body_may_have_any_bytes_and_as_many_as_are_allowed(size: int) -> None:
    body = (b"HTTP/1.1 200 OK\r\n\r\n" * (size // 19 + 1))[:size]
    got = read(answer(body=body))

    assert got is not None
    assert got.body == body


LINES = st.tuples(
    st.sampled_from(
        ["Content-Length", "content-length", "Transfer-Encoding", "Connection", "X", "X ", " X", "\tX", "X:"]
    ),
    st.sampled_from([":", ": ", ":\t", " : ", ""]),
    st.sampled_from(
        ["0", "2", "17", "1 7", "17,17", "0x11", "-1", "chunked", "identity", "close", "y", "", "\x0b17", "é"]
    ),
    st.sampled_from(["\r\n", "\r\n", "\r\n", "\n", "\r", "\r\n ", "\r\n\r\n", " \r\n", "\0\r\n"]),
)
STATUS_LINES = [
    "HTTP/1.1 200 OK",
    "HTTP/1.1 503 ",
    "HTTP/1.1 404",
    "HTTP/1.1  200 OK",
    "HTTP/1.1 421 \té",
    "http/1.1 200 OK",
]


@given(
    st.sampled_from(STATUS_LINES),
    st.lists(LINES, max_size=4),
    st.sampled_from(["Content-Length: 17\r\n", ""]),
    st.sampled_from([BODY, BODY[:-1], BODY + b"\r\n", BODY + ANSWER, b"", b"11\r\n" + BODY + b"\r\n0\r\n\r\n"]),
)
@example("HTTP/1.1 200 OK", [], "Content-Length: 17\r\n", BODY)
@example("HTTP/1.1 200 OK", [("Connection", ": ", "close", "\r\n")], "Content-Length: 17\r\n", BODY)
def test_an_answer_that_is_taken_is_read_as_by_h11(
    status_line: str, lines: list[tuple[str, str, str, str]], length: str, body: bytes
) -> None:
    fields = "".join(["".join(line) for line in lines])
    sent = f"{status_line}\r\nContent-Type: application/json\r\n{fields}{length}\r\n".encode("latin-1") + body
    reader = AnswerReader()
    try:
        got = reader.feed(sent)
    except UnexpectedAnswerError:
        return
    if got is None:
        return

    asker = h11.Connection(h11.CLIENT)
    asker.send(h11.Request(method="GET", target="/", headers=[("Host", "x")]))
    asker.send(h11.EndOfMessage())
    asker.receive_data(sent)
    head = asker.next_event()
    assert isinstance(head, h11.Response)
    assert head.status_code == got.answer.status
    known = b""
    while isinstance(event := asker.next_event(), h11.Data):
        known += bytes(event.data)
    assert isinstance(event, h11.EndOfMessage)
    assert known == got.answer.body
    assert asker.trailing_data == (b"", False)
    assert reader.is_last or asker.their_state is h11.DONE


def test_what_is_told_of_a_thousand_partitions_is_passed_on() -> None:
    told = ",".join(f"{partition}:{10**9 + partition}" for partition in range(1000))

    found = read(answer(TYPE, LENGTH, f"Balance-Position: {told}"))

    assert found is not None
    assert found.headers["Balance-Position"] == told


@pytest.mark.parametrize(
    "lines",
    [
        (TYPE, LENGTH, f"Balance-Proof: {'a1' * 32}"),
        (f"Balance-Proof: {'a1' * 32}", TYPE, LENGTH),
        (TYPE, f"balance-proof:\t{'a1' * 32} ", LENGTH),
    ],
)
def test_what_is_to_prove_an_answer_is_told_beside_it_wherever_it_stands(lines: tuple[str, ...]) -> None:
    assert received_of(answer(*lines)) == Received(Answer(200, BODY, "application/json", {}), "a1" * 32)


@pytest.mark.parametrize("value", ["", "a1", "A1" * 32, "a1" * 33, f"x{'a1' * 32}", f"{'a1' * 32}, {'a1' * 32}"])
def test_what_has_not_the_form_of_a_proof_is_none(value: str) -> None:
    assert received_of(answer(TYPE, LENGTH, f"Balance-Proof: {value}")) == Received(
        Answer(200, BODY, "application/json", {}), ""
    )


# --- connections


def test_queries_are_asked_one_after_the_other_on_one_connection() -> None:
    peer = Peer()

    async def steps(asker: Asker) -> None:
        assert [await asker.ask(f"c{n}") for n in range(5)] == [f"c{n}" for n in range(5)]

    run(peer, steps)
    assert peer.connections == 1
    assert peer.requests[0] == (
        b"GET /api/customers.getBalance?customerId=c0 HTTP/1.1\r\n"
        b"Host: %s\r\nBalance-Forwarded: asker:1\r\n\r\n" % peer.address.encode()
    )


def test_queries_at_once_are_asked_on_connections_of_their_own_and_these_kept() -> None:
    peer = Peer({f"c{n}": [0.1, own(f"c{n}")] for n in range(10)})

    async def steps(asker: Asker) -> None:
        customers = [f"c{n}" for n in range(10)]
        for _ in range(3):
            assert await asyncio.gather(*map(asker.ask, customers)) == customers

    run(peer, steps)
    assert peer.connections == 10


def test_a_peer_gets_no_more_than_64_connections_and_every_query_is_answered() -> None:
    peer = Peer({f"c{n}": [0.05, own(f"c{n}")] for n in range(200)})

    async def steps(asker: Asker) -> None:
        customers = [f"c{n}" for n in range(200)]
        assert await asyncio.gather(*map(asker.ask, customers)) == customers

    run(peer, steps)
    assert peer.connections == 64


def test_queries_that_wait_at_a_peer_leave_its_64_places_to_the_others_and_are_64_at_most_themselves() -> None:
    peer = Peer({f"w{n}": [60] for n in range(70)})

    async def steps(asker: Asker) -> None:
        waiting = [asyncio.ensure_future(asker.ask(f"w{n}", 60, waits=True)) for n in range(70)]
        await until(lambda: len(peer.asked) == 64, "as many wait as may")
        assert await asker.ask("c1") == "c1"
        assert [customer for _, customer in peer.asked] == [*(f"w{n}" for n in range(64)), "c1"]
        for one in waiting:
            one.cancel()
        await asyncio.wait(waiting)

    run(peer, steps)


HOSTILE: dict[str, Sequence[Act]] = {
    **{name: [sent] for name, (sent, _) in REFUSED.items()},
    "a length that is too large": [answer("Content-Type: application/json", "Content-Length: 99"), None],
    "half a head": [b"HTTP/1.1 200 OK\r\nContent-", None],
    "a body that stops": [own("bad")[:-3], None],
    "a body that stalls": [own("bad")[:-3], 1.0, own("bad")[-3:]],
    "an answer after the deadline": [1.0, own("bad")],
    "a byte at a time, beyond the deadline": [part for byte in own("bad") for part in (bytes([byte]), 0.02)],
}


@pytest.mark.parametrize("acts", HOSTILE.values(), ids=HOSTILE)
def test_after_an_answer_that_is_none_its_connection_is_never_used_again(acts: Sequence[Act]) -> None:
    peer = Peer({"bad": acts})

    async def steps(asker: Asker) -> None:
        assert await asker.ask("before") == "before"
        assert peer.address in await asker.ask("bad", 0.3)
        for customer in ("c1", "c2", "c3"):
            assert await asker.ask(customer) == customer

    run(peer, steps)
    connections = {customer: number for number, customer in peer.asked}
    assert connections["before"] == connections["bad"]
    assert connections["c1"] == connections["c2"] == connections["c3"] == connections["bad"] + 1


@pytest.mark.parametrize("late", [b"x", answer(body=b'"bad"'), b"HTTP/1.1 100 Continue\r\n\r\n"])
def test_a_connection_on_which_something_comes_that_nobody_asked_for_is_closed(late: bytes) -> None:
    peer = Peer({"c1": [own("c1"), 0.05, late]})

    async def steps(asker: Asker) -> None:
        assert await asker.ask("c1") == "c1"
        await until(lambda: not asker.proxy._connections._open, "the connection is closed")
        assert await asker.ask("c2") == "c2"

    run(peer, steps)
    assert peer.asked == [(1, "c1"), (2, "c2")]


def test_the_connection_of_a_query_that_was_given_up_is_closed() -> None:
    peer = Peer({"slow": [0.2, own("slow")]})

    async def steps(asker: Asker) -> None:
        given_up = asyncio.ensure_future(asker.ask("slow"))
        await until(lambda: peer.asked, "it is asked")
        given_up.cancel()
        assert await asker.ask("c1") == "c1"
        await asyncio.sleep(0.3)
        assert await asker.ask("c2") == "c2"

    run(peer, steps)
    assert peer.asked == [(1, "slow"), (2, "c1"), (2, "c2")]


def test_an_answer_that_says_that_it_is_the_last_is_taken_and_is_the_last() -> None:
    last = answer("Content-Type: application/json", "Content-Length: 4", "Connection: close", body=b'"c1"')
    peer = Peer({"c1": [last]})

    async def steps(asker: Asker) -> None:
        assert [await asker.ask("c1"), await asker.ask("c2")] == ["c1", "c2"]

    run(peer, steps)
    assert peer.asked == [(1, "c1"), (2, "c2")]


def test_a_query_that_meets_a_closing_connection_is_asked_again_on_a_new_one() -> None:
    peer = Peer({"c2": [None]})

    async def steps(asker: Asker) -> None:
        assert [await asker.ask("c1"), await asker.ask("c2")] == ["c1", "c2"]

    run(peer, steps)
    assert peer.asked == [(1, "c1"), (1, "c2"), (2, "c2")]


def test_it_is_asked_again_once_and_on_a_new_connection_only() -> None:
    class Closing(Peer):
        async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.connections += 1
            self.asked.append((self.connections, (await reader.readuntil(b"\r\n\r\n")).decode()[:3]))
            if self.connections == 1:
                writer.write(own("c1"))
                await reader.readuntil(b"\r\n\r\n")
            writer.close()

    peer = Closing()

    async def steps(asker: Asker) -> None:
        assert await asker.ask("c1") == "c1"
        assert "connection was closed" in await asker.ask("c2")
        assert peer.connections == 2

    run(peer, steps)


def test_a_query_of_which_something_was_answered_is_not_asked_again() -> None:
    peer = Peer({"c2": [b"HTTP/1.1 2", None]})

    async def steps(asker: Asker) -> None:
        assert await asker.ask("c1") == "c1"
        assert "connection was closed" in await asker.ask("c2")

    run(peer, steps)
    assert peer.asked == [(1, "c1"), (1, "c2")]


def test_a_peer_that_was_started_again_is_asked_on_a_new_connection() -> None:
    peer = Peer()

    async def main() -> None:
        proxy = Proxy()
        asker = Asker(proxy, peer)
        for customer in ("c1", "c2"):
            server = await asyncio.start_server(peer.serve, "127.0.0.1", peer.port)
            peer.port = server.sockets[0].getsockname()[1]
            assert await asker.ask(customer) == customer
            server.close()
            for connection in list(proxy._connections._open):
                connection.abort()
            await until(lambda: not proxy._connections._open, "the connections are closed")
        assert "cannot be reached" in await asker.ask("c3")
        await proxy.close()

    asyncio.run(main())
    assert peer.connections == 2


def test_a_name_that_stands_for_nothing_is_a_peer_that_cannot_be_reached() -> None:
    async def main() -> str:
        proxy = Proxy()
        with pytest.raises(RetriableError) as caught:
            await proxy.get(
                TrustedPeer("no-such-host.invalid:5051", "i"), PATH, {"customerId": "c1"}, "asker:1", SECONDS
            )
        await proxy.close()
        return str(caught.value)

    assert "cannot be reached" in asyncio.run(main())


def test_nothing_is_asked_any_more_once_it_is_closed() -> None:
    peer = Peer({"slow": [1.0]})

    async def steps(asker: Asker) -> None:
        waiting = asyncio.ensure_future(asker.ask("slow"))
        await until(lambda: peer.asked, "it is asked")
        await asker.proxy.close()
        assert "connection was closed" in await waiting
        assert "stopping" in await asker.ask("c1")

    run(peer, steps)
    assert peer.asked == [(1, "slow")]


def test_idle_connections_are_closed_after_a_while_and_the_peer_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_connections, "_IDLE_SECONDS", 1.0)
    monkeypatch.setattr(peer_connections, "_SWEEP_SECONDS", 1.0)
    peer = Peer()

    async def main() -> None:
        server = await asyncio.start_server(peer.serve, "127.0.0.1")
        url = URL(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        connections = PeerConnections()

        async def ask() -> Received:
            return await connections.ask(url, b"GET /?customerId=c1 HTTP/1.1\r\n\r\n", None)

        for _ in range(8):
            await ask()
            await asyncio.sleep(0.2)
        assert peer.connections == 1
        await until(lambda: not connections._open and not connections._peers, "all is closed and forgotten")
        await ask()
        assert peer.connections == 2
        await connections.close()
        server.close()

    asyncio.run(main())


def test_a_bounded_number_of_queries_waits_no_longer_than_its_deadline_for_a_peer_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_connections, "_MAX_CONNECTIONS_PER_PEER", 2)
    peer = Peer({f"c{n}": [60] for n in range(6)})

    async def steps(asker: Asker) -> None:
        began = asyncio.get_running_loop().time()
        answers = await asyncio.gather(*(asker.ask(f"c{n}", 1.0) for n in range(6)))
        assert all("did not answer in time" in reason for reason in answers)
        assert asyncio.get_running_loop().time() - began < 2.8
        assert await asker.ask("c9") == "c9"

    run(peer, steps)
    assert peer.connections <= 5
