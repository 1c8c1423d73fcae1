"""Standard folds: what a field of a state is of its events, and how the updates of several events become one.

Each fold is associative over the updates that it combines, so a batch may be combined in Arrow before it is folded; a
fold whose updates do not combine exactly has none of that, and the model's events are folded one by one. An event
without a value for a fold, because the field is null or the event of another type, leaves its field as it was.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Context, Decimal, DivisionByZero, Inexact, InvalidOperation, Overflow
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

from balance_service.avro.schemas import fields_of, simple_name, type_name, without_null
from balance_service.model.addition import Addition

if TYPE_CHECKING:
    from collections.abc import Callable

    from balance_service.avro.codec import AvroCodec
    from balance_service.avro.schemas import Schema

# Inexact is trapped: a digit is never dropped without an error.
_EXACT = Context(prec=60, traps=[Inexact, InvalidOperation, Overflow, DivisionByZero])
# Spark hands a decimal over with up to so many digits, whatever a writer declared.
_DIGITS = 38
_LONG_LIMIT = 2**63
# Ordered alike by Arrow and by Python; a double has values that are in no order.
_ORDERED = ("decimal", "int", "long", "string", "date", "timestamp-millis", "timestamp-micros")
_DOUBLES = ("double", "float")
# Every value of the one is one of the other.
_WIDENED = {("int", "long"), ("float", "double"), ("timestamp-millis", "timestamp-micros")}


class Combine(Enum):
    """How updates of one key become one; values of those that Arrow has are its aggregate functions."""

    SUM = "sum"
    MAX = "max"
    MIN = "min"
    FIRST = "first"
    LAST = "last"


@dataclass(frozen=True, slots=True)
class Best:
    """Updates are lists of entries: of all of one key, the `most` that are greatest by one of their fields."""

    most: int
    by: str


Combination = Combine | Best
"""How the updates of one column combine."""


class OutOfRangeError(Exception):
    """A result does not fit into the type of its field."""


@dataclass(frozen=True)
class StandardFold:
    """What a field of the state is of `column`, a field of an event: `FundsAdded.amount`."""

    column: str
    starts_empty: ClassVar[bool] = True
    """Whether the state has no value of it before the first update that has one."""

    @property
    def record(self) -> str:
        """The simple name of the record that the column is of."""
        return self.column.partition(".")[0]

    @property
    def field(self) -> str:
        """The column's name in its record; empty if the fold is of the event itself."""
        return self.column.partition(".")[2]

    def combination(self, kind: Any) -> Combination | None:
        """How updates of an Avro type combine; None: they do not."""
        raise NotImplementedError

    def step(self, kind: Any) -> Callable[[Any, Any], Any]:
        """The fold of a state's field of an Avro type: (its value, None before the first; an update) → the next.

        It raises OutOfRangeError where the result does not fit.
        """
        raise NotImplementedError

    def misfit(self, written: Any, kept: Any) -> str:
        """Why a field of the state, of type `kept`, cannot be this fold of a column of type `written`; empty if it can.

        Nullability aside.
        """
        return _difference(written, kept)

    def acceleration(self, field: str, state: Schema, codec: AvroCodec) -> Addition | None:
        """What makes the same states as `step`, many at once; None: nothing does.

        Args:
            field: the one field beside the key that the state has.
        """
        return None


class RunningSum(StandardFold):
    """The exact sum of a decimal, an int or a long; of no event, 0."""

    starts_empty = False

    def combination(self, kind: Any) -> Combination:
        return Combine.SUM

    def step(self, kind: Any) -> Callable[[Any, Any], Any]:
        if simple_name(kind) == "decimal":
            return _decimal_sum(Decimal(10) ** (kind["precision"] - kind.get("scale", 0)), kind.get("scale", 0))
        return _integer_sum

    def misfit(self, written: Any, kept: Any) -> str:
        match simple_name(written), simple_name(kept):
            case "int" | "long", "long":
                return ""
            case "decimal", "decimal":
                return _difference(written, kept)
            case "int" | "long" | "decimal", _:
                return (
                    f"a sum of {type_name(written)} is a {'decimal' if simple_name(written) == 'decimal' else 'long'}"
                )
        return f"a sum of {type_name(written)} is not exact"

    def acceleration(self, field: str, state: Schema, codec: AvroCodec) -> Addition | None:
        (_, text), (last, number) = fields_of(state).items()
        fits = text == "string" and last == field and simple_name(number) == "decimal"
        return Addition(field, number.get("scale", 0), codec.schema_id) if fits else None


class Count(StandardFold):
    """How many events of a record there are; the column is the record."""

    starts_empty = False

    def combination(self, kind: Any) -> Combination:
        return Combine.SUM

    def step(self, kind: Any) -> Callable[[Any, Any], Any]:
        return _integer_sum

    def misfit(self, written: Any, kept: Any) -> str:
        return "" if simple_name(kept) == "long" else "a count is a long"


