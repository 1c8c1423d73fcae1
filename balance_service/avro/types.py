"""What an Avro type is, as far as the service looks into one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from balance_service.avro.schemas import Schema


def without_null(kind: Any) -> tuple[Any, bool]:
    """The type of a value, and whether it may be absent: `["null", X]` is X, absent or not."""
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
    # A UUID of 16 bytes comes as bytes, from Spark and from fastavro alike.
    return plain if (plain, logical) == ("fixed", "uuid") else str(logical)


def type_name(kind: Any) -> str:
    """A type as people read it: `decimal(38,2)`, `string?` where it may be absent, `array<long>`, `Score{id long}`."""
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
    """A type with a change made to it, and to every type in it."""
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
