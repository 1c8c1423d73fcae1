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


def test_an_answer_has_a_status_a_body_and_the_known_headers() -> None:
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
def test_an_answer_is_the_same_in_any_segments(cuts: set[int]) -> None:
    segments = [ANSWER[a:b] for a, b in pairwise([0, *sorted(cuts), len(ANSWER)])]

    assert read(*segments) == read(ANSWER)


def test_answers_are_read_one_after_another() -> None:
    reader = AnswerReader()
    for body in (b"{}", BODY, b""):
        assert reader.feed(answer(body=body)[:9]) is None
        got = reader.feed(answer(body=body)[9:])
        assert got is not None
        assert got.answer.body == body


@pytest.mark.parametrize("size", [0, 1, 30, len(ANSWER) - 1, len(ANSWER)])
def test_the_reader_reports_whether_it_is_within_an_answer(size: int) -> None:
    reader = AnswerReader()
    reader.feed(ANSWER[:size])

    assert reader.is_within == (0 < size < len(ANSWER))


def test_header_names_are_case_insensitive_and_parameters_of_the_type_are_dropped() -> None:
    lower = answer("balance-role:active  ", "content-type: Application/JSON; charset=utf-8", "content-length:\t17")

    assert read(lower) == Answer(200, BODY, "application/json", {"Balance-Role": "active"})


@pytest.mark.parametrize("value", ["close", "Close", "upgrade", "keep-alive, close", ""])
def test_an_answer_may_announce_that_it_is_the_last(value: str) -> None:
    reader = AnswerReader()

    assert reader.feed(answer("Content-Type: application/json", "Content-Length: 17", f"Connection: {value}"))
    assert reader.is_last


@pytest.mark.parametrize(("sent", "reason"), REFUSED.values(), ids=REFUSED)
def test_an_ambiguous_or_foreign_answer_is_refused(sent: bytes, reason: str) -> None:
    with pytest.raises(UnexpectedAnswerError, match=reason):
        read(sent)


