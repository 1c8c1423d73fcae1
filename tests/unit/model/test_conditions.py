"""Conditions on events: their evaluation, their text, and the errors for invalid ones."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import Phase, find, settings

from balance_service.errors import ConfigurationError
from balance_service.model.conditions import col
from balance_service.model.events import Emit
from balance_service.model.folds import Count, RunningSum
from balance_service.model.read_model import ReadModel
from balance_service.model.stream import Stream
from balance_service.testing import Driver, event
from balance_service.testing.strategies import batches
from tests.support.models import SCORED
from tests.support.shipped import declared

if TYPE_CHECKING:
    from collections.abc import Callable

    from balance_service.model.conditions import Condition
    from balance_service.testing import InputEvent

# Columns without a type yet. The linter would warn about plain comparisons.
a: Any = col("a")
b: Any = col("b")


@pytest.mark.parametrize(
    ("found", "holds"),
    [("PRIME", True), ("prime", True), ("PrImE", True), ("PRİME", False), ("PRIME ", False), (None, False)],
)
def test_lower_changes_ascii_letters_only(found: str | None, holds: bool) -> None:
    assert (a.lower() == "prime").holds({"a": found}) is holds
    assert (a == "PRIME").holds({"a": found}) is (found == "PRIME")


@pytest.mark.parametrize(
    ("condition", "verdicts"),
    [
        # a and b both true; then b false, b unknown; a false; a unknown.
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
def test_a_comparison_with_null_is_unknown(condition: Condition, verdicts: list[bool | None]) -> None:
    events = [{"a": one, "b": other} for one in (1, 0, None) for other in (1, 0, None)]
    assert [condition.verdict(found) for found in events] == verdicts
    assert [condition.holds(found) for found in events] == [verdict is True for verdict in verdicts]


def test_fields_of_a_null_record_are_null() -> None:
    in_bern = col("a.place.city") == "Bern"

    assert in_bern.holds({"a": {"place": {"city": "Bern"}}})
    assert [in_bern.verdict({"a": found}) for found in (None, {"place": None}, {"place": {"city": None}})] == [None] * 3
    assert col("a.place.city").is_null().holds({"a": None})


def test_nan_equals_nan_and_is_the_greatest_number() -> None:
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


def test_the_columns_of_a_condition_are_those_that_it_reads() -> None:
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
        (lambda: a == "x" & b, "each condition in parentheses"),
        (lambda: a == "x" | (b == "y"), "each condition in parentheses"),
        (lambda: (a == 1) & b, "col('b') is not a condition"),
        (lambda: a & (b == 1), "col('a') is not a condition"),
        (lambda: ~a, "col('a') is not a condition"),
        (lambda: (a == 1) | True, "True is not a condition"),
        (lambda: Stream("t", "r").where(a), "col('a') is not a condition"),
        (lambda: Stream("t", "r").where(True), "True is not a condition"),  # type: ignore[arg-type]
        (lambda: Emit("t", where="a = 1"), "'a = 1' is not a condition"),  # type: ignore[arg-type]
    ],
)
def test_the_error_for_an_invalid_expression_shows_a_valid_one(write: Callable[[], object], instead: str) -> None:
    with pytest.raises(TypeError, match=re.escape(instead)):
        write()


# As a column of PySpark, which exists only with a session.
_OF_SPARK: Any = type("Column", (), {"__module__": "pyspark.sql.classic.column", "__eq__": lambda *_: True})()


@pytest.mark.parametrize(
    "write",
    [
        lambda: Stream("t", "r").where(_OF_SPARK),
        lambda: (a == 1) & _OF_SPARK,
        lambda: a > _OF_SPARK,
        lambda: a.isin(1, _OF_SPARK),
        lambda: Count("r", where=_OF_SPARK),
        lambda: RunningSum(_OF_SPARK),
        lambda: Emit("t", where=_OF_SPARK),
        lambda: Stream("t", "r").by(_OF_SPARK),
        lambda: Stream("t", "r").select("b", _OF_SPARK),
    ],
)
def test_the_error_for_an_expression_of_pyspark_names_transform(write: Callable[[], object]) -> None:
    with pytest.raises(TypeError) as caught:
        write()

    for part in ("`where` takes `col` of balance_service", "`transform(self, events: DataFrame) -> DataFrame`"):
        assert part in str(caught.value)


def test_columns_are_named_by_text() -> None:
    with pytest.raises(
        TypeError, match=re.escape("3 is not the name of a column, which `select` takes: write the name")
    ):
        Stream("t", "r").select(3)  # type: ignore[arg-type]


def model(condition: Condition, *records: str, name: str = "test-conditions") -> type[ReadModel]:
    """Returns a model of the events for which a condition holds."""
    attributes = {"name": name, "source": Stream("games", *(records or (SCORED,))).where(condition)}
    return type("Conditioned", (ReadModel,), {"__module__": __name__, **attributes, "emits": Emit("sent")})


_NIGHT = datetime(2026, 10, 25, tzinfo=UTC)


@pytest.mark.parametrize(
    ("condition", "why"),
    [
        (col("nothing") == 1, "has a condition on 'nothing', but Scored has no such column"),
        (col("place.street").is_null(), "has a condition on 'place.street', but Scored has no such column"),
        (col("id.length") == 1, "has a condition on 'id.length', but Scored has no such column"),
        (col("tags.x") == 1, "has a condition on 'tags.x', but Scored has no such column"),
        ((col("id") == "g") & ~(col("paid") == "abc"), "'paid' is of type decimal(18,2), and 'abc' is one of string"),
        (
            col("paid") == 1.5,
            """'paid' is of type decimal(18,2), and 1.5 is one of float, double; write Decimal("1.5")""",
        ),
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
        (col("kind") < "SMALL", "'kind' is of type Kind(SMALL, LARGE), and `<` compares numbers, text and times only"),
        (col("photo") >= b"", "'photo' is of type bytes, and `>=` compares numbers, text and times only"),
        (col("level").lower() == "x", "'level' is of type int, and only text has a lower case"),
        (col("tags") == "a", "'tags' is of type array<string>, and 'a' is one of string"),
        (col("place").isin("a"), "'place' is of type Place{city string, since timestamp-millis?}, and 'a' is one of"),
    ],
    ids=str,
)
def test_a_condition_that_does_not_fit_the_schema_is_refused(condition: Condition, why: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(why)):
        model(condition)()


def test_a_condition_must_fit_every_record_of_a_stream() -> None:
    with pytest.raises(ConfigurationError, match="has a condition on 'kind', but Ended has no such column"):
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
def test_generated_events_satisfy_conditions(condition: Condition) -> None:
    of_model = batches(model(condition)())

    def satisfies(drawn: list[list[InputEvent]]) -> bool:
        return any(condition.holds(found.fields) for batch in drawn for found in batch)

    find(
        of_model, satisfies, settings=settings(max_examples=500, phases=[Phase.generate], deadline=None, database=None)
    )
