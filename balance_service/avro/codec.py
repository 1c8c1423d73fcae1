"""Encodes and decodes framed Avro: 0x00, the schema's id (4 bytes, big-endian), the body.

Source: Confluent Schema Registry, "Wire format".
"""

from __future__ import annotations

import io
import json
import struct
from typing import TYPE_CHECKING, Any
from uuid import UUID

import fastavro

from balance_service.avro.number_reader import number_reader
from balance_service.avro.schemas import rewritten
from balance_service.errors import PoisonRecordError, StoreCorruptedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from balance_service.avro.registry import SchemaRegistry
    from balance_service.avro.schemas import Schema
    from balance_service.avro.writer_schema import WriterSchema

    Headers = Sequence[tuple[str, bytes | None]]

MAGIC = 0
SCHEMA_HEADER = "__value_schema_id"
"""Names the schema of a record whose value has no frame. Source: Confluent's `HeaderSchemaIdSerializer`."""
SCHEMA_GUID_UNKNOWN = "schema-guid-unknown"
_GUID_MAGIC = 1
_GUID_BYTES = 16
_HEADER = struct.Struct(">bI")
# The number of empty records in nested records may double with each level.
_MOST_EMPTY_VALUES = 1_000
_UNFINISHED = -1


class UndecodableError(Exception):
    """A frame without a header, with an unknown schema, or with a body that is not of its schema."""


def frame_header(schema_id: int) -> bytes:
    """The first bytes of every frame under a schema."""
    return _HEADER.pack(MAGIC, schema_id)


def framed(value: bytes, headers: Headers, registry: SchemaRegistry) -> bytes:
    """A record's value with its frame, also if a header names its schema.

    Raises:
        PoisonRecordError: the header names no schema that the registry knows.
        RetriableError: the registry does not answer.
    """
    # Such a value may look like a frame. Of several headers, the last counts, as for Confluent's deserializers.
    named = next((of for name, of in reversed(headers) if name == SCHEMA_HEADER and of), None)
    if named is None:
        return value
    if named[0] == MAGIC and len(named) == _HEADER.size:
        return named + value
    if named[0] != _GUID_MAGIC or len(named) != 1 + _GUID_BYTES:
        raise PoisonRecordError(SCHEMA_GUID_UNKNOWN, f"the header {SCHEMA_HEADER} is neither an id nor a GUID")
    guid = str(UUID(bytes=named[1:]))
    schema_id = registry.id_of(guid)
    if schema_id is None:
        raise PoisonRecordError(SCHEMA_GUID_UNKNOWN, f"a record names schema {guid}, which the registry does not know")
    return frame_header(schema_id) + value


def opened(frame: bytes) -> tuple[int, bytes]:
    """The schema's id and the body of a frame. Raises PoisonRecordError if the bytes are no frame."""
    if len(frame) < _HEADER.size:
        raise PoisonRecordError("frame-missing", f"a record of {len(frame)} bytes has no frame")
    magic, schema_id = _HEADER.unpack_from(frame)
    if magic != MAGIC:
        raise PoisonRecordError("magic-byte-unknown", f"a record's frame starts with {magic}, not {MAGIC}")
    return schema_id, frame[_HEADER.size :]


def schema_id_of(frame: bytes | None) -> int | None:
    """The schema's id of a frame; None if the bytes are no frame."""
    try:
        return None if frame is None else opened(frame)[0]
    except PoisonRecordError:
        return None


def parsed(schema: Any) -> Any:
    """A schema as fastavro parses it, with UUIDs as strings: fastavro would refuse some that producers write.

    Raises an error of fastavro if it is no Avro schema.
    """
    return fastavro.parse_schema(rewritten(schema, _with_uuid_as_text))


def parsed_of_writer(text: str) -> Any:
    """The schema of an untrusted writer, as `parsed`, once it is known to be safe to decode with.

    Raises an error of fastavro if it is no Avro schema, ValueError if it is not safe.
    """
    schema = parsed(json.loads(text))
    _check_bounded(schema)
    return schema


