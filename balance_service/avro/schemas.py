"""Avro schemas: the shipped ones, names of records, types of fields."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Any

from balance_service.process.package import resource

if TYPE_CHECKING:
    from collections.abc import Callable

Schema = dict[str, Any]
"""An Avro record schema, parsed from JSON."""


@cache
def load_schema(name: str) -> Schema:
    """The shipped schema of one record, by its simple name, e.g. `FundsAdded`."""
    schema: Schema = json.loads(resource(f"schemas/{name}.avsc").read_text(encoding="utf-8"))
    return schema


def is_shipped(schema: Schema) -> bool:
    """Whether a schema is the shipped one of its name."""
    try:
        return load_schema(schema["name"]) == schema
    except FileNotFoundError:
        return False


def subject_of(topic: str, schema: Schema) -> str:
    """The registry's subject of a record on a topic.

    Source: Confluent's TopicRecordNameStrategy.
    """
    return f"{topic}-{full_name(schema)}"


def full_name(schema: Any) -> str:
    """Full name of a named Avro type; the type itself for primitives; empty for unions.

    Source: Avro 1.12 specification, "Names".
    """
    if isinstance(schema, str):
        return schema
    if not isinstance(schema, dict):
        return ""
    name, namespace = str(schema.get("name", schema.get("type", ""))), schema.get("namespace")
    return name if "." in name or not namespace else f"{namespace}.{name}"


def without_null(kind: Any) -> tuple[Any, bool]:
    """The type without null, and whether null was a member: `["null", X]` → X, True."""
    if isinstance(kind, list) and "null" in kind:
        others = [member for member in kind if member != "null"]
        return (others[0] if len(others) == 1 else others), True
    return kind, False


def simple_name(kind: Any) -> str:
    """`decimal`, `timestamp-millis`, `array`, `string`, …: the logical type if there is one; `union` of several."""
    if isinstance(kind, list):
        return "union"
    if not isinstance(kind, dict):
        return str(kind)
    nested = kind["type"]
    plain = nested if isinstance(nested, str) else simple_name(nested)
    logical = kind.get("logicalType", plain)
    is_uuid_of_other_size = plain == "fixed" and logical == "uuid" and not is_fixed_uuid(kind)
    return plain if is_uuid_of_other_size else str(logical)


UUID_BYTES = 16


def is_fixed_uuid(kind: Any) -> bool:
    """Whether a type is a UUID of 16 bytes; its values are text, as those of a UUID that is a string."""
    return isinstance(kind, dict) and (kind.get("type"), kind.get("logicalType"), kind.get("size")) == (
        "fixed",
        "uuid",
        UUID_BYTES,
    )


def type_name(kind: Any) -> str:
    """A type in a readable form: `decimal(38,2)`, `string?` if nullable, `array<long>`, `Score{id long}`."""
    kind, is_nullable = without_null(kind)
    return _type_name(kind) + ("?" if is_nullable else "")


def _type_name(kind: Any) -> str:
    match simple_name(kind):
        case "union":
            return " | ".join(type_name(member) for member in kind)
        case "decimal":
            return f"decimal({kind['precision']},{kind.get('scale', 0)})"
        case "array":
            return f"array<{type_name(kind['items'])}>"
        case "map":
            return f"map<{type_name(kind['values'])}>"
        case "enum":
            return f"{kind['name']}({', '.join(kind['symbols'])})"
        case "record":
            fields = [f"{name} {type_name(field)}" for name, field in fields_of(kind).items()]
            return f"{kind['name']}{{{', '.join(fields)}}}"
        case name:
            return name


def fields_of(schema: Schema) -> dict[str, Any]:
    """The fields of a record: name → type."""
    return {field["name"]: field["type"] for field in schema["fields"]}


def rewritten(kind: Any, change: Callable[[Any], Any]) -> Any:
    """Applies a change to a type and to every type within it."""
    kind = change(kind)
    if isinstance(kind, list):
        return [rewritten(member, change) for member in kind]
    if not isinstance(kind, dict):
        return kind
    return {name: _rewritten_part(name, part, change) for name, part in kind.items()}


def _rewritten_part(name: str, part: Any, change: Callable[[Any], Any]) -> Any:
    if name == "fields":
        return [{**field, "type": rewritten(field["type"], change)} for field in part]
    return rewritten(part, change) if name in ("type", "items", "values") else part
