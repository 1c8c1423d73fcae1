"""The declaration of a read model as Spark columns: conditions, the changes of each event, and causes of refusal."""

from __future__ import annotations

import functools
import operator
from datetime import UTC, date, datetime, timedelta
from decimal import ROUND_FLOOR, Decimal, localcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)

from balance_service.avro.named_types import contracted
from balance_service.avro.schemas import fields_of, simple_name, without_null
from balance_service.engine.records import RESERVED_PREFIX
from balance_service.model.conditions import COMPARISONS, IN, IS_NULL, LOWER, UPPER, Compound, Not
from balance_service.model.keys import END_OF_TEXT, ESCAPED_NUL, MAX_KEY_BYTES, SIGN_BIT, cause_of
from balance_service.model.record_folds import IGNORED
from balance_service.model.record_keys import MOST_BYTES, OURS
from balance_service.model.stage_checks import TAKEN
from balance_service.model.standard_fold import columns_of
from balance_service.model.transform import FRAMES, KEYS, ROW

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pyspark.sql import Column

    from balance_service.avro.schemas import Schema
    from balance_service.model.conditions import Condition, Predicate
    from balance_service.model.read_model import ReadModel
    from balance_service.model.record_folds import Refusal
    from balance_service.model.stage import Stage
    from balance_service.model.standard_fold import Form, StandardFold
    from balance_service.model.transform import Transform

_DIGITS = 38
_DIGITS_HEX, _FLIPPED_HEX = "0123456789ABCDEF", "89ABCDEF01234567"
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
        own = _events(stage) if stage.joins else {"record_key": F.col("record_key")}
        return time | unchanged | own | ({} if stage.transform is None else _rows(stage, stage.by, stage.transform))
    forms = read_model.update_forms
    columns = {name: _update(fold, forms[name], stage) for name, fold in read_model.standard_folds.items()}
    if read_model.needs_events:
        columns |= _events(stage)
    if read_model.outputs or not read_model.standard_folds:
        columns |= time
    return columns if read_model.has_states() else columns | unchanged


def named_event(record: str) -> str:
    """Returns the name of the column with the struct of a record: its own, unless it is one of Kafka's, as `value`."""
    return f"#event {record}" if record.lower() in TAKEN else record


def event_column(record: str, path: str = "") -> Column:
    """Returns the struct of a record, or one of its columns by path."""
    return F.col(f"`{named_event(record)}`" + (f".{path}" if path else ""))


def stored_key(stage: Stage, record_key: Column, sent_by: Column, key_format: Column) -> Column:
    """Returns the key of a record as stores have it, as `RecordKey.stored`; null if it has another form.

    Args:
        sent_by, key_format: headers of the record.
    """
    match stage.key_format:
        case "int" | "long" as form:
            first, width = F.hex(F.substring(record_key, 1, 1)), 4 if form == "int" else 8
            # The digits with the first bit of four inverted.
            flipped = F.concat(
                F.translate(F.substring(first, 1, 1), _DIGITS_HEX, _FLIPPED_HEX), F.substring(first, 2, 1)
            )
            stored = F.concat(F.lit(bytearray(OURS)), F.unhex(flipped), F.substring(record_key, 2, width - 1))
            is_of_form = F.octet_length(record_key) == width
            if form == "long":
                is_of_form &= ~(sent_by.isNotNull() & key_format.isNull())
            return F.when(is_of_form, stored)
        case "bytes":
            return F.when(
                F.octet_length(record_key).between(1, MOST_BYTES), F.concat(F.lit(bytearray(OURS)), record_key)
            )
    # Checked with the first state.
    return record_key


def key_column(stage: Stage) -> Column | None:
    """Returns the key of the records that a stage passes on; None: the record's own, or known only after the join."""
    if stage.by is None or stage.joins:
        return None
    if stage.transform is not None:
        # Each row has its own.
        return F.lit(None).cast("binary")
    return _passed_key(stage, stage.by)


def _passed_key(stage: Stage, by: Sequence[str], row: Column | None = None) -> Column:
    """Returns the key that a record, or a row, is passed on with; before a join with a table, as the table's are."""
    if stage.next_table is None:
        return _key_of(stage, by, row)
    column = _of_all_records(stage, by[0], row)
    match stage.next_table.key_format:
        case "int":
            return F.unhex(F.substring(F.lpad(F.hex(column.cast("bigint")), 16, "0"), 9, 8))
        case "long":
            return F.unhex(F.lpad(F.hex(column.cast("bigint")), 16, "0"))
    return column.cast("string").cast("binary")


def reserved_cause(stage: Stage, key: Column) -> Column:
    """Returns the cause of an event whose key begins as reserved ones do; null for others."""
    if stage.may_have_any_key:
        return F.lit(None).cast("string")
    # A text does not begin so: it is UTF-8.
    cause = "key-reserved" if stage.own_key is None else stage.own_key.cause
    return F.when(key >= F.lit(bytearray(RESERVED_PREFIX)), cause)


