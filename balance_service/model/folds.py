"""The standard folds. Each class is all that the service knows of its fold; see `standard_fold`.

A fold whose updates combine is associative over them, so a batch can be combined in Arrow before it is folded. If the
updates of one fold do not combine exactly, the model's events are folded one by one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Context, Decimal, DivisionByZero, Inexact, InvalidOperation, Overflow
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from balance_service.avro.schemas import fields_of, simple_name, type_name, without_null
from balance_service.model.addition import Addition
from balance_service.model.standard_fold import (
    DIGITS,
    Combination,
    Combine,
    OutOfRangeError,
    Parts,
    StandardFold,
    difference,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from balance_service.avro.codec import AvroCodec
    from balance_service.avro.schemas import Schema
    from balance_service.model.standard_fold import Form, Groups

# Inexact is trapped: a lost digit raises an error.
_EXACT = Context(prec=60, traps=[Inexact, InvalidOperation, Overflow, DivisionByZero])
_LONG_LIMIT = 2**63
_DECIMAL = {"type": "bytes", "logicalType": "decimal", "precision": DIGITS}
# Arrow and Python order these types alike. Doubles have NaN, which has no order.
_ORDERED = ("decimal", "int", "long", "string", "date", "timestamp-millis", "timestamp-micros", "timestamp-nanos")
_DOUBLES = ("double", "float")
_DAY = {"type": "int", "logicalType": "date"}
_TIME = {"type": "long", "logicalType": "timestamp-micros"}
# The types of values that a distinct count takes, as states keep them; and decimals.
_KEPT = {"int": "long", "long": "long", "string": "string", "uuid": "string", "enum": "string", "date": _DAY}
_KEPT |= {"timestamp-millis": _TIME, "timestamp-micros": _TIME, "timestamp-nanos": _TIME}
_MOST_VALUES = 10_000


class RunningSum(StandardFold):
    """The exact sum; 0 before the first event. A sum beyond its type is a dead letter, `<name>-overflow`."""

    starts_empty = False
    keeps = "long, or decimal"

    def combination(self, kind: Any) -> Combination:
        return Combine.SUM

    def step(self, stored: Any) -> Callable[[Any, Any], Any]:
        return _decimal_sum(stored) if simple_name(stored) == "decimal" else _integer_sum

    def unfit(self, written: Any) -> str:
        return _not_exact("sum", written)

    def misfit(self, written: Any, kept: Any, columns: Mapping[str, Any]) -> str:
        is_decimal = simple_name(written) == "decimal"
        if simple_name(kept) != ("decimal" if is_decimal else "long"):
            return f"a sum of {type_name(written)} is a {'decimal' if is_decimal else 'long'}"
        return difference(written, kept) if is_decimal else ""

    def acceleration(self, field: str, state: Schema, codec: AvroCodec) -> Addition | None:
        *keys, (last, number) = fields_of(state).items()
        fits = all(simple_name(kind) == "string" for _, kind in keys) and last == field and _is_decimal_of_bytes(number)
        has_key = bool(keys)
        return Addition(field, number.get("scale", 0), codec.header, has_key=has_key) if fits else None


@dataclass(frozen=True, repr=False)
class Count(StandardFold):
    """The number of events of a record, named without a column; 0 before the first event.

    After a `transform`: of rows, or of those that have the column.
    """

    column: str = ""

    takes_column = False
    starts_empty = False
    example = ("Record",)
    keeps = "long"

    def form(self, kept: Any) -> Form:
        return 1

    def combination(self, kind: Any) -> Combination:
        return Combine.SUM

    def step(self, stored: Any) -> Callable[[Any, Any], Any]:
        return _integer_sum

    def misfit(self, written: Any, kept: Any, columns: Mapping[str, Any]) -> str:
        return "" if simple_name(kept) == "long" else "a count is a long"


class Average(StandardFold):
    """The average, rounded once from the exact quotient to the digits of the field, halves away from zero.

    States keep the sum and the count.
    """

    keeps = "decimal of any scale"

    def form(self, kept: Any) -> Form:
        return {"sum": self.field, "count": 1}

    def combination(self, kind: Any) -> Combination:
        return Parts({"sum": Combine.SUM, "count": Combine.SUM})

    def step(self, stored: Any) -> Callable[[Any, Any], Any]:
        added = _decimal_sum(fields_of(stored)["sum"])

        def running(value: Any, update: Any) -> Any:
            if update is None:
                return value
            before = value or {"sum": None, "count": 0}
            total = added(before["sum"], Decimal(update["sum"]))
            return {"sum": total, "count": _integer_sum(before["count"], update["count"])}

        return running

    def unfit(self, written: Any) -> str:
        return _not_exact("average", written)

    def misfit(self, written: Any, kept: Any, columns: Mapping[str, Any]) -> str:
        if simple_name(kept) == "decimal":
            return ""
        return "an average is a decimal, whose digits say how it is rounded, such as `Annotated[Decimal, scale(2)]`"

    def stored(self, written: Any, kept: Any, name: str) -> Any:
        total = {**_DECIMAL, "scale": written.get("scale", 0) if simple_name(written) == "decimal" else 0}
        return _record(f"Average_{name}", {"sum": total, "count": "long"})

    def answer(self, kept: Any) -> Callable[[Any], Any]:
        digits = kept.get("scale", 0)
        return lambda value: _quotient(value["sum"], value["count"], digits)


class Greatest(StandardFold):
    """The greatest value. NaN is skipped."""

    def combination(self, kind: Any) -> Combination | None:
        return None if simple_name(kind) in _DOUBLES else Combine.MAX

    def step(self, stored: Any) -> Callable[[Any, Any], Any]:
        return _extreme(lambda value, update: bool(update > value), is_double=simple_name(stored) in _DOUBLES)

    def unfit(self, written: Any) -> str:
        return _unordered(written)

    def may_skip(self, written: Any) -> bool:
        return simple_name(written) in _DOUBLES


class Least(Greatest):
    """The least value. NaN is skipped."""

    def combination(self, kind: Any) -> Combination | None:
        return None if simple_name(kind) in _DOUBLES else Combine.MIN

    def step(self, stored: Any) -> Callable[[Any, Any], Any]:
        return _extreme(lambda value, update: bool(update < value), is_double=simple_name(stored) in _DOUBLES)


class Range(Greatest):
    """The least and the greatest value, in a record with the fields `least` and `greatest`. NaN is skipped."""

    keeps = "record of both, as the column"

    def form(self, kept: Any) -> Form:
        return {"least": self.field, "greatest": self.field}

    def combination(self, kind: Any) -> Combination | None:
        one, other = Least(self.column).combination(kind), Greatest(self.column).combination(kind)
        return None if one is None or other is None else Parts({"least": one, "greatest": other})

    def step(self, stored: Any) -> Callable[[Any, Any], Any]:
        ends = _ends(stored)
        lower, higher = Least(self.column).step(ends["least"]), Greatest(self.column).step(ends["greatest"])

        def wider(value: Any, update: Any) -> Any:
            if update is None:
                return value
            before = value or {"least": None, "greatest": None}
            found = {
                "least": lower(before["least"], update["least"]),
                "greatest": higher(before["greatest"], update["greatest"]),
            }
            return value if found["least"] is None else found

        return wider

    def misfit(self, written: Any, kept: Any, columns: Mapping[str, Any]) -> str:
        if simple_name(kept) != "record" or fields_of(kept).keys() != {"least", "greatest"}:
            return "a range is a record with the fields 'least' and 'greatest', and no other"
        return next(filter(None, (difference(written, end) for end in _ends(kept).values())), "")


class Latest(StandardFold):
    """The value of the last event, in the order of the topic."""

    keeps_order = True

    def combination(self, kind: Any) -> Combination | None:
        return Combine.LAST

    def step(self, stored: Any) -> Callable[[Any, Any], Any]:
        return lambda value, update: value if update is None else update


class Earliest(StandardFold):
    """The value of the first event, in the order of the topic."""

    keeps_order = True

    def combination(self, kind: Any) -> Combination | None:
        return Combine.FIRST

    def step(self, stored: Any) -> Callable[[Any, Any], Any]:
        return lambda value, update: update if value is None else value


@dataclass(frozen=True, repr=False)
class Top(StandardFold):
    """The `most` events with the greatest `column`, greatest first; of equal ones, the earlier first.

    The state's field is an array of records. Its fields are fields of the event, and include the column. Events with
    null or NaN in the column are skipped.
    """

    most: int

    starts_empty = False
    example = ("Record.column", 3)
    keeps = "array of records"

    def form(self, kept: Any) -> Form:
        return [{name: name for name in fields_of(kept["items"])}]

    def combination(self, kind: Any) -> Combination | None:
        return _Best(self.most, self.field)

    def step(self, stored: Any) -> Callable[[Any, Any], Any]:
        def best(value: Any, update: Any) -> Any:
            entries = [*(value or ()), *(entry for entry in update or () if not _is_nan(entry[self.field]))]
            # Sorting is stable, also in reverse.
            return sorted(entries, key=lambda entry: entry[self.field], reverse=True)[: self.most]

        return best

    def unfit(self, written: Any) -> str:
        return _unordered(written)

    def misfit(self, written: Any, kept: Any, columns: Mapping[str, Any]) -> str:
        if not isinstance(self.most, int) or self.most < 1:
            return f"a top keeps at least 1 event, not {self.most!r}"
        if simple_name(kept) != "array" or simple_name(kept["items"]) != "record":
            return "a top is an array of records"
        entries = fields_of(kept["items"])
        if self.field not in entries:
            return f"its records have no '{self.field}'"
        return next(filter(None, (_unkept(name, kind, columns) for name, kind in entries.items())), "")


@dataclass(frozen=True, repr=False)
class Distinct(StandardFold):
    """The number of different values, exact up to `limit`, which is at most 10,000; beyond it, always `limit` + 1.

    States keep the values, until there are more.
    """

    limit: int

    starts_empty = False
    example = ("Record.column", 100)
    keeps = "long"

    def form(self, kept: Any) -> Form:
        return [self.field]

    def combination(self, kind: Any) -> Combination | None:
        return _Union(self.limit + 1)

    def step(self, stored: Any) -> Callable[[Any, Any], Any]:
        none, many = {"values": [], "isMore": False}, {"values": [], "isMore": True}

        def more(value: Any, update: Any) -> Any:
            before: Any = value or none
            if not update or before["isMore"]:
                return before
            # In order: the state must not depend on the order of the events.
            values = sorted({*before["values"], *update})
            return many if len(values) > self.limit else {"values": values, "isMore": False}

        return more

    def unfit(self, written: Any) -> str:
        if simple_name(written) in (*_KEPT, "decimal"):
            return ""
        return f"different values of {type_name(written)} cannot be counted: take a number, text, a date or a time"

    def misfit(self, written: Any, kept: Any, columns: Mapping[str, Any]) -> str:
        if not isinstance(self.limit, int) or not 1 <= self.limit <= _MOST_VALUES:
            return f"the limit of a distinct count is 1 to {_MOST_VALUES:,}, not {self.limit!r}"
        return "" if simple_name(kept) == "long" else "a distinct count is a long"

    def stored(self, written: Any, kept: Any, name: str) -> Any:
        is_decimal = simple_name(written) == "decimal"
        item = {**_DECIMAL, "scale": written.get("scale", 0)} if is_decimal else _KEPT[simple_name(written)]
        return _record(f"Distinct_{name}", {"values": {"type": "array", "items": item}, "isMore": "boolean"})

    def answer(self, kept: Any) -> Callable[[Any], Any]:
        return lambda value: self.limit + 1 if value["isMore"] else len(value["values"])


@dataclass(frozen=True)
class _Best(Combination):
    """Updates are lists of entries; keeps the `most` that are greatest by one field, and of equal ones the earlier."""

    most: int
    by: str

    @property
    def in_any_order(self) -> bool:
        return False

    def combined(self, updates: pa.ChunkedArray, aggregated: Iterator[pa.ChunkedArray], groups: Groups) -> pa.Array:
        lists = updates.combine_chunks()
        entries = pc.list_flatten(lists)
        owners = groups.numbers.take(pc.list_parent_indices(lists))
        by = entries.field(self.by)
        table = pa.table({"owner": owners, "by": by, "at": pa.array(range(len(by)), pa.int64())})
        if pa.types.is_floating(by.type):
            table = table.filter(pc.invert(pc.is_nan(by)))
        table = table.sort_by([("owner", "ascending"), ("by", "descending"), ("at", "ascending")])
        # Entries may be large: only those that are kept are taken.
        at = groups.lists(table["owner"].combine_chunks(), table["at"].combine_chunks(), self.most)
        return pa.ListArray.from_arrays(at.offsets, entries.take(at.values))


@dataclass(frozen=True)
class _Union(Combination):
    """Updates are lists; keeps at most `most` different values, which suffice to know that there are as many."""

    most: int

    @property
    def in_any_order(self) -> bool:
        return True

    def combined(self, updates: pa.ChunkedArray, aggregated: Iterator[pa.ChunkedArray], groups: Groups) -> pa.Array:
        lists = updates.combine_chunks()
        owners = groups.numbers.take(pc.list_parent_indices(lists))
        pairs = pa.table({"owner": owners, "value": pc.list_flatten(lists)})
        pairs = pairs.group_by(["owner", "value"], use_threads=False).aggregate([]).sort_by("owner")
        return groups.lists(pairs["owner"].combine_chunks(), pairs["value"].combine_chunks(), self.most)


def add(one: Decimal, other: Decimal) -> Decimal:
    """Returns the exact sum, for a fold of your own: `+` rounds to the 28 digits of Python's decimal context."""
    return _EXACT.add(one, other)