class Greatest(StandardFold):
    """The greatest value. A double that is no number counts for nothing."""

    def combination(self, kind: Any) -> Combination | None:
        return None if simple_name(kind) in _DOUBLES else Combine.MAX

    def step(self, kind: Any) -> Callable[[Any, Any], Any]:
        return _extreme(lambda value, update: bool(update > value), is_double=simple_name(kind) in _DOUBLES)

    def misfit(self, written: Any, kept: Any) -> str:
        return _unordered(written) or _difference(written, kept)


class Least(Greatest):
    """The least value. A double that is no number counts for nothing."""

    def combination(self, kind: Any) -> Combination | None:
        return None if simple_name(kind) in _DOUBLES else Combine.MIN

    def step(self, kind: Any) -> Callable[[Any, Any], Any]:
        return _extreme(lambda value, update: bool(update < value), is_double=simple_name(kind) in _DOUBLES)


class Latest(StandardFold):
    """The value of the last event in the topic's order."""

    def combination(self, kind: Any) -> Combination | None:
        return Combine.LAST

    def step(self, kind: Any) -> Callable[[Any, Any], Any]:
        return lambda value, update: value if update is None else update


class Earliest(StandardFold):
    """The value of the first event in the topic's order."""

    def combination(self, kind: Any) -> Combination | None:
        return Combine.FIRST

    def step(self, kind: Any) -> Callable[[Any, Any], Any]:
        return lambda value, update: update if value is None else value


@dataclass(frozen=True)
class Top(StandardFold):
    """The `most` events of the greatest `column`, greatest first, of equal ones the earlier first.

    The state's field is an array of records, whose fields are the event's of the same names, the column among them. A
    double that is no number is in no order, and its event left out.
    """

    most: int

    starts_empty = False

    def combination(self, kind: Any) -> Combination | None:
        return Best(self.most, self.field)

    def step(self, kind: Any) -> Callable[[Any, Any], Any]:
        def best(value: Any, update: Any) -> Any:
            entries = [*(value or ()), *(entry for entry in update or () if _is_ranked(entry[self.field]))]
            # Sorting keeps the order of equal ones, in reverse too.
            return sorted(entries, key=lambda entry: entry[self.field], reverse=True)[: self.most]

        return best

    def misfit(self, written: Any, kept: Any) -> str:
        if not isinstance(self.most, int) or self.most < 1:
            return f"the top is of at least 1 event, not of {self.most!r}"
        if simple_name(kept) != "array" or simple_name(kept["items"]) != "record":
            return "the top is an array of records"
        if self.field not in fields_of(kept["items"]):
            return f"its records have no '{self.field}'"
        return "" if simple_name(written) in _DOUBLES else _unordered(written)


def add(one: Decimal, other: Decimal) -> Decimal:
    """The exact sum, for a fold of one's own: `+` rounds to the 28 digits of Python's context."""
    return _EXACT.add(one, other)


def product(one: Decimal, other: Decimal) -> Decimal:
    """The exact product, of up to 60 digits; its digits after the point are those of both."""
    return _EXACT.multiply(one, other)


def _decimal_sum(limit: Decimal, scale: int) -> Callable[[Any, Any], Any]:
    zero = Decimal(0).scaleb(-scale)

    def running(value: Decimal | None, update: Decimal | None) -> Decimal:
        if update is None:
            return zero if value is None else value
        total = update if value is None else add(value, update)
        # `abs` would round to the precision of the calling thread.
        if total.copy_abs() >= limit:
            raise OutOfRangeError
        return total

    return running


def _integer_sum(value: int | None, update: int | None) -> int:
    total = (value or 0) + (update or 0)
    if not -_LONG_LIMIT <= total < _LONG_LIMIT:
        raise OutOfRangeError
    return total


def _extreme(is_further: Callable[[Any, Any], bool], *, is_double: bool) -> Callable[[Any, Any], Any]:
    def further(value: Any, update: Any) -> Any:
        if update is None or (is_double and math.isnan(update)):
            return value
        return update if value is None or is_further(value, update) else value

    return further


def _is_ranked(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and math.isnan(value))


def _unordered(written: Any) -> str:
    is_ordered = simple_name(written) in (*_ORDERED, *_DOUBLES)
    return "" if is_ordered else f"values of {type_name(written)} have no order here"


def _difference(written: Any, kept: Any) -> str:
    """Why not every value of one type is kept unchanged by another; empty if it is."""
    if simple_name(written) == "decimal":
        wanted = f"decimal({_DIGITS},{written.get('scale', 0)})"
        return "" if type_name(kept) == wanted else f"it is of type {type_name(kept)}, and {wanted} keeps every digit"
    found, wanted = type_name(without_null(written)[0]), type_name(without_null(kept)[0])
    return (
        ""
        if found == wanted or (found, wanted) in _WIDENED
        else f"it is of type {type_name(kept)}, the column of {type_name(written)}"
    )
