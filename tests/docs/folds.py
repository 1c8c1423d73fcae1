"""The reference of standard folds, from their classes."""

from __future__ import annotations

import inspect
import json
from typing import TYPE_CHECKING, Any

import balance_service
from balance_service.model.standard_fold import StandardFold
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
- `where=` limits a fold to the events for which a [condition](../how-to/read-models.md#conditions) is true:
  `Count("Record", where=col("amount") > 1)`. The other events still give their key a state.
- A field of the column's type keeps every value: an int may be kept as a long, a float as a double, milliseconds as
  microseconds. A decimal has 38 digits and the column's scale, since a producer may write more digits than its schema
  says.
- Queries, `view` and `emit` receive the values above. `emits` without a record type sends what states keep.
- Updates of a key combine before the fold, so a replay folds once per key and batch. A model with `emits`, or
  with a fold that does not combine (last column of the table), folds its events one by one, which is slower.
- A field with the name of an attribute of a model, such as `name`, has its fold in a mapping:
  `folds = {"name": Latest("Record.name")}`.
"""
_TYPES: dict[str, Any] = {
    "int": "int",
    "long": "long",
    "float": "float",
    "double": "double",
    "decimal": {"type": "bytes", "logicalType": "decimal", "precision": 38, "scale": 2},
    "date": {"type": "int", "logicalType": "date"},
    "timestamp": {"type": "long", "logicalType": "timestamp-micros"},
    "string": "string",
    "enum": {"type": "enum", "name": "Kind", "symbols": ["A"]},
    "boolean": "boolean",
    "bytes": "bytes",
    "record": {"type": "record", "name": "Entry", "fields": []},
}


def page() -> str:
    columns = ("fold", "value", "columns", "field of the state", "combines")
    return joined([_HEAD, table(columns, map(_row, _folds())), section("All folds", _COMMON)])


def _folds() -> Iterator[type[StandardFold]]:
    public = (getattr(balance_service, name) for name in balance_service.__all__)
    return (kind for kind in public if inspect.isclass(kind) and issubclass(kind, StandardFold))


def _row(kind: type[StandardFold]) -> Sequence[str]:
    fold = kind(*kind.example)
    columns = [name for name, written in _TYPES.items() if not fold.unfit(written)] if fold.takes_column else []
    taken = "any" if len(columns) == len(_TYPES) else ", ".join(columns) or "none"
    alone = [name for name in columns if fold.combination(_TYPES[name]) is None]
    combines = f"not {' and '.join(alone)}" if alone else "yes"
    docstring = " ".join((inspect.getdoc(kind) or "").split())
    arguments = ", ".join(map(json.dumps, kind.example))
    return (f"`{kind.__name__}({arguments})`", docstring, taken, fold.keeps, combines)
