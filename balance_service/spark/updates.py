"""A read model's declaration as columns of Spark: what each event changes, or why it can never be applied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)

from balance_service.avro.schemas import fields_of, simple_name, without_null
from balance_service.model.folds import StandardFold, Top
from balance_service.model.keys import MAX_KEY_BYTES, SIGN_BIT, words_of
from balance_service.spark.conditions import column_of
from balance_service.spark.notes import IGNORED
from balance_service.spark.shape import all_of, any_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pyspark.sql import Column

    from balance_service.model.conditions import Condition
    from balance_service.model.read_model import ReadModel
    from balance_service.model.stage import Stage

_TIMES = ("date", "timestamp-millis", "timestamp-micros", "local-timestamp-millis", "local-timestamp-micros")
_TEXTS = ("string", "uuid")
# Of Python's times.
_FIRST_YEAR, _LAST_YEAR = 1, 9999


def update_columns(read_model: ReadModel | None, stage: Stage) -> dict[str, Column]:
    """The columns by name that a stage hands over, of rows with a struct for each record that it reads.

    Of the last stage of a model with states, what each event changes; the event itself where the model's own code is
    told of it; with the event's time where the model emits, or folds by its own function. A stage without states passes
    on what rows have besides.
    """
    time = {"timestamp": F.unix_millis("timestamp")}
    as_it_is = {"value": F.col("value"), "headers": F.col("headers")}
    if read_model is None:
        return time | as_it_is
    if stage.by is not None:
        # What is joined keeps its key until it is made.
        return time | as_it_is | (_events(stage) if stage.joins else {"record_key": F.col("record_key")})
    columns = {name: _update(fold, read_model, name) for name, fold in read_model.standard_folds.items()}
    if read_model.needs_events:
        columns |= _events(stage)
    if read_model.outputs or not read_model.standard_folds:
        columns |= time
    return columns if read_model.has_states() else columns | as_it_is


def key_column(stage: Stage) -> Column | None:
    """The key that a stage passes its records on by; None: the record's own, or what is known once it is joined."""
    if stage.by is None or stage.joins:
        return None
    if stage.next_table is not None:
        return _of_all_records(stage, stage.by).cast("string").cast("binary")
    return _key_of(stage, stage.by)


def judged_cause(read_model: ReadModel, stage: Stage) -> Column:
    """Why an event is not for the stage's work, or null: it is to be ignored, or can never be applied."""
    ignored = F.when(~all_of(_holds(stage, condition) for condition in stage.conditions), IGNORED)
    if stage.joins:
        misfit = _value_misfit(_columns_of(stage), F.when(F.lit(False), ""))
    else:
        misfit = _pass_misfit(stage, stage.by) if stage.by is not None else _fold_misfit(read_model, stage)
    return F.coalesce(ignored, misfit) if stage.conditions else misfit


def _pass_misfit(stage: Stage, by: str) -> Column:
    """Why a record cannot be passed on."""
    column = _of_all_records(stage, by)
    cause = F.when(column.isNull(), "field-null")
    if _is_number(stage, by):
        return cause
    # No state could have a longer key, and the topic might refuse it.
    is_malformed = ~F.is_valid_utf8(column) | (F.octet_length(column) > MAX_KEY_BYTES)
    return cause.when(is_malformed, f"{'-'.join(words_of(by))}-malformed")


def _fold_misfit(read_model: ReadModel, stage: Stage) -> Column:
    """Why an event can never be applied: its key is not the record's, or Python could not hold a value."""
    cause, key, name = F.when(F.lit(False), ""), "", ""
    if read_model.has_states():
        key, name = read_model.key, "-".join(words_of(read_model.key))
        cause = F.when(_key_of(stage, key) != F.col("key"), f"key-is-not-{name}")
    return _value_misfit(_used_columns(read_model, stage), cause, key, f"{name}-malformed")


def _value_misfit(columns: Mapping[str, Any], cause: Column, key: str = "", key_cause: str = "") -> Column:
    """A cause, or that Python could not hold a value of some columns.

    Args:
        columns: with their types.
        key: the one of which that has a cause of its own.
    """
    for path, kind in columns.items():
        column = F.col(path)
        if simple_name(without_null(kind)[0]) in _TEXTS:
            is_key = bool(key) and path.endswith(f".{key}")
            # What is no UTF-8 reaches Spark as it is; see `shape`.
            cause = cause.when(~F.is_valid_utf8(column), key_cause if is_key else "text-malformed")
        elif _has_time(kind):
            cause = cause.when(_beyond(column, kind), "time-out-of-range")
    return cause


