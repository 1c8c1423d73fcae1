"""The declaration of a read model as Spark columns: conditions, the changes of each event, and causes of refusal."""

from __future__ import annotations

import functools
import operator
from datetime import UTC, date, datetime, timedelta
from decimal import ROUND_FLOOR, Decimal, localcontext
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)

from balance_service.avro.schemas import fields_of, simple_name, without_null
from balance_service.model.conditions import COMPARISONS, IN, IS_NULL, LOWER, UPPER, Compound, Not
from balance_service.model.folds import StandardFold, Top
from balance_service.model.keys import MAX_KEY_BYTES, SIGN_BIT, words_of
from balance_service.spark.combine import IGNORED
from balance_service.spark.shape import all_of, any_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pyspark.sql import Column

    from balance_service.avro.schemas import Schema
    from balance_service.model.conditions import Condition, Predicate
    from balance_service.model.read_model import ReadModel
    from balance_service.model.stage import Stage

_TIMES = ("date", "timestamp-millis", "timestamp-micros", "local-timestamp-millis", "local-timestamp-micros")
_TEXTS = ("string", "uuid")
# The range of Python's dates.
_FIRST_YEAR, _LAST_YEAR = 1, 9999
_DIGITS = 38
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def update_columns(read_model: ReadModel | None, stage: Stage) -> dict[str, Column]:
    """Returns the columns, by name, that a stage hands over; rows have a struct for each record that the stage reads.

    The last stage of a model with states hands over the changes of each event; the event itself if the model's own code
    receives it; and the event's time if the model emits or overrides `fold`. A stage without states also hands over the
    record's value and headers.
    """
    time = {"timestamp": F.unix_millis("timestamp")}
    unchanged = {"value": F.col("value"), "headers": F.col("headers")}
    if read_model is None:
        return time | unchanged
    if stage.by is not None:
        # Records of a stage with joins keep their key until the join.
        return time | unchanged | (_events(stage) if stage.joins else {"record_key": F.col("record_key")})
    columns = {name: _update(fold, read_model, name) for name, fold in read_model.standard_folds.items()}
    if read_model.needs_events:
        columns |= _events(stage)
    if read_model.outputs or not read_model.standard_folds:
        columns |= time
    return columns if read_model.has_states() else columns | unchanged


def key_column(stage: Stage) -> Column | None:
    """Returns the key of the records that a stage passes on; None: the record's own, or known only after the join."""
    if stage.by is None or stage.joins:
        return None
    if stage.next_table is not None:
        return _of_all_records(stage, stage.by).cast("string").cast("binary")
    return _key_of(stage, stage.by)


def cause_column(read_model: ReadModel, stage: Stage) -> Column:
    """Returns why the stage does not process an event; null if it does."""
    ignored = F.when(~all_of(_holds(stage, condition) for condition in stage.conditions), IGNORED)
    if stage.joins:
        misfit = _value_misfit(_columns_of(stage), F.when(F.lit(False), ""))
    else:
        misfit = _pass_misfit(stage, stage.by) if stage.by is not None else _fold_misfit(read_model, stage)
    return F.coalesce(ignored, misfit) if stage.conditions else misfit


def _pass_misfit(stage: Stage, by: str) -> Column:
    column = _of_all_records(stage, by)
    cause = F.when(column.isNull(), "field-null")
    if _is_number(stage, by):
        return cause
    # A state's key may not be longer, and the topic might refuse it.
    is_malformed = ~F.is_valid_utf8(column) | (F.octet_length(column) > MAX_KEY_BYTES)
    return cause.when(is_malformed, f"{'-'.join(words_of(by))}-malformed")


def _fold_misfit(read_model: ReadModel, stage: Stage) -> Column:
    """Returns why an event cannot be applied: its key is not the record's, or Python cannot represent a value."""
    cause, key, name = F.when(F.lit(False), ""), "", ""
    if read_model.has_states():
        key, name = read_model.key, "-".join(words_of(read_model.key))
        cause = F.when(_key_of(stage, key) != F.col("key"), f"key-is-not-{name}")
    return _value_misfit(_used_columns(read_model, stage), cause, key, f"{name}-malformed")


