"""Answers of peers: read in one form only, and never otherwise than a parser that knows all of HTTP reads them."""

from __future__ import annotations

from itertools import pairwise

import h11
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from balance_service.http.answer import Answer
from balance_service.http.peers.connections import (
    MAX_BODY_BYTES,
    AnswerReader,
    Received,
    UnexpectedAnswerError,
)
from tests.unit.http.peer_answers import BODY, LENGTH, REFUSED, TYPE, answer

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
