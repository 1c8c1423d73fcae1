"""Which values a type of a state holds: each is read back exactly, or refused."""

from __future__ import annotations

import math
import re
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Annotated, Any, Dict, Optional  # noqa: UP035  (users write them)

import pytest

from balance_service.avro.codec import AvroCodec
from balance_service.errors import PoisonRecordError
from balance_service.model.converters import converter_of
from balance_service.model.value_types import scale
from balance_service.testing.fakes import FakeRegistry
from tests.unit.model.dataclass_states import (
    DATE,
    MICROS,
    MONEY,
    NOON,
    Level,
    Line,
    Money,
    Rank,
    Size,
    holding,
    schema_of_field,
    there_and_back,
)


@pytest.mark.parametrize(
    ("hint", "given_value", "read"),
    [
        (Money, Decimal(1), "1.00"),
        (Money, Decimal("1E+35"), "1" + "0" * 35 + ".00"),
        (Money, Decimal("9" * 36 + ".99"), "9" * 36 + ".99"),
        (Annotated[Decimal, scale(0)], Decimal("9" * 38), "9" * 38),
        (Annotated[Decimal, scale(38)], Decimal("0." + "9" * 38), "0." + "9" * 38),
        (Money | None, Decimal(-1), "-1.00"),
        (list[Money], [Decimal("1.5")], "['1.50']"),
    ],
)
def test_a_decimal_is_widened_exactly(hint: Any, given_value: Any, read: str) -> None:
    value = there_and_back(holding(hint)(given_value)).f

    assert str([*map(str, value)] if isinstance(value, list) else format(value, "f")) == read


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (float, 3),
        (float, math.inf),
        (str, Size.SMALL),
        (int, Rank.FIRST),
        (Size, Size.SMALL),
        (Rank | None, Rank.FIRST),
        (Dict[str, list[int | None]], {"a": [1, None], "": []}),  # noqa: UP006
        (list[bool], [True, False]),
        (list[list[float]], [[1, 0.5], []]),
        (datetime, datetime(2024, 1, 1, tzinfo=timezone(timedelta(hours=5, minutes=30)))),
        (datetime | None, datetime.max.replace(tzinfo=UTC)),
        (dict[str, str] | None, {"a": "b"}),
        (Annotated[int, "in grams"], 1),
        (Line | None, Line("a", Decimal("1.00"))),
    ],
)
def test_a_value_that_a_type_holds_exactly_is_read_back(hint: Any, value: Any) -> None:
    assert there_and_back(holding(hint)(value)).f == value


@pytest.mark.parametrize(
    ("hint", "default", "written"),
    [
        (Optional[str], {"default": None}, {"type": ["null", "string"], "default": None}),  # noqa: UP045
        (str | None, {"default": "a"}, {"type": ["string", "null"], "default": "a"}),
        (None | str, {}, {"type": ["null", "string"]}),
        (float, {"default": 1}, {"type": "double", "default": 1.0}),
        (float, {"default": math.nan}, {"type": "double"}),
        (int, {"default": Rank.FIRST}, {"type": "long", "default": 1}),
        (Money, {"default": Decimal("2.56")}, {"type": MONEY, "default": "\x01\x00"}),
        (Money, {"default": Decimal(0)}, {"type": MONEY, "default": "\x00"}),
        (bytes, {"default": b"\xff"}, {"type": "bytes", "default": "ÿ"}),
        (datetime, {"default": datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)}, {"type": MICROS, "default": 1_000_000}),
        (date, {"default": date(1970, 1, 2)}, {"type": DATE, "default": 1}),
        (list[int], {"default_factory": list}, {"type": {"type": "array", "items": "long"}, "default": []}),
        (list[int], {"default_factory": lambda: [1]}, {"type": {"type": "array", "items": "long"}}),
        (datetime, {"default_factory": lambda: datetime.now(UTC)}, {"type": MICROS}),
    ],
)
def test_a_default_becomes_an_avro_default(hint: Any, default: Any, written: Any) -> None:
    assert schema_of_field(hint, **default) == written


@pytest.mark.parametrize(
    ("hint", "value", "why"),
    [
        (int, "1", "has a value of type str, and int is expected"),
        (int, True, "of type bool, and int"),
        (int, 1.0, "of type float, and int"),
        (int, None, "of type NoneType, and int"),
        (int | None, False, "of type bool, and int"),
        (list[int], [1, True], "of type bool, and int"),
        (list[int], (1,), "of type tuple, and a list"),
        (list[str], "ab", "of type str, and a list"),
        (list[Line], [{"sku": "a"}], "Line has a value of type dict, and a Line is expected"),
        (dict[str, int], {"a": 1.5}, "of type float, and int"),
        (dict[str, str], [], "of type list, and a dict"),
        (float, "1", "of type str, and float"),
        (float, True, "of type bool, and float"),
        (float, Decimal(1), "of type Decimal, and float"),
        (float, 2**53 + 1, "an int that no float represents exactly"),
        (float, 10**400, "an int that no float represents exactly"),
        (bool, 1, "of type int, and bool"),
        (bool, None, "of type NoneType, and bool"),
        (date, NOON, "of type datetime, and date"),
        (date, "2024-05-17", "of type str, and date"),
        (datetime, NOON.replace(tzinfo=None), "has a datetime without a time zone"),
        (datetime, 1_700_000_000, "of type int, and datetime"),
        (datetime, datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=1))), "outside of the years 1 to 9999 in UTC"),
        (Money, 1, "of type int, and a Decimal"),
        (Money, 1.5, "of type float, and a Decimal"),
        (Money, b"a", "of type bytes, and a Decimal"),
        (Money, Decimal("0.001"), "a Decimal with more than 38 digits, or more than 2 after the point"),
        (Money, Decimal("1.000"), "2 after the point"),
        (Money, Decimal("1E+36"), "more than 38 digits"),
        (Money, Decimal("1E+40"), "more than 38 digits"),
        (Money | None, Decimal("NaN"), "more than 38 digits"),
        (Money, Decimal("-Infinity"), "more than 38 digits"),
        (list[Money], [Decimal("0.001")], "2 after the point"),
        (Annotated[Decimal, scale(2, precision=4)], Decimal(100), "more than 4 digits"),
        (Level, "LOW", "of type str, and a member of Level"),
        (Level, Size.SMALL, "of type Size, and a member of Level"),
        (Line, None, "Line has a value of type NoneType, and a Line is expected"),
    ],
)
def test_a_value_that_does_not_fit_its_type_is_a_dead_letter(hint: Any, value: Any, why: str) -> None:
    state = holding(hint)

    with pytest.raises(PoisonRecordError, match=re.escape(why)) as refused:
        converter_of(state, "test").to_record(state(value))

    assert refused.value.cause == "state-does-not-fit"
    assert str(refused.value).startswith("the state cannot be kept: ")


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (int, 2**63),
        (int | None, -(2**63) - 1),
        (list[int], [2**63]),
        (str, 1),
        (str, None),
        (str, "\ud800"),
        (str | None, b"a"),
        (list[str], ["a", 1]),
        (bytes, "a"),
        (dict[str, str], {1: "a"}),
        (dict[str, int] | None, {1: 1}),
    ],
)
def test_the_codec_refuses_values_that_the_converter_leaves_to_it(hint: Any, value: Any) -> None:
    state = holding(hint)
    converter = converter_of(state, "test")
    codec = AvroCodec(FakeRegistry(), "states", converter.schema)
    record = converter.to_record(state(value))

    with pytest.raises((TypeError, ValueError, OverflowError)):
        codec.encode(record)
