"""Micro-batches gathered for one commit: what they come to together is what they come to one after the other."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balance_service.events.combine import PartitionUpdates, by_partition
from balance_service.events.gathering import Gathered
from balance_service.read_models.read_model import Combine
from tests.unit.decoded import row, table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SUM = {"amount": Combine.SUM}
WIDEST = pa.decimal128(38, 2)
Event = tuple[bytes, Decimal]


def part(events: Sequence[Event], combine: Any = SUM, start: int = 0, **noted: Any) -> PartitionUpdates:
    rows = [row(start + n, key, amount, **noted) for n, (key, amount) in enumerate(events)]
    return by_partition(table(rows, WIDEST))[0].combined(combine) if rows else PartitionUpdates()


def amounts(updates: PartitionUpdates) -> dict[bytes, Decimal]:
    return {u.key: u.update["amount"] for some in updates.updates for u in some.take([*range(len(some.keys))])}


def batch(start: int, end: int, events: Sequence[Event] = (), **changed: Any) -> Gathered:
    parts: Mapping[int, PartitionUpdates] = {0: part(events)} if events else {}
    return Gathered(
        **{"starts": {0: start}, "ends": {0: end}, "parts": parts, "waiting": {}, "traceparents": {}, "rows": {}}
        | changed,
        began=0.0,
    )


def event(amount: str, key: bytes = b"a") -> Event:
    return key, Decimal(amount)


def test_two_batches_come_to_the_sums_of_both() -> None:
    both = batch(0, 2, [event("1.00"), event("2.00", b"b")]).and_then(
        batch(2, 4, [event("0.10"), event("5.00", b"c")]), SUM
    )

    assert both is not None
    assert (both.starts, both.ends, both.batches) == ({0: 0}, {0: 4}, 2)
    assert amounts(both.parts[0]) == {b"a": Decimal("1.10"), b"b": Decimal("2.00"), b"c": Decimal("5.00")}
    assert both.parts[0].applied == 4


def test_a_partition_without_records_in_one_of_them_keeps_those_of_the_other() -> None:
    one = batch(0, 1, [event("1.00")], starts={0: 0, 1: 5}, ends={0: 1, 1: 5})
    other = Gathered({0: 1, 1: 5}, {0: 1, 1: 6}, {1: part([event("2.00", b"b")])}, {}, {}, {}, 0.0)

    both = one.and_then(other, SUM)

    assert both is not None
    assert {p: amounts(updates) for p, updates in both.parts.items()} == {
        0: {b"a": Decimal("1.00")},
        1: {b"b": Decimal("2.00")},
    }
    assert both.ends == {0: 1, 1: 6}


def test_dead_letters_and_ignored_records_of_both_are_kept() -> None:
    dead = {"timestamp": 5, "record_key": b"rk", "value": b"rv"}
    rows = [
        [row(0, None, cause="ignored"), row(1, None, cause="frame-missing", **dead), row(2, b"a", Decimal(1))],
        [row(3, None, cause="key-null", **dead), row(4, None, cause="ignored")],
    ]
    first, second = (by_partition(table(some))[0].combined(SUM) for some in rows)

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
        ([event("9" * 36 + ".99")], [event("1.00")], SUM),
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


def test_a_partition_that_has_to_wait_is_gathered_with_nothing() -> None:
    waiting = batch(0, 1, waiting={0: "the registry is down"})

    assert batch(0, 1).and_then(waiting, SUM) is None
    assert waiting.and_then(batch(1, 2), SUM) is None
    assert not waiting.may_grow(1)


def test_only_a_full_batch_waits_for_the_next() -> None:
    assert batch(0, 100).may_grow(100)
    assert batch(0, 99).may_grow(100)
    assert not batch(0, 50).may_grow(100)


def test_a_full_batch_that_could_not_be_gathered_does_not_wait() -> None:
    assert not batch(0, 2, [event("1.00"), event("-1.00")]).may_grow(2)


def test_a_topic_full_of_garbage_is_not_gathered() -> None:
    dead = {"cause": "frame-missing", "timestamp": 5, "record_key": b"rk", "value": b"rv"}
    part_of_garbage = by_partition(table([row(n, None, **dead) for n in range(10_000)]))[0].combined(SUM)

    assert not batch(0, 10_000, parts={0: part_of_garbage}).may_grow(10_000)


def test_so_many_batches_are_gathered_and_no_more() -> None:
    gathered = batch(0, 100)
    while gathered.may_grow(100):
        following = gathered.and_then(batch(gathered.ends[0], gathered.ends[0] + 100), SUM)
        assert following is not None
        gathered = following

    assert gathered.batches == 8


def test_a_batch_that_is_not_full_ends_the_gathering() -> None:
    both = batch(0, 100).and_then(batch(100, 120), SUM)

    assert both is not None
    assert not both.may_grow(100)


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
