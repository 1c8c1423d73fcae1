"""A read model whose key has several columns, in the test driver and by the contract."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from balance_service.errors import InvalidInputError
from balance_service.testing import Driver
from balance_service.testing.contract import CONTRACT, Check
from balance_service.testing.strategies import batches
from tests.support.composite import Purchase, Spent, SpentPerDay

READ_MODEL = SpentPerDay()


def test_each_combination_of_columns_has_a_state_of_its_own() -> None:
    with Driver(READ_MODEL) as driver:
        driver.given(Purchase("a", 1, 10), Purchase("a", 1, 5), Purchase("a", 2, 7), Purchase("ab", 1, 3))

        assert driver.view({"card": "a", "day": 1}) == {"total": 15, "purchases": 2}
        assert driver.view("card=a&day=2") == {"total": 7, "purchases": 1}
        assert driver.view({"card": "ab", "day": 1}, into=Spent) == Spent("ab", 1, 3, 1)
        assert driver.view({"card": "b", "day": 1}) is None
        driver.redeliver().restart().rebuild().then({"total": 3, "purchases": 1})


def test_states_have_the_columns_of_their_key() -> None:
    with Driver(READ_MODEL) as driver:
        driver.given(Purchase("a", -1, 10))

        (state,) = [driver.state_codec.decode(frame) for frame in driver.states().values()]

    assert state == {"card": "a", "day": -1, "total": 10, "purchases": 1}
    assert READ_MODEL.field_types == {"total": "long", "purchases": "long"}
    assert READ_MODEL.description()["key"] == ("card", "day")


def test_an_event_whose_columns_are_no_key_is_a_dead_letter() -> None:
    purchases = [
        Purchase(None, 1, 1),
        Purchase("", 1, 1),
        Purchase("line\nbreak", 1, 1),
        Purchase("c" * 246, 1, 1),
        Purchase("c" * 247, 1, 1),
    ]
    with Driver(READ_MODEL) as driver:
        driver.given(*purchases)

        assert [one.cause for one in driver.dead_letters()] == [
            "field-null",
            "card-day-malformed",
            "card-day-malformed",
            "card-day-malformed",
        ]
        assert [one.detail for one in driver.dead_letters()] == [
            "card or day is null",
            "card or day is not UTF-8, or they have more than 256 bytes",
            "card must have 1 to 256 bytes of UTF-8",
            "card must not contain control characters",
        ]
        assert len(driver.states()) == 1


def test_a_key_that_is_none_is_refused() -> None:
    with Driver(READ_MODEL) as driver, pytest.raises(InvalidInputError, match="of the form card=…&day=…"):
        driver.view("a")


def test_a_wrong_answer_is_told_with_the_key() -> None:
    with Driver(READ_MODEL) as driver, pytest.raises(AssertionError, match="a query for 'card=a%26&day=1' answers"):
        driver.when(Purchase("a&", 1, 10)).then({"total": 11, "purchases": 1})


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_model_with_a_composite_key_keeps_the_contract(check: Check, data: st.DataObject) -> None:
    check(READ_MODEL, data.draw(batches(READ_MODEL)))


def test_the_stage_that_re_keys_is_named_by_all_columns() -> None:
    first, last = READ_MODEL.stages

    assert (first.name, first.by) == ("spent-per-day-by-card-day", ("card", "day"))
    assert (last.name, last.key) == ("spent-per-day", ("card", "day"))
