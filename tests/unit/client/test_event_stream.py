"""The parser of server-sent events: the WHATWG's rules, and any division of the bytes."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from balance_service.client.event_stream import Comment, EventParser, ServerEvent


def parsed(*parts: bytes, last_event_id: str = "") -> list[ServerEvent | Comment]:
    parser = EventParser(last_event_id)
    return [item for part in parts for item in parser.feed(part)]


def test_fields_make_an_event_at_the_empty_line() -> None:
    assert parsed(b"event: state\nid: 1:4\ndata: {}\n\n") == [ServerEvent("state", "{}", "1:4")]


def test_lines_of_data_are_joined_and_one_leading_space_is_removed() -> None:
    # The examples of the specification: YHOO, and an event whose data is a line end.
    assert parsed(b"data: YHOO\ndata: +2\ndata: 10\n\n") == [ServerEvent("message", "YHOO\n+2\n10", "")]
    assert parsed(b"data\n\ndata\ndata\n\ndata:") == [ServerEvent("message", "", ""), ServerEvent("message", "\n", "")]
    assert parsed(b"data:test\n\ndata:  test\n\n") == [
        ServerEvent("message", "test", ""),
        ServerEvent("message", " test", ""),
    ]


def test_an_id_holds_for_later_events_until_an_empty_one() -> None:
    stream = b"data: 1\nid: 7\n\ndata: 2\n\ndata: 3\nid\n\ndata: 4\nid: a\0b\n\n"

    assert [item.id for item in parsed(stream) if isinstance(item, ServerEvent)] == ["7", "7", "", ""]
    assert parsed(b"data: 1\n\n", last_event_id="9") == [ServerEvent("message", "1", "9")]


def test_an_event_without_data_is_none_and_its_name_is_not_kept() -> None:
    assert parsed(b"event: state\n\ndata: 1\n\n") == [ServerEvent("message", "1", "")]


def test_comments_are_returned_and_unknown_fields_ignored() -> None:
    assert parsed(b": partition 1 epoch 3 at h:1\nretry: 5\nfoo: bar\n:\n") == [
        Comment("partition 1 epoch 3 at h:1"),
        Comment(""),
    ]


def test_an_event_that_has_not_ended_is_not_returned() -> None:
    assert parsed(b"data: 1\n\ndata: 2\n") == [ServerEvent("message", "1", "")]


def test_a_byte_order_mark_is_removed_only_at_the_start() -> None:
    mark = "\ufeff".encode()

    assert parsed(mark[:1], mark[1:] + b"data: 1\n\n") == [ServerEvent("message", "1", "")]
    assert parsed(b"data: 1\n" + mark + b"data: 2\n\n") == [ServerEvent("message", "1", "")]


def test_only_the_specified_line_ends_end_a_line() -> None:
    text = "a\u2028b\x0bc\x0cd\x85e"

    assert parsed(f"data: {text}\n\n".encode()) == [ServerEvent("message", text, "")]


STREAM = "event: état\r\nid: 1:4\rdata: 💶 1\r\ndata: 2\n\r\n\r\n: so\r\rdata: x\n\ndata: y\r\r"
WHOLE = [ServerEvent("état", "💶 1\n2", "1:4"), Comment("so"), ServerEvent("message", "x", "1:4")]


@given(st.lists(st.integers(0, len(STREAM.encode())), max_size=12))
def test_the_division_of_the_bytes_does_not_matter(cuts: list[int]) -> None:
    content = STREAM.encode()
    bounds = [0, *sorted(cuts), len(content)]

    parts = [content[start:end] for start, end in itertools.pairwise(bounds)]

    assert parsed(*parts) == [*WHOLE, ServerEvent("message", "y", "1:4")]
