"""Standard folds: how a field of a state is computed from events, and how several updates combine into one.

A fold whose updates combine is associative over them, so a batch can be combined in Arrow before it is folded. If the
updates of one fold do not combine exactly, the model's events are folded one by one. An event without a value for a
fold, because the field is null or the event is of another type, leaves the state's field unchanged.
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

# Inexact is trapped: a lost digit raises an error.
_EXACT = Context(prec=60, traps=[Inexact, InvalidOperation, Overflow, DivisionByZero])
# Spark hands over decimals with up to 38 digits, regardless of the writer's schema.
_DIGITS = 38
_LONG_LIMIT = 2**63
# Arrow and Python order these types alike. Doubles have NaN, which has no order.
_ORDERED = ("decimal", "int", "long", "string", "date", "timestamp-millis", "timestamp-micros", "timestamp-nanos")
_DOUBLES = ("double", "float")
# Every value of the first type is a value of the second.
_WIDENED = {
    ("int", "long"),
    ("float", "double"),
    ("timestamp-millis", "timestamp-micros"),
    # The time is read to microseconds.
    ("timestamp-nanos", "timestamp-micros"),
    ("local-timestamp-nanos", "local-timestamp-micros"),
}


class Combine(Enum):
    """How updates of one key combine. Values that Arrow has are names of its aggregate functions."""

    SUM = "sum"
    MAX = "max"
    MIN = "min"
    FIRST = "first"
    LAST = "last"


@dataclass(frozen=True, slots=True)
class Best:
    """Updates are lists of entries; the combined update keeps the `most` entries that are greatest by one field."""

    most: int
    by: str


Combination = Combine | Best
"""How the updates of one column combine."""


class OutOfRangeError(Exception):
    """A result does not fit into the type of its field."""


@dataclass(frozen=True)
class StandardFold:
    """Computes a field of the state from `column`, a field of an event, such as `FundsAdded.amount`."""

    column: str
    starts_empty: ClassVar[bool] = True
    """Whether the field is null until the first update with a value."""

    @property
    def record(self) -> str:
        return self.column.partition(".")[0]

    @property
    def field(self) -> str:
        """The column's name in its record; empty if the fold applies to the event itself."""
        return self.column.partition(".")[2]

    def combination(self, kind: Any) -> Combination | None:
        """Returns how updates of an Avro type combine; None if they do not."""
        raise NotImplementedError

    def step(self, kind: Any) -> Callable[[Any, Any], Any]:
        """Returns the fold of a state's field of an Avro type: (value or None, update) → next value.

        The fold raises OutOfRangeError if the result does not fit.
        """
        raise NotImplementedError

    def misfit(self, written: Any, kept: Any) -> str:
        """Returns why a field of type `kept` cannot hold this fold of a column of type `written`; empty if it can.

        Ignores nullability.
        """
        return _difference(written, kept)

    def acceleration(self, field: str, state: Schema, codec: AvroCodec) -> Addition | None:
        """Returns an object that computes the states of `step` for many keys at once; None if there is none.

        Args:
            field: the only field of the state apart from its key.
        """
        return None


class RunningSum(StandardFold):
    """The exact sum; 0 before the first event. A sum beyond its type is a dead letter, `<name>-overflow`."""

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
        fits = simple_name(text) == "string" and last == field and _is_decimal_of_bytes(number)
        return Addition(field, number.get("scale", 0), codec.schema_id) if fits else None


class Count(StandardFold):
    """The number of events of a record, named without a column; 0 before the first event."""

    starts_empty = False

    def combination(self, kind: Any) -> Combination:
        return Combine.SUM

    def step(self, kind: Any) -> Callable[[Any, Any], Any]:
        return _integer_sum

    def misfit(self, written: Any, kept: Any) -> str:
        return "" if simple_name(kept) == "long" else "a count is a long"


class Greatest(StandardFold):
    """The greatest value. NaN is skipped."""

    def combination(self, kind: Any) -> Combination | None:
        return None if simple_name(kind) in _DOUBLES else Combine.MAX

    def step(self, kind: Any) -> Callable[[Any, Any], Any]:
        return _extreme(lambda value, update: bool(update > value), is_double=simple_name(kind) in _DOUBLES)

    def misfit(self, written: Any, kept: Any) -> str:
        return _unordered(written) or _difference(written, kept)


