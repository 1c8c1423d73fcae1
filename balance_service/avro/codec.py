"""Framed Avro: 0x00, the schema's id (4 bytes, big-endian), the body.

Source: Confluent Schema Registry, "Wire format".
"""

from __future__ import annotations

import io
import json
import struct
from typing import TYPE_CHECKING, Any

import fastavro

from balance_service.avro.bounded import check_bounded
from balance_service.avro.one_number import number_reader
from balance_service.avro.types import rewritten
from balance_service.errors import PoisonRecordError, StoreCorruptedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from balance_service.avro.registry import SchemaRegistry
    from balance_service.avro.schemas import Schema

MAGIC = 0
_HEADER = struct.Struct(">bI")


def frame_header(schema_id: int) -> bytes:
    """What every frame under a schema begins with."""
    return _HEADER.pack(MAGIC, schema_id)


def opened(frame: bytes) -> tuple[int, bytes]:
    """The schema's id and the body of a frame. Raises PoisonRecordError if the bytes are none."""
    if len(frame) < _HEADER.size:
        raise PoisonRecordError("frame-missing", f"a record of {len(frame)} bytes has no frame")
    magic, schema_id = _HEADER.unpack_from(frame)
    if magic != MAGIC:
        raise PoisonRecordError("magic-byte-unknown", f"a record's frame starts with {magic}, not {MAGIC}")
    return schema_id, frame[_HEADER.size :]


def schema_id_of(frame: bytes | None) -> int | None:
    """The schema's id of a frame; None of bytes that are none."""
    try:
        return None if frame is None else opened(frame)[0]
    except PoisonRecordError:
        return None


def parsed(schema: Any) -> Any:
    """A schema as fastavro takes it, in which a UUID is text: producers write any, and fastavro would not read it back.

    Raises whatever fastavro does of one that is no Avro schema.
    """
    return fastavro.parse_schema(rewritten(schema, _with_uuid_as_text))


def parsed_of_writer(text: str) -> Any:
    """Anybody's schema, as `parsed`, by which it is safe to read, and to skip, what they wrote.

    Raises whatever fastavro does of one that is no Avro schema, ValueError of one that is not safe.
    """
    schema = parsed(json.loads(text))
    check_bounded(schema)
    return schema


def _with_uuid_as_text(kind: Any) -> Any:
    if not isinstance(kind, dict):
        return kind
    # Those of 16 bytes fastavro leaves as they are.
    if (kind.get("type"), kind.get("logicalType")) == ("string", "uuid"):
        return "string"
    # With this mark in it, fastavro would take a schema as it is, unseen.
    return {name: part for name, part in kind.items() if name != "__fastavro_parsed"}


class AvroReader:
    """Reads records of one schema from frames, whatever version wrote them. Any thread may use it."""

    def __init__(self, registry: SchemaRegistry, schema: Schema) -> None:
        self._registry = registry
        self._schema = parsed(schema)
        self._writers: dict[int, Any] = {}

    def decode_foreign(self, frame: bytes) -> dict[str, Any]:
        """The record in a frame of anybody's making.

        Raises:
            PoisonRecordError: the bytes are not such a frame.
            RetriableError: the writer's schema is not known here yet and the registry cannot be reached.
        """
        schema_id, body = opened(frame)
        writer = self._writers.get(schema_id) or self._learn(schema_id)
        try:
            record = fastavro.schemaless_reader(
                io.BytesIO(body), writer, None if writer is self._schema else self._schema
            )
        except Exception as error:  # fastavro raises whatever its reader trips over
            message = f"a record under schema {schema_id} does not decode: {error}"
            raise PoisonRecordError("body-undecodable", message) from error
        if not isinstance(record, dict):
            raise PoisonRecordError("schema-incompatible", f"schema {schema_id} is not that of a record")
        return record

    def _learn(self, schema_id: int) -> Any:
        registered = self._registry.writer_schema(schema_id)
        if registered is None:
            message = f"a record names schema {schema_id}, which the registry does not know"
            raise PoisonRecordError("schema-id-unknown", message)
        try:
            writer = parsed_of_writer(registered.text)
        except Exception as error:  # fastavro raises whatever its parser trips over
            message = f"schema {schema_id} is no Avro schema, or no safe one: {error}"
            raise PoisonRecordError("schema-incompatible", message) from error
        self._writers[schema_id] = writer
        return writer


class AvroCodec(AvroReader):
    """Writes records of one schema as frames, and reads them; what it writes is registered.

    Made once its schema's id is known; then any thread may use it.
    """

    def __init__(self, registry: SchemaRegistry, subject: str, schema: Schema) -> None:
        super().__init__(registry, schema)
        self.schema_id = registry.register(subject, schema)
        self._header = frame_header(self.schema_id)
        self._writers[self.schema_id] = self._schema

    def encode(self, record: Mapping[str, Any]) -> bytes:
        """The frame of a record. Raises whatever fastavro does of one that the schema does not allow."""
        body = io.BytesIO()
        body.write(self._header)
        fastavro.schemaless_writer(body, self._schema, record, strict_allow_default=True)
        return body.getvalue()

    def decode(self, frame: bytes) -> dict[str, Any]:
        """The record in a frame of our own making.

        Raises:
            StoreCorruptedError: the bytes are not such a frame.
            RetriableError: the writer's schema is not known here yet and the registry cannot be reached.
        """
        try:
            return self.decode_foreign(frame)
        except PoisonRecordError as error:
            raise StoreCorruptedError(str(error)) from error

    def number(self, name: str) -> Callable[[bytes], Any]:
        """What reads one field of frames of our own making, a number above all. It raises as `decode`."""
        read, header = number_reader(self._schema, name), self._header
        if read is None:
            return lambda frame: self.decode(frame)[name]

        def number_of(frame: bytes) -> Any:
            if frame.startswith(header):
                try:
                    return read(frame, len(header))
                except (IndexError, struct.error):
                    pass  # decoding says what is wrong
            return self.decode(frame)[name]

        return number_of
