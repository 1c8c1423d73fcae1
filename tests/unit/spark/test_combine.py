"""Combination of a batch in Arrow: it equals folding event by event, and classifies every row."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balance_service.engine.batch import KeyedUpdate, PartitionUpdates, updates_in
from balance_service.engine.records import DeadLetter
from balance_service.errors import PoisonRecordError
from balance_service.model.record_folds import IGNORED
from balance_service.model.standard_fold import Combine
from balance_service.read_models.balance import Balance
from balance_service.spark.combine import UNRESOLVED, PartitionRows, end_of, merged
from tests.unit.spark.decoded import MONEY, row, table
from tests.unit.spark.decoded import combined as combined_by

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

SUM = {"amount": Combine.SUM}
WIDEST = pa.decimal128(38, 2)
BALANCE = Balance()
Event = tuple[bytes, Decimal]


def dead(offset: int, cause: str = "frame-missing", **changed: Any) -> dict[str, Any]:
    return row(offset, None, cause=cause, timestamp=5, record_key=b"rk", value=b"rv", **changed)


def combined(rows: Iterable[Mapping[str, Any]], combine: Any = SUM, amount: pa.DataType = MONEY) -> PartitionUpdates:
    return combined_by(rows, combine, amount)


def every(part: PartitionUpdates) -> list[KeyedUpdate]:
    combined = [update for some in part.slices() for update in updates_in(some, [*range(some.num_rows)])]
    return [*combined, *part.events]


def amounts(part: PartitionUpdates) -> dict[bytes, Any]:
    keys = [keyed.key for keyed in every(part)]
    assert len(keys) == len(set(keys)), "a key occurs twice"
    return {keyed.key: keyed.update["amount"] for keyed in every(part)}


def test_the_updates_of_a_key_combine_into_one() -> None:
    part = combined(
        [row(0, b"a", Decimal("0.10")), row(1, b"b", Decimal("5.00")), row(2, b"a", Decimal("0.20"))],
    )

    assert amounts(part) == {b"a": Decimal("0.30"), b"b": Decimal("5.00")}
    assert part.applied == 3


def test_an_update_has_only_update_columns() -> None:
    part = combined([row(0, b"a", Decimal("0.10"))])

    assert every(part) == [KeyedUpdate(b"a", {"amount": Decimal("0.10")})]


def test_negative_and_zero_amounts_are_summed() -> None:
    part = combined([row(0, b"a", Decimal("-5.00")), row(1, b"a", Decimal("0.00")), row(2, b"a", Decimal("-2.50"))])

    assert amounts(part) == {b"a": Decimal("-7.50")}


def test_amounts_of_both_signs_stay_single_because_their_sum_could_hide_an_overflow() -> None:
    part = combined(
        [row(2, b"a", Decimal(-3)), row(0, b"b", Decimal(1)), row(1, b"a", Decimal(2)), row(3, b"b", Decimal(1))]
    )

    updates = [(keyed.key, keyed.update["amount"]) for keyed in every(part)]
    assert updates == [(b"b", Decimal(2)), (b"a", Decimal(2)), (b"a", Decimal(-3))]


def test_combined_updates_are_returned_in_slices() -> None:
    keys = pa.array([b"%06d" % n for n in range(45_000)])
    slices = PartitionUpdates(9, pa.table({"key": keys, "amount": pa.array(range(45_000))})).slices()

    assert [some.num_rows for some in slices] == [20_000, 20_000, 5_000]
    assert pa.concat_arrays([some["key"] for some in slices]) == keys


def test_a_sum_may_be_wider_than_its_amounts() -> None:
    largest = Decimal("9999999999999999.99")

    part = combined([row(n, b"a", largest) for n in range(1000)])

    assert amounts(part) == {b"a": Decimal("9999999999999999990.00")}


@pytest.mark.parametrize("combine", [SUM, {"amount": Combine.LAST}, None])
def test_ignored_records_make_no_updates(combine: Mapping[str, Combine] | None) -> None:
    part = combined([row(0, None, cause=IGNORED), row(1, None, cause=IGNORED)], combine)

    assert (every(part), part.applied, part.ignored, part.dead_letters) == ([], 0, {"": 2}, [])


def test_records_of_other_types_are_counted_by_type() -> None:
    names = ["a.B", None, "a.C", "a.B"]

    part = combined([row(n, None, cause=IGNORED, record=name) for n, name in enumerate(names)], SUM)

    assert part.ignored == {"a.B": 2, "": 1, "a.C": 1}


def test_every_row_is_an_update_or_ignored_or_a_dead_letter() -> None:
    part = combined(
        [
            row(0, b"a", Decimal(1)),
            row(1, None, cause=IGNORED),
            dead(4, UNRESOLVED),
            dead(5, UNRESOLVED, schema_id=1),
            row(6, b"a", Decimal(1)),
            dead(7, "key-null"),
        ]
    )

    assert amounts(part) == {b"a": Decimal(2)}
    assert (part.applied, part.ignored) == (2, {"": 1})
    assert part.dead_letters == [
        DeadLetter(
            4,
            5,
            b"rk",
            b"rv",
            "schema-guid-unknown",
            "the registry does not know the schema that the header __value_schema_id names",
        ),
        DeadLetter(5, 5, b"rk", b"rv", "schema-id-unknown", "the registry does not know schema 1"),
        DeadLetter(7, 5, b"rk", b"rv", "key-null"),
    ]


def test_unresolved_records_are_returned_as_kafkas() -> None:
    headers = [{"key": "a", "value": b"1"}]
    rows = [
        row(0, b"a", Decimal(1)),
        dead(1),
        dead(2, UNRESOLVED, schema_id=9),
        dead(3, UNRESOLVED, headers=headers),
    ]

    records = PartitionRows(table(rows)).unresolved().to_pylist()

    common = {"timestamp": datetime.fromtimestamp(0.005, UTC), "key": b"rk", "value": b"rv"}
    assert records == [
        {"offset": 2, **common, "headers": None, "schema_id": 9},
        {"offset": 3, **common, "headers": headers, "schema_id": None},
    ]
    assert not PartitionRows(table(rows[:2])).unresolved().num_rows


def test_a_dead_letter_keeps_a_null_key_and_a_null_value() -> None:
    part = combined([row(3, None, cause="value-null", timestamp=9)])

    assert part.dead_letters == [DeadLetter(3, 9, None, None, "value-null")]


def test_updates_that_do_not_combine_stay_single_in_offset_order() -> None:
    part = combined([row(2, b"a", Decimal(3)), row(0, b"a", Decimal(1)), row(1, b"b", Decimal(2))], None)

    assert [(keyed.key, keyed.update["amount"]) for keyed in every(part)] == [
        (b"a", Decimal(1)),
        (b"b", Decimal(2)),
        (b"a", Decimal(3)),
    ]


def test_last_is_the_value_with_the_highest_offset_in_any_order_of_rows() -> None:
    part = combined(
        [
            row(2, b"a", Decimal(3)),
            row(9, b"b", Decimal(9)),
            row(0, b"a", Decimal(1)),
            row(1, b"b", Decimal(2)),
        ],
        {"amount": Combine.LAST},
    )

    assert amounts(part) == {b"a": Decimal(3), b"b": Decimal(9)}


def test_the_maximum_is_the_greatest() -> None:
    part = combined(
        [row(0, b"a", Decimal(-3)), row(1, b"a", Decimal(-1)), row(2, b"a", Decimal(-2))],
        {"amount": Combine.MAX},
    )

    assert amounts(part) == {b"a": Decimal(-1)}


def test_each_column_combines_in_its_own_way() -> None:
    rows = [row(0, b"a", Decimal(3), seen=10, name="old"), row(1, b"a", Decimal(1), seen=20, name="new")]
    combine = {"amount": Combine.SUM, "seen": Combine.MAX, "name": Combine.LAST}

    part = combined_by(rows, combine, seen=pa.int64(), name=pa.string())

    assert every(part) == [KeyedUpdate(b"a", {"amount": Decimal(4), "seen": 20, "name": "new"})]


def test_sums_that_could_overflow_arrows_decimal_stay_single_in_offset_order() -> None:
    huge = Decimal("9" * 36 + ".99")

    part = combined(
        [row(1, b"a", huge), row(0, b"a", Decimal("1.00")), row(2, b"b", huge.copy_negate())], amount=WIDEST
    )

    assert [(keyed.key, keyed.update["amount"]) for keyed in every(part)] == [
        (b"a", Decimal("1.00")),
        (b"a", huge),
        (b"b", huge.copy_negate()),
    ]
    assert part.applied == 3


@pytest.mark.parametrize("sign", [1, -1])
def test_a_sum_does_not_wrap_around_arrows_decimal(sign: int) -> None:
    half = Decimal("9" * 36 + ".99").copy_sign(sign)

    part = combined([row(n, b"a", half) for n in range(4)], amount=WIDEST)

    assert [keyed.update["amount"] for keyed in every(part)] == [half] * 4


def test_integers_whose_sum_could_wrap_around_stay_single() -> None:
    part = combined([row(0, b"a", 2**62), row(1, b"a", 2**62)], amount=pa.int64())

    assert [keyed.update["amount"] for keyed in every(part)] == [2**62, 2**62]


def test_small_integers_are_summed() -> None:
    assert amounts(combined([row(0, b"a", 2), row(1, b"a", 5)], amount=pa.int64())) == {b"a": 7}


def test_single_updates_of_some_keys_have_their_records_in_offset_order() -> None:
    rows = PartitionRows(table([row(5, b"a", Decimal(2)), row(4, b"a", Decimal(1)), row(7, b"b", Decimal(4)), dead(8)]))
    records = {offset: DeadLetter(offset, 9, b"r", b"v%d" % offset, "") for offset in range(9)}

    assert rows.single_updates(rows.updates_of([b"a", b"c"]), records) == [
        KeyedUpdate(b"a", {"amount": Decimal(1)}, records[4], offset=4),
        KeyedUpdate(b"a", {"amount": Decimal(2)}, records[5], offset=5),
    ]


def test_an_event_that_is_read_again_keeps_its_idempotency_key() -> None:
    once = {"idempotency_key": b"i", "timestamp": 9, "record_key": b"a", "value": b"frame"}
    rows = PartitionRows(table([row(4, b"a", Decimal(1), **once)]))
    read_again = DeadLetter(4, 9, b"a", b"whole frame", "")

    assert rows.single_updates(rows.updates, {4: read_again}) == [
        KeyedUpdate(b"a", {"amount": Decimal(1)}, read_again, b"i", 4),
    ]


@pytest.mark.parametrize(("rows", "is_combined"), [(2, False), (1000, True)])
def test_a_few_events_stay_single_and_more_are_combined(rows: int, is_combined: bool) -> None:
    part = PartitionRows(table(row(n, b"a", Decimal(1)) for n in range(rows))).combined(SUM)

    assert len(every(part)) == (1 if is_combined else rows)
    assert sum(keyed.update["amount"] for keyed in every(part)) == part.applied == rows


def test_a_batch_ends_after_its_last_row_of_any_kind() -> None:
    assert end_of(table([row(3, b"a", Decimal(1)), row(7, b"b", Decimal(1))])) == 8
    assert end_of(table([row(3, b"a", Decimal(1)), row(9, None, cause=IGNORED)])) == 10


def test_the_events_of_a_key_stay_single_if_one_has_an_idempotency_key() -> None:
    once = {"idempotency_key": b"i", "timestamp": 9, "record_key": b"a", "value": b"frame"}

    part = combined(
        [row(0, b"a", Decimal(1)), row(1, b"b", Decimal(5)), row(2, b"a", Decimal(2), **once), row(3, b"b", Decimal(5))]
    )

    assert every(part) == [
        KeyedUpdate(b"b", {"amount": Decimal(10)}),
        KeyedUpdate(b"a", {"amount": Decimal(1)}, offset=0),
        KeyedUpdate(b"a", {"amount": Decimal(2)}, DeadLetter(2, 9, b"a", b"frame", ""), b"i", 2),
    ]
    assert part.applied == 4


def cents(number: int) -> Decimal:
    return Decimal((number < 0, tuple(map(int, str(abs(number)))), -2))


def folded(updates: Iterable[tuple[bytes, Decimal]]) -> dict[bytes, Decimal | str]:
    """Returns the balances by key, or that a key has overflowed."""
    states: dict[bytes, Any] = {}
    outcome: dict[bytes, Decimal | str] = {}
    for key, amount in updates:
        try:
            states[key] = BALANCE.next_state(states.get(key), key, {"amount": amount})
            outcome.setdefault(key, "")
        except PoisonRecordError as error:
            outcome[key] = error.cause
    return {key: outcome[key] or states[key]["amount"] for key in outcome}


KEYS = st.sampled_from([b"a", b"b", "é".encode(), b"c" * 256])


@given(st.lists(st.tuples(KEYS, st.integers(-(10**18) + 1, 10**18 - 1).map(cents)), max_size=40))
def test_combined_updates_fold_to_the_same_states_as_single_ones(updates: list[tuple[bytes, Decimal]]) -> None:
    part = combined([row(n, key, amount) for n, (key, amount) in enumerate(updates)])

    assert folded((keyed.key, keyed.update["amount"]) for keyed in every(part)) == folded(updates)
    assert part.applied == len(updates)


@given(st.lists(st.tuples(KEYS, st.integers(0, 10**38 - 1).map(cents)), max_size=12))
def test_amounts_as_wide_as_a_balance_never_fold_to_a_wrapped_sum(
    updates: list[tuple[bytes, Decimal]],
) -> None:
    part = combined([row(n, key, amount) for n, (key, amount) in enumerate(updates)], amount=WIDEST)

    assert folded((keyed.key, keyed.update["amount"]) for keyed in every(part)) == folded(updates)


@given(st.lists(st.sampled_from([None, IGNORED, UNRESOLVED, "frame-missing", "key-null"]), max_size=40))
def test_every_row_counts_once(causes: list[str | None]) -> None:
    part = combined(
        row(offset, b"k", Decimal(1), cause=cause, timestamp=0, schema_id=1 if cause == UNRESOLVED else None)
        for offset, cause in enumerate(causes)
    )

    assert part.applied == causes.count(None)
    assert sum(part.ignored.values()) == causes.count(IGNORED)
    assert len(part.dead_letters) == sum(cause not in (None, IGNORED) for cause in causes)
    assert sum(keyed.update["amount"] for keyed in every(part)) == causes.count(None)


# --- merging of batches


def part(events: Sequence[Event], combine: Any = SUM, start: int = 0, **noted: Any) -> PartitionUpdates:
    rows = [row(start + n, key, amount, **noted) for n, (key, amount) in enumerate(events)]
    return combined(rows, combine, WIDEST)


def combined_amounts(updates: PartitionUpdates) -> dict[bytes, Decimal]:
    slices = updates.slices()
    return {u.key: u.update["amount"] for some in slices for u in updates_in(some, [*range(some.num_rows)])}


def event(amount: str, key: bytes = b"a") -> Event:
    return key, Decimal(amount)


def test_merged_batches_have_the_sums_of_both() -> None:
    both = merged(part([event("1.00"), event("2.00", b"b")]), part([event("0.10"), event("5.00", b"c")], start=2), SUM)

    assert both is not None
    assert combined_amounts(both) == {b"a": Decimal("1.10"), b"b": Decimal("2.00"), b"c": Decimal("5.00")}
    assert (both.applied, both.keys) == (4, 3)


def test_merging_a_batch_without_updates_changes_nothing() -> None:
    one = part([event("1.00")])

    for both in (merged(one, PartitionUpdates(1), SUM), merged(PartitionUpdates(0), one, SUM)):
        assert both is not None
        assert combined_amounts(both) == {b"a": Decimal("1.00")}
        assert both.applied == 1


def test_merging_keeps_dead_letters_and_ignored_records_of_both() -> None:
    dead = {"timestamp": 5, "record_key": b"rk", "value": b"rv"}
    rows = [
        [row(0, None, cause="ignored"), row(1, None, cause="frame-missing", **dead), row(2, b"a", Decimal(1))],
        [
            row(3, None, cause="key-null", **dead),
            row(4, None, cause="ignored"),
            row(5, None, cause="ignored", record="a.B"),
        ],
    ]
    first, second = (combined(some, SUM) for some in rows)

    both = merged(first, second, SUM)

    assert both is not None
    assert [letter.offset for letter in both.dead_letters] == [1, 3]
    assert (both.applied, both.ignored, combined_amounts(both)) == (1, {"": 2, "a.B": 1}, {b"a": Decimal(1)})


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
    ids=[
        "another sign",
        "another sign of another key",
        "a key of both signs",
        "could overflow",
        "last",
        "not combined",
    ],
)
def test_batches_whose_result_depends_on_their_order_are_not_merged(
    first: list[Event], second: list[Event], combine: Any
) -> None:
    assert merged(part(first, combine), part(second, combine), combine) is None


def test_batches_with_idempotency_keys_are_not_merged() -> None:
    once: dict[str, Any] = {"idempotency_key": b"i", "timestamp": 9, "record_key": b"a", "value": b"frame"}

    assert merged(part([event("1.00")], **once), part([event("1.00")], start=1), SUM) is None
    assert merged(part([event("1.00")]), part([event("1.00")], start=1, **once), SUM) is None


def test_maxima_of_any_sign_are_merged() -> None:
    greatest = {"amount": Combine.MAX}

    one = part([event("5.00"), event("-7.00", b"b")], greatest)
    both = merged(one, part([event("-1.00"), event("-2.00", b"b")], greatest), greatest)

    assert both is not None
    assert combined_amounts(both) == {b"a": Decimal("5.00"), b"b": Decimal("-2.00")}


KEYS = st.sampled_from([b"a", b"b", "é".encode(), b"c" * 256])
BATCHES = st.lists(
    st.lists(st.tuples(KEYS, st.integers(-(10**18), 10**18).map(lambda n: Decimal(n).scaleb(-2))), max_size=8),
    max_size=6,
)


@given(BATCHES)
def test_merged_and_separate_batches_have_the_same_sums(batches: list[list[Event]]) -> None:
    committed: dict[bytes, Decimal] = {}
    gathered = PartitionUpdates(0)

    def commit(updates: PartitionUpdates) -> None:
        for key, amount in combined_amounts(updates).items():
            committed[key] = committed.get(key, Decimal(0)) + amount
        for single in updates.events:
            committed[single.key] = committed.get(single.key, Decimal(0)) + single.update["amount"]

    applied = 0
    for events in batches:
        later = part(events)
        both = merged(gathered, later, SUM)
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
