"""A dead letter's status and due time after each attempt."""

from __future__ import annotations

import pytest

from balance_service.engine.dead_letter import GONE, Letter, Status, is_final

UNKNOWN = "schema-id-unknown"
EVERY_MS = 300_000


@pytest.mark.shows("retried-once")
def test_waits_between_attempts_double_up_to_a_maximum_until_the_dead_letter_is_parked() -> None:
    letter = Letter.first(42, UNKNOWN, b"k", 0, EVERY_MS)
    waits = []
    while letter.status is Status.SCHEDULED:
        waits.append(letter.due_ms // EVERY_MS)
        letter = letter.failed_again(UNKNOWN, 0, EVERY_MS)

    assert waits == [1, 2, 4, 8, 16, 32, 64, 72, 72, 72]
    assert (letter.status, letter.attempt, letter.due_ms) == (Status.PARKED, 10, -1)


def test_a_dead_letter_has_the_detail_of_the_last_attempt() -> None:
    first = Letter.first(42, "field-null", b"k", 0, EVERY_MS, "the first")
    again = first.failed_again("field-null", 0, EVERY_MS, "the second")

    details = [Letter.of(letter.record(), offset=42).detail for letter in (first, again)]

    assert details == ["the first", "the second"]


@pytest.mark.parametrize("cause", ["balance-overflow", "schema-incompatible", "field-null", "of-a-model", GONE])
def test_a_permanent_cause_waits_for_an_operator(cause: str) -> None:
    letter = Letter.first(42, cause, b"k", 0, EVERY_MS)

    assert (letter.status, letter.due_ms) == (Status.WAITING, -1)


@pytest.mark.parametrize(
    ("cause", "expected"),
    [
        ("key-null", True),
        ("key-is-not-customer-id", True),
        ("customer-id-malformed", True),
        (UNKNOWN, False),
        ("of-a-model", False),
    ],
)
def test_a_malformed_record_has_a_final_cause(cause: str, expected: bool) -> None:
    assert is_final(cause) is expected


def test_a_closed_dead_letter_that_fails_in_a_replay_takes_the_key_and_the_cause_of_its_record() -> None:
    known_by_its_decision = Letter.first(5, "redriven", None, 0, EVERY_MS).closed(Status.APPLIED, 1)

    again = known_by_its_decision.failed_in_replay(UNKNOWN, b"k", 9)

    assert (again.status, again.cause, again.key, again.due_ms) == (Status.SCHEDULED, UNKNOWN, b"k", 9)
    assert again.blocks_key


@pytest.mark.parametrize(("size", "is_kept"), [(64 << 10, True), ((64 << 10) + 1, False)])
def test_a_key_longer_than_64_kib_is_not_kept(size: int, is_kept: bool) -> None:
    key = b"k" * size

    kept = [Letter.first(0, "key-null", key, 0, EVERY_MS).key, Letter.retry(0, key, 0, 0, 0, EVERY_MS).key]

    assert kept == [key if is_kept else None] * 2
