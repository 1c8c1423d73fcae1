"""Converts a writer's record to the fields and types of the reader's schema, on Spark, and finds what would be lost.

A field of a single value is cast, and checked for loss. Arrays, maps, records and enums are resolved by Avro from the
writer's schema to the reader's, as its specification defines.
"""

from __future__ import annotations

import functools
import json
import operator
import re
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)
from pyspark.sql.avro.functions import from_avro

from balance_service.avro.schemas import fields_of, full_name, rewritten, simple_name, without_null

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pyspark.sql import Column, DataFrame

    from balance_service.avro.schemas import Schema

PROBLEM = "_problem"
# Spark sets all fields of an undecodable body to null. In a decodable body any field may be null, except this one.
_DECODED = {"name": "_decoded", "type": "boolean", "default": True}
_MAX_PRECISION = 38
# Up to 18 digits, Spark keeps a decimal in a long; above, in a BigInteger, which takes several objects per row.
_LONG_DIGITS = 18
_LONG_BYTES = 8
_DECIMAL = re.compile(r"decimal\(([0-9]+),([0-9]+)\)")
_EXACT_TYPES = ("decimal", "int", "bigint")
# Any type that can be cast to these is accepted.
_TAKES_ANY = ("string", "timestamp")
_PROMOTIONS = {
    ("int", "bigint"),
    ("int", "float"),
    ("int", "double"),
    ("bigint", "float"),
    ("bigint", "double"),
    ("float", "double"),
    ("string", "binary"),
}
# A plain number is read as a time in the unit of the reader's type, up to Spark's greatest number of units.
_FROM_LONG = {"timestamp-millis": (F.timestamp_millis, 10**15), "timestamp-micros": (F.timestamp_micros, 10**18)}
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
_AVRO_PROMOTIONS = {
    ("int", "long"),
    ("int", "float"),
    ("int", "double"),
    ("long", "float"),
    ("long", "double"),
    ("float", "double"),
    ("string", "bytes"),
    ("bytes", "string"),
}


def field_types(reader: Schema, texts: Iterable[str]) -> dict[str, str]:
    """Returns the Spark types of the reader's fields, for events of some writers.

    Decimals have the reader's scale, and 18 digits if no writer needs more, else 38.

    Args:
        texts: the writers' schemas.
    """
    writers = [fields_of(json.loads(text)) for text in texts]
    return {
        name: _spark_type(kind, [writer.get(name) for writer in writers]) for name, kind in fields_of(reader).items()
    }


def in_shape_of(reader: Schema, types: Mapping[str, str], records: DataFrame, column: str, text: str) -> Column:
    """Returns a writer's struct with the reader's fields and types, and `PROBLEM`: null, or why a row cannot convert.

    A row where a decimal would lose a digit has a problem.

    Args:
        types: the result of `field_types`.
        records: with the writer's struct, the result of `decoded`, as `column`.
        text: the writer's schema.

    Raises:
        KeyError: the writer lacks a field without a default.
        TypeError: the writer has a decimal in an inexact type, or another value in a type with another meaning.
    """
    written = {field.name: field.dataType.simpleString() for field in records.select(f"{column}.*").schema}
    narrow = {field["name"]: kind for field, kind in _narrow_decimals(json.loads(text))}
    shaped: list[Column] = []
    missing: list[Column] = []
    lossy: list[Column] = []
    for field in reader["fields"]:
        name, wanted = field["name"], types[field["name"]]
        ours, is_nullable = without_null(field["type"])
        if name not in written:
            shaped.append(F.lit(field["default"]).cast(wanted).alias(name))
            continue
        source, kind = F.col(f"{column}.`{name}`"), written[name]
        if not is_nullable:
            missing.append(source.isNull())
        if resolved_by_avro(ours):
            shaped.append(source.cast(wanted).alias(name))
            continue
        _check_taken(name, wanted, kind)
        if kind == "bigint" and simple_name(ours) in _FROM_LONG:
            of_number, most = _FROM_LONG[simple_name(ours)]
            # A value beyond the limit stays outside of Python's range, so an event whose time is used is refused.
            source, kind = of_number(F.least(F.greatest(source, F.lit(-most)), F.lit(most))), wanted
        if name in narrow:
            kind = f"decimal({narrow[name]['precision']},{narrow[name].get('scale', 0)})"
            whole, source = source, source.try_cast(kind)
            lossy.append(source.isNull() if not is_nullable else source.isNull() & whole.isNotNull())
        target = source if kind == wanted else source.try_cast(wanted)
        if not _holds(wanted, kind):
            # There and back: Spark would compare decimals of two scales in a third type, which may round.
            lossy.append(~target.try_cast(kind).eqNullSafe(source))
        shaped.append(target.alias(name))
    signs = [_DECODED["name"]] if _DECODED["name"] in written else written
    something = any_of(F.col(f"{column}.`{name}`").isNotNull() for name in signs)
    problem = (
        F.when(~something, "body-undecodable")
        .when(any_of(missing), "field-null")
        .when(any_of(lossy), "decimal-loses-digits")
    )
    return F.struct(*shaped, problem.alias(PROBLEM))


