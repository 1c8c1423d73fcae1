"""Generates events of a read model for property tests; needs the extra `testing`."""

from __future__ import annotations

import io
from datetime import UTC, datetime
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import NAMESPACE_DNS, uuid5

import fastavro
from hypothesis import strategies as st

from balance_service.avro.codec import parsed
from balance_service.avro.schemas import fields_of, is_fixed_uuid, simple_name, without_null
from balance_service.model.record_folds import TRUNCATED
from balance_service.testing.rows import InputEvent, driven_stages, encoded, tombstone

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hypothesis.strategies import SearchStrategy

    from balance_service.avro.schemas import Schema
    from balance_service.model.read_model import ReadModel
    from balance_service.model.record_keys import RecordKey
    from balance_service.model.stage import Stage

# Few keys, so that events share them: short and long ones, and one with more bytes than characters.
_KEYS = ("a", "b", "key with a space", "é", "c" * 64)
_MALFORMED = ("", "line\nbreak")
_INT, _LONG = 2**31, 2**63


def batches(read_model: ReadModel) -> SearchStrategy[list[list[InputEvent]]]:
    """Generates batches of events with few keys; some events are rejected."""
    # Columns that are not read have the zero of their type.
    last = read_model.stages[-1]
    schemas = last.events.values()
    keys = st.sampled_from(_KEYS) if last.own_key is None else _record_keys(last.own_key)
    tombstones = [st.builds(tombstone, keys)] if last.tombstones else []
    events = st.one_of([*(_events(read_model, schema) for schema in schemas), *tombstones])
    if last.format != "avro":
        # JSON has no NaN.
        events = events.filter(partial(_has_form, last))
    return st.lists(st.lists(events, max_size=8), max_size=4)


def _has_form(stage: Stage, given: InputEvent) -> bool:
    try:
        encoded(given, stage)
    except ValueError:
        return False
    return True


def _events(read_model: ReadModel, schema: Schema) -> SearchStrategy[InputEvent]:
    # Few events are rejected, so that most are folded.
    keys, last = st.sampled_from([*_KEYS * 4, *_MALFORMED]), read_model.stages[-1]
    literals = _literals(read_model)
    fields = {name: _sent(kind, name, literals) for name, kind in fields_of(schema).items()}
    record_keys = st.sampled_from([*[None] * 19, b"another key"])
    if (own := read_model.stages[-1].own_key) is not None:
        record_keys = _record_keys(own)
    elif read_model.has_states():
        for part in read_model.key_type.parts:
            if not part.is_number and not last.row:
                fields[part.column] = _or_of(keys, "string", literals.get(part.column, ()))
        for outer in last.row:
            columns = {name: _sent(kind, f"{outer}.{name}", literals) for name, kind in last.row_fields(schema).items()}
            columns |= {part.column: keys for part in read_model.key_type.parts if not part.is_number}
            fields[outer] = st.fixed_dictionaries(columns)
    events = st.builds(InputEvent, st.just(schema["name"]), st.fixed_dictionaries(fields), record_keys)
    # Others halt the task.
    halting = [refusal.condition for refusal in last.refusals if refusal.cause == TRUNCATED]
    return events.filter(lambda one: not any(condition.holds(one.fields) for condition in halting))


def _record_keys(own: RecordKey) -> SearchStrategy[bytes | None]:
    """Generates few keys of a form, as producers write them, and some that have another form, or none."""
    if own.key_format == "bytes":
        valid = [b"a", b"\0", b"\xff\xff"]
    elif own.is_number:
        valid = [own.record_key(number) for number in (-1, 0, 1, 2**31 - 1, -(2**31))]
    else:
        valid = [own.record_key(key) for key in (_KEYS if own.is_text else map(uuid5, [NAMESPACE_DNS] * 3, "abc"))]
    return st.sampled_from([*valid * 4, None, b"", b"another key"])


def _literals(read_model: ReadModel) -> Mapping[str, Sequence[Any]]:
    """Returns the values that conditions compare with, by column or nested field."""
    conditions = [condition for stage in driven_stages(read_model, after_joins=True) for condition in stage.conditions]
    optional = [output.where for output in read_model.outputs]
    optional += [fold.where for fold in read_model.standard_folds.values()]
    optional += [refusal.condition for refusal in read_model.stages[-1].refusals]
    found: dict[str, list[Any]] = {}
    for condition in (*conditions, *(where for where in optional if where is not None)):
        for predicate in condition.predicates:
            also = [value.upper() for value in predicate.values] if predicate.field.is_lowered else []
            found.setdefault(predicate.field.path, []).extend((*predicate.values, *also))
    return found


