"""`Upsert` and `Debezium`, the standard folds of a whole record: the newest one of a key is its state.

They have no field of the state, so a model names one as its `fold`. Their updates are records, and null deletes the
state.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import operator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from balance_service.avro.schemas import fields_of, simple_name, without_null
from balance_service.errors import PoisonRecordError
from balance_service.model.conditions import col
from balance_service.model.events import DeclaredRecord
from balance_service.model.standard_fold import Combination, Combine, StandardFold, difference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from balance_service.avro.schemas import Schema
    from balance_service.model.conditions import Condition
    from balance_service.model.standard_fold import Form, Groups

STATE = "#state"
"""The update column with the new state; null deletes it. No field can have this name."""
OFFSET = "offset"
"""The column of rows, and of their combined updates, with the offset of the newest record."""
IGNORED = "ignored"
"""The cause of a record of another type, or one that does not meet a condition."""
TRUNCATED = "table-truncated"
UNAVAILABLE = "value-unavailable"
_OPERATION_UNKNOWN = "operation-unknown"
_FIELD_NULL = "field-null"
_PLACEHOLDER = "__debezium_unavailable_value"
_OP, _AFTER, _BEFORE = "op", "after", "before"
_FLAT_OP = "__op"
_FLAT_DELETIONS = {"__deleted": "true", _FLAT_OP: "d"}


@dataclass(frozen=True)
class Refusal:
    """Events that the fold does not take: their cause, and what is wrong with them."""

    condition: Condition
    cause: str
    detail: str = ""


@dataclass(frozen=True, repr=False)
class Upsert(StandardFold):
    """The newest record of each key, whole. A record without a value deletes the state.

    The model names it as its `fold`. With `where`, a record for which the condition is not true deletes the state, too.
    """

    takes_column = False
    example = ("Record",)
    keeps = "the whole state"
    unavailable: str = dataclasses.field(default="", init=False)
    re_keys: ClassVar[bool] = False
    """Whether a re-key of the source keeps the order of each state's records."""

    if TYPE_CHECKING:

        def __init__(self, column: str | type, *, where: Condition | None = None) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "column", DeclaredRecord.named(self.column))
        super().__post_init__()

    @property
    def placeholders(self) -> Sequence[bytes]:
        """What stands in records for a value that was not sent: one of these."""
        return ()

    @property
    def row(self) -> tuple[str, ...]:
        """The fields of the record that may have the row, in their order; none: the record is the row."""
        return ()

    @property
    def refusals(self) -> Sequence[Refusal]:
        """The events that are not rows; the first one that applies counts."""
        return ()

    def whole(self, schema: Schema) -> Schema:
        """Returns the record's schema with the fields that the fold reads and no class needs to have."""
        return schema

    def of(self, schema: Schema) -> Upsert:
        """Returns the fold for a record as it is written. Raises ValueError if the record is none for it."""
        return self

    def columns(self, state: Sequence[str], key: Sequence[str]) -> frozenset[str] | None:
        """Returns the columns that are read, by path, for fields of the state and of the key; None for all."""
        return None

    def form(self, kept: Any) -> Form:
        """Returns what an event adds to states of a record schema."""
        path = "".join(f"{part}." for part in self.row[:1])
        return {name: f"{path}{name}" for name in fields_of(kept)}

    def combination(self, kind: Any) -> Combination:
        return Combine.NEWEST

    def lacks(self, record: Mapping[str, Any] | None) -> Sequence[str]:
        """Returns the fields of an update whose values are those of the former state."""
        return ()

    def step(self, stored: Any) -> Callable[[Any, Any], Any]:
        return lambda _state, record: record

    def misfit(self, written: Any, kept: Any, columns: Mapping[str, Any]) -> str:
        path = "".join(f"{part}." for part in self.row[:1])
        return next(filter(None, (_unkept(name, kind, columns, path) for name, kind in fields_of(kept).items())), "")