def _check_taken(name: str, wanted: str, written: str) -> None:
    """Raises TypeError if values of one Spark type must not be read as another."""
    if wanted.startswith("decimal"):
        if not written.startswith(_EXACT_TYPES):
            raise TypeError(f"{name} is {written}, which is not exact")
    elif written != wanted and wanted not in _TAKES_ANY and (written, wanted) not in _PROMOTIONS:
        raise TypeError(f"{name} is {written}, which is no {wanted}")


def decoded(body: Column, reader: Schema, text: str, *, skips_others: bool = False) -> Column:
    """Returns an Avro body as a struct of its writer's fields; null if it does not decode.

    Args:
        skips_others: whether to skip fields that the reader lacks. Avro does not check skipped bytes, so damage in them
            goes unnoticed. If the reader has arrays, maps, records or enums, such fields are always skipped.

    Raises:
        TypeError: Avro would read a field's values with another meaning.
    """
    options = {"mode": "PERMISSIVE"}
    wanted = fields_of(reader)
    nested = {name: kind for name, kind in wanted.items() if resolved_by_avro(without_null(kind)[0])}
    named: dict[str, Any] = {}
    writer = with_full_names(json.loads(_decodable(reader, text)), named)
    written = fields_of(writer)
    if nested or (skips_others and written.keys() - wanted):
        plain = standing_alone({name: kind for name, kind in written.items() if name in wanted.keys() - nested}, named)
        ours = [
            {**field, "type": widened(field["type"])}
            if field["name"] in nested
            else {"name": field["name"], "type": plain[field["name"]]}
            for field in reader["fields"]
            if field["name"] in written or (field["name"] in nested and "default" in field)
        ]
        for name in nested.keys() & written.keys():
            check_resolvable(written[name], nested[name], named)
        options["avroSchema"] = json.dumps({**writer, "fields": [*ours, _DECODED]})
    return from_avro(body, json.dumps(writer), options)


def _decodable(reader: Schema, text: str) -> str:
    """Returns a writer's schema with which Spark reads all bytes of a decimal, and the bytes of a string.

    Of a decimal of up to 18 digits, Spark silently reads the last 64 bits only. Strings and bytes have the same
    encoding, but of a string Avro looks up the Java class each time, and replaces invalid UTF-8.
    """
    schema = json.loads(text)
    wanted = fields_of(reader)
    for field in schema["fields"]:
        if resolved_by_avro(without_null(wanted.get(field["name"]))[0]):
            field["type"] = widened(field["type"])
    for _, kind in _narrow_decimals(schema):
        kind["precision"] = _LONG_DIGITS + 1
    for field in schema["fields"]:
        if field["type"] == "string" and wanted.get(field["name"], "string") == "string":
            field["type"] = "bytes"
    return json.dumps(schema)


def _narrow_decimals(schema: Any) -> list[tuple[Any, Any]]:
    """Returns fields with their decimal type whose bytes may exceed the 64 bits that Spark reads."""
    found = []
    for field in schema["fields"]:
        for kind in field["type"] if isinstance(field["type"], list) else [field["type"]]:
            is_decimal = isinstance(kind, dict) and kind.get("logicalType") == "decimal"
            if is_decimal and kind["precision"] <= _LONG_DIGITS and kind.get("size", _LONG_BYTES + 1) > _LONG_BYTES:
                found.append((field, kind))
    return found


