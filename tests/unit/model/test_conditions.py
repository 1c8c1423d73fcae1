"""Conditions on events, as functions of them: what they hold for, what they say, and how they cannot be written."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import Phase, find, settings

from balance_service.errors import ConfigurationError
from balance_service.model.conditions import col
from balance_service.model.flow import Stream
from balance_service.model.outputs import Emit
from balance_service.model.read_model import ReadModel
from balance_service.testing import Driver, event
from balance_service.testing.strategies import batches
from tests.support.models import SCORED
from tests.support.shipped import declared

if TYPE_CHECKING:
    from collections.abc import Callable

    from balance_service.model.conditions import Condition
    from balance_service.testing import Given

# Comparisons of which no type is known yet; Python's own would be warned of.
a: Any = col("a")
b: Any = col("b")


@pytest.mark.parametrize(
    ("found", "holds"),
    [("PRIME", True), ("prime", True), ("PrImE", True), ("PRİME", False), ("PRIME ", False), (None, False)],
)
def test_lower_changes_ascii_letters_alone(found: str | None, holds: bool) -> None:
    assert (a.lower() == "prime").holds({"a": found}) is holds
    assert (a == "PRIME").holds({"a": found}) is (found == "PRIME")


@pytest.mark.parametrize(
    ("condition", "verdicts"),
    [
        # Of a and b both true, then b false, b unknown; a false; a unknown.
        ((a == 1) & (b == 1), [True, False, None, False, False, False, None, False, None]),
        ((a == 1) | (b == 1), [True, True, True, True, False, None, True, None, None]),
        (~(a == 1), [False, False, False, True, True, True, None, None, None]),
        (a.is_null(), [False, False, False, False, False, False, True, True, True]),
        (a != 1, [False, False, False, True, True, True, None, None, None]),
        (a.isin(1, 7), [True, True, True, False, False, False, None, None, None]),
        (a.isin([1, 7]), [True, True, True, False, False, False, None, None, None]),
        (a < 1, [False, False, False, True, True, True, None, None, None]),
    ],
    ids=str,
)
def test_what_is_null_is_neither_equal_nor_not(condition: Condition, verdicts: list[bool | None]) -> None:
    events = [{"a": one, "b": other} for one in (1, 0, None) for other in (1, 0, None)]
    assert [condition.verdict(found) for found in events] == verdicts
    assert [condition.holds(found) for found in events] == [verdict is True for verdict in verdicts]


def test_fields_of_a_record_are_null_where_that_is() -> None:
    in_bern = col("a.place.city") == "Bern"

    assert in_bern.holds({"a": {"place": {"city": "Bern"}}})
    assert [in_bern.verdict({"a": found}) for found in (None, {"place": None}, {"place": {"city": None}})] == [None] * 3
    assert col("a.place.city").is_null().holds({"a": None})


def test_numbers_that_are_none_equal_each_other_and_are_the_greatest() -> None:
    nan = float("nan")
    assert (a == nan).holds({"a": nan})
    assert not (a != nan).holds({"a": nan})
    assert (a > float("inf")).holds({"a": nan})
    assert not (a < nan).holds({"a": nan})
    assert a.isin(1.0, nan).holds({"a": nan})
    assert (a == 0.0).holds({"a": -0.0})


def test_decimals_compare_exactly() -> None:
    long = Decimal("1234567890123456789012345678901234.56")
    assert (a == Decimal("9.5")).holds({"a": Decimal("9.50")})
    assert (a < long).holds({"a": Decimal("1234567890123456789012345678901234.55")})
    assert not (a == long).holds({"a": Decimal("1234567890123456789012345678901234.55")})
    assert (a > Decimal("0.001")).holds({"a": Decimal("0.01")})


def test_the_columns_of_a_condition_are_those_that_it_looks_into() -> None:
    asked = ((col("a.x") == 1) | ~col("b").is_null()) & col("c").lower().isin("x", "y")
    assert asked.columns == {"a", "b", "c"}


def test_conditions_are_values() -> None:
    def made() -> Any:
        return ((a == 1) & (b.lower() == "x")) | ~a.isin(1, 2)

    assert made() == made()
    assert hash(made()) == hash(made())
    assert made() != ((a == 1) & (b == "x")) | ~a.isin(1, 2)
    funds = Stream("t", "FundsAdded")
    assert declared("m", funds.where(made())) == declared("m", funds.where(made()))
    assert hash(col("a")) == hash(col("a"))
    with pytest.raises(AttributeError):
        made().word = "and"


@pytest.mark.parametrize(
    ("condition", "text"),
    [
        (a == "PRIME", "a = PRIME"),
        ((a.lower() == "home-delivery") & (b > 3), "lower(a) = home-delivery and b > 3"),
        ((a == 1) & ((b == 2) | (b == 3)) & (a != 4), "a = 1 and (b = 2 or b = 3) and a != 4"),
        (((a == 1) & (b == 2)) | (b <= Decimal("3.00")), "(a = 1 and b = 2) or b <= 3.00"),
        (~((a == 1) | (b == 2)), "not (a = 1 or b = 2)"),
        (~col("a.b").is_null(), "not a.b is null"),
        (a.isin("x", "it's here", ""), "a in (x, 'it''s here', '')"),
        (a == True, "a = true"),  # noqa: E712
        (a >= date(2026, 1, 2), "a >= 2026-01-02"),
        (a < datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), "a < 2026-01-02 03:04:05+00:00"),
    ],
)
def test_a_condition_reads_as_text(condition: Condition, text: str) -> None:
    assert str(condition) == text


@pytest.mark.parametrize(
    ("write", "instead"),
    [
        (lambda: a == None, 'write `col("a").is_null()`'),  # noqa: E711
        (lambda: a != None, '`~col("a").is_null()`'),  # noqa: E711
        (lambda: a < None, "is_null()"),
        (lambda: a.isin("x", None), "is_null()"),
        (lambda: a.isin(), "name a value"),
        (lambda: a.isin([]), "name a value"),
        (lambda: a == b, "not with another column"),
        (lambda: a == (b == 1), "not with another column or a condition"),
        (lambda: bool(a == 1), "write `&` for `and`, `|` for `or`, `~` for `not`"),
        (lambda: bool(a), "write `&` for `and`"),
        (lambda: 1 < a < 3, '`(1 < col("a")) & (col("a") < 3)`'),
        (lambda: a == 1 and b == 2, "write `&` for `and`"),
        (lambda: a == 1 or b == 2, "`|` for `or`"),
        (lambda: not (a < 1), "`~` for `not`"),
        (lambda: a == "x" & b, "each in parentheses"),
        (lambda: a == "x" | (b == "y"), "each in parentheses"),
        (lambda: (a == 1) & b, "col('b') is no condition"),
        (lambda: a & (b == 1), "col('a') is no condition"),
        (lambda: ~a, "col('a') is no condition"),
        (lambda: (a == 1) | True, "True is no condition"),
        (lambda: Stream("t", "r").where(a), "col('a') is no condition"),
        (lambda: Stream("t", "r").where(True), "True is no condition"),  # type: ignore[arg-type]
        (lambda: Emit("t", where="a = 1"), "'a = 1' is no condition"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_meant_is_refused_with_what_to_write(write: Callable[[], object], instead: str) -> None:
    with pytest.raises(TypeError, match=re.escape(instead)):
        write()


def model(condition: Condition, *records: str, name: str = "test-conditions") -> type[ReadModel]:
    """a model of the events for which a condition holds."""
    attributes = {"name": name, "source": Stream("games", *(records or (SCORED,))).where(condition)}
    return type("Conditioned", (ReadModel,), {"__module__": __name__, **attributes, "emits": Emit("sent")})


_NIGHT = datetime(2026, 10, 25, tzinfo=UTC)


@pytest.mark.parametrize(
    ("condition", "why"),
    [
        (col("nothing") == 1, "asks for 'nothing', a column that Scored does not have"),
        (col("place.street").is_null(), "asks for 'place.street', a column that Scored does not have"),
        (col("id.length") == 1, "asks for 'id.length', a column that Scored does not have"),
        (col("tags.x") == 1, "asks for 'tags.x', a column that Scored does not have"),
        ((col("id") == "g") & ~(col("paid") == "abc"), "'paid' is of type decimal(18,2), and 'abc' is one of string"),
        (col("paid") == 1.5, "'paid' is of type decimal(18,2), and 1.5 is one of float, double"),
        (col("paid") == Decimal("NaN"), "and Decimal('NaN') is one of none"),
        (col("id") == 1, "'id' is of type string, and 1 is one of int, long, decimal"),
        (col("id") == "\ud800", r"and '\ud800' is one of none"),
        (col("id").isin("g", b"g"), "and b'g' is one of bytes, fixed"),
        (col("level") == True, "'level' is of type int, and True is one of boolean"),  # noqa: E712
        (col("level") == 2**31, "and 2147483648 is one of long, decimal"),
        (col("score") == 1, "'score' is of type double, and 1 is one of int, long, decimal"),
        (col("at") == _NIGHT.replace(tzinfo=None), "is one of local-timestamp-millis, local-timestamp-micros"),
        (col("at") == _NIGHT.date(), "is one of date"),
        (col("day") == _NIGHT, "is one of timestamp-millis, timestamp-micros"),
        (col("day") == "2026-10-25", "'day' is of type date, and '2026-10-25' is one of string, uuid, enum"),
        (col("kind") < "SMALL", "'kind' is of type Kind(SMALL, LARGE), and `<` is of numbers, texts and times"),
        (col("photo") >= b"", "'photo' is of type bytes, and `>=` is of numbers, texts and times"),
        (col("level").lower() == "x", "'level' is of type int, and only text is lowered"),
        (col("tags") == "a", "'tags' is of type array<string>, and 'a' is one of string"),
        (col("place").isin("a"), "'place' is of type Place{city string, since timestamp-millis?}, and 'a' is one of"),
    ],
    ids=str,
)
def test_a_condition_that_cannot_be_asked_is_refused(condition: Condition, why: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(why)):
        model(condition)()


def test_a_condition_can_be_asked_of_every_record_of_a_stream() -> None:
    with pytest.raises(ConfigurationError, match="asks for 'kind', a column that Ended does not have"):
        model(col("kind") == "SMALL", SCORED, "Ended")()

    with Driver(model(col("id") == "g", SCORED, "Ended")()) as driver:
        driver.given(event("Ended", {"id": "g"}), event(SCORED, {"id": "h"}), event(SCORED, {"id": "g"}))
        assert len(driver.emitted("sent")) == 2


@pytest.mark.parametrize(
    "condition",
    [
        col("id") == "unheard of",
        col("id").lower() == "unheard of",
        col("level") == 12345,
        (col("paid") == 7) & (col("level") == 12345),
        col("place.city") == "Bern",
        (col("place.city") == "Bern") & (col("place.since") == _NIGHT),
        col("at").isin(_NIGHT),
        (col("paid") == Decimal("0.001")) | (col("kind") == "LARGE"),
    ],
    ids=str,
)
def test_events_that_are_made_up_satisfy_conditions(condition: Condition) -> None:
    of_model = batches(model(condition)())

    def satisfies(drawn: list[list[Given]]) -> bool:
        return any(condition.holds(found.fields) for batch in drawn for found in batch)

    find(
        of_model, satisfies, settings=settings(max_examples=500, phases=[Phase.generate], deadline=None, database=None)
    )