@dataclass(frozen=True, repr=False)
class Debezium(Upsert):
    """The newest row of each key, by change events of Debezium, with `ExtractNewRecordState` or without.

    `unavailable` is what the connector sends for a value that did not change: it remains as it was.
    """

    unavailable: str = dataclasses.field(default=_PLACEHOLDER, kw_only=True)
    is_envelope: bool | None = dataclasses.field(default=None, init=False)
    """Whether the record has rows before and after the change; None until its schema is known."""
    operation: str = dataclasses.field(default="", init=False)
    """The column with the operation; empty if there is none."""

    example = ("Envelope",)
    re_keys = True

    if TYPE_CHECKING:

        def __init__(self, column: str | type, *, unavailable: str = ...) -> None: ...

    def __repr__(self) -> str:
        return f"Debezium(column={str(self.column)!r}, unavailable={self.unavailable!r})"

    @property
    def placeholders(self) -> Sequence[bytes]:
        code = self.unavailable.encode()
        # Text; bytes in JSON; the numbers of an array in JSON, and in Avro, each as a zigzag number.
        numbers = "[" + ",".join(map(str, code)) + "]"
        return (code, base64.b64encode(code), numbers.encode(), b"".join(map(_zigzag, code)))

    @property
    def row(self) -> tuple[str, ...]:
        return (_AFTER, _BEFORE) if self.is_envelope else ()

    @property
    def refusals(self) -> Sequence[Refusal]:
        if not self.operation:
            return ()
        op = col(self.operation)
        unknown = ~op.isin("c", "u", "r", "d", "t", "m")
        if self.is_envelope:
            unknown = op.is_null() | unknown
        found = [
            Refusal(op == "t", TRUNCATED, "the table was truncated, which names no row"),
            Refusal(op == "m", IGNORED),
            Refusal(unknown, _OPERATION_UNKNOWN, f"'{self.operation}' is none of c, u, r, d, t and m"),
        ]
        if self.is_envelope:
            found.append(Refusal((op != "d") & col(_AFTER).is_null(), _FIELD_NULL, f"'{_AFTER}' is null"))
        return found

    def whole(self, schema: Schema) -> Schema:
        columns = fields_of(schema)
        if _OP in columns and _AFTER in columns:
            return schema
        # Python gives such a field of a class another name, and without it a deletion would be a row.
        told = [{"name": one, "type": ["null", "string"], "default": None} for one in _FLAT_DELETIONS]
        return {**schema, "fields": [*schema["fields"], *(one for one in told if one["name"] not in columns)]}

    def of(self, schema: Schema) -> Upsert:
        columns = fields_of(schema)
        fold, is_deleted = replace(self), None
        is_envelope = _OP in columns and _AFTER in columns
        if self.where is not None:
            raise ValueError("Debezium takes no `where`: fold what the connector sends, and select in `view`")
        if is_envelope:
            if simple_name(without_null(columns[_AFTER])[0]) != "record":
                raise ValueError(f"its '{_AFTER}' is no record")
            operation, is_deleted = _OP, _is(_OP, "d")
        else:
            operation = _FLAT_OP if _FLAT_OP in columns else ""
            told = [_is(name, value) for name, value in _FLAT_DELETIONS.items() if name in columns]
            is_deleted = functools.reduce(operator.or_, told) if told else None
        object.__setattr__(fold, "is_envelope", is_envelope)
        object.__setattr__(fold, "operation", operation)
        object.__setattr__(fold, "where", None if is_deleted is None else ~is_deleted)
        return fold

    def columns(self, state: Sequence[str], key: Sequence[str]) -> frozenset[str] | None:
        if not self.is_envelope:
            found = {*state, *key, *([self.operation] if self.operation else [])}
            return frozenset(found if self.where is None else found | self.where.columns)
        # Both are of one named type.
        return frozenset({_OP, *(f"{part}.{name}" for part in self.row for name in (*state, *key))})

    def combination(self, kind: Any) -> Combination:
        return _Known(self.unavailable)

    def lacks(self, record: Mapping[str, Any] | None) -> Sequence[str]:
        return [name for name, value in (record or {}).items() if self._is_unavailable(value)]

    def _is_unavailable(self, value: Any) -> bool:
        # Of an array of numbers, the connector sends the bytes of the placeholder.
        text, code = self.unavailable, self.unavailable.encode()
        match value:
            case str() | bytes():
                return value in (text, code)
            case list():
                return value in ([text], [code], [*code])
            case dict():
                return value == {text: text}
        return False

    def step(self, stored: Any) -> Callable[[Any, Any], Any]:
        def known(state: Any, record: Any) -> Any:
            if not (lacking := self.lacks(record)):
                return record
            if state is None:
                raise PoisonRecordError(UNAVAILABLE, f"'{lacking[0]}' was not sent, and there is no former state")
            return {**record, **{name: state[name] for name in lacking}}

        return known