def product(one: Decimal, other: Decimal) -> Decimal:
    """Returns the exact product of up to 60 digits; its scale is the sum of both scales."""
    return _EXACT.multiply(one, other)


def _decimal_sum(kind: Any) -> Callable[[Any, Any], Any]:
    scale = kind.get("scale", 0)
    limit, zero = Decimal(10) ** (kind["precision"] - scale), Decimal(0).scaleb(-scale)

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


def _quotient(total: Decimal, count: int, digits: int) -> Decimal:
    """Returns the quotient, rounded once, halves away from zero."""
    sign, figures, exponent = total.as_tuple()
    shift = digits + int(exponent)
    number = int("".join(map(str, figures))) * 10 ** max(shift, 0)
    unit = count * 10 ** max(-shift, 0)
    rounded = (2 * number + unit) // (2 * unit)
    return Decimal((sign if rounded else 0, tuple(map(int, str(rounded))), -digits))


def _extreme(is_further: Callable[[Any, Any], bool], *, is_double: bool) -> Callable[[Any, Any], Any]:
    def further(value: Any, update: Any) -> Any:
        if update is None or (is_double and math.isnan(update)):
            return value
        return update if value is None or is_further(value, update) else value

    return further


def _ends(kind: Schema) -> dict[str, Any]:
    return {name: without_null(end)[0] for name, end in fields_of(kind).items()}


