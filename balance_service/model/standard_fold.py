"""What a standard fold is: the one place where everything that the service knows of one is declared.

A fold says what an event adds (`form`, which Spark and the test driver both make), how the updates of a key combine in
Arrow (`combination`), and how one changes the state (`step`), which is the definition. No module knows a fold by its
class.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from balance_service.avro.schemas import simple_name, type_name, without_null
from balance_service.model.conditions import checked, column_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from balance_service.avro.codec import AvroCodec
    from balance_service.avro.schemas import Schema
    from balance_service.model.addition import Addition
    from balance_service.model.conditions import Condition

Form: TypeAlias = "str | Literal[1] | list[Form] | dict[str, Form]"
"""What an event adds: the value of a column, by its name; 1; a list of one form; or a record of forms by name."""

# Spark hands over decimals with up to 38 digits, regardless of the writer's schema.
DIGITS = 38
# Every value of the first type is a value of the second.
_WIDENED = {
    ("int", "long"),
    ("float", "double"),
    ("timestamp-millis", "timestamp-micros"),
    # The time is read to microseconds.
    ("timestamp-nanos", "timestamp-micros"),
    ("local-timestamp-nanos", "local-timestamp-micros"),
}


class OutOfRangeError(Exception):
    """A result does not fit into the type of its field."""


@dataclass(frozen=True)
class Groups:
    """The rows of each key, for combinations that Arrow has no function for."""

    of_rows: pa.ChunkedArray
    """The key of each row."""
    keys: pa.ChunkedArray
    """Each key once."""

    @cached_property
    def numbers(self) -> pa.Array:
        """The number of each row's key in `keys`."""
        return pc.index_in(self.of_rows.combine_chunks(), self.keys.combine_chunks())

    def lists(self, owners: pa.Array, values: pa.Array, most: int) -> pa.ListArray:
        """Returns a list for each key, with the first `most` of its values.

        Args:
            owners: the number of each value's key, in ascending order.
        """
        owner = owners.to_numpy(zero_copy_only=False)
        kept = np.arange(len(owner)) - np.searchsorted(owner, owner, side="left") < most
        counts = np.bincount(owner[kept], minlength=len(self.keys))
        offsets = np.concatenate([[0], counts.cumsum()]).astype(np.int32)
        return pa.ListArray.from_arrays(offsets, values.filter(pa.array(kept)))


class Combination:
    """How the updates of a key combine into one update of the same type. Null is no update."""

    @property
    def in_any_order(self) -> bool:
        """Whether the result is the same in every order of the updates."""
        raise NotImplementedError

    def sums(self, updates: pa.ChunkedArray) -> Sequence[pa.ChunkedArray]:
        """Returns the columns that are added, and so may overflow."""
        return ()

    def apart(self, updates: pa.ChunkedArray) -> pa.ChunkedArray | None:
        """Returns which updates must not be combined, as booleans without null; None if all can be."""
        return None

    def aggregates(self, updates: pa.ChunkedArray) -> Sequence[tuple[pa.ChunkedArray, str]]:
        """Returns the columns to aggregate by key, with the names of Arrow's functions for this.

        Args:
            updates: of all keys; unless `in_any_order`, in the order of the events.
        """
        return ()

    def combined(
        self, updates: pa.ChunkedArray, aggregated: Iterator[pa.ChunkedArray], groups: Groups
    ) -> pa.Array | pa.ChunkedArray:
        """Returns one update for each key.

        Args:
            updates: those of `aggregates`.
            aggregated: yields the results of `aggregates`, one row for each key.
        """
        raise NotImplementedError


class Combine(Combination, Enum):
    """The combinations of single values. Values that Arrow has are names of its aggregate functions."""

    SUM = "sum"
    MAX = "max"
    MIN = "min"
    FIRST = "first"
    LAST = "last"
    NEWEST = "newest"
    """As LAST, but null is an update, too."""

    @property
    def in_any_order(self) -> bool:
        # Among equal values, one is as good as another.
        return self not in (Combine.FIRST, Combine.LAST, Combine.NEWEST)

    def sums(self, updates: pa.ChunkedArray) -> Sequence[pa.ChunkedArray]:
        return (updates,) if self is Combine.SUM else ()

    def aggregates(self, updates: pa.ChunkedArray) -> Sequence[tuple[pa.ChunkedArray, str]]:
        if self.in_any_order:
            return ((updates, self.value),)
        # Arrow has no `first` and `last` for decimals, but the row numbers of a key identify its first and last row.
        numbers = pa.array(np.arange(len(updates)))
        counted = numbers if self is Combine.NEWEST else pc.if_else(pc.is_valid(updates), numbers, None)
        return ((counted, "min" if self is Combine.FIRST else "max"),)

    def combined(
        self, updates: pa.ChunkedArray, aggregated: Iterator[pa.ChunkedArray], groups: Groups
    ) -> pa.Array | pa.ChunkedArray:
        found = next(aggregated)
        return found if self.in_any_order else updates.take(found)