@dataclass(frozen=True)
class _Known(Combination):
    """As `Combine.NEWEST`, of records without a value that was not sent."""

    unavailable: str

    @property
    def in_any_order(self) -> bool:
        return False

    def aggregates(self, updates: pa.ChunkedArray) -> Sequence[tuple[pa.ChunkedArray, str]]:
        return Combine.NEWEST.aggregates(updates)

    def combined(
        self, updates: pa.ChunkedArray, aggregated: Iterator[pa.ChunkedArray], groups: Groups
    ) -> pa.Array | pa.ChunkedArray:
        return Combine.NEWEST.combined(updates, aggregated, groups)

    def apart(self, updates: pa.ChunkedArray) -> pa.ChunkedArray | None:
        found = None
        for column in updates.flatten():
            kind = column.type
            if pa.types.is_string(kind):
                mask = pc.equal(column, self.unavailable)
            elif pa.types.is_binary(kind):
                mask = pc.equal(column, self.unavailable.encode())
            elif pa.types.is_list(kind):
                # Few others are as long, and these are only folded one by one.
                mask = pc.is_in(pc.list_value_length(column), pa.array([1, len(self.unavailable.encode())], pa.int32()))
            elif pa.types.is_map(kind):
                mask = column.is_valid()
            else:
                continue
            found = mask if found is None else pc.or_kleene(found, mask)
        return None if found is None else pc.fill_null(found, False)


def _zigzag(byte: int) -> bytes:
    return bytes([2 * byte]) if byte < 64 else bytes([2 * byte & 0x7F | 0x80, byte >> 6])


def _is(column: str, value: str) -> Condition:
    """Returns whether a column has a value; never unknown."""
    return ~col(column).is_null() & (col(column) == value)


def _unkept(name: str, kept: Any, columns: Mapping[str, Any], path: str) -> str:
    """Returns why a field of the state cannot keep the column of the same name; empty if it can."""
    if name not in columns:
        return f"the state has '{name}', and the record has no such column; it has {', '.join(columns)}"
    (kind, is_nullable), (inner, keeps_null) = without_null(columns[name]), without_null(kept)
    if why := _inexact(kind, inner):
        return f"the state has '{name}', and '{path}{name}' {why}"
    why = "" if _is_wider(kind, inner) else difference(kind, inner)
    why = why or ("it may be null" if is_nullable and not keeps_null else "")
    return why and f"the state has '{name}': {why}"


def _inexact(written: Any, kept: Any) -> str:
    """Returns why a column of Debezium has lost, or hides, the digits of a number; empty if it does not."""
    if simple_name(written) == "record" and written["name"].rpartition(".")[2] == "VariableScaleDecimal":
        return (
            "is a VariableScaleDecimal, a number whose scale differs from row to row: give the column a scale, such as "
            "NUMERIC(18, 2), or set `decimal.handling.mode=string`"
        )
    if simple_name(written) in ("double", "float") and simple_name(kept) == "decimal":
        return (
            f"is a {simple_name(written)}, which has lost digits: the connector has `decimal.handling.mode=double`; "
            "set `precise`"
        )
    return ""


def _is_wider(written: Any, kept: Any) -> bool:
    """Whether a decimal keeps all values that the schema of another one allows: a longer one is a dead letter."""
    if not simple_name(written) == simple_name(kept) == "decimal":
        return False
    return bool(written.get("scale", 0) == kept.get("scale", 0) and written["precision"] <= kept["precision"])
