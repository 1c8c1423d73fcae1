"""The schemas that ship with the project, and names of Avro records."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from balance_service.process.package import resource

Schema = dict[str, Any]
"""An Avro record schema, parsed from JSON."""


@cache
def load_schema(name: str) -> Schema:
    """The shipped schema of one record, by its simple name, e.g. `FundsAdded`."""
    schema: Schema = json.loads(resource(f"schemas/{name}.avsc").read_text(encoding="utf-8"))
    return schema


def is_shipped(schema: Schema) -> bool:
    """Whether a schema is one of ours."""
    try:
        return load_schema(schema["name"]) == schema
    except FileNotFoundError:
        return False


def subject_of(topic: str, schema: Schema) -> str:
    """What the registry knows a record on a topic by.

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