def cause_column(read_model: ReadModel, stage: Stage) -> Column:
    """Returns why the stage does not process an event; null if it does."""
    misfit = F.when(F.lit(False), "")
    if stage.by is not None and stage.transform is not None:
        misfit = _rows_misfit(stage, stage.by, stage.transform)
    elif stage.by is not None and not stage.joins:
        misfit = _pass_misfit(stage, stage.by)
    elif not stage.joins and read_model.has_states() and stage.own_key is None:
        key = read_model.key_columns
        misfit = F.when(_key_of(stage, key) != F.col("key"), f"key-is-not-{cause_of(key)}")
    if stage.transform is not None:
        return misfit
    ignored = ignored_column(stage)
    return misfit if ignored is None else F.coalesce(ignored, misfit)


def refusals_column(stage: Stage) -> Column:
    """Returns why an event is none that the model's fold of whole records takes; null if it is one."""
    # A re-key is by columns, and a deletion has told them before.
    cause = F.when(F.lit(stage.tombstones and stage.by is not None) & F.col("value").isNull(), IGNORED)
    for refusal in stage.refusals:
        cause = cause.when(_is_refused(stage, refusal), refusal.cause)
    return cause


def _is_refused(stage: Stage, refusal: Refusal) -> Column:
    # Without a record, whose columns are null: a tombstone, or one of another type.
    has_record = any_of(event_column(record).isNotNull() for record in stage.records)
    return has_record & holds_in(stage.wanted_schemas, refusal.condition)


def ignored_column(stage: Stage) -> Column | None:
    """Returns the cause of an event that a condition of the source excludes; None without conditions."""
    if not stage.conditions:
        return None
    return F.when(~all_of(holds_in(stage.wanted_schemas, condition) for condition in stage.conditions), IGNORED)


def detail_column(read_model: ReadModel, stage: Stage, cause: Column) -> Column:
    """Returns what is wrong with an event that has a cause of `cause_column` or `refusals_column`; null for others."""
    detail = F.when(F.lit(False), "")
    for refusal in stage.refusals:
        detail = detail.when(_is_refused(stage, refusal) & (cause == refusal.cause), refusal.detail)
    for name, problem in stage.key_problems(read_model.key_columns).items():
        detail = detail.when(cause == name, problem)
    return detail


def read_schemas(read_model: ReadModel, stage: Stage) -> list[Schema]:
    """Returns the schemas of the records that a stage reads, for `java/Resolving.java`.

    Python must be able to represent the values of a field with the property `malformed`, which is the cause if its text
    is not UTF-8.
    """
    used = None if stage.transform is not None else _used_columns(read_model, stage)
    keys = read_model.key_columns if stage.by is None and stage.own_key is None else ()

    malformed_key = f"{cause_of(keys)}-malformed"

    def marked(record: str, field: dict[str, Any]) -> dict[str, Any]:
        if used is not None and (record, field["name"]) not in used:
            return field
        return {**field, "malformed": malformed_key if field["name"] in keys else "text-malformed"}

    return [
        contracted({**schema, "fields": [marked(schema["name"], field) for field in schema["fields"]]})
        for schema in stage.wanted_schemas.values()
    ]


def _used_columns(read_model: ReadModel, stage: Stage) -> set[tuple[str, str]]:
    """Returns the columns that Python receives, as record and field."""
    events = {record: fields_of(schema) for record, schema in stage.events.items()}
    if stage.joins or (stage.by is None and (read_model.needs_events or not read_model.has_states())):
        return {(record, field) for record, fields in events.items() for field in fields}
    sent = {column for emit in read_model.outputs if stage.by is None for column in emit.columns}
    folds = read_model.standard_folds if stage.by is None else {}
    return {(record, column) for record in events for column in sent} | {
        (fold.record, column.partition(".")[0])
        for name, fold in folds.items()
        for column in columns_of(read_model.update_forms[name])
    }


def _rows(stage: Stage, by: Sequence[str], transform: Transform) -> dict[str, Column]:
    """Returns the rows of an event that are passed on, and their keys, in lists."""
    key = partial(_passed_key, stage, by)
    keys = F.transform(event_column(ROW), lambda row: key(row)) if transform.analysed.multiplies else F.array(key())
    return {KEYS: keys, FRAMES: F.col(f"`{FRAMES}`")}


def _rows_misfit(stage: Stage, by: Sequence[str], transform: Transform) -> Column:
    """Returns why the first of an event's rows that cannot be passed on cannot be; null if all can be."""

    def misfit(row: Column | None) -> Column:
        return F.coalesce(_pass_misfit(stage, by, row), reserved_cause(stage, _passed_key(stage, by, row)))

    if not transform.analysed.multiplies:
        return misfit(None)
    return F.get(F.filter(F.transform(event_column(ROW), misfit), F.isnotnull), F.lit(0))


