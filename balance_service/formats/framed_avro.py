"""Avro in the frame of a schema registry: see `avro.codec`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from balance_service.avro.codec import SCHEMA_GUID_UNKNOWN, SCHEMA_ID_UNKNOWN, VALUES_TOO_MANY, AvroCodec, AvroReader
from balance_service.avro.schemas import subject_of
from balance_service.avro.writer_schema import SCHEMA_INCOMPATIBLE, SCHEMA_TYPE_UNSUPPORTED
from balance_service.formats.format import Format

if TYPE_CHECKING:
    from collections.abc import Sequence

    from balance_service.avro.registry import SchemaRegistry
    from balance_service.avro.schemas import Schema
    from balance_service.formats.rows import Rows
    from balance_service.model.stage import Stage


class FramedAvro(Format):
    name = "avro"
    final = frozenset({"body-undecodable", "frame-missing", "magic-byte-unknown"})
    blocking = frozenset(
        {SCHEMA_GUID_UNKNOWN, SCHEMA_ID_UNKNOWN, SCHEMA_INCOMPATIBLE, SCHEMA_TYPE_UNSUPPORTED, VALUES_TOO_MANY}
    )
    transient = frozenset({SCHEMA_ID_UNKNOWN, SCHEMA_GUID_UNKNOWN})

    def rows(self, jvm: Any, registry: SchemaRegistry, stage: Stage, texts: Sequence[str] | None) -> Rows:
        # Imports Spark, which most uses of a format do not need.
        from balance_service.formats.framed_avro_rows import FramedAvroRows

        return FramedAvroRows(jvm, registry, stage, texts)

    def reader(self, registry: SchemaRegistry, schema: Schema) -> AvroReader:
        return AvroReader(registry, schema)

    def codec(self, registry: SchemaRegistry, topic: str, schema: Schema) -> AvroCodec:
        return AvroCodec(registry, subject_of(topic, schema), schema)
