"""Frames of any schema, read as their writers wrote them."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import fastavro

from balance_service.avro.codec import opened, parsed_of_writer
from balance_service.errors import PoisonRecordError

if TYPE_CHECKING:
    from balance_service.avro.registry import SchemaRegistry, WriterSchema


class UndecodableError(Exception):
    """No frame, a schema that the registry does not know, or a body that is not of its schema; the message says why."""


class FrameReader:
    """Reads frames by the schemas that they name. For one thread."""

    def __init__(self, registry: SchemaRegistry) -> None:
        self._registry = registry
        self._writers: dict[int, WriterSchema | None] = {}
        # Only of schemas under which something was read.
        self._parsed: dict[int, Any] = {}

    def record(self, frame: bytes) -> str:
        """The full name of a frame's record; empty if its schema is no named type.

        Raises:
            UndecodableError: it has none.
            RetriableError: the registry does not answer.
        """
        schema_id, _ = _opened(frame)
        return self._writer(schema_id).record

    def value(self, frame: bytes) -> Any:
        """What is in a frame: values of Avro types, a record as a dict.

        Raises:
            UndecodableError: it does not decode.
            RetriableError: the registry does not answer.
        """
        schema_id, body = _opened(frame)
        if schema_id not in self._parsed:
            self._parsed[schema_id] = _parse(self._writer(schema_id))
        schema = self._parsed[schema_id]
        if schema is None:
            raise UndecodableError(f"schema {schema_id} is recursive, has items of no bytes, or is no Avro schema")
        try:
            return fastavro.schemaless_reader(io.BytesIO(body), schema, None)
        except Exception as error:  # fastavro raises whatever its reader trips over
            raise UndecodableError(f"it does not decode under schema {schema_id}: {error}") from error

    def _writer(self, schema_id: int) -> WriterSchema:
        if schema_id not in self._writers:
            self._writers[schema_id] = self._registry.writer_schema(schema_id)
        writer = self._writers[schema_id]
        if writer is None:
            raise UndecodableError(f"it names schema {schema_id}, which the registry does not know")
        return writer


def _opened(frame: bytes) -> tuple[int, bytes]:
    try:
        return opened(frame)
    except PoisonRecordError as error:
        raise UndecodableError(str(error)) from None


def _parse(writer: WriterSchema) -> Any:
    """A schema as fastavro takes it; None if it can or may not."""
    try:
        return parsed_of_writer(writer.text)
    except Exception:  # fastavro raises whatever its parser trips over
        return None
