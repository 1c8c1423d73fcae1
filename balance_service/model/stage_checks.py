"""The stages of a read model, checked with the schemas of their events, tables and rows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from balance_service.avro.named_types import expanded
from balance_service.avro.resolution import difference
from balance_service.avro.schemas import fields_of, full_name, simple_name, type_name, without_null
from balance_service.errors import ConfigurationError
from balance_service.model.class_checks import declared_key, refuse, transforms
from balance_service.model.converters import record_converter
from balance_service.model.events import DeclaredRecord, Emit
from balance_service.model.key_forms import join_key_misfit
from balance_service.model.keys import ColumnKey
from balance_service.model.record_folds import Upsert
from balance_service.model.record_keys import RecordKey, is_record_key
from balance_service.model.sources import declared_stages, has_several, sources_of
from balance_service.model.stream import By, Global, Join, Select, Stream, Where, join_misfit
from balance_service.model.transform import transform_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from balance_service.avro.schemas import Schema
    from balance_service.model.conditions import Condition
    from balance_service.model.stage import Stage
    from balance_service.model.transform import Transform

_MOST_NAMES = 20
# The columns that every row has.
_ENVELOPE = ("offset", "timestamp", "key", "record_key", "value", "headers", "idempotency_key", "traceparent")
TAKEN = frozenset((*_ENVELOPE, "note", "partition"))
"""The names of columns that Spark has for each record, in lower case."""
READ_TYPES = frozenset(
    (
        *("boolean", "int", "long", "float", "double", "string", "bytes", "fixed", "enum", "decimal", "uuid", "date"),
        *(f"{local}timestamp-{unit}" for local in ("", "local-") for unit in ("millis", "micros", "nanos")),
    )
)
"""The Avro types of single values that events may have; `spark/java/Reading.java` reads them."""


def checked_stages(
    model: Any,
    outputs: Sequence[Emit],
    needed: Sequence[str],
    *,
    is_all_needed: bool = False,
    as_read: Callable[[Stage], Stage] | None = None,
) -> tuple[Stage, ...]:
    """Returns the checked stages of a model.

    Args:
        needed: columns that the declaration names outside of its source.
        is_all_needed: whether the model's own code receives all columns.
        as_read: changes the stages before they are checked.
    """
    sources, several = sources_of(model), has_several(model)
    tables = {step.table.topic for source in sources for step in source.steps if isinstance(step, Join)}
    known: dict[str, Schema] = {}

    def schema_of(name: str, topic: str | None) -> Schema:
        found = found_schema(model, name, topic)
        if not several or topic in tables or transforms(model):
            return found
        # The last stage tells records apart by their names.
        read = known.setdefault(name, found)
        if why := _unlike(read, found):
            refuse(model, f"reads {name} from several sources, and they differ: {why}; fold them by two models")
        return read

    emits = [output.topic for output in outputs]
    of_sources: Sequence[Transform] = ()
    if transforms(model):
        asked = None if is_all_needed else needed
        sources, of_sources = _transformed(model, sources, asked, several=several)
    stages = declared_stages(model.name, sources, emits, needed, schema_of, several=several, transforms=of_sources)
    stages = stages if as_read is None else tuple(map(as_read, stages))
    for source, first in zip(sources, (stage for stage in stages if not stage.reads_rekeyed), strict=True):
        _check_selected(model, source, first)
    for stage in stages:
        _check_connect(model, stage)
        events = events_of(model, stage)
        if not isinstance(getattr(model, "fold", None), Upsert):
            check_reserved(model, events)
        for condition in stage.conditions:
            check_condition(model, condition, events if stage.transform is None else stage.schemas)
        _check_joins(model, stage, events)
        if stage.by is None:
            continue
        made = events if stage.makes is None else {stage.makes["name"]: stage.makes}
        for record, column, schema in [(name, column, made[name]) for name in made for column in stage.by]:
            kind = stage.row_fields(schema).get(column)
            if kind is None or ColumnKey.from_column(column, kind) is None:
                found = no_column(schema) if kind is None else f"one of type {type_name(kind)}"
                refuse(model, f"continues by '{column}', which must be a string, int or long; {record} has {found}")
    if is_record_key(getattr(model, "key", None)) and hasattr(model, "state"):
        stages = (*stages[:-1], replace(stages[-1], own_key=RecordKey.of_format(sources[0].key_format or "string")))
    if len({stage.name for stage in stages}) < len(stages):
        refuse(model, "continues by the same column twice")
    return stages


def _transformed(
    model: Any, sources: Sequence[Stream], needed: Sequence[str] | None, *, several: bool
) -> tuple[tuple[Stream, ...], tuple[Transform, ...]]:
    """Returns a model's sources, which continue by the rows' key unless that is the events', and the rows of each.

    Args:
        needed: the columns that the model uses; None for all.
    """
    continued: list[Stream] = []
    made: list[Transform] = []
    for source in sources:
        if any(isinstance(step, Select) for step in source.steps):
            refuse(model, "has a `transform` and a `select`: the columns that the rows need are read")
        if source.tombstones:
            refuse(model, "has a `transform` and a source with tombstones, which have no columns")
        schemas = {record: found_schema(model, record, asked_topic(source)) for record in source.records}
        try:
            whole = transform_of(model, schemas, source if several else None)
        except ConfigurationError as error:
            refuse(model, str(error))
        key = declared_key(model)
        keys = [column for step in source.steps if isinstance(step, By) for column in step.columns]
        joins = any(isinstance(step, Join) for step in source.steps)
        asked = {*whole.names}
        if needed is not None and not joins:
            asked = {*needed, *keys, *key, *_conditions_of_rows(source)}
        required = asked if joins else {*asked, *keys, *key}
        if missing := required - {*whole.names}:
            refuse(model, f"names '{min(missing)}', but the rows of its `transform` have {no_column(whole.schema)}")
        transform = whole.only(asked)
        multiplies = transform.analysed.multiplies
        if any(isinstance(step, By) and step.unchanged for step in source.steps):
            _check_unchanged(model, source, transform, several=several)
            made.append(transform)
            continued.append(source)
            continue
        if multiplies and not key and not keys:
            refuse(model, "makes several rows of an event: name a `key`, the columns by which they are passed on")
        made.append(transform)
        is_keyed = len(key) == 1 and key[0] in transform.names
        is_keyed = is_keyed and transform.analysed.untouched(key[0]) == (source.keyed_by or key[0])
        stays = keys or not key or (is_keyed and not multiplies)
        continued.append(source if stays else source.by(*key))
    if unlike := [one.schema for one in made if one.schema != made[0].schema]:
        refuse(
            model,
            f"makes rows of different columns or types of its sources: {made[0].schema['fields']} and "
            f"{unlike[0]['fields']}; return the same columns, in the same order",
        )
    return tuple(continued), tuple(made)


def _check_unchanged(model: Any, source: Stream, transform: Transform, *, several: bool) -> None:
    """Refuses what cannot be behind a re-key of the events themselves."""
    says = "passes its events on unchanged"
    if several or sum(isinstance(step, By) for step in source.steps) > 1:
        refuse(model, f"{says}, and has several sources or re-keys: let the rows be passed on")
    if any(isinstance(step, Join) for step in source.steps):
        refuse(model, f"{says}, and joins: let the rows be passed on, and joined")
    if transform.analysed.multiplies:
        refuse(model, f"{says}, and makes several rows of an event, which are passed on together: remove `unchanged`")
    for column in next(step.columns for step in source.steps if isinstance(step, By)):
        if transform.analysed.untouched(column) != column:
            refuse(
                model, f"{says} by '{column}', which its `transform` computes: keep the column as it is in the event"
            )


def _conditions_of_rows(source: Stream) -> set[str]:
    """Returns the columns of the conditions after the first re-key, which are those of rows."""
    first = next((at for at, step in enumerate(source.steps) if isinstance(step, By)), len(source.steps))
    return {name for step in source.steps[first:] if isinstance(step, Where) for name in step.condition.columns}


def _check_connect(model: Any, stage: Stage) -> None:
    """Refuses decimals of Kafka Connect whose form is not declared: digits may be base64, and a number a double."""
    read = [*stage.wanted_schemas.values()] if stage.format == "connect" else []
    read += [stage.rows[join.table.record] for join in stage.joins if join.table.format == "connect"]
    for schema in read:
        if path := _formless(schema, schema["name"]):
            refuse(
                model,
                f"reads the decimal '{path}' from Kafka Connect's JSON: name its form, which the converter and the "
                "connector choose: Annotated[Decimal, scale(2), BASE64] (the default), NUMERIC (decimal.format), or "
                "DIGITS (decimal.handling.mode=string)",
            )


def _formless(kind: Any, path: str) -> str:
    """Returns the path of a decimal without the property `json`; empty if there is none."""
    kind, _ = without_null(kind)
    match simple_name(kind):
        case "record":
            return next(filter(None, (_formless(of, f"{path}.{name}") for name, of in fields_of(kind).items())), "")
        case "array":
            return _formless(kind["items"], f"{path}[]")
        case "map":
            return _formless(kind["values"], path + "{}")
        case "decimal":
            return "" if "json" in kind else path
    return ""


def _unlike(read: Schema, other: Schema) -> str:
    """Returns why records of one schema cannot be read as those of another; empty if they can."""
    names = [full_name(schema) for schema in (read, other)]
    return difference(other, read) if names[0] == names[1] else f"one is {names[0]}, and the other {names[1]}"


def _check_selected(model: Any, source: Stream, first: Stage) -> None:
    events = [fields_of(schema) for schema in first.schemas.values()]
    selected = [step for step in source.steps if isinstance(step, Select)]
    if len(selected) > 1:
        refuse(model, "selects columns twice")
    if selected and any(isinstance(step, Join) for step in source.steps):
        refuse(model, "selects columns and joins: the joined record determines which columns are kept")
    if unknown := frozenset[str]().union(*(step.columns for step in selected)).difference(*events):
        refuse(model, f"selects '{min(unknown)}', but {' or '.join(source.records)} has no such column")


def _check_joins(model: Any, stage: Stage, events: Mapping[str, Schema]) -> None:
    if stage.transform is not None and stage.joins:
        refuse(model, "joins the rows of its `transform`: put a `.by` that names the join's column before the join")
    if stage.transform is None and bool(stage.joins) != (stage.makes is not None):
        refuse(model, "needs both a join and a `.by` that names the joined record, or neither")
    for join in stage.joins:
        table = stage.rows[join.table.record]
        if not isinstance(join.table, Global) and (not stage.reads_rekeyed or stage.key != (join.on,)):
            refuse(
                model, f"joins the table '{join.table.topic}' on '{join.on}': put a `.by` that column before the join"
            )
        for record, schema in events.items():
            kind = fields_of(schema).get(join.on)
            if why := join_key_misfit(join, kind):
                refuse(model, f"joins {table['name']}, {why} of {record}")
    if stage.joins and stage.makes is not None:
        if len(stage.records) > 1:
            refuse(model, f"joins records of several types: {', '.join(stage.records)}")
        if why := join_misfit(stage.makes, stage.schemas[stage.records[0]], stage.joins, stage.rows):
            refuse(model, why)


def events_of(model: Any, stage: Stage) -> dict[str, Schema]:
    """Returns the stage's records by simple name, after checking that each can be read."""
    for schema in stage.wanted_schemas.values():
        record = schema["name"]
        columns = fields_of(schema)
        if not columns:
            refuse(model, f"selects no column of {record}: select one, so that records that do not decode are found")
        for column, kind in columns.items():
            if unread := _unread(kind):
                refuse(model, f"folds {record}, whose '{column}' has {unread}, a type that events may not have")
    return {**stage.events}


