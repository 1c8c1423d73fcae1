"""The fold of `Balance`: exact, in any order and combination."""

from __future__ import annotations

import decimal
from decimal import Decimal
from functools import reduce
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balance_service.errors import PoisonRecordError
from balance_service.read_models.balance import Balance

if TYPE_CHECKING:
    from collections.abc import Iterable

    from balance_service.model.events import State

BALANCE = Balance()
LARGEST = Decimal("9" * 36 + ".99")
AMOUNTS = st.integers(-(10**18) + 1, 10**18 - 1).map(lambda cents: Decimal(cents).scaleb(-2))


def cents(amount: Decimal) -> int:
    """Converts a decimal to cents with integers only."""
    sign, digits, exponent = amount.as_tuple()
    assert isinstance(exponent, int)
    whole = int("".join(map(str, digits)))
    assert exponent >= -2
    return (-1 if sign else 1) * whole * int(10 ** (exponent + 2))


def fold(state: State | None, amount: Decimal, key: bytes = b"c1") -> State:
    after = BALANCE.next_state(state, key, {"amount": amount})
    assert after is not None
    return after


def folded(amounts: Iterable[Decimal | str]) -> Decimal:
    state: State | None = None
    for amount in amounts:
        state = fold(state, Decimal(amount))
    assert state is not None
    result = state["amount"]
    assert isinstance(result, Decimal)
    return result


def test_the_first_event_makes_the_state_of_its_customer() -> None:
    assert fold(None, Decimal("12.34"), "Zoë".encode()) == {"customerId": "Zoë", "amount": Decimal("12.34")}


def test_a_later_event_keeps_the_customer_and_adds_the_amount() -> None:
    state = {"customerId": "c1", "amount": Decimal("1.00")}

    assert fold(state, Decimal("2.50")) == {"customerId": "c1", "amount": Decimal("3.50")}


def test_the_fold_does_not_change_the_given_state() -> None:
    state = {"customerId": "c1", "amount": Decimal("1.00")}

    fold(state, Decimal("2.50"))

    assert state == {"customerId": "c1", "amount": Decimal("1.00")}


def test_a_tenth_and_two_tenths_are_three_tenths() -> None:
    assert folded(["0.10", "0.20"]) == Decimal("0.30")


def test_amounts_of_sixteen_digits_keep_every_cent() -> None:
    assert folded(["9999999999999999.99", "0.01"]) == Decimal("10000000000000000.00")
    assert folded(["9999999999999999.99", "9999999999999999.98"]) == Decimal("19999999999999999.97")


def test_sums_beyond_ten_to_the_twenty_keep_every_cent() -> None:
    state = {"customerId": "c1", "amount": Decimal("123456789012345678901234567890.12")}

    assert str(fold(state, Decimal("0.01"))["amount"]) == "123456789012345678901234567890.13"


def test_negative_and_zero_amounts_are_added() -> None:
    assert folded(["-5.00"]) == Decimal("-5.00")
    assert folded(["0.00"]) == Decimal("0.00")
    assert folded(["10.00", "-12.50", "0.00"]) == Decimal("-2.50")


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_balance_of_38_digits_is_kept(sign: int) -> None:
    largest, cent = LARGEST.copy_sign(Decimal(sign)), Decimal("0.01").copy_sign(Decimal(sign))
    almost = {"customerId": "c1", "amount": Decimal("9" * 36 + ".98").copy_sign(Decimal(sign))}

    assert fold(None, largest)["amount"] == largest
    assert fold(almost, cent)["amount"] == largest


@pytest.mark.parametrize("sign", [1, -1])
def test_a_balance_beyond_38_digits_is_an_overflow(sign: int) -> None:
    state = {"customerId": "c1", "amount": LARGEST.copy_sign(Decimal(sign))}

    with pytest.raises(PoisonRecordError) as caught:
        fold(state, Decimal("0.01").copy_sign(Decimal(sign)))

    assert caught.value.cause == "balance-overflow"


def test_a_first_amount_beyond_38_digits_is_an_overflow() -> None:
    with pytest.raises(PoisonRecordError) as caught:
        fold(None, Decimal("1" + "0" * 36))

    assert caught.value.cause == "balance-overflow"


def test_an_overflow_does_not_block_later_events() -> None:
    state: State = {"customerId": "c1", "amount": LARGEST}
    with pytest.raises(PoisonRecordError):
        fold(state, Decimal("0.01"))

    assert str(fold(state, Decimal("-1.00"))["amount"]) == "9" * 35 + "8.99"


def test_the_view_has_only_the_amount() -> None:
    assert BALANCE.view({"customerId": "c1", "amount": Decimal("1.50")}) == {"amount": Decimal("1.50")}


@pytest.mark.shows("exact")
@given(st.lists(AMOUNTS, min_size=1, max_size=20))
def test_a_balance_is_the_integer_sum_of_all_cents(amounts: list[Decimal]) -> None:
    assert cents(folded(amounts)) == sum(map(cents, amounts))


@given(st.lists(AMOUNTS, min_size=1, max_size=20).flatmap(lambda a: st.tuples(st.just(a), st.permutations(a))))
def test_the_order_of_events_does_not_change_the_balance(orders: tuple[list[Decimal], list[Decimal]]) -> None:
    one, other = orders

    assert folded(one) == folded(other)


@given(st.lists(st.lists(AMOUNTS, min_size=1, max_size=5), min_size=1, max_size=5))
def test_combined_and_single_updates_fold_to_the_same_balance(batches: list[list[Decimal]]) -> None:
    exact = decimal.Context(prec=60, traps=[decimal.Inexact])
    combined = [reduce(exact.add, batch) for batch in batches]

    assert folded(combined) == folded(amount for batch in batches for amount in batch)


@given(st.integers(-(10**38) + 1, 10**38 - 1), st.integers(-(10**38) + 1, 10**38 - 1))
def test_a_sum_is_exact_or_an_overflow(before: int, added: int) -> None:
    def amount(number: int) -> Decimal:
        return Decimal((number < 0, tuple(map(int, str(abs(number)))), -2))

    state = {"customerId": "c1", "amount": amount(before)}
    if abs(before + added) < 10**38:
        assert cents(fold(state, amount(added))["amount"]) == before + added
    else:
        with pytest.raises(PoisonRecordError):
            fold(state, amount(added))


@pytest.mark.parametrize(
    "context",
    [
        decimal.Context(prec=3),
        decimal.Context(prec=3, traps=[decimal.Inexact, decimal.Rounded]),
        decimal.Context(prec=2, rounding=decimal.ROUND_UP, Emax=5, Emin=-5),
    ],
)
def test_the_callers_decimal_context_has_no_effect(context: decimal.Context) -> None:
    with decimal.localcontext(context):
        assert str(folded(["9999999999999999.99", "0.01"])) == "10000000000000000.00"
        assert str(folded([LARGEST])) == str(LARGEST)
        with pytest.raises(PoisonRecordError):
            folded([LARGEST, "0.01"])