def _value_misfit(columns: Mapping[str, Any], cause: Column, key: str = "", key_cause: str = "") -> Column:
    """Returns a cause, or the cause for a value that Python cannot represent.

    Args:
        columns: column → Avro type.
        key: the column among them that has its own cause.
    """
    for path, kind in columns.items():
        column = F.col(path)
        if simple_name(without_null(kind)[0]) in _TEXTS:
            is_key = bool(key) and path.endswith(f".{key}")
            # Invalid UTF-8 reaches Spark unchanged; see `shape`.
            cause = cause.when(~F.is_valid_utf8(column), key_cause if is_key else "text-malformed")
        elif _has_time(kind):
            cause = cause.when(_has_time_out_of_range(column, kind), "time-out-of-range")
    return cause


def _holds(stage: Stage, condition: Condition) -> Column:
    """Returns whether a condition holds for an event; never null."""
    return F.coalesce(column_of(condition, [*stage.wanted_schemas.values()]), F.lit(False))


def _key_of(stage: Stage, name: str) -> Column:
    """Returns the value of a column, encoded as a key; see `keys`."""
    column = _of_all_records(stage, name)
    if not _is_number(stage, name):
        return column.cast("binary")
    digits = F.hex(column.cast("bigint").bitwiseXOR(F.lit(-SIGN_BIT)))
    return F.unhex(F.lpad(digits, 16, "0"))


def _is_number(stage: Stage, name: str) -> bool:
    kinds = (fields_of(schema)[name] for schema in stage.wanted_schemas.values())
    return any(simple_name(without_null(kind)[0]) != "string" for kind in kinds)


def _of_all_records(stage: Stage, name: str) -> Column:
    """Returns a column that all records have, from the record that the row has."""
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
    return {
        schema["name"]: F.when(F.col(schema["name"]).isNotNull(), _struct(schema["name"], fields_of(schema)))
        for schema in stage.wanted_schemas.values()
    }


def _columns_of(stage: Stage) -> dict[str, Any]:
    events = {schema["name"]: fields_of(schema) for schema in stage.wanted_schemas.values()}
    return {f"{record}.{field}": kind for record, fields in events.items() for field, kind in fields.items()}


def _entries(read_model: ReadModel, name: str) -> list[str]:
    kept, _ = without_null(read_model.state_fields[name])
    return [*fields_of(kept["items"])]


def _used_columns(read_model: ReadModel, stage: Stage) -> dict[str, Any]:
    events = {schema["name"]: fields_of(schema) for schema in stage.wanted_schemas.values()}
    if read_model.needs_events:
        return _columns_of(stage)
    used: dict[str, Any] = {}
    for name, fold in read_model.standard_folds.items():
        fields = _entries(read_model, name) if isinstance(fold, Top) else [fold.field] if fold.field else []
        used |= {f"{fold.record}.{field}": events[fold.record][field] for field in fields}
    return used


def _has_time_out_of_range(column: Column, kind: Any) -> Column:
    """Returns whether a time in a value is outside of Python's range; false or null if none is."""
    kind, _ = without_null(kind)
    match simple_name(kind):
        case name if name in _TIMES:
            return ~F.year(column).between(_FIRST_YEAR, _LAST_YEAR)
        case "array":
            return F.exists(column, lambda item: _has_time_out_of_range(item, kind["items"]))
        case "map":
            return F.exists(F.map_values(column), lambda value: _has_time_out_of_range(value, kind["values"]))
        case _:
            parts = [
                _has_time_out_of_range(column[name], field)
                for name, field in fields_of(kind).items()
                if _has_time(field)
            ]
            return any_of(F.coalesce(part, F.lit(False)) for part in parts)


def _has_time(kind: Any) -> bool:
    """Returns whether a value of a type may contain a time."""
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