def _holds(stage: Stage, condition: Condition) -> Column:
    """Whether a condition holds for an event; never null."""
    return F.coalesce(column_of(condition, [*stage.wanted_schemas.values()]), F.lit(False))


def _key_of(stage: Stage, name: str) -> Column:
    """The value of a column as a key; see `keys`."""
    column = _of_all_records(stage, name)
    if not _is_number(stage, name):
        return column.cast("binary")
    digits = F.hex(column.cast("bigint").bitwiseXOR(F.lit(-SIGN_BIT)))
    return F.unhex(F.lpad(digits, 16, "0"))


def _is_number(stage: Stage, name: str) -> bool:
    kinds = (fields_of(schema)[name] for schema in stage.wanted_schemas.values())
    return any(simple_name(without_null(kind)[0]) != "string" for kind in kinds)


def _of_all_records(stage: Stage, name: str) -> Column:
    """A column that all records have, of whichever the row has."""
    columns = [F.col(f"{record}.{name}") for record in stage.records]
    return columns[0] if len(columns) == 1 else F.coalesce(*columns)


def _update(fold: StandardFold, read_model: ReadModel, name: str) -> Column:
    is_there = F.col(fold.record).isNotNull()
    if not fold.field:
        return F.when(is_there, F.lit(1).cast("bigint"))
    if isinstance(fold, Top):
        return F.when(is_there, F.array(_struct(fold.record, _entries(read_model, name))))
    return F.col(fold.column)


def _struct(record: str, fields: Iterable[str]) -> Column:
    return F.struct(*(F.col(f"{record}.{field}").alias(field) for field in fields))


def _events(stage: Stage) -> dict[str, Column]:
    """The events themselves, a column for each record type."""
    return {
        schema["name"]: F.when(F.col(schema["name"]).isNotNull(), _struct(schema["name"], fields_of(schema)))
        for schema in stage.wanted_schemas.values()
    }


def _columns_of(stage: Stage) -> dict[str, Any]:
    """All columns of the events, with their types."""
    events = {schema["name"]: fields_of(schema) for schema in stage.wanted_schemas.values()}
    return {f"{record}.{field}": kind for record, fields in events.items() for field, kind in fields.items()}


def _entries(read_model: ReadModel, name: str) -> list[str]:
    """The fields of a top's entries."""
    kept, _ = without_null(read_model.state_fields[name])
    return [*fields_of(kept["items"])]


def _used_columns(read_model: ReadModel, stage: Stage) -> dict[str, Any]:
    """The columns of events that reach Python, with their types."""
    events = {schema["name"]: fields_of(schema) for schema in stage.wanted_schemas.values()}
    if read_model.needs_events:
        return _columns_of(stage)
    used: dict[str, Any] = {}
    for name, fold in read_model.standard_folds.items():
        fields = _entries(read_model, name) if isinstance(fold, Top) else [fold.field] if fold.field else []
        used |= {f"{fold.record}.{field}": events[fold.record][field] for field in fields}
    return used


def _beyond(column: Column, kind: Any) -> Column:
    """Whether a time anywhere in a value lies beyond Python's; false or null if none does."""
    kind, _ = without_null(kind)
    match simple_name(kind):
        case name if name in _TIMES:
            return ~F.year(column).between(_FIRST_YEAR, _LAST_YEAR)
        case "array":
            return F.exists(column, lambda item: _beyond(item, kind["items"]))
        case "map":
            return F.exists(F.map_values(column), lambda value: _beyond(value, kind["values"]))
        case _:
            parts = [_beyond(column[name], field) for name, field in fields_of(kind).items() if _has_time(field)]
            return any_of(F.coalesce(part, F.lit(False)) for part in parts)


def _has_time(kind: Any) -> bool:
    """Whether a value of a type may have a time in it."""
    kind, _ = without_null(kind)
    match simple_name(kind):
        case "array":
            return _has_time(kind["items"])
        case "map":
            return _has_time(kind["values"])
        case "record":
            return any(_has_time(field) for field in fields_of(kind).values())
        case name:
            return name in _TIMES
