"""Conditions on events, as values. `spark.columns` turns one into a Spark column; `holds` evaluates it for one row."""

from __future__ import annotations

import operator
import re
import string
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any, NoReturn

from balance_service.avro.schemas import fields_of, simple_name, type_name, without_null

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from balance_service.avro.schemas import Schema

UPPER, LOWER = string.ascii_uppercase, string.ascii_lowercase
"""The letters that `Col.lower` changes. Outside of ASCII, Spark and Python do not agree on lower case."""
COMPARISONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
"""Comparison operators by their sign; each works on Spark columns and on Python values."""
IN, IS_NULL = "in", "is null"
_OF_ORDER = ("<", "<=", ">", ">=")
_LOWERED = str.maketrans(UPPER, LOWER)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_TEXTS = ("string", "uuid", "enum")
_TIMES = (
    "date",
    *("timestamp-millis", "timestamp-micros", "timestamp-nanos"),
    *("local-timestamp-millis", "local-timestamp-micros", "local-timestamp-nanos"),
)
# Spark also orders booleans, bytes and enum symbols, but such an order has no meaning.
_ORDERED = ("int", "long", "float", "double", "decimal", "string", "uuid", *_TIMES)
_PLAIN = re.compile(r"[\w.:/+@-]+")
FOR_SPARK = (
    "`where` takes `col` of balance_service, and expressions of PySpark belong in the model's method "
    "`transform(self, events: DataFrame) -> DataFrame`"
)
"""For messages about an expression of PySpark in another place."""


@dataclass(frozen=True, slots=True)
class Field:
    """A column of events, or a field of a record in it, optionally in lower case."""

    path: str
    """The column's name, or the path to a nested field, separated by dots."""
    is_lowered: bool = False

    def value_in(self, event: Mapping[str, Any]) -> Any:
        """Returns the value; None if the field or one of its parents is null."""
        found: Any = event
        for name in self.path.split("."):
            if found is None:
                return None
            found = found[name]
        return found.translate(_LOWERED) if self.is_lowered and found is not None else found

    def type_in(self, schema: Schema) -> Any:
        """Returns the field's Avro type in a record, without null; None if the record has no such field."""
        kind: Any = schema
        for name in self.path.split("."):
            if simple_name(kind) != "record" or name not in fields_of(kind):
                return None
            kind, _ = without_null(fields_of(kind)[name])
        return kind

    def __str__(self) -> str:
        return f"lower({self.path})" if self.is_lowered else self.path


class Condition:
    """A condition on an event: true, false or unknown, as in SQL. Made by `col`, and combined by `&`, `|` and `~`."""

    __slots__ = ()

    def holds(self, event: Mapping[str, Any]) -> bool:
        """Returns whether the condition is true for an event; an unknown condition is not."""
        return self.verdict(event) is True

    def verdict(self, event: Mapping[str, Any]) -> bool | None:
        """Returns whether the condition holds; None if that is unknown because a value is null."""
        raise NotImplementedError

    @property
    def predicates(self) -> tuple[Predicate, ...]:
        raise NotImplementedError

    @property
    def columns(self) -> frozenset[str]:
        return frozenset(predicate.field.path.partition(".")[0] for predicate in self.predicates)

    def __and__(self, other: Condition) -> Condition:
        return Compound(self, "and", checked(other))

    def __or__(self, other: Condition) -> Condition:
        return Compound(self, "or", checked(other))

    def __invert__(self) -> Condition:
        return Not(self)

    def __rand__(self, other: object) -> NoReturn:
        _refuse(other)

    __ror__ = __rand__

    def __bool__(self) -> NoReturn:
        _refuse_truth()