def _sent(kind: Any, path: str, literals: Mapping[str, Sequence[Any]]) -> SearchStrategy[Any]:
    """Generates values of an Avro type as producers send them, including values for which conditions hold.

    A UUID that is a string may be malformed, because producers need not check it.
    """
    inner, is_nullable = without_null(kind)
    if simple_name(inner) == "record" and any(compared.startswith(f"{path}.") for compared in literals):
        fields = {name: _sent(field, f"{path}.{name}", literals) for name, field in fields_of(inner).items()}
        return st.fixed_dictionaries(fields) | (st.none() if is_nullable else st.nothing())
    values = values_of(kind) | (
        st.nothing() if simple_name(inner) != "uuid" or is_fixed_uuid(inner) else st.sampled_from(["", "nonsense"])
    )
    return _or_of(values, inner, literals.get(path, ()))


def _or_of(values: SearchStrategy[Any], kind: Any, literals: Sequence[Any]) -> SearchStrategy[Any]:
    """Adds the literals that a type allows to some values."""
    if simple_name(kind) == "decimal":
        literals = [Decimal(value) for value in literals]
    allowed = [value for value in literals if _is_allowed(kind, value)]
    return values | st.sampled_from(allowed) if allowed else values


def _is_allowed(kind: Any, value: Any) -> bool:
    """Whether a value can be sent: a literal may have more digits than its column, for example."""
    try:
        fastavro.schemaless_writer(io.BytesIO(), parsed(kind), value)
    except Exception:  # fastavro raises many types of errors.
        return False
    return True


def values_of(kind: Any) -> SearchStrategy[Any]:
    if isinstance(kind, list):
        return st.one_of([values_of(member) for member in kind])
    name = simple_name(kind)
    if name in _PLAIN:
        return _PLAIN[name]
    return _MADE_OF[name](kind)


def _decimals(kind: Any) -> SearchStrategy[Decimal]:
    limit = 10 ** kind["precision"]
    unscaled = st.integers(-1000, 1000) | st.integers(-limit + 1, limit - 1)
    return unscaled.map(lambda number: Decimal((number < 0, tuple(map(int, str(abs(number)))), -kind.get("scale", 0))))


_MOMENTS = st.datetimes(timezones=st.just(UTC)).map(lambda at: at.replace(microsecond=at.microsecond // 1000 * 1000))
# Of the years whose nanoseconds a long holds.
_NANOS = st.datetimes(datetime(1678, 1, 1), datetime(2261, 12, 31))  # noqa: DTZ001
_PLAIN: Mapping[str, SearchStrategy[Any]] = {
    "null": st.none(),
    "boolean": st.booleans(),
    "int": st.integers(-3, 3) | st.integers(-_INT, _INT - 1),
    "long": st.integers(-3, 3) | st.integers(-_LONG, _LONG - 1),
    "float": st.sampled_from([0.0, -0.0, 1.0]) | st.floats(width=32),
    "double": st.sampled_from([0.0, -0.0, 1.0]) | st.floats(),
    "string": st.text(max_size=5),
    "bytes": st.binary(max_size=5),
    "date": st.dates(),
    "timestamp-millis": _MOMENTS,
    "timestamp-micros": st.datetimes(timezones=st.just(UTC)),
    "timestamp-nanos": _NANOS.map(lambda at: at.replace(tzinfo=UTC)),
    "local-timestamp-millis": _MOMENTS.map(lambda at: at.replace(tzinfo=None)),
    "local-timestamp-micros": st.datetimes(),
    "local-timestamp-nanos": _NANOS,
    "uuid": st.uuids().map(str),
}
_MADE_OF: Mapping[str, Callable[[Any], SearchStrategy[Any]]] = {
    "decimal": _decimals,
    "enum": lambda kind: st.sampled_from(kind["symbols"]),
    "fixed": lambda kind: st.binary(min_size=kind["size"], max_size=kind["size"]),
    "array": lambda kind: st.lists(values_of(kind["items"]), max_size=3),
    "map": lambda kind: st.dictionaries(st.text(max_size=3), values_of(kind["values"]), max_size=3),
    "record": lambda kind: st.fixed_dictionaries({n: values_of(k) for n, k in fields_of(kind).items()}),
}