def _unread(kind: Any) -> str:
    """Returns the name of the first unsupported type inside a type; empty if all are supported."""
    kind, _ = without_null(kind)
    match simple_name(kind):
        case "array" | "map" as nesting:
            return _unread(kind["items" if nesting == "array" else "values"])
        case "record":
            return next(filter(None, map(_unread, fields_of(kind).values())), "")
        case name:
            return "" if name in READ_TYPES else type_name(kind)


def found_schema(model: Any, name: str, topic: str | None = None) -> Schema:
    """Returns the schema with a simple name.

    Args:
        topic: the topic that its records are read from, if they are read.

    Raises:
        ConfigurationError: the schema is not found, or its dataclass cannot be a record.
        RetriableError: the registry does not answer.
    """
    if isinstance(name, DeclaredRecord):
        declared: Schema = expanded(record_converter(name.owner).schema)
        return declared
    try:
        found: Schema = model.schemas.find(name, topic)
    except ConfigurationError as error:
        refuse(model, f"names the schema {name}: {error}")
    return found


def asked_topic(source: Stream) -> str | None:
    """Returns the topic whose schemas the registry may have."""
    return source.topic if source.format == "avro" else None


def check_condition(model: Any, condition: Condition, events: Mapping[str, Schema]) -> None:
    """Checks that a condition applies to events. Raises ConfigurationError."""
    for record, schema in events.items():
        for predicate in condition.predicates:
            kind = predicate.field.type_in(schema)
            if kind is None:
                refuse(model, f"has a condition on '{predicate.field.path}', but {record} has {no_column(schema)}")
            if why := predicate.misfit(kind):
                refuse(model, f"has a condition that cannot be evaluated: {why}")


def check_reserved(model: Any, names: Iterable[str]) -> None:
    """Refuses fields and records whose columns Spark would not tell apart from others: it ignores case."""
    known = {*TAKEN}
    for name in names:
        if name.lower() in known:
            refuse(model, f"has a field or record called '{name}', which is a reserved name in upper and lower case")
        known.add(name.lower())


def no_column(schema: Schema) -> str:
    names = [*fields_of(schema)]
    return f"no such column; it has {', '.join(names[:_MOST_NAMES])}{', …' if len(names) > _MOST_NAMES else ''}"