@dataclass(frozen=True, slots=True)
class Predicate(Condition):
    """A condition on one field: a sign of `COMPARISONS` with one value, IN with several, or IS_NULL."""

    field: Field
    sign: str
    values: tuple[Any, ...] = ()

    def misfit(self, kind: Any) -> str:
        """Returns why the predicate cannot apply to a field of an Avro type; empty if it can."""
        of_type, name = f"'{self.field.path}' is of type {type_name(kind)}, and", simple_name(kind)
        if self.field.is_lowered and name not in _TEXTS:
            return f"{of_type} only text has a lower case"
        if self.sign in _OF_ORDER and name not in _ORDERED:
            return f"{of_type} `{self.sign}` compares numbers, text and times only"
        for value in self.values:
            if name not in (kinds := _kinds_of(value)):
                hint = f'; write Decimal("{value}")' if name == "decimal" and isinstance(value, float | str) else ""
                return f"{of_type} {value!r} is one of {', '.join(kinds) or 'none'}{hint}"
        return ""

    def verdict(self, event: Mapping[str, Any]) -> bool | None:
        found = self.field.value_in(event)
        if self.sign == IS_NULL:
            return found is None
        if found is None:
            return None
        values = map(_comparable, self.values)
        return _comparable(found) in values if self.sign == IN else COMPARISONS[self.sign](_comparable(found), *values)

    @property
    def predicates(self) -> tuple[Predicate, ...]:
        return (self,)

    def __str__(self) -> str:
        values = ", ".join(map(_text, self.values))
        return f"{self.field} {self.sign} {f'({values})' if self.sign == IN else values}".rstrip()


@dataclass(frozen=True, slots=True)
class Compound(Condition):
    """Two conditions joined by `and` or `or`."""

    left: Condition
    word: str
    right: Condition

    def verdict(self, event: Mapping[str, Any]) -> bool | None:
        decides = self.word == "or"
        if (left := self.left.verdict(event)) is decides:
            return decides
        right = self.right.verdict(event)
        # An unknown left side leaves the result to the right side only if that decides it.
        return right if right is decides or left is not None else None

    @property
    def predicates(self) -> tuple[Predicate, ...]:
        return (*self.left.predicates, *self.right.predicates)

    def __str__(self) -> str:
        sides = (self.left, self.right)
        return f" {self.word} ".join(
            f"({side})" if isinstance(side, Compound) and side.word != self.word else str(side) for side in sides
        )


@dataclass(frozen=True, slots=True)
class Not(Condition):
    """The negation of a condition; unknown where that is unknown."""

    condition: Condition

    def verdict(self, event: Mapping[str, Any]) -> bool | None:
        found = self.condition.verdict(event)
        return None if found is None else not found

    @property
    def predicates(self) -> tuple[Predicate, ...]:
        return self.condition.predicates

    def __str__(self) -> str:
        return f"not ({self.condition})" if isinstance(self.condition, Compound) else f"not {self.condition}"


@dataclass(frozen=True, slots=True, eq=False)
class Col:
    """A column of events, from which conditions are made; see `col`."""

    field: Field

    def lower(self) -> Col:
        """Returns the column with A to Z in lower case; all other letters are unchanged."""
        return Col(replace(self.field, is_lowered=True))

    def is_null(self) -> Condition:
        """Whether the column is null. A field of a null record is null too."""
        return Predicate(self.field, IS_NULL)

    def isin(self, *values: Any) -> Condition:
        """Whether the column equals one of the given values, or of the values in one list."""
        if len(values) == 1 and isinstance(values[0], list | tuple):
            (values,) = values
        if not values:
            raise TypeError("`.isin()` without values never holds: name a value")
        return Predicate(self.field, IN, tuple(map(_literal, values)))

    def __eq__(self, value: object) -> Condition:  # type: ignore[override]
        return self._compared("=", value)

    def __ne__(self, value: object) -> Condition:  # type: ignore[override]
        return self._compared("!=", value)

    def __lt__(self, value: object) -> Condition:
        return self._compared("<", value)

    def __le__(self, value: object) -> Condition:
        return self._compared("<=", value)

    def __gt__(self, value: object) -> Condition:
        return self._compared(">", value)

    def __ge__(self, value: object) -> Condition:
        return self._compared(">=", value)

    def __hash__(self) -> int:
        return hash(self.field)

    def __bool__(self) -> NoReturn:
        _refuse_truth()

    def __and__(self, _other: object) -> NoReturn:
        _refuse(self)

    __rand__ = __or__ = __ror__ = __and__

    def __invert__(self) -> NoReturn:
        _refuse(self)

    def _compared(self, sign: str, value: object) -> Condition:
        return Predicate(self.field, sign, (_literal(value),))