def _with_uuid_as_text(kind: Any) -> Any:
    if not isinstance(kind, dict):
        return kind
    # fastavro leaves UUIDs of 16 bytes unchanged.
    if (kind.get("type"), kind.get("logicalType")) == ("string", "uuid"):
        return "string"
    # fastavro does not verify a schema with this mark.
    return {name: part for name, part in kind.items() if name != "__fastavro_parsed"}


class AvroReader:
    """Decodes frames of any version of a schema into records of this version. Any thread may use it."""

    def __init__(self, registry: SchemaRegistry, schema: Schema) -> None:
        self._registry = registry
        self._schema = parsed(schema)
        self._writers: dict[int, Any] = {}

    def framed(self, value: bytes, headers: Headers) -> bytes:
        """A record's value with its frame. Raises as `framed`."""
        return framed(value, headers, self._registry)

    def decode_foreign(self, frame: bytes) -> dict[str, Any]:
        """Decodes a frame of an untrusted writer.

        Raises:
            PoisonRecordError: the bytes are no frame of this schema.
            RetriableError: the writer's schema is not cached and the registry cannot be reached.
        """
        schema_id, body = opened(frame)
        writer = self._writers.get(schema_id) or self._learn(schema_id)
        try:
            record = fastavro.schemaless_reader(
                io.BytesIO(body), writer, None if writer is self._schema else self._schema
            )
        except Exception as error:  # fastavro raises errors of many types
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
        if registered.problem:
            raise PoisonRecordError(registered.cause, f"schema {schema_id} {registered.problem}")
        try:
            writer = parsed_of_writer(registered.text)
        except Exception as error:  # fastavro raises errors of many types
            message = f"schema {schema_id} is no Avro schema, or no safe one: {error}"
            raise PoisonRecordError("schema-incompatible", message) from error
        self._writers[schema_id] = writer
        return writer


class AvroCodec(AvroReader):
    """Encodes records under a registered schema, and decodes them. Any thread may use it."""

    def __init__(self, registry: SchemaRegistry, subject: str, schema: Schema) -> None:
        """Registers the schema. Raises as `SchemaRegistry.register`."""
        super().__init__(registry, schema)
        self.schema_id = registry.register(subject, schema)
        self._header = frame_header(self.schema_id)
        self._writers[self.schema_id] = self._schema

    def encode(self, record: Mapping[str, Any]) -> bytes:
        """Encodes a record. Raises an error of fastavro if the schema does not allow it."""
        body = io.BytesIO()
        body.write(self._header)
        fastavro.schemaless_writer(body, self._schema, record, strict_allow_default=True)
        return body.getvalue()

    def decode(self, frame: bytes) -> dict[str, Any]:
        """Decodes a frame that the service wrote.

        Raises:
            StoreCorruptedError: the bytes are no frame of this schema.
            RetriableError: the writer's schema is not cached and the registry cannot be reached.
        """
        try:
            return self.decode_foreign(frame)
        except PoisonRecordError as error:
            raise StoreCorruptedError(str(error)) from error

    def number(self, name: str) -> Callable[[bytes], Any]:
        """Returns a function that reads one field of frames that the service wrote. It is fast for numbers.

        The function raises as `decode`.
        """
        read, header = number_reader(self._schema, name), self._header
        if read is None:
            return lambda frame: self.decode(frame)[name]

        def number_of(frame: bytes) -> Any:
            if frame.startswith(header):
                try:
                    return read(frame, len(header))
                except (IndexError, struct.error):
                    pass  # `decode` raises the error
            return self.decode(frame)[name]

        return number_of


