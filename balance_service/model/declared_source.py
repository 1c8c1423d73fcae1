"""What must hold of a read model's source; one that cannot be right is refused in a sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from balance_service.avro.schemas import load_schema
from balance_service.avro.types import fields_of, simple_name, type_name, without_null
from balance_service.errors import ConfigurationError
from balance_service.model.flow import Leg, Select, Stream, legs_of
from balance_service.model.joins import Global, Join, misfit
from balance_service.model.keys import KeyType

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from balance_service.avro.schemas import Schema
    from balance_service.model.conditions import Condition

READ_TYPES = frozenset(
    (
        *("boolean", "int", "long", "float", "double", "string", "bytes", "fixed", "enum", "decimal", "uuid", "date"),
        *("timestamp-millis", "timestamp-micros", "local-timestamp-millis", "local-timestamp-micros"),
    )
)
"""The types of one value that events may have; `events.nested` says how Spark has them."""


def refuse(model: type, why: str) -> NoReturn:
    """Raises ConfigurationError: a read model cannot be as it is declared."""
    raise ConfigurationError(f"the read model {model.__qualname__} {why}")


def checked_legs(model: Any, needed: Iterable[str]) -> tuple[Leg, ...]:
    """The way of a model's events, each leg of which can be gone.

    Args:
        needed: columns that its declaration names, apart from the source.
    """
    if not isinstance(model.source, Stream) or not model.source.records:
        refuse(model, "has a source that is not a Stream of a topic and one or more records")
    _check_selected(model, model.source)
    legs = legs_of(model.name, model.source, needed)
    for leg in legs:
        events = events_of(model, leg)
        for condition in leg.conditions:
            check_condition(model, condition, events)
        _check_joins(model, leg, events)
        if leg.by is None:
            continue
        made = events if leg.makes is None else {leg.makes: shipped_schema(model, leg.makes)}
        for record, schema in made.items():
            kind = fields_of(schema).get(leg.by)
            if kind is None or KeyType.of(leg.by, kind) is None:
                found = "no such column" if kind is None else f"one of type {type_name(kind)}"
                refuse(model, f"goes on by '{leg.by}', a string, int or long; {record} has {found}")
    if len({leg.name for leg in legs}) < len(legs):
        refuse(model, "goes on by the same column twice")
    return legs


def _check_selected(model: Any, source: Stream) -> None:
    events = [fields_of(shipped_schema(model, record)) for record in source.records]
    selected = [step for step in source.steps if isinstance(step, Select)]
    if len(selected) > 1:
        refuse(model, "selects columns twice")
    if selected and any(isinstance(step, Join) for step in source.steps):
        refuse(model, "selects columns, and joins: the record that it makes says which of them are kept")
    if unknown := frozenset[str]().union(*(step.columns for step in selected)).difference(*events):
        refuse(model, f"selects '{min(unknown)}', a column that {' or '.join(source.records)} does not have")


def _check_joins(model: Any, leg: Leg, events: Mapping[str, Schema]) -> None:
    if bool(leg.joins) != (leg.makes is not None):
        refuse(model, "joins, and does not go on by a column as another record, or the other way round")
    for join in leg.joins:
        table = shipped_schema(model, join.table.record)
        if not isinstance(join.table, Global) and (leg.is_first or leg.key != join.on):
            refuse(model, f"joins the table '{join.table.topic}' on '{join.on}': it has to go `.by` that column before")
        for record, schema in events.items():
            kind = fields_of(schema).get(join.on)
            if kind is None or KeyType.of(join.on, kind) is None:
                refuse(model, f"joins {table['name']} on '{join.on}', which is no string, int or long of {record}")
    if leg.makes is not None:
        if len(leg.records) > 1:
            refuse(model, f"joins records of several types: {', '.join(leg.records)}")
        if why := misfit(shipped_schema(model, leg.makes), shipped_schema(model, leg.records[0]), leg.joins):
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


def events_of(model: Any, leg: Leg) -> dict[str, Schema]:
    """A leg's records by their simple name, each of which can be read."""
    for record in leg.records:
        shipped_schema(model, record)
    events = {schema["name"]: schema for schema in leg.wanted_schemas.values()}
    for record, schema in events.items():
        columns = fields_of(schema)
        if not columns:
            refuse(model, f"selects no column of {record}: without one, nobody can tell it from what does not decode")
        for column, kind in columns.items():
            if unread := _unread(kind):
                refuse(model, f"folds {record}, of which '{column}' has {unread}, a type that events may not have")
    return events


def shipped_schema(model: type, name: str) -> Schema:
    """The schema of a simple name. Raises ConfigurationError if none is shipped."""
    try:
        return load_schema(name)
    except FileNotFoundError:
        refuse(model, f"names the schema {name}, and there is no schemas/{name}.avsc")


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
