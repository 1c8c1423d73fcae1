"""Records that an output takes from columns of the event and fields of the state after it: checks, and values."""

from __future__ import annotations

import io
from dataclasses import dataclass
from decimal import Context, Decimal, Inexact, InvalidOperation
from typing import TYPE_CHECKING, Any

import fastavro

from balance_service.avro.codec import misfit as misfit_of
from balance_service.avro.codec import parsed
from balance_service.avro.field_writer import field_writer
from balance_service.avro.named_types import expanded
from balance_service.avro.schemas import fields_of, is_fixed_uuid, simple_name, type_name, without_null
from balance_service.errors import PoisonRecordError
from balance_service.model.conditions import Field
from balance_service.model.events import EVENT, OfState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from balance_service.avro.schemas import Schema
    from balance_service.model.events import Emit, State

UNFIT = "output-does-not-fit"
MISFIT = "the record to send does not fit its schema"
PART = "#"
"""How the names of columns with parts of outputs begin. No field of a model can have such a name."""
_PROMOTED = {("int", "long"), ("float", "double")}
_LIMIT = (1 << 63) - 1
# The number of bytes, 1, and the byte.
_ZERO = b"\2\0"
_EXACT = Context(prec=80, traps=[InvalidOperation, Inexact])


def output_column(number: int, part: int = 0) -> str:
    """The column of the rows with a part of the record that an output makes of the event's columns.

    In a stage without states, there is one part, and it is null if the event is not sent. For an output that makes no
    record of columns, it is true or null.
    """
    return f"{PART}{number}+{part}"


def problem_of(
    emit: Emit, made: Schema, events: Mapping[str, Schema], state: Mapping[str, Any], key: Sequence[str]
) -> str:
    """Returns why an output cannot make its record, as the rest of a sentence about the model; empty if it can.

    A null where the record has none, a symbol that it lacks, and a decimal of more digits concern single events.

    Args:
        events: the records of the source, by simple name.
        state: the fields of the state as the model declares them, and their types; empty without states.
        key: the key's columns; empty without states.
    """
    return next(_problems(emit, expanded(made), {n: expanded(one) for n, one in events.items()}, state, key), "")


def _problems(
    emit: Emit, made: Schema, events: Mapping[str, Schema], state: Mapping[str, Any], key: Sequence[str]
) -> Iterator[str]:
    fields, name = fields_of(made), made["name"]
    to = f"emits {name} to '{emit.topic}'"
    if emit.of is not None:
        yield from _problems_of_items(to, emit.of, made, events)
        return
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
        elif emit.each is not EVENT and of not in key:
            known = " and ".join(map(repr, key))
            yield f"{its} of the event's '{of}': `each=LAST` has no event, only the key {known} and `OfState`"
        else:
            yield from _of_events(its, of, wanted, events)


def _problems_of_items(to: str, column: str, made: Schema, events: Mapping[str, Schema]) -> Iterator[str]:
    for record, schema in events.items():
        kind = without_null(fields_of(schema).get(column))[0]
        items = without_null(kind["items"])[0] if kind is not None and simple_name(kind) == "array" else None
        if items is None or simple_name(items) != "record":
            yield f"{to} of each of the event's '{column}', which is no array of records in {record}"
            continue
        given = fields_of(items)
        for one in made["fields"]:
            its = f"{to} with a '{one['name']}' of the event's '{column}'"
            if one["name"] not in given:
                if "default" not in one:
                    yield f"{its}, whose records have none; they have {', '.join(given)}"
            elif why := misfit(given[one["name"]], one["type"]):
                yield f"{its}: {why}"


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
            return bool(given.get("scale", 0) == kept.get("scale", 0))
        case "fixed":
            return bool(given["size"] == kept["size"])
        case "uuid":
            return bool(is_fixed_uuid(given) == is_fixed_uuid(kept))
        case "union":
            return False
        case _:
            return True


@dataclass(frozen=True, slots=True)
class OfEvent:
    """Successive fields of a record that the event has, or that have their default. Spark encodes them together.

    `schema` is a record of these fields, and `paths` names the columns of the event by field; without any, the fields
    are the same for all events. `column` is the column of the rows with the encoded fields; null for a tombstone.
    """

    column: str
    schema: Schema
    paths: Mapping[str, str]

    def encoded(self, event: Mapping[str, Any]) -> bytes:
        """Returns the encoded fields. Raises PoisonRecordError if a value does not fit."""
        wanted, record = fields_of(self.schema), {}
        for field, path in self.paths.items():
            record[field] = value = Field(path).value_in(event)
            if value is None and not without_null(wanted[field])[1]:
                raise unfit(f"{field} is null, but {type_name(wanted[field])} is expected")
            if isinstance(value, Decimal):
                record[field] = _EXACT.quantize(
                    value, Decimal(1).scaleb(-without_null(wanted[field])[0].get("scale", 0))
                )
        schema, body = parsed(self.schema), io.BytesIO()
        try:
            fastavro.schemaless_writer(body, schema, record, strict_allow_default=True)
        except Exception as error:  # fastavro raises any exception its writer runs into
            raise unfit(str(misfit_of(schema, record) or error)) from error
        return body.getvalue()


