"""The records of dead letters."""

from __future__ import annotations

import pytest

from balance_service.engine.changelog_writer import Envelope
from balance_service.engine.records import DeadLetter

LARGEST = 4 << 10


@pytest.mark.parametrize("detail", ["", "declare another partitioner"])
def test_a_record_has_the_detail_of_its_dead_letter_if_there_is_one(detail: str) -> None:
    envelope = Envelope("balance", "balance", 0, "app", LARGEST)

    _, _, headers = envelope.of(DeadLetter(1, 2, b"k", b"v", "cause", detail))

    assert dict(headers).get("dead-letter-detail", b"") == detail.encode()


def test_a_long_detail_leaves_less_room_for_the_value() -> None:
    envelope = Envelope("balance", "balance", 0, "app", LARGEST)

    _, value, headers = envelope.of(DeadLetter(1, 2, b"k", b"v" * 2_000, "cause", "d" * 100))

    assert (value, dict(headers)["dead-letter-value-bytes"]) == (None, b"2000")