class FrameReader:
    """Decodes frames of any schema by the writer's schema. For one thread."""

    def __init__(self, registry: SchemaRegistry) -> None:
        self._registry = registry
        self._writers: dict[int, WriterSchema | None] = {}
        self._parsed: dict[int, Any] = {}
        self._unsafe: dict[int, str] = {}

    def framed(self, value: bytes, headers: Headers) -> bytes:
        """A record's value with its frame, as `framed`.

        Raises:
            UndecodableError: a header names no schema that the registry knows.
            RetriableError: the registry does not answer.
        """
        try:
            return framed(value, headers, self._registry)
        except PoisonRecordError as error:
            raise UndecodableError(str(error)) from None

    def record(self, frame: bytes) -> str:
        """The full name of a frame's record, of a union's the member that was written; empty if it is no record.

        Raises:
            UndecodableError: the bytes are no frame, or the registry does not know the schema.
            RetriableError: the registry does not answer.
        """
        schema_id, body = self._opened(frame)
        return self._writer(schema_id).record_of(body)

    def value(self, frame: bytes) -> Any:
        """Decodes a frame; a record becomes a dict.

        Raises:
            UndecodableError: the frame does not decode.
            RetriableError: the registry does not answer.
        """
        schema_id, body = self._opened(frame)
        if schema_id not in self._parsed and schema_id not in self._unsafe:
            writer = self._writer(schema_id)
            if writer.problem:
                raise UndecodableError(f"schema {schema_id} {writer.problem}")
            try:
                self._parsed[schema_id] = parsed_of_writer(writer.text)
            except Exception as error:  # fastavro raises errors of many types
                self._unsafe[schema_id] = str(error) or type(error).__name__
        if schema_id in self._unsafe:
            why = self._unsafe[schema_id]
            raise UndecodableError(f"schema {schema_id} is no Avro schema, or no safe one: {why}")
        schema = self._parsed[schema_id]
        try:
            return fastavro.schemaless_reader(io.BytesIO(body), schema, None)
        except Exception as error:  # fastavro raises errors of many types
            raise UndecodableError(f"it does not decode under schema {schema_id}: {error}") from error

    def _writer(self, schema_id: int) -> WriterSchema:
        if schema_id not in self._writers:
            self._writers[schema_id] = self._registry.writer_schema(schema_id)
        writer = self._writers[schema_id]
        if writer is None:
            raise UndecodableError(f"it names schema {schema_id}, which the registry does not know")
        return writer

    @staticmethod
    def _opened(frame: bytes) -> tuple[int, bytes]:
        try:
            return opened(frame)
        except PoisonRecordError as error:
            raise UndecodableError(str(error)) from None


def _check_bounded(schema: Any) -> None:
    """Refuses a parsed schema under which a few bytes keep fastavro busy for long.

    fastavro follows a recursive schema as deep as the bytes say, which can end the process. It reads array items of no
    bytes as often as the array's count says, and nothing can interrupt it.

    Raises:
        ValueError: the schema is recursive, or has such items.
    """
    _empty_values(schema, {})


def _empty_values(kind: Any, named: dict[str, int]) -> int:
    """The number of values in a type whose encoding takes no bytes; 0 if it takes some."""
    if isinstance(kind, list):
        for member in kind:
            _empty_values(member, named)
        # The member's index takes a byte.
        return 0
    if isinstance(kind, str):
        if named.get(kind) == _UNFINISHED:
            raise ValueError(f"{kind} contains itself")
        return 1 if kind == "null" else named.get(kind, 0)
    match kind["type"]:
        case "array":
            if _empty_values(kind["items"], named):
                raise ValueError("an array's items take no bytes")
            return 0
        case "map":
            _empty_values(kind["values"], named)
            return 0
        case "record" | "error" | "enum" | "fixed":
            return _empty_values_of_named(kind, named)
        case other:
            return 1 if other == "null" else 0


def _empty_values_of_named(kind: dict[str, Any], named: dict[str, int]) -> int:
    name = kind["name"]
    # fastavro allows that for the members of a union, and would decode all with the last.
    if name in named:
        raise ValueError(f"{name} is defined twice")
    named[name] = _UNFINISHED
    match kind["type"]:
        case "enum":
            empty = 0
        case "fixed":
            empty = 0 if kind["size"] > 0 else 1
        case _:
            of_fields = [_empty_values(field["type"], named) for field in kind["fields"]]
            empty = 1 + sum(of_fields) if all(of_fields) else 0
    if empty > _MOST_EMPTY_VALUES:
        raise ValueError(f"{name} holds more than {_MOST_EMPTY_VALUES} values that take no bytes")
    named[name] = empty
    return empty
