"""JSON: a document is the value of a record, bare or after the id of a schema. Only the reader's schema counts."""

from __future__ import annotations

import io
import math
from datetime import UTC, date, datetime, timedelta
from decimal import Context, Decimal
from typing import TYPE_CHECKING, Any

import fastavro

from balance_service.avro.codec import misfit, parsed
from balance_service.avro.frames import opened
from balance_service.avro.named_types import expanded
from balance_service.avro.schemas import fields_of, simple_name, without_null
from balance_service.formats.format import Format
from balance_service.formats.json_document import MALFORMED
from balance_service.formats.json_values import (
    BASE64,
    DIGITS,
    EPOCH_DAYS,
    EPOCH_MICROS,
    EPOCH_MILLIS,
    MISFIT,
    MISSING,
    JsonRecords,
    kinds_of,
)
from balance_service.model.json_view import exact_json
from balance_service.model.made_records import unfit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from balance_service.avro.registry import SchemaRegistry
    from balance_service.avro.schemas import Schema
    from balance_service.formats.format import Headers
    from balance_service.formats.rows import Rows
    from balance_service.model.stage import Stage

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_UNITS = {EPOCH_MILLIS: timedelta(milliseconds=1), EPOCH_MICROS: timedelta(microseconds=1)}
_EXACT = Context(prec=38)


class JsonFormat(Format):
    name = "json"
    final = frozenset({MALFORMED})
    blocking = frozenset({MISFIT, MISSING})

    def rows(self, jvm: Any, registry: SchemaRegistry, stage: Stage, texts: Sequence[str] | None) -> Rows:  # noqa: ARG002
        # Imports Spark, which most uses of a format do not need.
        from balance_service.formats.json_rows import JsonRows

        return JsonRows(jvm, stage, texts or ())

    def reader(self, registry: SchemaRegistry, schema: Schema) -> JsonCodec:  # noqa: ARG002
        return JsonCodec(schema)

    def codec(self, registry: SchemaRegistry, topic: str, schema: Schema, kind: str | None = None) -> JsonCodec:  # noqa: ARG002
        return JsonCodec(schema, kind)


class CloudEvents(JsonFormat):
    """Source: CloudEvents 1.0, "JSON Event Format" and "Kafka Protocol Binding"."""

    name = "cloudevents"


class ConnectJson(JsonFormat):
    """Of Kafka Connect: a record, or its schema and it as the two fields of an object. Records are written without.

    Source: Kafka, `org.apache.kafka.connect.json.JsonConverter`, `schemas.enable`.
    """

    name = "connect"

    def reader(self, registry: SchemaRegistry, schema: Schema) -> JsonCodec:  # noqa: ARG002
        return JsonCodec(schema, is_connect=True)

    def codec(self, registry: SchemaRegistry, topic: str, schema: Schema, kind: str | None = None) -> JsonCodec:  # noqa: ARG002
        return JsonCodec(schema, is_connect=True)


class JsonCodec:
    """Reads and writes documents of one record. Any thread may use it."""

    header = flat = None

    def __init__(self, schema: Schema, kind: str | None = None, *, is_connect: bool = False) -> None:
        """Args:
        kind: the field that names the record, if the topic has several; added to documents of records without it.
        """
        whole = expanded(schema)
        self._schema = parsed(schema)
        self._whole = whole
        self._records = JsonRecords([whole], *(("", "payload", "schema") if is_connect else ()))
        self._named = {} if kind is None or kind in fields_of(whole) else {kind: kinds_of(whole)[0]}
        self._is_plain = not _has_own_form(whole)

    def framed(self, value: bytes, headers: Headers) -> bytes:  # noqa: ARG002
        return value

    def decode_foreign(self, frame: bytes) -> dict[str, Any]:
        """Raises PoisonRecordError: the value is no document of the record."""
        return self._records.read(frame)[1]

    def decode(self, frame: bytes) -> dict[str, Any]:
        return self.decode_foreign(frame)

    def encode(self, record: Mapping[str, Any]) -> bytes:
        body = io.BytesIO()
        fastavro.schemaless_writer(body, self._schema, record, strict_allow_default=True)
        return self.frame(body.getvalue())

    def frame(self, body: bytes) -> bytes:
        """Raises PoisonRecordError: JSON has no form of a value, NaN or an infinity."""
        record: Any = fastavro.schemaless_reader(io.BytesIO(body), self._schema, None)
        return exact_json({**self._named, **(record if self._is_plain else _shown(self._whole, record))}).encode()

    def reframed(self, frame: bytes) -> bytes:
        return self.frame(opened(frame)[1])

    def misfit(self, record: Any) -> str:
        return misfit(self._schema, record)


def _has_own_form(kind: Any) -> bool:
    """Whether a type has values that `exact_json` writes in another form than a reader takes."""
    match kind:
        case list():
            return any(map(_has_own_form, kind))
        case {"type": "record", "fields": fields}:
            return any(_has_own_form(field["type"]) for field in fields)
        case {"type": "array", "items": inner} | {"type": "map", "values": inner}:
            return _has_own_form(inner)
        case {"json": _}:
            return True
    return simple_name(kind) in ("float", "double")


def _shown(kind: Any, value: Any) -> Any:
    kind, _ = without_null(kind)
    match simple_name(kind), value:
        case _, None:
            return None
        case "record", dict():
            return {name: _shown(of, value[name]) for name, of in fields_of(kind).items()}
        case "array", list():
            return [_shown(kind["items"], item) for item in value]
        case "map", dict():
            return {name: _shown(kind["values"], member) for name, member in value.items()}
        case (("float" | "double"), float()) if not math.isfinite(value):
            raise unfit(f"{value} is no number of JSON")
        case _, datetime() if unit := _UNITS.get(kind.get("json")):
            return (value.replace(tzinfo=UTC) - _EPOCH) // unit
        case "date", date() if isinstance(kind, dict) and kind.get("json") == EPOCH_DAYS:
            return (value - _EPOCH.date()).days
        case "decimal", Decimal() if kind.get("json") == DIGITS:
            return f"{value:f}"
        case "decimal", Decimal() if kind.get("json") == BASE64:
            number = int(value.scaleb(kind.get("scale", 0), _EXACT))
            return number.to_bytes((number if number >= 0 else ~number).bit_length() // 8 + 1, "big", signed=True)
    return value
