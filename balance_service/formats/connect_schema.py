"""What the schema in a document of Kafka Connect says of values: whether they have the unit, or scale, of the reader.

A number tells neither. Where the document does, the reader's must be the same: milliseconds that are read as
microseconds are a time of January 1970. `java/ConnectSchema.java` compares the same.

Source: Kafka, `org.apache.kafka.connect.data` and `JsonSchema`; Debezium, `io.debezium.time`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from balance_service.avro.schemas import fields_of, without_null

if TYPE_CHECKING:
    from collections.abc import Mapping

    from balance_service.avro.schemas import Schema

_DECIMAL = "org.apache.kafka.connect.data.Decimal"
_OF_TIMES = ("org.apache.kafka.connect.data.", "io.debezium.time.")
# The last part of the name of a time, by the form that declares it.
_TIMES = {"epoch-millis": "Timestamp", "epoch-micros": "MicroTimestamp", "epoch-days": "Date"}


def contradiction(kind: Any, schema: Any, path: str = "") -> str:
    """Returns what a schema says otherwise than the reader's type; empty if it says the same, or nothing.

    Args:
        kind: the Avro type, with named types in full at each use.
        schema: of the document, parsed. It may be any value.
        path: of the value.
    """
    if not isinstance(schema, dict):
        return ""
    match without_null(kind)[0]:
        case {"fields": _} as record:
            return _of_fields(record, schema.get("fields"), f"{path}." if path else "")
        case {"items": item}:
            return contradiction(item, schema.get("items"), f"{path}[]")
        case {"values": value}:
            return contradiction(value, schema.get("values"), path + "{}")
        case {"json": form} as single:
            return _of_single(single, form, schema, path)
    return ""


def _of_fields(record: Schema, fields: Any, inside: str) -> str:
    types = fields_of(record)
    for field in fields if isinstance(fields, list) else ():
        name = field.get("field") if isinstance(field, dict) else None
        if isinstance(name, str) and name in types and (found := contradiction(types[name], field, inside + name)):
            return found
    return ""


def _of_single(kind: Mapping[str, Any], form: str, schema: Mapping[str, Any], path: str) -> str:
    name = schema.get("name")
    if not isinstance(name, str):
        return ""
    if form in _TIMES and name.startswith(_OF_TIMES) and name.rpartition(".")[2] != _TIMES[form]:
        return f"{path} is of {name} by the document's schema, and the reader has {form}"
    parameters = schema.get("parameters")
    scale = parameters.get("scale") if isinstance(parameters, dict) else None
    if form == "base64" and name == _DECIMAL and isinstance(scale, str) and scale != str(kind.get("scale", 0)):
        return (
            f"{path} is a decimal of scale {scale} by the document's schema, and the reader has {kind.get('scale', 0)}"
        )
    return ""
