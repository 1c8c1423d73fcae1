"""Types of values that Avro resolves itself: arrays, maps, records and enums, and what is in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from balance_service.avro.schemas import fields_of, full_name, rewritten, simple_name, without_null

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
_NAMED = ("record", "enum", "fixed")
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


def with_full_names(kind: Any, named: dict[str, Any], namespace: str = "") -> Any:
    """A type in which what is named is defined, and referred to, by its full name.

    Source: Avro 1.12 specification, "Names".

    Args:
        named: is given each definition, by full name.
        namespace: of what the type is in.
    """
    if isinstance(kind, list):
        return [with_full_names(member, named, namespace) for member in kind]
    if not isinstance(kind, dict):
        name = full_name({"name": kind, "namespace": namespace})
        return name if name in named else kind
    full = dict(kind)
    if kind["type"] in _NAMED:
        name = full_name({"namespace": namespace, **kind})
        namespace = name.rpartition(".")[0]
        full |= {"name": name, "namespace": namespace}
        named[name] = full
    for part in full.keys() & {"type", "items", "values"}:
        full[part] = with_full_names(kind[part], named, namespace)
    if "fields" in kind:
        full["fields"] = [
            {**field, "type": with_full_names(field["type"], named, namespace)} for field in kind["fields"]
        ]
    return full


def standing_alone(kinds: Mapping[str, Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """The types of some fields, in their order, with what defines a named type where it comes first.

    Other fields may have defined it.

    Args:
        named: as `with_full_names` has made it, and the types too.
    """
    defined = set[str]()

    def with_definition(kind: Any) -> Any:
        name = full_name(kind)
        if name in defined:
            return name
        if name in named:
            defined.add(name)
        return named.get(name, kind)

    return {name: rewritten(kind, with_definition) for name, kind in kinds.items()}


def check_resolvable(written: Any, wanted: Any, named: Mapping[str, Any]) -> None:
    """Check that Avro can read the values of one type as another, and that they mean the same.

    Whether they do, its resolution does not look at: it would take a decimal for one of another scale.

    Args:
        named: as `with_full_names` has made it, and `written` too.

    Raises:
        TypeError: it cannot, or they do not.
    """
    written, wanted = without_null(written)[0], without_null(wanted)[0]
    if isinstance(written, str):
        written = named.get(written, written)
    theirs, ours = _form(written), _form(wanted)
    if theirs != ours and (theirs, ours) not in _PROMOTIONS:
        raise TypeError(f"{theirs} would be taken for {ours}")
    match simple_name(wanted):
        case "array" | "map" as nesting:
            inner = "items" if nesting == "array" else "values"
            check_resolvable(written[inner], wanted[inner], named)
        case "record":
            fields = fields_of(written)
            for field in wanted["fields"]:
                if field["name"] in fields:
                    check_resolvable(fields[field["name"]], field["type"], named)
                elif "default" not in field:
                    raise TypeError(f"{wanted['name']} lacks '{field['name']}'")


def _form(kind: Any) -> str:
    """What tells values of one type from those of another, but for what is in them."""
    name = simple_name(kind)
    if name == "decimal":
        return f"decimal of scale {kind.get('scale', 0)}, in {kind['type']}"
    return "string" if name == "uuid" else name
