"""Whether records of one schema can be read as ones of another, before a record shows it.

Source: Avro 1.12 specification, "Schema Resolution". Stricter, as a state must have the type that its class says: a
number is no time, and text no amount.
"""

from __future__ import annotations

from typing import Any

from balance_service.avro.logical_types import with_times
from balance_service.avro.named_types import contracted, expanded
from balance_service.avro.schemas import Schema, fields_of, full_name, is_fixed_uuid, rewritten, type_name

_WIDER = {
    ("int", "long"),
    ("int", "float"),
    ("int", "double"),
    ("long", "float"),
    ("long", "double"),
    ("float", "double"),
    ("string", "bytes"),
    ("bytes", "string"),
}
_UNITS = ("-millis", "-micros", "-nanos")


def difference(written: Any, wanted: Any, field: str = "") -> str:
    """Why no record of a schema can be read as one of another, as in "'n' is a long there and a string here".

    Empty if records can be read, except for a null or a symbol that the other schema lacks.

    Args:
        written: with each named type in full at each use, as is `wanted`.
        field: where both are, in a record.
    """
    ours = _members(wanted)
    for member in _members(written):
        found = [_of_members(member, one, field) for one in ours]
        if all(found):
            # Of a union, none of the differences is the one.
            return found[0] if len(found) == 1 else _other(written, wanted, field)
    return ""


def with_fields_of(written: Schema, wanted: Schema) -> Schema:
    """A record's schema with the fields of another one that it lacks: records under it can be read as either.

    It is the same object if it lacks none.

    Args:
        wanted: with each named type in full at each use.

    Raises:
        ValueError: their full names differ, or a field of both cannot be read as the other one's, as `difference` says.
    """
    if full_name(written) != full_name(wanted):
        raise ValueError(f"one is {full_name(written)}, and the other {full_name(wanted)}")
    known = fields_of(written)
    lacking = [field for field in wanted["fields"] if field["name"] not in known]
    # A type that both define keeps its written form.
    whole = contracted({**written, "fields": [*written["fields"], *lacking]}) if lacking else written
    if why := difference(rewritten(expanded(with_times(whole)), _of_bytes), wanted):
        raise ValueError(why)
    return whole


def _of_bytes(kind: Any) -> Any:
    """A decimal is read alike whether it is written as `fixed` or as `bytes`."""
    is_decimal = isinstance(kind, dict) and kind.get("logicalType") == "decimal"
    return {**kind, "type": "bytes"} if is_decimal else kind


def _members(kind: Any) -> list[Any]:
    """The types that a value can have. A null says nothing about the others."""
    members = kind if isinstance(kind, list) else [kind]
    return [member for member in members if member != "null"] or members


def _of_members(written: Any, wanted: Any, field: str) -> str:
    match written, wanted:
        case {"type": "record"}, {"type": "record"}:
            return _of_records(written, wanted, field)
        case ({"type": "array", "items": theirs}, {"type": "array", "items": ours}) | (
            {"type": "map", "values": theirs},
            {"type": "map", "values": ours},
        ):
            is_same = not difference(theirs, ours, field)
        case {"type": "enum"}, {"type": "enum"}:
            is_same = _is_named(written, wanted)
        case _:
            before, after = _plain(written), _plain(wanted)
            is_same = _meaning(written) == _meaning(wanted) and (before == after or (before, after) in _WIDER)
    return "" if is_same else _other(written, wanted, field)


def _of_records(written: Any, wanted: Any, field: str) -> str:
    if not _is_named(written, wanted):
        return f"{_named(field)} is {_a(full_name(written))} there and {_a(full_name(wanted))} here"
    theirs = fields_of(written)
    for ours in wanted["fields"]:
        name = f"{field}.{ours['name']}" if field else ours["name"]
        if ours["name"] not in theirs:
            found = "" if "default" in ours else f"{_named(name)} is missing there and has no default here"
        else:
            found = difference(theirs[ours["name"]], ours["type"], name)
        if found:
            return found
    return ""


def _is_named(written: Any, wanted: Any) -> bool:
    """Whether two named types have one name. As for fastavro, a namespace may differ."""
    names = {str(name).rpartition(".")[2] for name in (wanted["name"], *wanted.get("aliases", ()))}
    return full_name(written).rpartition(".")[2] in names


def _plain(kind: Any) -> Any:
    """Returns the parts of a type that decide whether values have one encoding, except `_WIDER`."""
    if is_fixed_uuid(kind):
        return "string"
    if not isinstance(kind, dict):
        # A type within its own definition is a name.
        return str(kind).rpartition(".")[2]
    return (kind["type"], kind["size"]) if kind["type"] == "fixed" else kind["type"]


def _meaning(kind: Any) -> str:
    """The logical type without its unit; empty for text and numbers."""
    logical = kind.get("logicalType", "") if isinstance(kind, dict) else ""
    for unit in _UNITS:
        logical = str(logical).removesuffix(unit)
    return "" if logical == "uuid" else logical


def _other(written: Any, wanted: Any, field: str) -> str:
    return f"{_named(field)} is {_a(type_name(written))} there and {_a(type_name(wanted))} here"


def _named(field: str) -> str:
    return f"'{field}'" if field else "the record"


def _a(name: str) -> str:
    return f"{'an' if name[:1].lower() in 'aeio' else 'a'} {name}"
