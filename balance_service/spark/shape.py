"""A writer's record in the fields and types of ours, on Spark; and what of it would not survive that.

A field of one value is cast, and looked at for what the cast would lose. Arrays, maps, records and enums are resolved
by Avro itself, as its specification has it, from the writer's schema to ours.
"""

from __future__ import annotations

import functools
import json
import operator
import re
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)
from pyspark.sql.avro.functions import from_avro

from balance_service.avro.schemas import fields_of, simple_name, without_null
from balance_service.spark.nested import (
    SPARK_TYPES,
    check_resolvable,
    nested_type,
    resolved_by_avro,
    standing_alone,
    widened,
    with_full_names,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pyspark.sql import Column, DataFrame

    from balance_service.avro.schemas import Schema

PROBLEM = "_problem"
# Spark makes null in all fields of a body that does not decode. They may be null in one that does, this one aside.
_DECODED = {"name": "_decoded", "type": "boolean", "default": True}
_MAX_PRECISION = 38
# Of so many digits, Spark keeps a decimal in a long, and of more, in a BigInteger, which takes several objects a row.
_LONG_DIGITS = 18
_LONG_BYTES = 8
_DECIMAL = re.compile(r"decimal\(([0-9]+),([0-9]+)\)")
_EXACT_TYPES = ("decimal", "int", "bigint")
# Taken from any type that can be cast to it.
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
# A plain number is a time in the unit that we read it in, of which Spark holds so many.
_FROM_LONG = {"timestamp-millis": (F.timestamp_millis, 10**15), "timestamp-micros": (F.timestamp_micros, 10**18)}


def field_types(reader: Schema, texts: Iterable[str]) -> dict[str, str]:
    """The Spark types of our fields, for events of some writers.

    Decimals have the reader's scale, and 18 digits if no writer's need more, else 38.

    Args:
        texts: the writers' schemas.
    """
    writers = [fields_of(json.loads(text)) for text in texts]
    return {
        name: _spark_type(kind, [writer.get(name) for writer in writers]) for name, kind in fields_of(reader).items()
    }


def in_shape_of(reader: Schema, types: Mapping[str, str], records: DataFrame, column: str, text: str) -> Column:
    """A writer's struct with our fields in our types, and `PROBLEM`: null, or why a row cannot have that shape.

    A row of which a decimal would lose a digit is refused.

    Args:
        types: of our fields, as `field_types` has them.
        records: with the writer's struct as `column`, as `decoded` makes it.
        text: the writer's schema.

    Raises:
        KeyError: the writer lacks a field that has no default.
        TypeError: the writer has money in a type that is not exact, or another value in one that means something else.
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
            # What is beyond stays beyond what Python holds, for which the event is refused if the time is used.
            source, kind = of_number(F.least(F.greatest(source, F.lit(-most)), F.lit(most))), wanted
        if name in narrow:
            kind = f"decimal({narrow[name]['precision']},{narrow[name].get('scale', 0)})"
            whole, source = source, source.try_cast(kind)
            lossy.append(source.isNull() if not is_nullable else source.isNull() & whole.isNotNull())
        target = source if kind == wanted else source.try_cast(wanted)
        if not _holds(wanted, kind):
            # There and back: Spark would compare decimals of two scales in a third, which may round.
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
    """Raises TypeError if values of a Spark type may not be taken for another."""
    if wanted.startswith("decimal"):
        if not written.startswith(_EXACT_TYPES):
            raise TypeError(f"{name} is {written}, which is not exact")
    elif written != wanted and wanted not in _TAKES_ANY and (written, wanted) not in _PROMOTIONS:
        raise TypeError(f"{name} is {written}, which is no {wanted}")


def decoded(body: Column, reader: Schema, text: str, *, skips_others: bool = False) -> Column:
    """An Avro body as a struct of its writer's fields; all of it null where it does not decode.

    Args:
        skips_others: whether fields that the reader lacks are passed over. Avro does not look at what it passes over,
            so damage there goes unnoticed. Where the reader has arrays, maps, records or enums it always does so.

    Raises:
        TypeError: Avro would take a value in a field for something that it is not.
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
    """A writer's schema under which Spark sees all of an amount, and of a string its bytes.

    Of a decimal of at most 18 digits it takes the last 64 bits, however many bytes there are, and says nothing. Strings
    and bytes are encoded alike, but of a string Avro looks up its Java class each time, and what is no UTF-8 would be
    replaced.
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
    """Fields, each with its decimal type, whose bytes may hold more than Spark would look at."""
    found = []
    for field in schema["fields"]:
        for kind in field["type"] if isinstance(field["type"], list) else [field["type"]]:
            is_decimal = isinstance(kind, dict) and kind.get("logicalType") == "decimal"
            if is_decimal and kind["precision"] <= _LONG_DIGITS and kind.get("size", _LONG_BYTES + 1) > _LONG_BYTES:
                found.append((field, kind))
    return found


def any_of(conditions: Iterable[Column]) -> Column:
    """Whether any condition holds; none of them may be null."""
    return functools.reduce(operator.or_, conditions, F.lit(False))


def all_of(conditions: Iterable[Column]) -> Column:
    """Whether every condition holds; none of them may be null."""
    return functools.reduce(operator.and_, conditions, F.lit(True))


def _holds(wanted: str, written: str) -> bool:
    """Whether every value of one Spark type fits into another unchanged."""
    if written == wanted:
        return True
    to, of = _DECIMAL.fullmatch(wanted), _DECIMAL.fullmatch(written)
    if to is None or of is None:
        return to is None
    scale = int(of[2])
    return scale <= int(to[2]) and int(of[1]) - scale <= int(to[1]) - int(to[2])


def struct_type(types: Mapping[str, str]) -> str:
    """The Spark type of what `in_shape_of` makes."""
    return f"struct<{','.join(f'`{name}`:{kind}' for name, kind in types.items())},{PROBLEM}:string>"


def _spark_type(avro: Any, written: Iterable[Any]) -> str:
    """The Spark type in which the engine hands over an Avro type. Raises KeyError for one that events may not have.

    Args:
        written: the field's types in the writers' schemas; None where a writer lacks it.
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
    """How many digits a plain decimal may have before its point; for another type, more than any."""
    if isinstance(kind, dict) and kind.get("logicalType") == "decimal":
        return int(kind["precision"]) - int(kind.get("scale", 0))
    return _MAX_PRECISION
