"""Lists of dead letters on two instances: every letter once, however many, however large and however far apart."""

from __future__ import annotations

import base64
import itertools
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.http_api import assert_problem
from tests.e2e.letters import Unread, decide, get, letter, of_partition, pages, place, wait_for
from tests.support.service import PARTITIONS, application

if TYPE_CHECKING:
    from balance_service.devtools.local.stack import LocalInstance

    Pair = tuple[LocalInstance, LocalInstance]

_FAR_APART = 2_100


@pytest.fixture(scope="module")
def settings() -> dict[str, str]:
    return application()


def test_pages_have_every_letter_once_whatever_their_size(pair: Pair, unread: Unread) -> None:
    # No test before has letters of this cause.
    short = [unread.put(of_partition(number % PARTITIONS), b"\0") for number in range(11)]
    garbage = unread.put(of_partition(0), b"garbage")
    wait_for(pair[0], "waiting", *short, garbage)
    expected = sorted(short, key=place)
    assert decide(pair[0], "discard", *short[:3]).status_code == 202

    for instance, size in itertools.product(pair, (2, 7, 1000)):
        found = pages(instance, cause="frame-missing", limit=str(size))
        assert ids_of(found) == expected
        assert max(map(len, found)) <= size
        everything = ids_of(pages(instance, limit=str(size)))
        assert everything == sorted(set(everything), key=place)
        assert set(everything) >= {*expected, garbage}
        discarded = pages(instance, cause="frame-missing", status="discarded", model="balance", limit=str(size))
        assert ids_of(discarded) == sorted(short[:3], key=place)
    assert pages(pair[0], cause="frame-missing", status="scheduled") == [[]]


def test_a_page_ends_before_it_is_too_large_and_leaves_nothing_out(pair: Pair, unread: Unread) -> None:
    large = b"\1" * 450_000
    letters = [unread.put(of_partition(number % PARTITIONS), large) for number in range(6)]
    letters += [unread.put(of_partition(number % PARTITIONS), b"garbage") for number in range(4)]
    wait_for(pair[0], "waiting", *letters)

    for instance in pair:
        found = pages(instance, cause="magic-byte-unknown", status="waiting")
        assert ids_of(found) == sorted(set(ids_of(found)), key=place)
        assert set(ids_of(found)) >= set(letters)
        assert len(found) > PARTITIONS


@pytest.mark.parametrize(
    ("parameters", "status", "why"),
    [
        ({"model": "purchases"}, 404, "does not host a read model 'purchases'"),
        ({"status": "lost"}, 400, "status must be one of"),
        ({"limit": "0"}, 400, "limit must be a number from 1 to 1000"),
        ({"limit": "1001"}, 400, "limit must be a number from 1 to 1000"),
        ({"after": "balance"}, 400, "an id is stage/partition:offset"),
    ],
)
def test_what_cannot_be_listed_is_refused(pair: Pair, parameters: dict[str, str], status: int, why: str) -> None:
    for instance in pair:
        assert_problem(get(instance, **parameters), status, why)


def test_letters_far_apart_in_their_topic_are_listed_by_either_instance(pair: Pair, unread: Unread) -> None:
    customer = of_partition(0)
    event = unread.frame(customer, "0.01")
    letters = []
    for _ in range(20):
        for _ in range(_FAR_APART):
            unread.send(customer, event)
        letters.append(unread.put(customer, b"\0far"))
    wait_for(pair[0], "waiting", letters[-1])

    for instance in pair:
        assert set(ids_of(pages(instance, cause="frame-missing"))) >= set(letters)


def test_a_letter_about_a_large_record_is_shown_with_it_by_either_instance(pair: Pair, unread: Unread) -> None:
    large = b"\1" * 900_000
    letters = [unread.put(of_partition(partition), large) for partition in range(PARTITIONS)]

    for instance in pair:
        for one in letters:
            assert base64.b64decode(letter(instance, one)["valueBase64"]) == large
        assert set(ids_of(pages(instance, cause="magic-byte-unknown"))) >= set(letters)


def ids_of(found: list[list[dict[str, Any]]]) -> list[str]:
    return [one["id"] for page in found for one in page]
