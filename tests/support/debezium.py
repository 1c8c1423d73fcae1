"""Schemas of the shape that Debezium's change events have in Avro; no connector has written them.

The shape is that of Debezium's documentation, "Data change events" of the connectors for PostgreSQL and MySQL.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from balance_service.avro.schemas import load_schema

if TYPE_CHECKING:
    from collections.abc import Mapping

UNAVAILABLE = "__debezium_unavailable_value"
_OPTIONAL_LONG, _OPTIONAL_TEXT = ["null", "long"], ["null", "string"]
_OF_ALL: Mapping[str, Any] = {"version": "string", "connector": "string", "name": "string", "ts_ms": "long"}
_SNAPSHOT = {
    "type": "string",
    "connect.version": 1,
    "connect.parameters": {"allowed": "true,first,first_in_data_collection,last_in_data_collection,last,false"},
    "connect.default": "false",
    "connect.name": "io.debezium.data.Enum",
}
_SOURCES: Mapping[str, Mapping[str, Any]] = {
    "postgresql": {
        "schema": "string",
        "table": "string",
        "txId": _OPTIONAL_LONG,
        "lsn": _OPTIONAL_LONG,
        "xmin": _OPTIONAL_LONG,
    },
    "mysql": {
        "table": _OPTIONAL_TEXT,
        "server_id": "long",
        "gtid": _OPTIONAL_TEXT,
        "file": "string",
        "pos": "long",
        "row": "int",
        "thread": _OPTIONAL_LONG,
        "query": _OPTIONAL_TEXT,
    },
}


def envelope(connector: str, columns: Mapping[str, Any], name: str = "Envelope", table: str = "s.t") -> dict[str, Any]:
    """Returns the schema of a connector's change events of a table."""
    source: list[dict[str, Any]] = [{"name": one, "type": kind} for one, kind in _OF_ALL.items()]
    source.append({"name": "snapshot", "type": [_SNAPSHOT, "null"], "default": "false"})
    source += [{"name": "db", "type": "string"}, _nullable("sequence", "string")]
    source += [_nullable("ts_us", "long"), _nullable("ts_ns", "long")]
    source += [
        _nullable(one, kind[1]) if isinstance(kind, list) else {"name": one, "type": kind}
        for one, kind in _SOURCES[connector].items()
    ]
    row = {
        "type": "record",
        "name": "Value",
        "fields": [
            {"name": one, "type": kind, **({"default": None} if isinstance(kind, list) else {})}
            for one, kind in columns.items()
        ],
        "connect.name": f"{table}.Value",
    }
    block = {
        "type": "record",
        "name": "block",
        "namespace": "event",
        "fields": [
            {"name": "id", "type": "string"},
            {"name": "total_order", "type": "long"},
            {"name": "data_collection_order", "type": "long"},
        ],
        "connect.version": 1,
        "connect.name": "event.block",
    }
    of_source = {
        "type": "record",
        "name": "Source",
        "namespace": f"io.debezium.connector.{connector}",
        "fields": source,
        "connect.name": f"io.debezium.connector.{connector}.Source",
    }
    return {
        "type": "record",
        "name": name,
        "namespace": table,
        "fields": [
            _nullable("before", row),
            _nullable("after", "Value"),
            {"name": "source", "type": of_source},
            _nullable("transaction", block),
            {"name": "op", "type": "string"},
            _nullable("ts_ms", "long"),
            _nullable("ts_us", "long"),
            _nullable("ts_ns", "long"),
        ],
        "connect.version": 1,
        "connect.name": f"{table}.{name}",
    }


def shipped(connector: str, columns: Mapping[str, Any], *, name: str) -> str:
    """Makes the schema loadable by its name, as if it were a shipped file."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        file = Path(folder, "schema.avsc")
        file.write_text(json.dumps(envelope(connector, columns, name)))
        patch.setattr("balance_service.avro.schemas.resource", lambda _path: file)
        load_schema(name)
    return name


def _nullable(name: str, kind: Any) -> dict[str, Any]:
    return {"name": name, "type": ["null", kind], "default": None}