def _pass_misfit(stage: Stage, by: Sequence[str], row: Column | None = None) -> Column:
    columns = {name: _of_all_records(stage, name, row) for name in by}
    cause = F.when(any_of(column.isNull() for column in columns.values()), "field-null")
    texts = [column for name, column in columns.items() if not _is_number(stage, name)]
    if not texts:
        return cause
    # A state's key may not be longer, and the topic might refuse it.
    size = F.octet_length(texts[0] if len(by) == 1 else _key_of(stage, by, row))
    is_malformed = any_of(~F.is_valid_utf8(text) for text in texts) | (size > MAX_KEY_BYTES)
    return cause.when(is_malformed, f"{cause_of(by)}-malformed")


def holds_in(events: Mapping[str, Schema], condition: Condition) -> Column:
    """Returns whether a condition holds for an event of one of these schemas; never null."""
    return _is_true(condition, [*events.values()])


def _is_true(condition: Condition, schemas: Sequence[Schema]) -> Column:
    return F.coalesce(column_of(condition, schemas), F.lit(False))


def _key_of(stage: Stage, names: Sequence[str], row: Column | None = None) -> Column:
    """Returns the values of columns, encoded as a key; null if one is. See `keys`.

    Args:
        row: one of the rows that a transform makes of the event; None if the event is one row.
    """
    columns = {name: _of_all_records(stage, name, row) for name in names}
    if len(names) == 1 and not _is_number(stage, names[0]):
        return columns[names[0]].cast("binary")
    parts = [_number(column) if _is_number(stage, name) else _text(column) for name, column in columns.items()]
    return parts[0] if len(parts) == 1 else F.concat(*parts)


def _text(column: Column) -> Column:
    """Returns a text as a part of a composite key."""
    return F.concat(F.replace(column, F.lit("\0"), F.lit(ESCAPED_NUL)), F.lit(END_OF_TEXT)).cast("binary")


def _number(column: Column) -> Column:
    digits = F.hex(column.cast("bigint").bitwiseXOR(F.lit(-SIGN_BIT)))
    return F.unhex(F.lpad(digits, 16, "0"))


def _is_number(stage: Stage, name: str) -> bool:
    kinds = (stage.row_fields(schema)[name] for schema in stage.events.values())
    return any(simple_name(without_null(kind)[0]) != "string" for kind in kinds)


def _of_all_records(stage: Stage, name: str, row: Column | None = None) -> Column:
    """Returns a column that all records have, from the record that the row has."""
    if row is not None:
        return row.getField(name)
    columns = [event_column(record, f"{part}{name}") for record in stage.events for part in _paths(stage)]
    return columns[0] if len(columns) == 1 else F.coalesce(*columns)


def _paths(stage: Stage) -> Sequence[str]:
    return [f"{part}." for part in stage.row] or [""]


def _update(fold: StandardFold, form: Form, stage: Stage) -> Column:
    """Returns what an event adds to a field; null if it adds nothing."""
    added, column = _made(form, fold.record), event_column(fold.record, fold.field)
    if fold.where is None:
        return F.when(column.isNotNull(), added) if isinstance(form, list | dict) else added
    schemas = [schema for schema in stage.events.values() if schema["name"] == fold.record]
    return F.when(column.isNotNull() & _is_true(fold.where, schemas), added)


def _made(form: Form, record: str) -> Column:
    match form:
        case str():
            return event_column(record, form)
        case list():
            return F.array(_made(form[0], record))
        case dict():
            return F.struct(*(_made(part, record).alias(name) for name, part in form.items()))
    # Nullable, as all columns: Arrow cannot read a member that is not, in a struct that is null.
    return F.when(event_column(record).isNotNull(), F.lit(form).cast("bigint"))


def _struct(record: str, fields: Iterable[str]) -> Column:
    return F.struct(*(event_column(record, field).alias(field) for field in fields))


def _events(stage: Stage) -> dict[str, Column]:
    return {
        schema["name"]: F.when(event_column(schema["name"]).isNotNull(), _struct(schema["name"], fields_of(schema)))
        for schema in stage.events.values()
    }


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
    kind, column = predicate.field.type_in(schema), event_column(schema["name"], predicate.field.path)
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


def any_of(conditions: Iterable[Column]) -> Column:
    """Returns whether any condition holds; none may be null."""
    return functools.reduce(operator.or_, conditions, F.lit(False))


def all_of(conditions: Iterable[Column]) -> Column:
    """Returns whether all conditions hold; none may be null."""
    return functools.reduce(operator.and_, conditions, F.lit(True))


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