@pytest.mark.parametrize("size", [0, 1, MAX_BODY_BYTES])
def test_a_body_may_contain_any_bytes_up_to_the_maximum(size: int) -> None:
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
def test_an_accepted_answer_is_read_as_by_h11(
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


def test_headers_about_a_thousand_partitions_are_accepted() -> None:
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
def test_the_proof_of_an_answer_is_returned_apart_from_its_headers(lines: tuple[str, ...]) -> None:
    assert received_of(answer(*lines)) == Received(Answer(200, BODY, "application/json", {}), "a1" * 32)


@pytest.mark.parametrize("value", ["", "a1", "A1" * 32, "a1" * 33, f"x{'a1' * 32}", f"{'a1' * 32}, {'a1' * 32}"])
def test_a_malformed_proof_is_ignored(value: str) -> None:
    assert received_of(answer(TYPE, LENGTH, f"Balance-Proof: {value}")) == Received(
        Answer(200, BODY, "application/json", {}), ""
    )


# --- connections


def test_sequential_queries_use_one_connection() -> None:
    peer = Peer()

    async def steps(asker: Asker) -> None:
        assert [await asker.ask(f"c{n}") for n in range(5)] == [f"c{n}" for n in range(5)]

    run(peer, steps)
    assert peer.connections == 1
    assert peer.requests[0] == (
        b"GET /api/customers.getBalance?customerId=c0 HTTP/1.1\r\n"
        b"Host: %s\r\nBalance-Forwarded: asker:1;to=i\r\n\r\n" % peer.address.encode()
    )


def test_concurrent_queries_use_separate_connections_and_reuse_them() -> None:
    peer = Peer({f"c{n}": [0.1, own(f"c{n}")] for n in range(10)})

    async def steps(asker: Asker) -> None:
        customers = [f"c{n}" for n in range(10)]
        for _ in range(3):
            assert await asyncio.gather(*map(asker.ask, customers)) == customers

    run(peer, steps)
    assert peer.connections == 10


def test_a_peer_has_at_most_64_connections_and_every_query_is_answered() -> None:
    peer = Peer({f"c{n}": [0.05, own(f"c{n}")] for n in range(200)})

    async def steps(asker: Asker) -> None:
        customers = [f"c{n}" for n in range(200)]
        asked = [asker.ask(customer, client=customer) for customer in customers]
        assert await asyncio.gather(*asked) == customers

    run(peer, steps)
    assert peer.connections == 64


def test_a_client_has_at_most_three_quarters_of_the_connections_to_a_peer_and_another_does_not_wait_for_it() -> None:
    peer = Peer({f"c{n}": [60] for n in range(200)})

    async def steps(asker: Asker) -> None:
        many = [asyncio.ensure_future(asker.ask(f"c{n}", 60, client="a")) for n in range(200)]
        await until(lambda: len(peer.asked) == 48, "as many are asked as may")
        assert await asker.ask("other", client="b") == "other"
        for one in many:
            one.cancel()
        await asyncio.wait(many)

    run(peer, steps)


def test_at_most_64_queries_wait_at_a_peer_on_connections_apart_from_the_others() -> None:
    peer = Peer({f"w{n}": [60] for n in range(70)})

    async def steps(asker: Asker) -> None:
        waiting = [asyncio.ensure_future(asker.ask(f"w{n}", 60, client=f"{n}", waits=True)) for n in range(70)]
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
def test_a_connection_is_never_reused_after_an_unexpected_answer(acts: Sequence[Act]) -> None:
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
def test_unexpected_data_on_an_idle_connection_closes_it(late: bytes) -> None:
    peer = Peer({"c1": [own("c1"), 0.05, late]})

    async def steps(asker: Asker) -> None:
        assert await asker.ask("c1") == "c1"
        await until(lambda: not peer.open, "the connection is closed")
        assert await asker.ask("c2") == "c2"

    run(peer, steps)
    assert peer.asked == [(1, "c1"), (2, "c2")]


def test_the_connection_of_a_cancelled_query_is_closed() -> None:
    peer = Peer({"slow": [0.2, own("slow")]})

    async def steps(asker: Asker) -> None:
        given_up = asyncio.ensure_future(asker.ask("slow"))
        await until(lambda: peer.asked, "the peer has the query")
        given_up.cancel()
        assert await asker.ask("c1") == "c1"
        await asyncio.sleep(0.3)
        assert await asker.ask("c2") == "c2"

    run(peer, steps)
    assert peer.asked == [(1, "slow"), (2, "c1"), (2, "c2")]


def test_no_query_is_sent_after_the_last_answer_of_a_connection() -> None:
    last = answer("Content-Type: application/json", "Content-Length: 4", "Connection: close", body=b'"c1"')
    peer = Peer({"c1": [last]})

    async def steps(asker: Asker) -> None:
        assert [await asker.ask("c1"), await asker.ask("c2")] == ["c1", "c2"]

    run(peer, steps)
    assert peer.asked == [(1, "c1"), (2, "c2")]


def test_a_query_on_a_closing_connection_is_sent_again_on_a_new_one() -> None:
    peer = Peer({"c2": [None]})

    async def steps(asker: Asker) -> None:
        assert [await asker.ask("c1"), await asker.ask("c2")] == ["c1", "c2"]

    run(peer, steps)
    assert peer.asked == [(1, "c1"), (1, "c2"), (2, "c2")]


def test_a_query_is_sent_again_only_once_and_on_a_new_connection() -> None:
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


def test_a_query_with_a_partial_answer_is_not_sent_again() -> None:
    peer = Peer({"c2": [b"HTTP/1.1 2", None]})

    async def steps(asker: Asker) -> None:
        assert await asker.ask("c1") == "c1"
        assert "connection was closed" in await asker.ask("c2")

    run(peer, steps)
    assert peer.asked == [(1, "c1"), (1, "c2")]


def test_a_restarted_peer_gets_a_new_connection() -> None:
    peer = Peer()

    async def main() -> None:
        proxy = Proxy()
        asker = Asker(proxy, peer)
        for customer in ("c1", "c2"):
            server = await asyncio.start_server(peer.serve, "127.0.0.1", peer.port)
            peer.port = server.sockets[0].getsockname()[1]
            assert await asker.ask(customer) == customer
            server.close()
            peer.close_connections()
            await until(lambda: not peer.open, "the connections are closed")
        assert "cannot be reached" in await asker.ask("c3")
        await proxy.close()

    asyncio.run(main())
    assert peer.connections == 2


def test_a_peer_with_an_unknown_host_name_cannot_be_reached() -> None:
    async def main() -> str:
        proxy = Proxy()
        with pytest.raises(RetriableError) as caught:
            await proxy.get(
                TrustedPeer("no-such-host.invalid:5051", "i"), PATH, {"customerId": "c1"}, "asker:1", SECONDS
            )
        await proxy.close()
        return str(caught.value)

    assert "cannot be reached" in asyncio.run(main())


def test_a_closed_proxy_sends_no_query() -> None:
    peer = Peer({"slow": [1.0]})

    async def steps(asker: Asker) -> None:
        waiting = asyncio.ensure_future(asker.ask("slow"))
        await until(lambda: peer.asked, "the peer has the query")
        await asker.proxy.close()
        assert "connection was closed" in await waiting
        assert "stopping" in await asker.ask("c1")

    run(peer, steps)
    assert peer.asked == [(1, "slow")]


def test_idle_connections_are_closed_and_their_peer_is_dropped() -> None:
    peer = Peer()

    async def main() -> None:
        server = await asyncio.start_server(peer.serve, "127.0.0.1")
        url = URL(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        connections = PeerConnections(idle_seconds=1.0, sweep_seconds=1.0)

        async def ask() -> Received:
            return await connections.ask(url, b"GET /?customerId=c1 HTTP/1.1\r\n\r\n", None)

        for _ in range(8):
            await ask()
            await asyncio.sleep(0.2)
        assert peer.connections == 1
        await until(lambda: not peer.open and not connections._peers, "the connection is closed and the peer dropped")
        await ask()
        assert peer.connections == 2
        await connections.close()
        server.close()

    asyncio.run(main())


def test_queries_to_a_hanging_peer_are_bounded_and_end_at_their_deadline(
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
