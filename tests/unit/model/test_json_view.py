"""Views as JSON: all digits of a number, and all Avro types."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balance_service.model.json_view import exact_json, parsed_json


@pytest.mark.parametrize(
    ("value", "digits"),
    [("0.00", "0.00"), ("1E+3", "1000"), ("1E-7", "0.0000001"), ("-0.50", "-0.50"), ("9" * 40, "9" * 40)],
)
def test_a_decimal_is_written_with_all_its_digits(value: str, digits: str) -> None:
    assert exact_json({"amount": Decimal(value)}) == f'{{"amount":{digits}}}'


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (5, "5"),
        (2**63, "9223372036854775808"),
        (0.1, "0.1"),
        (float("nan"), '"nan"'),
        (float("-inf"), '"-inf"'),
        ('Zoë "Z"\n', '"Zoë \\"Z\\"\\n"'),
        (b"\x00\xff", '"AP8="'),
        (datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), '"2026-01-02T03:04:05.000Z"'),
        (datetime(2026, 1, 2, 3, 4, 5, 678_901, tzinfo=UTC), '"2026-01-02T03:04:05.678901Z"'),
        (datetime(2026, 1, 2, 3, tzinfo=timezone(timedelta(hours=2))), '"2026-01-02T01:00:00.000Z"'),
        (datetime(1, 1, 1, tzinfo=UTC), '"0001-01-01T00:00:00.000Z"'),
        (datetime(2026, 1, 2, 3, 4), '"2026-01-02T03:04:00.000"'),  # noqa: DTZ001
        (date(2026, 1, 2), '"2026-01-02"'),
        (time(3, 4, 5), '"03:04:05.000"'),
        ({}, "{}"),
        ([{"a": [Decimal("1.50")]}, None], '[{"a":[1.50]},null]'),
    ],
    ids=repr,
)
def test_every_type_has_a_json_form(value: Any, text: str) -> None:
    assert exact_json(value) == text
    json.loads(text)


def test_the_error_for_a_value_without_json_form_names_it() -> None:
    with pytest.raises(TypeError, match="of type object"):
        exact_json({"a": object()})


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda v: st.lists(v) | st.dictionaries(st.text(), v)
    )
)
def test_written_values_are_read_back(value: Any) -> None:
    assert json.loads(exact_json(value)) == value


_NUMBERS = st.decimals(allow_nan=False, allow_infinity=False, places=4) | st.floats() | st.integers()


@given(
    st.recursive(
        _NUMBERS | st.text() | st.none() | st.booleans(), lambda of: st.lists(of) | st.dictionaries(st.text(), of)
    )
)
def test_what_is_parsed_is_written_as_it_was(value: Any) -> None:
    text = exact_json(value)

    assert exact_json(parsed_json(text)) == text
