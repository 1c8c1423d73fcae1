"""Records of control topics: which of them count, with and without signatures."""

from __future__ import annotations

from typing import Any

import pytest

from balance_service.kafka.signing import (
    HEADER,
    REPEATED,
    UNSIGNED,
    WRONGLY_SIGNED,
    ControlReading,
    ControlRecords,
    SharedSecret,
)

NOW, FORMER, FOREIGN = (SharedSecret(f"{name} secret of all") for name in ("present", "former", "foreign"))


class Message:
    """A record as the client hands it over."""

    def __init__(self, key: bytes, value: bytes, signature: bytes | None, offset: int, partition: int = 0) -> None:
        self._key, self._value, self._offset, self._partition = key, value, offset, partition
        self._headers = [] if signature is None else [(HEADER, signature)]

    def key(self) -> bytes:
        return self._key

    def value(self) -> bytes:
        return self._value

    def headers(self) -> list[tuple[str, bytes]]:
        return self._headers

    def offset(self) -> int:
        return self._offset

    def partition(self) -> int:
        return self._partition


def signed(secret: SharedSecret | None, key: bytes, value: bytes, topic: str = "t") -> bytes | None:
    return ControlRecords(topic, secret).headers(key, value).get(HEADER)


def judged(records: ControlRecords, *messages: Message) -> list[str]:
    reading = ControlReading(records)
    return [reading.refusal(message) for message in messages]  # type: ignore[arg-type]


def test_a_signed_record_counts_and_one_of_a_former_secret_too() -> None:
    records = ControlRecords("t", NOW, [FORMER])
    messages = [Message(b"k", b"%d" % n, signed(s, b"k", b"%d" % n), n) for n, s in enumerate((FORMER, NOW, FORMER))]

    assert judged(records, *messages) == ["", "", ""]


@pytest.mark.parametrize(
    "message",
    [
        Message(b"k", b"v", signed(FOREIGN, b"k", b"v"), 0),
        Message(b"other", b"v", signed(NOW, b"k", b"v"), 0),
        Message(b"k", b"other", signed(NOW, b"k", b"v"), 0),
        Message(b"k", b"v", signed(NOW, b"k", b"v", topic="other"), 0),
        Message(b"k", b"v", b"\xff", 0),
    ],
    ids=["another secret", "another key", "another value", "another topic", "no text"],
)
def test_a_record_that_no_known_secret_has_signed_does_not_count(message: Message) -> None:
    assert judged(ControlRecords("t", NOW, [FORMER]), message) == [WRONGLY_SIGNED]


def test_an_unsigned_record_counts_only_before_the_first_signed_one_of_its_partition() -> None:
    def unsigned(offset: int, partition: int = 0) -> Message:
        return Message(b"k", b"%d" % offset, None, offset, partition)

    first = Message(b"k", b"v", signed(NOW, b"k", b"v"), 1)

    assert judged(ControlRecords("t", NOW), unsigned(0), first, unsigned(2), unsigned(0, 1)) == ["", "", UNSIGNED, ""]


def test_a_wrongly_signed_record_does_not_end_the_time_of_unsigned_ones() -> None:
    wrong = Message(b"k", b"v", signed(FOREIGN, b"k", b"v"), 0)

    assert judged(ControlRecords("t", NOW), wrong, Message(b"k", b"v", None, 1)) == [WRONGLY_SIGNED, ""]


def test_a_repeated_record_does_not_count() -> None:
    message = Message(b"k", b"v", signed(NOW, b"k", b"v"), 0)

    assert judged(ControlRecords("t", NOW), message, message) == ["", REPEATED]


def test_without_a_secret_every_record_counts_and_none_is_signed() -> None:
    records = ControlRecords("t")

    assert judged(records, Message(b"k", b"v", signed(FOREIGN, b"k", b"v"), 0), Message(b"k", b"v", None, 1)) == [
        "",
        "",
    ]
    assert records.headers(b"k", b"v") == {}


def test_a_refused_record_is_told_once_with_its_place() -> None:
    records = ControlRecords("t", NOW)
    message: Any = Message(b"k", b"v", None, 7)

    records.refuse(message, "it is unsigned")
    records.refuse(message, "it is unsigned")

    assert records.problems == ["the record at offset 7 of partition 0 of topic 't' does not count: it is unsigned"]
