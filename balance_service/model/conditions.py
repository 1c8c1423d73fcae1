"""Which events count, as values: each is a column on Spark (`events.conditions`), and a function of a row here."""

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
"""The letters that `Col.lower` changes. Beyond ASCII, what is the same letter depends on who is asked."""
COMPARISONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
"""What compares a column with a value, be it a column of Spark or a value of one: by its sign."""
IN, IS_NULL = "in", "is null"
_OF_ORDER = ("<", "<=", ">", ">=")
_LOWERED = str.maketrans(UPPER, LOWER)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_TEXTS = ("string", "uuid", "enum")
_TIMES = ("date", "timestamp-millis", "timestamp-micros", "local-timestamp-millis", "local-timestamp-micros")
# Booleans, bytes and symbols have some order on Spark, and nobody means that.
_ORDERED = ("int", "long", "float", "double", "decimal", "string", "uuid", *_TIMES)
_PLAIN = re.compile(r"[\w.:/+@-]+")


@dataclass(frozen=True, slots=True)
class Field:
    """A column of events, or a field of the record in one, as it is or in lower case."""

    path: str
    """The column's name; for a field in it, the names on the way to that, with dots between them."""
    is_lowered: bool = False

    def value_in(self, event: Mapping[str, Any]) -> Any:
        """Its value; None where it, or what it is in, is null."""
        found: Any = event
        for name in self.path.split("."):
            if found is None:
                return None
            found = found[name]
        return found.translate(_LOWERED) if self.is_lowered and found is not None else found

    def type_in(self, schema: Schema) -> Any:
        """Its Avro type in a record, null aside; None if that has no such field."""
        kind: Any = schema
        for name in self.path.split("."):
            if simple_name(kind) != "record" or name not in fields_of(kind):
                return None
            kind, _ = without_null(fields_of(kind)[name])
        return kind

    def __str__(self) -> str:
        return f"lower({self.path})" if self.is_lowered else self.path


class Condition:
    """What holds for an event, or does not, or is unknown of it, as in SQL: made by `col`, and by `&`, `|` and `~`."""

    __slots__ = ()

    def holds(self, event: Mapping[str, Any]) -> bool:
        """Whether it holds for an event's fields; one that is unknown does not."""
        return self.verdict(event) is True

    def verdict(self, event: Mapping[str, Any]) -> bool | None:
        """Whether it holds; None: unknown, since a value is null."""
        raise NotImplementedError

    @property
    def asked(self) -> tuple[Asked, ...]:
        """What it asks of single fields, in order."""
        raise NotImplementedError

    @property
    def columns(self) -> frozenset[str]:
        """The columns that it looks at, or into."""
        return frozenset(asked.field.path.partition(".")[0] for asked in self.asked)

    def __and__(self, other: Condition) -> Condition:
        return Joined(self, "and", checked(other))

    def __or__(self, other: Condition) -> Condition:
        return Joined(self, "or", checked(other))

    def __invert__(self) -> Condition:
        return Not(self)

    def __rand__(self, other: object) -> NoReturn:
        _refuse(other)

    __ror__ = __rand__

    def __bool__(self) -> NoReturn:
        _refuse_truth()


@dataclass(frozen=True, slots=True)
class Asked(Condition):
    """A condition on one field: by a sign of `COMPARISONS` with one value, by IN with some, or by IS_NULL."""

    field: Field
    sign: str
    values: tuple[Any, ...] = ()

    def misfit(self, kind: Any) -> str:
        """Why it cannot be asked of a field of an Avro type; empty if it can."""
        of_type, name = f"'{self.field.path}' is of type {type_name(kind)}, and", simple_name(kind)
        if self.field.is_lowered and name not in _TEXTS:
            return f"{of_type} only text is lowered"
        if self.sign in _OF_ORDER and name not in _ORDERED:
            return f"{of_type} `{self.sign}` is of numbers, texts and times"
        for value in self.values:
            if name not in (kinds := _kinds_of(value)):
                return f"{of_type} {value!r} is one of {', '.join(kinds) or 'none'}"
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
    def asked(self) -> tuple[Asked, ...]:
        return (self,)

    def __str__(self) -> str:
        told = ", ".join(map(_text, self.values))
        return f"{self.field} {self.sign} {f'({told})' if self.sign == IN else told}".rstrip()


