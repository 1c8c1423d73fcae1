"""Framed Avro: 0x00, the schema's id (4 bytes, big-endian), the body.

Source: Confluent Schema Registry, "Wire format".
"""

from __future__ import annotations

import io
import json
import struct
from typing import TYPE_CHECKING, Any

import fastavro

from balance_service.errors import StoreCorruptedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from balance_service.avro.registry import SchemaRegistry
    from balance_service.avro.schemas import Schema

MAGIC = 0
_HEADER = struct.Struct(">bI")


class AvroCodec:
    """Writes records of one schema as frames, and reads them whatever version wrote them.

    Made once its schema's id is known; then any thread may use it.
    """

    def __init__(self, registry: SchemaRegistry, subject: str, schema: Schema) -> None:
        self._registry = registry
        self.schema_id = registry.register(subject, schema)
        self._schema = fastavro.parse_schema(schema)
        self.header = _HEADER.pack(MAGIC, self.schema_id)
        """What each frame that `encode` makes begins with."""
        self._writers: dict[int, Any] = {self.schema_id: self._schema}

    def encode(self, record: Mapping[str, Any]) -> bytes:
        """The frame of a record."""
        body = io.BytesIO()
        body.write(self.header)
        fastavro.schemaless_writer(body, self._schema, record)
        return body.getvalue()

    def decode(self, frame: bytes) -> dict[str, Any]:
        """The record in a frame of our own making.

        Raises:
            StoreCorruptedError: the bytes are not such a frame.
            RetriableError: the writer's schema is not known here yet and the registry cannot be reached.
        """
        try:
            magic, schema_id = _HEADER.unpack_from(frame)
        except struct.error as error:
            raise StoreCorruptedError(f"a record of {len(frame)} bytes has no frame") from error
        if magic != MAGIC:
            raise StoreCorruptedError(f"a record's frame starts with {magic}, not {MAGIC}")
        writer = self._writers.get(schema_id) or self._learn(schema_id)
        try:
            record = fastavro.schemaless_reader(
                io.BytesIO(frame[_HEADER.size :]), writer, None if writer is self._schema else self._schema
            )
        except Exception as error:  # fastavro raises whatever its reader trips over
            raise StoreCorruptedError(f"a record under schema {schema_id} does not decode: {error}") from error
        if not isinstance(record, dict):
            raise StoreCorruptedError(f"schema {schema_id} is not that of a record")
        return record

    def _learn(self, schema_id: int) -> Any:
        registered = self._registry.writer_schema(schema_id)
        if registered is None:
            raise StoreCorruptedError(f"a record names schema {schema_id}, which the registry does not know")
        writer = fastavro.parse_schema(json.loads(registered.text))
        self._writers[schema_id] = writer
        return writer
