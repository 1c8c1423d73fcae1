"""What two batches mean together: the same as one after the other, or nothing is said."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balance_service.model.folds import Combine
from balance_service.spark.combine import PartitionUpdates
from tests.unit.spark.decoded import combined, row

if TYPE_CHECKING:
    from collections.abc import Sequence

SUM = {"amount": Combine.SUM}
WIDEST = pa.decimal128(38, 2)
Event = tuple[bytes, Decimal]


def part(events: Sequence[Event], combine: Any = SUM, start: int = 0, **noted: Any) -> PartitionUpdates:
    rows = [row(start + n, key, amount, **noted) for n, (key, amount) in enumerate(events)]
    return combined(rows, combine, WIDEST)


def amounts(updates: PartitionUpdates) -> dict[bytes, Decimal]:
    return {u.key: u.update["amount"] for some in updates.updates for u in some.take([*range(len(some.keys))])}


def event(amount: str, key: bytes = b"a") -> Event:
    return key, Decimal(amount)


def test_two_batches_come_to_the_sums_of_both() -> None:
    both = part([event("1.00"), event("2.00", b"b")]).and_then(part([event("0.10"), event("5.00", b"c")], start=2), SUM)

    assert both is not None
    assert amounts(both) == {b"a": Decimal("1.10"), b"b": Decimal("2.00"), b"c": Decimal("5.00")}
    assert (both.applied, both.keys) == (4, 3)


def test_a_batch_without_updates_leaves_the_other_as_it_is() -> None:
    one = part([event("1.00")])

    for both in (one.and_then(PartitionUpdates(), SUM), PartitionUpdates().and_then(one, SUM)):
        assert both is not None
        assert amounts(both) == {b"a": Decimal("1.00")}
        assert both.applied == 1


def test_dead_letters_and_ignored_records_of_both_are_kept() -> None:
    dead = {"timestamp": 5, "record_key": b"rk", "value": b"rv"}
    rows = [
        [row(0, None, cause="ignored"), row(1, None, cause="frame-missing", **dead), row(2, b"a", Decimal(1))],
        [row(3, None, cause="key-null", **dead), row(4, None, cause="ignored")],
    ]
    first, second = (combined(some, SUM) for some in rows)

    both = first.and_then(second, SUM)

    assert both is not None
    assert [letter.offset for letter in both.dead_letters] == [1, 3]
    assert (both.applied, both.ignored, amounts(both)) == (1, 2, {b"a": Decimal(1)})


@pytest.mark.parametrize(
    ("first", "second", "combine"),
    [
        ([event("5.00")], [event("-1.00")], SUM),
        ([event("5.00")], [event("-1.00", b"b")], SUM),
        ([event("5.00"), event("-1.00")], [event("1.00")], SUM),
        ([event("6" + "0" * 35)], [event("6" + "0" * 35)], SUM),
        ([event("5.00")], [event("1.00")], {"amount": Combine.LAST}),
        ([event("5.00")], [event("1.00")], None),
    ],
    ids=["another sign", "another sign elsewhere", "a key of both signs", "could overflow", "last", "not combined"],
)
def test_what_depends_on_the_order_of_events_is_committed_batch_by_batch(
    first: list[Event], second: list[Event], combine: Any
) -> None:
    assert part(first, combine).and_then(part(second, combine), combine) is None


def test_events_that_count_once_are_committed_batch_by_batch() -> None:
    once: dict[str, Any] = {"idempotency_key": b"i", "timestamp": 9, "record_key": b"a", "value": b"frame"}

    assert part([event("1.00")], **once).and_then(part([event("1.00")], start=1), SUM) is None
    assert part([event("1.00")]).and_then(part([event("1.00")], start=1, **once), SUM) is None


def test_maxima_are_gathered_whatever_their_sign() -> None:
    greatest = {"amount": Combine.MAX}

    both = part([event("5.00"), event("-7.00", b"b")], greatest).and_then(
        part([event("-1.00"), event("-2.00", b"b")], greatest), greatest
    )

    assert both is not None
    assert amounts(both) == {b"a": Decimal("5.00"), b"b": Decimal("-2.00")}


def test_what_dead_letters_take_is_known() -> None:
    dead = {"cause": "frame-missing", "timestamp": 5, "record_key": b"k" * 10, "value": b"v" * 1000}

    one, two = (combined([row(n, None, **dead) for n in range(rows)], SUM) for rows in (1, 2))

    assert 1010 < one.letter_bytes < 2010
    assert two.letter_bytes == 2 * one.letter_bytes


KEYS = st.sampled_from([b"a", b"b", "é".encode(), b"c" * 256])
BATCHES = st.lists(
    st.lists(st.tuples(KEYS, st.integers(-(10**18), 10**18).map(lambda n: Decimal(n).scaleb(-2))), max_size=8),
    max_size=6,
)


@given(BATCHES)
def test_what_is_gathered_is_the_sum_of_every_key(batches: list[list[Event]]) -> None:
    committed: dict[bytes, Decimal] = {}
    gathered = PartitionUpdates()

    def commit(updates: PartitionUpdates) -> None:
        for key, amount in amounts(updates).items():
            committed[key] = committed.get(key, Decimal(0)) + amount
        for single in updates.events:
            committed[single.key] = committed.get(single.key, Decimal(0)) + single.update["amount"]

    applied = 0
    for events in batches:
        later = part(events)
        both = gathered.and_then(later, SUM)
        if both is None:
            commit(gathered)
            applied += gathered.applied
        gathered = both or later
    commit(gathered)

    expected: dict[bytes, Decimal] = {}
    for key, amount in (event for events in batches for event in events):
        expected[key] = expected.get(key, Decimal(0)) + amount
    assert committed == expected
    assert applied + gathered.applied == sum(map(len, batches))