class Least(Greatest):
    """The least value. NaN is skipped."""

    def combination(self, kind: Any) -> Combination | None:
        return None if simple_name(kind) in _DOUBLES else Combine.MIN

    def step(self, kind: Any) -> Callable[[Any, Any], Any]:
        return _extreme(lambda value, update: bool(update < value), is_double=simple_name(kind) in _DOUBLES)


class Latest(StandardFold):
    """The value of the last event, in the order of the topic."""

    def combination(self, kind: Any) -> Combination | None:
        return Combine.LAST

    def step(self, kind: Any) -> Callable[[Any, Any], Any]:
        return lambda value, update: value if update is None else update


class Earliest(StandardFold):
    """The value of the first event, in the order of the topic."""

    def combination(self, kind: Any) -> Combination | None:
        return Combine.FIRST

    def step(self, kind: Any) -> Callable[[Any, Any], Any]:
        return lambda value, update: update if value is None else value


@dataclass(frozen=True)
class Top(StandardFold):
    """The `most` events with the greatest `column`, greatest first; of equal ones, the earlier first.

    The state's field is an array of records. Its fields are fields of the event, and include the column. Events with
    null or NaN in the column are skipped.
    """

    most: int

    starts_empty = False

    def combination(self, kind: Any) -> Combination | None:
        return Best(self.most, self.field)

    def step(self, kind: Any) -> Callable[[Any, Any], Any]:
        def best(value: Any, update: Any) -> Any:
            entries = [*(value or ()), *(entry for entry in update or () if _is_ranked(entry[self.field]))]
            # Sorting is stable, also in reverse.
            return sorted(entries, key=lambda entry: entry[self.field], reverse=True)[: self.most]

        return best

    def misfit(self, written: Any, kept: Any) -> str:
        if not isinstance(self.most, int) or self.most < 1:
            return f"a top keeps at least 1 event, not {self.most!r}"
        if simple_name(kept) != "array" or simple_name(kept["items"]) != "record":
            return "a top is an array of records"
        if self.field not in fields_of(kept["items"]):
            return f"its records have no '{self.field}'"
        return "" if simple_name(written) in _DOUBLES else _unordered(written)


def add(one: Decimal, other: Decimal) -> Decimal:
    """Returns the exact sum, for a fold of your own: `+` rounds to the 28 digits of Python's decimal context."""
    return _EXACT.add(one, other)


def product(one: Decimal, other: Decimal) -> Decimal:
    """Returns the exact product of up to 60 digits; its scale is the sum of both scales."""
    return _EXACT.multiply(one, other)


def _decimal_sum(limit: Decimal, scale: int) -> Callable[[Any, Any], Any]:
    zero = Decimal(0).scaleb(-scale)

    def running(value: Decimal | None, update: Decimal | None) -> Decimal:
        if update is None:
            return zero if value is None else value
        total = update if value is None else add(value, update)
        # `abs` rounds to the precision of the calling thread.
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


def _is_decimal_of_bytes(kind: Any) -> bool:
    # The number of a `fixed` has another encoding.
    return simple_name(kind) == "decimal" and kind["type"] == "bytes"


def _unordered(written: Any) -> str:
    is_ordered = simple_name(written) in (*_ORDERED, *_DOUBLES)
    return "" if is_ordered else f"values of {type_name(written)} have no order"


def _difference(written: Any, kept: Any) -> str:
    """Returns why a type cannot keep every value of another unchanged; empty if it can."""
    if simple_name(written) == "decimal":
        wanted = f"decimal({_DIGITS},{written.get('scale', 0)})"
        return "" if type_name(kept) == wanted else f"it is of type {type_name(kept)}, and {wanted} keeps every digit"
    found, wanted = type_name(without_null(written)[0]), type_name(without_null(kept)[0])
    return (
        ""
        if found == wanted or (found, wanted) in _WIDENED
        else f"it is of type {type_name(kept)}, the column of {type_name(written)}"
    )