def _record(name: str, fields: Mapping[str, Any]) -> Schema:
    return {"type": "record", "name": name, "fields": [{"name": one, "type": kind} for one, kind in fields.items()]}


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _is_decimal_of_bytes(kind: Any) -> bool:
    # The number of a `fixed` has another encoding.
    return simple_name(kind) == "decimal" and kind["type"] == "bytes"


def _not_exact(what: str, written: Any) -> str:
    article = "an" if what[0] == "a" else "a"
    match simple_name(written):
        case "int" | "long" | "decimal":
            return ""
        case "double" | "float" as name:
            return (
                f"{article} {what} of {name} is not exact, and would depend on where batches end: let the producer "
                "send decimals, or whole numbers of the smallest unit; or write a `fold`, which adds the events in the "
                "topic's order"
            )
    return f"{article} {what} is one of numbers, not of {type_name(written)}"


def _unordered(written: Any) -> str:
    is_ordered = simple_name(written) in (*_ORDERED, *_DOUBLES)
    return "" if is_ordered else f"values of {type_name(written)} have no order"


def _unkept(name: str, kept: Any, columns: Mapping[str, Any]) -> str:
    """Returns why a field of a record cannot keep the column of the same name; empty if it can."""
    if name not in columns:
        return f"it keeps '{name}', and the record has no such column, or the stream does not select it"
    (kind, is_nullable), (inner, keeps_null) = without_null(columns[name]), without_null(kept)
    why = difference(kind, inner) or ("it may be null" if is_nullable and not keeps_null else "")
    return why and f"it keeps '{name}': {why}"