@dataclass(frozen=True, slots=True)
class OfOne:
    """A field of a record that is one of the state, or a column of the key."""

    field: str
    kind: Any
    of: OfState | str


@dataclass(frozen=True, slots=True)
class Total:
    """A field of a record that is a sum of the state, a decimal of the same scale; see `avro.number_columns.decimals`.

    The unscaled numbers are below `limit`.
    """

    prefix: bytes
    limit: int


def parts_of(emit: Emit, made: Schema, number: int) -> list[OfEvent | OfOne]:
    """Returns the parts of an output's record, in order.

    Args:
        made: the schema of the record.
        number: of the output in its model.
    """
    parts: list[OfEvent | OfOne] = []
    for one in expanded(made)["fields"]:
        of = emit.fields.get(one["name"])
        if isinstance(of, OfState) or (of is not None and emit.each is not EVENT):
            parts.append(OfOne(one["name"], one["type"], of))
            continue
        last = parts.pop() if parts and isinstance(parts[-1], OfEvent) else None
        before = last if isinstance(last, OfEvent) else OfEvent(output_column(number, len(parts)), {}, {})
        fields = [*before.schema.get("fields", ()), one]
        paths = before.paths if of is None else {**before.paths, one["name"]: of}
        parts.append(OfEvent(before.column, {"type": "record", "name": made["name"], "fields": fields}, paths))
    return parts


def each_of(made: Schema, item: Mapping[str, Any]) -> bytes:
    """Returns the record, encoded, that an output sends of one of an array. Raises PoisonRecordError if it is unfit."""
    schema = expanded(made)
    return OfEvent("", schema, {name: name for name in fields_of(schema) if name in item}).encoded(item)


def columns_of(emits: Sequence[Emit], made: Mapping[str, Schema]) -> Iterator[tuple[Emit, OfEvent]]:
    """Yields the parts of outputs that are columns of the rows."""
    for number, emit in enumerate(emits):
        for part in parts_of(emit, made[str(emit.record)], number) if emit.fields else ():
            if isinstance(part, OfEvent) and part.paths:
                yield emit, part


class Making:
    """Makes the records of an output with `fields`, from encoded columns of the event and the state after it."""

    def __init__(self, emit: Emit, made: Schema, number: int) -> None:
        self.takes_key = emit.each is not EVENT
        self._parts: list[bytes | str | tuple[OfOne, Callable[[Any], bytes]]] = []
        for part in parts_of(emit, made, number):
            match part:
                case OfOne(kind=kind):
                    self._parts.append((part, field_writer(kind)))
                case OfEvent(paths=paths) if not paths:
                    self._parts.append(part.encoded({}))
                case OfEvent(column=column):
                    self._parts.append(column)

    def of_total(self, field: str, scale: int) -> list[bytes | str | Total] | None:
        """Returns the parts of the record, in order: bytes, the name of a column, or the sum after the event.

        None if another field of the state than this sum of a scale is a part.
        """
        parts: list[bytes | str | Total] = []
        for part in self._parts:
            match part:
                case bytes() | str():
                    parts.append(part)
                case OfOne(kind=kind, of=of), write:
                    inner, _ = without_null(kind)
                    is_decimal = simple_name(inner) == "decimal" and inner["type"] == "bytes"
                    if of != OfState(field) or not is_decimal or inner.get("scale", 0) != scale:
                        return None
                    parts.append(Total(write(Decimal(0))[: -len(_ZERO)], min(10 ** inner["precision"], _LIMIT)))
        return parts

    def body(self, columns: Mapping[str, Any], state: State | None, key: Mapping[str, Any]) -> bytes | None:
        """Returns the encoded record; None if there is no event, or no state, and the record has a field of it.

        Args:
            columns: those of the event's row.
            state: as the model declares it.
            key: its columns; empty unless `takes_key`.

        Raises:
            PoisonRecordError: a value does not fit the record's type.
        """
        found: list[bytes] = []
        for part in self._parts:
            match part:
                case bytes():
                    found.append(part)
                case str():
                    if (encoded := columns[part]) is None:
                        return None
                    found.append(encoded)
                case one, write:
                    if isinstance(one.of, OfState) and state is None:
                        return None
                    value = key[one.of] if isinstance(one.of, str) else (state or {})[one.of.field]
                    try:
                        found.append(write(value))
                    except Exception as error:  # fastavro raises any exception its writer runs into
                        raise unfit(f"{one.field} is {value!r}, but {type_name(one.kind)} is expected") from error
        return b"".join(found)


def unfit(why: str) -> PoisonRecordError:
    return PoisonRecordError(UNFIT, f"{MISFIT}: {why}")