def column_of(condition: Condition, schemas: Sequence[Schema]) -> Column:
    """Returns a condition as a column; null if the condition is unknown. Equals `Condition.verdict` for every row.

    Args:
        schemas: the records, a struct column each. Each row has one of them.
    """
    match condition:
        case Compound(left, word, right):
            one, other = column_of(left, schemas), column_of(right, schemas)
            return one | other if word == "or" else one & other
        case Not(condition=denied):
            return ~column_of(denied, schemas)
    (predicate,) = condition.predicates
    columns = [_of_record(predicate, schema) for schema in schemas]
    if predicate.sign == IS_NULL:
        return functools.reduce(operator.and_, columns)
    # For the records that a row lacks, the condition is unknown. Coalescing the fields would convert their types.
    return columns[0] if len(columns) == 1 else F.coalesce(*columns)


def _of_record(predicate: Predicate, schema: Schema) -> Column:
    kind, column = predicate.field.type_in(schema), F.col(f"{schema['name']}.{predicate.field.path}")
    if predicate.sign == IS_NULL:
        return column.isNull()
    if predicate.field.is_lowered:
        column = F.translate(column, UPPER, LOWER)
    if simple_name(kind) == "decimal":
        return _of_decimal(predicate, column, kind.get("scale", 0))
    literals = map(_literal, predicate.values)
    return column.isin(*literals) if predicate.sign == IN else COMPARISONS[predicate.sign](column, *literals)


def _of_decimal(predicate: Predicate, column: Column, scale: int) -> Column:
    values = [Decimal(value) for value in predicate.values]
    if predicate.sign != IN:
        return _decimal_compared(column, scale, predicate.sign, *values)
    found = [_at_scale(value, scale) for value in values]
    exact = [value for value in found if value is not None]
    # `isin` without values is false even for null.
    return column.isin(exact) if exact else _unless_null(column, outcome=False)


def _decimal_compared(column: Column, scale: int, sign: str, value: Decimal) -> Column:
    """Compares a decimal with a value of any number of digits, which Spark might round first."""
    exact = _at_scale(value, scale)
    if exact is not None:
        return COMPARISONS[sign](column, F.lit(exact))  # type: ignore[no-any-return]
    if sign in ("=", "!="):
        return _unless_null(column, outcome=sign == "!=")
    is_below = sign in ("<", "<=")
    if value.copy_abs() >= _decimal_limit(scale):
        return _unless_null(column, outcome=is_below == (value > 0))
    next_below = _at_scale(value, scale, rounding=ROUND_FLOOR)
    if next_below is None:
        return _unless_null(column, outcome=not is_below)
    return column <= F.lit(next_below) if is_below else column > F.lit(next_below)


def _at_scale(value: Decimal, scale: int, rounding: str | None = None) -> Decimal | None:
    """Returns a number at a scale; None if it has more digits after the point, or more than 38 in total.

    Args:
        rounding: how to drop digits after the point, if that is allowed.
    """
    if value.copy_abs() >= _decimal_limit(scale):
        return None
    with localcontext(prec=_DIGITS + 1):
        found = value.quantize(Decimal(1).scaleb(-scale), rounding)
    return found if found.copy_abs() < _decimal_limit(scale) and (rounding or found == value) else None


def _decimal_limit(scale: int) -> Decimal:
    """Returns the least number that exceeds every decimal of a scale."""
    return Decimal(1).scaleb(_DIGITS - scale)


def _unless_null(column: Column, *, outcome: bool) -> Column:
    return F.when(column.isNotNull(), F.lit(outcome))


def _literal(value: Any) -> Column:
    """Returns a literal of any type except decimal.

    Of a Python time, Spark would convert the calendar and the time zone.
    """
    match value:
        case datetime() if value.utcoffset() is not None:
            return F.timestamp_micros(F.lit((value - _EPOCH) // timedelta(microseconds=1)))
        case datetime():
            return F.lit(value.isoformat()).cast("timestamp_ntz")
        case date():
            return F.lit(value.isoformat()).cast("date")
        case bytes():
            return F.lit(bytearray(value))
        case _:
            return F.lit(value)