def col(path: str) -> Col:
    """A column of events, for conditions: `(col("customerType") == "PRIME") & ~col("address.city").is_null()`.

    `==`, `!=`, `<`, `<=`, `>`, `>=` and `.isin` compare the column with values of its Avro type, without conversion.
    The order operators apply to numbers, text and times, not to booleans, bytes and enums. Arrays, maps and records
    support only `.is_null`. As in SQL, a comparison with null is neither true nor false. NaN equals NaN and is greater
    than all other numbers. Text is ordered by its UTF-8 bytes.

    Args:
        path: the column's name, or the path to a nested field, separated by dots.
    """
    return Col(Field(path))


def checked(condition: Condition) -> Condition:
    """Returns the condition. Raises TypeError for any other object."""
    if not isinstance(condition, Condition):
        _refuse(condition)
    return condition


def column_name(found: object, taker: str) -> str:
    """Returns the name of a column. Raises TypeError for any other object, such as a column of PySpark."""
    if isinstance(found, str):
        return found
    why = FOR_SPARK if is_of_spark(found) else f'write the name, `{taker}("a")`'
    raise TypeError(f"{found!r} is not the name of a column, which `{taker}` takes: {why}")


def is_of_spark(found: object) -> bool:
    """Whether an object is one of PySpark's, such as a column."""
    # Without an import of PySpark, which takes long.
    return type(found).__module__.partition(".")[0] == "pyspark"


def _refuse(found: object) -> NoReturn:
    if is_of_spark(found):
        raise TypeError(f"{found!r} is not a condition: {FOR_SPARK}")
    what = f"col({found.field.path!r})" if isinstance(found, Col) else repr(found)
    raise TypeError(
        f'{what} is not a condition: write `col("a") == 1`, and put each condition in parentheses if `&`, `|` or `~` '
        'combines them: `(col("a") == 1) & (col("b") == 2)`'
    )


def _refuse_truth() -> NoReturn:
    raise TypeError(
        "a condition has no truth value until it is evaluated for an event: write `&` for `and`, `|` for `or`, `~` for "
        '`not`, and `(1 < col("a")) & (col("a") < 3)` for `1 < col("a") < 3`'
    )


def _literal(value: object) -> object:
    """Returns the value if it can be compared. Whether it fits the column is checked once the type is known."""
    if value is None:
        raise TypeError('nothing equals null: write `col("a").is_null()` or `~col("a").is_null()`')
    if is_of_spark(value):
        raise TypeError(f"{value!r} is no value that a column can be compared with: {FOR_SPARK}")
    if isinstance(value, Col | Condition):
        raise TypeError("a column can be compared with a value only, not with another column or a condition")
    return value


def _kinds_of(value: Any) -> Sequence[str]:
    """Returns the Avro types that the value belongs to."""
    match value:
        case bool():
            return ("boolean",)
        case int():
            whole = [name for name, bits in (("int", 31), ("long", 63)) if -(1 << bits) <= value < 1 << bits]
            return (*whole, "decimal")
        case float():
            return ("float", "double")
        case Decimal():
            return ("decimal",) if value.is_finite() else ()
        case str():
            # Lone surrogates cannot be encoded as UTF-8.
            return () if any("\ud800" <= letter <= "\udfff" for letter in value) else _TEXTS
        case bytes():
            return ("bytes", "fixed")
        case datetime():
            kind = "local-timestamp" if value.utcoffset() is None else "timestamp"
            return (f"{kind}-millis", f"{kind}-micros", f"{kind}-nanos")
        case date():
            return ("date",)
        case _:
            return ()


def _comparable(value: Any) -> Any:
    """Returns an object that Python compares as Spark compares the value."""
    if isinstance(value, float):
        is_nan = value != value
        return (is_nan, 0.0 if is_nan else value)
    # Python never treats a time in the repeated hour of a clock change as equal to a time in another zone.
    return value - _EPOCH if isinstance(value, datetime) and value.utcoffset() is not None else value


def _text(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str():
            return value if _PLAIN.fullmatch(value) else "'{}'".format(value.replace("'", "''"))
        case _:
            return str(value)
