"""What must hold of a read model's source; one that cannot be right is refused in a sentence."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, NoReturn

from balance_service.avro.schemas import fields_of, simple_name, type_name, without_null
from balance_service.errors import ConfigurationError
from balance_service.model.flow import Select, Stream
from balance_service.model.joins import Global, Join, misfit
from balance_service.model.keys import KeyType
from balance_service.model.stage import declared_stages

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from balance_service.avro.schemas import Schema
    from balance_service.model.conditions import Condition
    from balance_service.model.outputs import Emit
    from balance_service.model.stage import Stage

READ_TYPES = frozenset(
    (
        *("boolean", "int", "long", "float", "double", "string", "bytes", "fixed", "enum", "decimal", "uuid", "date"),
        *("timestamp-millis", "timestamp-micros", "local-timestamp-millis", "local-timestamp-micros"),
    )
)
"""The types of one value that events may have; `events.nested` says how Spark has them."""


def refuse(model: Any, why: str) -> NoReturn:
    """Raises ConfigurationError: a read model, or its class, cannot be as it is declared."""
    named = model if isinstance(model, type) else type(model)
    raise ConfigurationError(f"the read model {named.__qualname__}{_place(named)} {why}")


def _place(named: type) -> str:
    try:
        return f" ({inspect.getsourcefile(named)}:{inspect.getsourcelines(named)[1]})"
    except (OSError, TypeError):
        # Such as of a class that was made in a console.
        return ""


def checked_stages(model: Any, outputs: Sequence[Emit], needed: Iterable[str]) -> tuple[Stage, ...]:
    """The stages of a model, each of which can be.

    Args:
        needed: columns that its declaration names, apart from the source.
    """

    def schema_of(name: str, topic: str | None) -> Schema:
        return found_schema(model, name, topic)

    stages = declared_stages(model.name, model.source, [output.topic for output in outputs], needed, schema_of)
    _check_selected(model, model.source, stages[0])
    for stage in stages:
        events = events_of(model, stage)
        for condition in stage.conditions:
            check_condition(model, condition, events)
        _check_joins(model, stage, events)
        if stage.by is None:
            continue
        made = events if stage.makes is None else {stage.makes["name"]: stage.makes}
        for record, schema in made.items():
            kind = fields_of(schema).get(stage.by)
            if kind is None or KeyType.of(stage.by, kind) is None:
                found = "no such column" if kind is None else f"one of type {type_name(kind)}"
                refuse(model, f"goes on by '{stage.by}', a string, int or long; {record} has {found}")
    if len({stage.name for stage in stages}) < len(stages):
        refuse(model, "goes on by the same column twice")
    return stages


def _check_selected(model: Any, source: Stream, first: Stage) -> None:
    events = [fields_of(schema) for schema in first.schemas.values()]
    selected = [step for step in source.steps if isinstance(step, Select)]
    if len(selected) > 1:
        refuse(model, "selects columns twice")
    if selected and any(isinstance(step, Join) for step in source.steps):
        refuse(model, "selects columns, and joins: the record that it makes says which of them are kept")
    if unknown := frozenset[str]().union(*(step.columns for step in selected)).difference(*events):
        refuse(model, f"selects '{min(unknown)}', a column that {' or '.join(source.records)} does not have")


def _check_joins(model: Any, stage: Stage, events: Mapping[str, Schema]) -> None:
    if bool(stage.joins) != (stage.makes is not None):
        refuse(model, "joins, and does not go on by a column as another record, or the other way round")
    for join in stage.joins:
        table = stage.rows[join.table.record]
        if not isinstance(join.table, Global) and (not stage.reads_rekeyed or stage.key != join.on):
            refuse(model, f"joins the table '{join.table.topic}' on '{join.on}': it has to go `.by` that column before")
        for record, schema in events.items():
            kind = fields_of(schema).get(join.on)
            if kind is None or KeyType.of(join.on, kind) is None:
                refuse(model, f"joins {table['name']} on '{join.on}', which is no string, int or long of {record}")
    if stage.makes is not None:
        if len(stage.records) > 1:
            refuse(model, f"joins records of several types: {', '.join(stage.records)}")
        if why := misfit(stage.makes, stage.schemas[stage.records[0]], stage.joins, stage.rows):
            refuse(model, why)


def check_condition(model: Any, condition: Condition, events: Mapping[str, Schema]) -> None:
    """Check that a condition can be asked of events. Raises ConfigurationError."""
    for record, schema in events.items():
        for asked in condition.asked:
            kind = asked.field.type_in(schema)
            if kind is None:
                refuse(model, f"asks for '{asked.field.path}', a column that {record} does not have")
            if why := asked.misfit(kind):
                refuse(model, f"asks what it cannot: {why}")


def events_of(model: Any, stage: Stage) -> dict[str, Schema]:
    """A stage's records by their simple name, each of which can be read."""
    events = {schema["name"]: schema for schema in stage.wanted_schemas.values()}
    for record, schema in events.items():
        columns = fields_of(schema)
        if not columns:
            refuse(model, f"selects no column of {record}: without one, nobody can tell it from what does not decode")
        for column, kind in columns.items():
            if unread := _unread(kind):
                refuse(model, f"folds {record}, of which '{column}' has {unread}, a type that events may not have")
    return events


def found_schema(model: Any, name: str, topic: str | None = None) -> Schema:
    """The schema of a simple name.

    Args:
        topic: that its records are read from.

    Raises:
        ConfigurationError: there is none.
        RetriableError: the registry does not answer.
    """
    try:
        found: Schema = model.schemas.find(name, topic)
    except ConfigurationError as error:
        refuse(model, f"names the schema {name}: {error}")
    return found


def _unread(kind: Any) -> str:
    """The name of a type that events may not have, if there is one in a type; a type that is only named is one."""
    kind, _ = without_null(kind)
    match simple_name(kind):
        case "array" | "map" as nesting:
            return _unread(kind["items" if nesting == "array" else "values"])
        case "record":
            return next(filter(None, map(_unread, fields_of(kind).values())), "")
        case name:
            return "" if name in READ_TYPES else type_name(kind)