def any_of(conditions: Iterable[Column]) -> Column:
    """Returns whether any condition holds; none may be null."""
    return functools.reduce(operator.or_, conditions, F.lit(False))


def all_of(conditions: Iterable[Column]) -> Column:
    """Returns whether all conditions hold; none may be null."""
    return functools.reduce(operator.and_, conditions, F.lit(True))


def _holds(wanted: str, written: str) -> bool:
    """Returns whether every value of one Spark type fits into another unchanged."""
    if written == wanted:
        return True
    to, of = _DECIMAL.fullmatch(wanted), _DECIMAL.fullmatch(written)
    if to is None or of is None:
        return to is None
    scale = int(of[2])
    return scale <= int(to[2]) and int(of[1]) - scale <= int(to[1]) - int(to[2])


def struct_type(types: Mapping[str, str]) -> str:
    return f"struct<{','.join(f'`{name}`:{kind}' for name, kind in types.items())},{PROBLEM}:string>"


def _spark_type(avro: Any, written: Iterable[Any]) -> str:
    """Returns the Spark type of an Avro type. Raises KeyError for a type that events may not have.

    Args:
        written: the field's types in the writers' schemas; None if a writer lacks it.
    """
    avro, _ = without_null(avro)
    if resolved_by_avro(avro):
        return nested_type(widened(avro))
    if simple_name(avro) != "decimal":
        return SPARK_TYPES[simple_name(avro)]
    scale = avro.get("scale", 0)
    fits = all(_integer_digits(kind) + scale <= _LONG_DIGITS for kind in written)
    return f"decimal({_LONG_DIGITS if fits else _MAX_PRECISION},{scale})"


def _integer_digits(kind: Any) -> int:
    """Returns the greatest number of digits before the point of a decimal; for another type, more than any."""
    if isinstance(kind, dict) and kind.get("logicalType") == "decimal":
        return int(kind["precision"]) - int(kind.get("scale", 0))
    return _MAX_PRECISION


def resolved_by_avro(kind: Any) -> bool:
    """Whether Avro resolves values of a non-null type: arrays, maps, records and enums."""
    return simple_name(kind) in _NESTED


def nested_type(kind: Any) -> str:
    """Returns the Spark type of an Avro type. Raises KeyError for a type that events may not have."""
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
    """Gives decimals their greatest precision: with a small one, Spark reads the last 64 bits only."""
    return rewritten(kind, _widened)


def _widened(kind: Any) -> Any:
    if not isinstance(kind, dict) or kind.get("logicalType") != "decimal":
        return kind
    size = kind.get("size", _MAX_PRECISION)
    # The most digits for which every number fits into `size` bytes.
    most = min(_MAX_PRECISION, len(str(2 ** (8 * size - 1) - 1)) - 1)
    return kind if size <= _LONG_BYTES else {**kind, "precision": most}


def with_full_names(kind: Any, named: dict[str, Any], namespace: str = "") -> Any:
    """Returns a type whose named types are defined and referenced by full name.

    Source: Avro 1.12 specification, "Names".

    Args:
        named: receives each definition, by full name.
        namespace: the enclosing namespace.
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
    """Returns the types of some fields, in order, with each named type defined at its first use.

    Fields that are left out may have defined it.

    Args:
        named: the result of `with_full_names`, as are the types.
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
    """Checks that Avro can read values of one type as another, and that their meaning is the same.

    Avro's resolution does not check the latter: it would read a decimal as one of another scale.

    Args:
        named: the result of `with_full_names`, as is `written`.

    Raises:
        TypeError: the types cannot be resolved, or their meaning differs.
    """
    written, wanted = without_null(written)[0], without_null(wanted)[0]
    if isinstance(written, str):
        written = named.get(written, written)
    theirs, ours = _form(written), _form(wanted)
    if theirs != ours and (theirs, ours) not in _AVRO_PROMOTIONS:
        raise TypeError(f"{theirs} would be read as {ours}")
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
    """Returns a name that is equal for types with the same meaning, apart from nested types."""
    name = simple_name(kind)
    if name == "decimal":
        return f"decimal of scale {kind.get('scale', 0)}, in {kind['type']}"
    return "string" if name == "uuid" else name
