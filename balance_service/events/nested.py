"""Types of values that Avro resolves itself: arrays, maps, records and enums, and what is in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from balance_service.avro.types import fields_of, rewritten, simple_name, without_null

if TYPE_CHECKING:
    from collections.abc import Mapping

SPARK_TYPES: Mapping[str, str] = {
    "boolean": "boolean",
    "int": "int",
    "long": "bigint",
    "float": "float",
    "double": "double",
    "string": "string",
    "uuid": "string",
    "enum": "string",
    "bytes": "binary",
    "fixed": "binary",
    "date": "date",
    "timestamp-millis": "timestamp",
    "timestamp-micros": "timestamp",
    "local-timestamp-millis": "timestamp_ntz",
    "local-timestamp-micros": "timestamp_ntz",
}
_NESTED = ("array", "map", "record", "enum")
_DIGITS = 38
_PROMOTIONS = {
    ("int", "long"),
    ("int", "float"),
    ("int", "double"),
    ("long", "float"),
    ("long", "double"),
    ("float", "double"),
    ("string", "bytes"),
    ("bytes", "string"),
}
# Of a fixed of so many bytes Spark sees all.
_LONG_BYTES = 8


def resolved_by_avro(kind: Any) -> bool:
    """Whether a value of a type, never null, is one that Avro resolves."""
    return simple_name(kind) in _NESTED


def nested_type(kind: Any) -> str:
    """The Spark type of an Avro type. Raises KeyError for one that events may not have."""
    kind, _ = without_null(kind)
    match simple_name(kind):
        case "array":
            return f"array<{nested_type(kind['items'])}>"
        case "map":
            return f"map<string,{nested_type(kind['values'])}>"
        case "record":
            return f"struct<{','.join(f'`{name}`:{nested_type(field)}' for name, field in fields_of(kind).items())}>"
        case "decimal":
            return f"decimal({kind['precision']},{kind.get('scale', 0)})"
        case name:
            return SPARK_TYPES[name]


def widened(kind: Any) -> Any:
    """A type whose decimals have as many digits as there may be: of few, Spark would look at the last 64 bits alone."""
    return rewritten(kind, _widened)


def _widened(kind: Any) -> Any:
    if not isinstance(kind, dict) or kind.get("logicalType") != "decimal":
        return kind
    size = kind.get("size", _DIGITS)
    # The most digits of which every number fits into so many bytes.
    most = min(_DIGITS, len(str(2 ** (8 * size - 1) - 1)) - 1)
    return kind if size <= _LONG_BYTES else {**kind, "precision": most}


def standing_alone(kinds: Mapping[str, Any], schema: Any) -> dict[str, Any]:
    """The types of some fields of a schema, in its order, with what defines a named type where it comes first.

    The others may have defined it.
    """
    named, defined = _named(schema, {}), set[str]()

    def with_definition(kind: Any) -> Any:
        if isinstance(kind, str) and kind not in defined:
            kind = named.get(kind, kind)
        defined.update(name for name, definition in named.items() if definition is kind)
        return kind

    return {name: rewritten(kind, with_definition) for name, kind in kinds.items()}


def check_resolvable(written: Any, wanted: Any, writer: Any) -> None:
    """Check that Avro can read the values of one type as another, and that they mean the same.

    Whether they do, its resolution does not look at: it would take a decimal for one of another scale.

    Args:
        writer: the schema that `written` is in, for the types that it names.

    Raises:
        TypeError: it cannot, or they do not.
    """
    _check(written, wanted, _named(writer, {}))


def _check(written: Any, wanted: Any, named: Mapping[str, Any]) -> None:
    written, wanted = without_null(written)[0], without_null(wanted)[0]
    if isinstance(written, str):
        written = named.get(written, written)
    theirs, ours = _form(written), _form(wanted)
    if theirs != ours and (theirs, ours) not in _PROMOTIONS:
        raise TypeError(f"{theirs} would be taken for {ours}")
    match simple_name(wanted):
        case "array" | "map" as nesting:
            inner = "items" if nesting == "array" else "values"
            _check(written[inner], wanted[inner], named)
        case "record":
            fields = fields_of(written)
            for field in wanted["fields"]:
                if field["name"] in fields:
                    _check(fields[field["name"]], field["type"], named)
                elif "default" not in field:
                    raise TypeError(f"{wanted['name']} lacks '{field['name']}'")


def _form(kind: Any) -> str:
    """What tells values of one type from those of another, but for what is in them."""
    name = simple_name(kind)
    if name == "decimal":
        return f"decimal of scale {kind.get('scale', 0)}, in {kind['type']}"
    return "string" if name == "uuid" else name


def _named(kind: Any, found: dict[str, Any]) -> dict[str, Any]:
    """Every named type in a schema, by simple and by full name."""
    if isinstance(kind, list):
        for member in kind:
            _named(member, found)
    elif isinstance(kind, dict):
        if "name" in kind and kind.get("type") in ("record", "enum", "fixed"):
            found[kind["name"]] = kind
            if "namespace" in kind:
                found[f"{kind['namespace']}.{kind['name']}"] = kind
        for part in ("type", "items", "values"):
            _named(kind.get(part), found)
        for field in kind.get("fields", ()):
            _named(field["type"], found)
    return found
