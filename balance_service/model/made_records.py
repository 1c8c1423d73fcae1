"""Records that an output takes from columns of the event and fields of the state after it: checks, and values."""

from __future__ import annotations

from decimal import Decimal, localcontext
from typing import TYPE_CHECKING, Any

from balance_service.avro.named_types import expanded
from balance_service.avro.schemas import fields_of, is_fixed_uuid, simple_name, type_name, without_null
from balance_service.errors import PoisonRecordError
from balance_service.model.conditions import Field
from balance_service.model.events import EVENT, OfState

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from balance_service.avro.schemas import Schema
    from balance_service.model.events import Emit, Event, State

UNFIT = "output-does-not-fit"
MISFIT = "the record to send does not fit its schema: "
_PROMOTED = {("int", "long"), ("float", "double")}
_DIGITS = 80


def output_column(number: int) -> str:
    """The column of a stage without states that says what an output sends for an event; null if it sends nothing.

    It is the frame of a record that is made of columns; for other outputs, it is true.
    """
    # No field of a model can have the name.
    return f"#{number}"


def problem_of(emit: Emit, made: Schema, events: Mapping[str, Schema], state: Mapping[str, Any], key: str) -> str:
    """Returns why an output cannot make its record, as the rest of a sentence about the model; empty if it can.

    A null where the record has none, a symbol that it lacks, and a decimal of more digits concern single events.

    Args:
        events: the records of the source, by simple name.
        state: the fields of the state as the model declares them, and their types; empty without states.
        key: the key's column; empty without states.
    """
    return next(_problems(emit, expanded(made), {n: expanded(one) for n, one in events.items()}, state, key), "")


def _problems(
    emit: Emit, made: Schema, events: Mapping[str, Schema], state: Mapping[str, Any], key: str
) -> Iterator[str]:
    fields, name = fields_of(made), made["name"]
    to = f"emits {name} to '{emit.topic}'"
    if unknown := emit.fields.keys() - fields.keys():
        yield f"{to} with '{min(unknown)}', which is no field of it; it has {', '.join(fields)}"
    for field in made["fields"]:
        if field["name"] not in emit.fields and "default" not in field:
            yield f"{to} without its '{field['name']}', which has no default"
    for field, of in emit.fields.items():
        wanted, its = fields[field], f"{to} with a '{field}'"
        if isinstance(of, OfState):
            if of.field not in state:
                known = f"; it has {', '.join(state)}" if state else ": the model has no states"
                yield f"{its} of the state's '{of.field}', which does not exist{known}"
            elif why := misfit(state[of.field], wanted):
                yield f"{its} of the state's '{of.field}': {why}"
        elif emit.each is not EVENT and of != key:
            yield f"{its} of the event's '{of}': `each=LAST` has no event, only the key '{key}' and `OfState`"
        else:
            yield from _of_events(its, of, wanted, events)


def _of_events(its: str, path: str, wanted: Any, events: Mapping[str, Schema]) -> Iterator[str]:
    for record, schema in events.items():
        kind = Field(path).type_in(schema)
        if kind is None:
            known = ", ".join(fields_of(schema))
            yield f"{its} of the event's '{path}', but {record} has no such column; it has {known}"
        elif why := misfit(kind, wanted):
            yield f"{its} of the event's '{path}': {why}"


def misfit(written: Any, wanted: Any) -> str:
    """Returns why no value of a type can be one of another, apart from null; empty if values can.

    As `spark/java/Writing.java`. Source: Avro 1.12 specification, "Schema Resolution"; of decimals, the scale may be
    smaller.

    Args:
        written: with each named type in full at each use, as is `wanted`.
    """
    (given, _), (kept, _) = without_null(written), without_null(wanted)
    name, other = simple_name(given), simple_name(kept)
    if name == other == "decimal":
        fits = given.get("scale", 0) <= kept.get("scale", 0)
    else:
        fits = _is_same(given, kept) or (name, other) in _PROMOTED
    return "" if fits else f"it is of type {type_name(given)}, and the field of {type_name(kept)}"


def _is_same(given: Any, kept: Any) -> bool:
    """Whether values of a type are written alike as those of another, however deep."""
    (given, _), (kept, _) = without_null(given), without_null(kept)
    name = simple_name(given)
    if name != simple_name(kept):
        return {name, simple_name(kept)} == {"string", "uuid"} and not is_fixed_uuid(given) and not is_fixed_uuid(kept)
    match name:
        case "array":
            return _is_same(given["items"], kept["items"])
        case "map":
            return _is_same(given["values"], kept["values"])
        case "record":
            ours = fields_of(given)
            return all(
                _is_same(ours[one["name"]], one["type"]) if one["name"] in ours else "default" in one
                for one in kept["fields"]
            )
        case "decimal":
            return given.get("scale", 0) == kept.get("scale", 0)
        case "fixed":
            return bool(given["size"] == kept["size"])
        case "uuid":
            return bool(is_fixed_uuid(given) == is_fixed_uuid(kept))
        case "union":
            return False
        case _:
            return True


def record_of(
    emit: Emit, made: Schema, event: Event | Mapping[str, Any] | None, state: State | None, key: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Returns the record that an output makes; None if it has a field of the event or the state, and there is none.

    Args:
        made: the record's schema.
        state: after the event, as the model declares it.
        key: the key's column and value, for the last state of a key.

    Raises:
        PoisonRecordError: a value is null, and the record's field is not.
    """
    fields, record = fields_of(made), {}
    for field, of in emit.fields.items():
        source = state if isinstance(of, OfState) else event if emit.each is EVENT else key
        if source is None:
            return None
        value = source[of.field] if isinstance(of, OfState) else Field(of).value_in(source)
        if value is None and not without_null(fields[field])[1]:
            raise PoisonRecordError(UNFIT, f"{MISFIT}{field} is null, but {type_name(fields[field])} is expected")
        record[field] = at_scale(value, fields[field]) if isinstance(value, Decimal) else value
    return record


def at_scale(value: Decimal, kind: Any) -> Decimal:
    """Returns a decimal with the digits after the point that its type has; its own have no more."""
    with localcontext(prec=_DIGITS):
        return value.quantize(Decimal(1).scaleb(-without_null(kind)[0].get("scale", 0)))
