"""A condition as a column of Spark; as a function of a row it is in `model.conditions`, and both say the same."""

from __future__ import annotations

import functools
import operator
from datetime import UTC, date, datetime, timedelta
from decimal import ROUND_FLOOR, Decimal, localcontext
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)

from balance_service.avro.schemas import simple_name
from balance_service.model.conditions import COMPARISONS, IN, IS_NULL, LOWER, UPPER, Joined, Not

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import Column

    from balance_service.avro.schemas import Schema
    from balance_service.model.conditions import Asked, Condition

_DIGITS = 38
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def column_of(condition: Condition, schemas: Sequence[Schema]) -> Column:
    """Whether a condition holds for a row; null where that is unknown.

    Args:
        schemas: of the records, a struct each, one of which a row has.
    """
    match condition:
        case Joined(left, word, right):
            one, other = column_of(left, schemas), column_of(right, schemas)
            return one | other if word == "or" else one & other
        case Not(condition=denied):
            return ~column_of(denied, schemas)
    (asked,) = condition.asked
    columns = [_of_record(asked, schema) for schema in schemas]
    if asked.sign == IS_NULL:
        return functools.reduce(operator.and_, columns)
    # Of the records that a row has not, it is unknown. Values of two types would first be made values of one.
    return columns[0] if len(columns) == 1 else F.coalesce(*columns)


def _of_record(asked: Asked, schema: Schema) -> Column:
    """What is asked of a field of one record."""
    kind, column = asked.field.type_in(schema), F.col(f"{schema['name']}.{asked.field.path}")
    if asked.sign == IS_NULL:
        return column.isNull()
    if asked.field.is_lowered:
        column = F.translate(column, UPPER, LOWER)
    if simple_name(kind) == "decimal":
        return _of_decimal(asked, column, kind.get("scale", 0))
    literals = map(_literal, asked.values)
    return column.isin(*literals) if asked.sign == IN else COMPARISONS[asked.sign](column, *literals)


def _of_decimal(asked: Asked, column: Column, scale: int) -> Column:
    values = [Decimal(value) for value in asked.values]
    if asked.sign != IN:
        return _decimal_compared(column, scale, asked.sign, *values)
    found = [_at_scale(value, scale) for value in values]
    exact = [value for value in found if value is not None]
    # Of nothing, Spark says that null is none of it.
    return column.isin(exact) if exact else _unless_null(column, outcome=False)


def _decimal_compared(column: Column, scale: int, sign: str, value: Decimal) -> Column:
    """A decimal compared with another of whatever digits, of which Spark might round one first."""
    exact = _at_scale(value, scale)
    if exact is not None:
        return COMPARISONS[sign](column, F.lit(exact))  # type: ignore[no-any-return]
    if sign in ("=", "!="):
        return _unless_null(column, outcome=sign == "!=")
    is_below = sign in ("<", "<=")
    if value.copy_abs() >= _beyond(scale):
        return _unless_null(column, outcome=is_below == (value > 0))
    next_below = _at_scale(value, scale, rounding=ROUND_FLOOR)
    if next_below is None:
        return _unless_null(column, outcome=not is_below)
    return column <= F.lit(next_below) if is_below else column > F.lit(next_below)


def _at_scale(value: Decimal, scale: int, rounding: str | None = None) -> Decimal | None:
    """A number with so many digits after its point; None if it has more, or more in all than Spark's.

    Args:
        rounding: how it gets fewer.
    """
    if value.copy_abs() >= _beyond(scale):
        return None
    with localcontext(prec=_DIGITS + 1):
        found = value.quantize(Decimal(1).scaleb(-scale), rounding)
    return found if found.copy_abs() < _beyond(scale) and (rounding or found == value) else None


def _beyond(scale: int) -> Decimal:
    """The least number that no decimal of a scale reaches."""
    return Decimal(1).scaleb(_DIGITS - scale)


def _unless_null(column: Column, *, outcome: bool) -> Column:
    return F.when(column.isNotNull(), F.lit(outcome))


def _literal(value: Any) -> Column:
    """A value that is no decimal. Spark would take a time for one of the Julian calendar, and of its session's zone."""
    match value:
        case datetime() if value.utcoffset() is not None:
            return F.timestamp_micros(F.lit((value - _EPOCH) // timedelta(microseconds=1)))
        case datetime():
            return F.lit(value.isoformat()).cast("timestamp_ntz")
        case date():
            return F.lit(value.isoformat()).cast("date")
        case bytes():
            return F.lit(bytearray(value))
        case _:
            return F.lit(value)