@dataclass(frozen=True, slots=True)
class Joined(Condition):
    """Holds where both of two conditions do, or one of them: their word is `and` or `or`."""

    left: Condition
    word: str
    right: Condition

    def verdict(self, event: Mapping[str, Any]) -> bool | None:
        decides = self.word == "or"
        if (left := self.left.verdict(event)) is decides:
            return decides
        right = self.right.verdict(event)
        # What is unknown on the left could decide.
        return right if right is decides or left is not None else None

    @property
    def asked(self) -> tuple[Asked, ...]:
        return (*self.left.asked, *self.right.asked)

    def __str__(self) -> str:
        sides = (self.left, self.right)
        return f" {self.word} ".join(
            f"({side})" if isinstance(side, Joined) and side.word != self.word else str(side) for side in sides
        )


@dataclass(frozen=True, slots=True)
class Not(Condition):
    """Holds where another condition does not, and is not unknown."""

    condition: Condition

    def verdict(self, event: Mapping[str, Any]) -> bool | None:
        found = self.condition.verdict(event)
        return None if found is None else not found

    @property
    def asked(self) -> tuple[Asked, ...]:
        return self.condition.asked

    def __str__(self) -> str:
        return f"not ({self.condition})" if isinstance(self.condition, Joined) else f"not {self.condition}"


@dataclass(frozen=True, slots=True, eq=False)
class Col:
    """A column of events, of which conditions are made; see `col`."""

    field: Field

    def lower(self) -> Col:
        """The same text with a to z in place of A to Z; all other letters stay."""
        return Col(replace(self.field, is_lowered=True))

    def is_null(self) -> Condition:
        """Whether it has no value; a field of a record that is null has none either."""
        return Asked(self.field, IS_NULL)

    def isin(self, *values: Any) -> Condition:
        """Whether it has one of some values, or of those of a list."""
        if len(values) == 1 and isinstance(values[0], list | tuple):
            (values,) = values
        if not values:
            raise TypeError("`.isin()` of nothing never holds: name a value")
        return Asked(self.field, IN, tuple(map(_literal, values)))

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
        return Asked(self.field, sign, (_literal(value),))


def col(path: str) -> Col:
    """A column of events, for conditions: `(col("customerType") == "PRIME") & ~col("address.city").is_null()`.

    `==`, `!=`, `<`, `<=`, `>`, `>=` and `.isin` compare it with values of its Avro type: nothing is converted. The four
    of order are for numbers, text and times, not for booleans, bytes and enums. Of arrays, maps and records, `.is_null`
    alone can be asked. As in SQL, a comparison with null is neither true nor false. NaN equals itself, and is greater
    than all else; text is ordered by its UTF-8 bytes.

    Args:
        path: of a field in a record, the names on the way to it, with dots between them.
    """
    return Col(Field(path))


def checked(condition: Condition) -> Condition:
    """The same. Raises TypeError for what is no condition."""
    if not isinstance(condition, Condition):
        _refuse(condition)
    return condition


def _refuse(found: object) -> NoReturn:
    what = f"col({found.field.path!r})" if isinstance(found, Col) else repr(found)
    raise TypeError(
        f'{what} is no condition: write `col("a") == 1`, and each in parentheses where `&`, `|` or `~` joins them: '
        '`(col("a") == 1) & (col("b") == 2)`'
    )


def _refuse_truth() -> NoReturn:
    raise TypeError(
        "a condition is neither true nor false before it is asked of an event: write `&` for `and`, `|` for `or`, `~` "
        'for `not`, and `(1 < col("a")) & (col("a") < 3)` for `1 < col("a") < 3`'
    )


def _literal(value: object) -> object:
    """A value to compare with. Whether it fits is known once there is a type."""
    if value is None:
        raise TypeError('nothing equals null: write `col("a").is_null()`, or `~col("a").is_null()`')
    if isinstance(value, Col | Condition):
        raise TypeError("a column is compared with a value, not with another column or a condition")
    return value


def _kinds_of(value: Any) -> Sequence[str]:
    """The Avro types of which a value is one."""
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
            # What is no UTF-8 is no text.
            return () if any("\ud800" <= letter <= "\udfff" for letter in value) else _TEXTS
        case bytes():
            return ("bytes", "fixed")
        case datetime():
            kind = "local-timestamp" if value.utcoffset() is None else "timestamp"
            return (f"{kind}-millis", f"{kind}-micros")
        case date():
            return ("date",)
        case _:
            return ()


def _comparable(value: Any) -> Any:
    """What Python compares as Spark compares the value."""
    if isinstance(value, float):
        is_nan = value != value
        return (is_nan, 0.0 if is_nan else value)
    # In zones that turn their clocks back, Python finds no moment equal to another zone's.
    return value - _EPOCH if isinstance(value, datetime) and value.utcoffset() is not None else value


def _text(value: Any) -> str:
    """A value as people read it."""
    match value:
        case bool():
            return str(value).lower()
        case str():
            return value if _PLAIN.fullmatch(value) else "'{}'".format(value.replace("'", "''"))
        case _:
            return str(value)