@dataclass(frozen=True)
class Parts(Combination):
    """Updates are records; each part combines by itself. A record whose first part is null is no update."""

    parts: Mapping[str, Combination]

    @property
    def in_any_order(self) -> bool:
        return all(how.in_any_order for how in self.parts.values())

    def sums(self, updates: pa.ChunkedArray) -> Sequence[pa.ChunkedArray]:
        return [summands for how, column in self._columns(updates) for summands in how.sums(column)]

    def aggregates(self, updates: pa.ChunkedArray) -> Sequence[tuple[pa.ChunkedArray, str]]:
        return [one for how, column in self._columns(updates) for one in how.aggregates(column)]

    def combined(
        self, updates: pa.ChunkedArray, aggregated: Iterator[pa.ChunkedArray], groups: Groups
    ) -> pa.Array | pa.ChunkedArray:
        found = [how.combined(column, aggregated, groups) for how, column in self._columns(updates)]
        columns = [part.combine_chunks() if isinstance(part, pa.ChunkedArray) else part for part in found]
        return pa.StructArray.from_arrays(columns, [*self.parts], mask=columns[0].is_null())

    def _columns(self, updates: pa.ChunkedArray) -> Iterator[tuple[Combination, pa.ChunkedArray]]:
        return zip(self.parts.values(), updates.flatten(), strict=True)


@dataclass(frozen=True, repr=False)
class StandardFold:
    """Computes a field of the state from `column`, a field of an event, such as `FundsAdded.amount`.

    In a model with a `transform`, it is a column of the rows, such as `points`.

    An event adds something if it is of the column's record, has a value there, and `where` is true for it. If it adds
    nothing, the field keeps its value.
    """

    column: str
    where: Condition | None = dataclasses.field(default=None, kw_only=True)
    """The events that count, by a condition on their record (`col`); None for all."""

    takes_column: ClassVar[bool] = True
    """Whether the fold is of a column; otherwise of a record, named without one."""
    starts_empty: ClassVar[bool] = True
    """Whether the field is null until the first event that adds something."""
    keeps_order: ClassVar[bool] = False
    """Whether the result depends on the order of a key's events."""
    example: ClassVar[Sequence[Any]] = ("Record.column",)
    """The arguments of a fold of the class, for its reference."""
    keeps: ClassVar[str] = "as the column"
    """The type of the state's field, for people."""

    def __post_init__(self) -> None:
        column_name(self.column, type(self).__name__)
        if self.where is not None:
            checked(self.where)

    def __repr__(self) -> str:
        # A part of the fingerprint of a model's declaration, so a fold without a condition must not show one.
        values = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        if (where := values.pop("where")) is not None:
            values["where"] = where
        return f"{type(self).__qualname__}({', '.join(f'{name}={value!r}' for name, value in values.items())})"

    @property
    def record(self) -> str:
        return self.column.partition(".")[0]

    @property
    def field(self) -> str:
        """The column's name in its record; empty if the fold applies to the event itself."""
        return self.column.partition(".")[2]

    def form(self, kept: Any) -> Form:
        """Returns what an event adds to a field of an Avro type."""
        return self.field

    def combination(self, kind: Any) -> Combination | None:
        """Returns how updates of a column of an Avro type combine; None if they do not."""
        raise NotImplementedError

    def step(self, stored: Any) -> Callable[[Any, Any], Any]:
        """Returns the fold of a field that is stored as an Avro type: (value or None, update or None) → next value.

        The fold raises OutOfRangeError if the result does not fit.
        """
        raise NotImplementedError

    def unfit(self, written: Any) -> str:
        """Returns why the fold takes no column of an Avro type; empty if it does."""
        return ""

    def misfit(self, written: Any, kept: Any, columns: Mapping[str, Any]) -> str:
        """Returns why a field cannot hold this fold; empty if it can. Ignores nullability.

        Args:
            written: the type of the column, one that the fold takes.
            kept: the type of the field, as declared.
            columns: the columns of the record and their types.
        """
        return difference(written, kept)

    def may_skip(self, written: Any) -> bool:
        """Whether the fold skips some values of a type, other than null."""
        return False

    def stored(self, written: Any, kept: Any, name: str) -> Any:
        """Returns the Avro type that states have for a field `name`, declared as `kept`. Both without null."""
        return kept

    def answer(self, kept: Any) -> Callable[[Any], Any] | None:
        """Returns the function from a stored value to one of the declared type; None if they are the same."""
        return None

    def acceleration(self, field: str, state: Schema, codec: AvroCodec) -> Addition | None:
        """Returns an object that computes the states of `step` for many keys at once; None if there is none.

        Args:
            field: the only field of the state apart from its key.
        """
        return None


def columns_of(form: Form) -> Iterator[str]:
    """Yields the names of the columns in a form."""
    match form:
        case str():
            yield form
        case list():
            yield from columns_of(form[0])
        case dict():
            for part in form.values():
                yield from columns_of(part)


def difference(written: Any, kept: Any) -> str:
    """Returns why a type cannot keep every value of another unchanged; empty if it can."""
    if simple_name(written) == "decimal":
        digits = written.get("scale", 0)
        wanted = f"decimal({DIGITS},{digits})"
        if type_name(kept) == wanted:
            return ""
        return f"it is of type {type_name(kept)}, and {wanted} keeps every digit: `Annotated[Decimal, scale({digits})]`"
    found, wanted = type_name(without_null(written)[0]), type_name(without_null(kept)[0])
    return (
        ""
        if found == wanted or (found, wanted) in _WIDENED
        else f"it is of type {type_name(kept)}, the column of {type_name(written)}"
    )
