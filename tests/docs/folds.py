"""The reference of standard folds, from their classes."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import balance_service
from balance_service.model.folds import Count, StandardFold, Top
from tests.docs.markdown import joined, section, table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_HEAD = """\
# Standard folds

A standard fold computes one field of the state from a column, a field of the events. [How to write a read
model](../how-to/read-models.md#standard-folds) shows them in use.

"""
_COMMON = """\
- An event without a value for a fold, because the column is null or the event is of another record, leaves the field
  unchanged. A field that is null before its first value must be nullable.
- A field of the column's type keeps every value: an int may be kept as a long, a float as a double, milliseconds as
  microseconds. A decimal has 38 digits and the column's scale, since a producer may write more digits than its schema
  says.
- Updates of a key combine before the fold, so a replay folds once per key and batch. A model with `emits`, or
  with a fold that does not combine (last column of the table), folds its events one by one, which is slower.
- A field with the name of an attribute of a model, such as `name`, has its fold in a mapping:
  `folds = {"name": Latest("Record.name")}`.
"""
_RECORD: dict[str, Any] = {"type": "record", "name": "Entry", "fields": [{"name": "column", "type": "long"}]}
_ARRAY = "array of records"
_DECIMAL = {"type": "bytes", "logicalType": "decimal", "precision": 38, "scale": 2}
_TYPES: dict[str, Any] = {
    "int": "int",
    "long": "long",
    "float": "float",
    "double": "double",
    "decimal": _DECIMAL,
    "date": {"type": "int", "logicalType": "date"},
    "timestamp": {"type": "long", "logicalType": "timestamp-micros"},
    "string": "string",
    "boolean": "boolean",
    "bytes": "bytes",
    "record": _RECORD,
}
_FIELDS = {**_TYPES, _ARRAY: {"type": "array", "items": _RECORD}}


def page() -> str:
    columns = ("fold", "value", "columns", "field of the state", "combines")
    return joined([_HEAD, table(columns, map(_row, _folds())), section("All folds", _COMMON)])


def _folds() -> Iterator[type[StandardFold]]:
    public = (getattr(balance_service, name) for name in balance_service.__all__)
    return (kind for kind in public if inspect.isclass(kind) and issubclass(kind, StandardFold))


def _row(kind: type[StandardFold]) -> Sequence[str]:
    arguments, fold = _made(kind)
    kept = {
        name: {of for of, field in _FIELDS.items() if not fold.misfit(written, field)}
        for name, written in _TYPES.items()
    }
    columns = [name for name, fields in kept.items() if fields]
    if kind is Count:
        taken, field = "none", "long"
    else:
        taken = "any" if len(columns) == len(_TYPES) else ", ".join(columns)
        field = _ARRAY if kept["long"] == {_ARRAY} else "as the column" if "int" in kept["int"] else "long, or decimal"
    alone = [name for name in columns if fold.combination(_TYPES[name]) is None]
    combines = f"not {' and '.join(alone)}" if alone else "yes"
    docstring = " ".join((inspect.getdoc(kind) or "").split())
    return (f"`{kind.__name__}({arguments})`", docstring, taken, field, combines)


def _made(kind: type[StandardFold]) -> tuple[str, StandardFold]:
    """Returns a fold of a class, and the arguments that made it."""
    if kind is Count:
        return '"Record"', Count("Record")
    if kind is Top:
        return '"Record.column", 3', Top("Record.column", 3)
    return '"Record.column"', kind("Record.column")
