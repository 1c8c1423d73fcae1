"""Encodes and decodes Avro records in frames: see `frames`."""

from __future__ import annotations

import io
import json
import struct
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID

import fastavro

from balance_service.avro.flat_records import flat_records
from balance_service.avro.frames import (
    ID_BYTES,
    MAGIC,
    frame_header,
    hexadecimal,
    is_fingerprint,
    opened,
    opened_own,
    schema_id_of,
)
from balance_service.avro.logical_types import of_writer, read_as_amount, resolvable
from balance_service.avro.named_types import contracted, expanded
from balance_service.avro.number_reader import number_reader
from balance_service.avro.resolution import difference
from balance_service.avro.schemas import full_name, rewritten, type_name
from balance_service.errors import (
    ConfigurationError,
    PoisonRecordError,
    RetriableError,
    StoreCorruptedError,
    UnreadableRecordError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from balance_service.avro.registry import Place, SchemaRegistry
    from balance_service.avro.schemas import Schema
    from balance_service.avro.writer_schema import WriterSchema

    Headers = Sequence[tuple[str, bytes | None]]

SCHEMA_HEADER = "__value_schema_id"
"""Names the schema of a record whose value has no frame. Source: Confluent's `HeaderSchemaIdSerializer`."""
SCHEMA_GUID_UNKNOWN, SCHEMA_ID_UNKNOWN = "schema-guid-unknown", "schema-id-unknown"
VALUES_TOO_MANY = "values-too-many"
_GUID_MAGIC = 1
_GUID_BYTES = 16
_SHOWN_CHARACTERS = 60
# As in `spark/java/Body.java`, which counts them while it reads.
_VALUES, _VALUES_PER_BYTE = 250_000, 4
_COUNTLESS = 1 << 60
_NONE: Mapping[str, Any] = {}
_RESTORE_THE_REGISTRY = (
    "restore the registry's data, or set BALANCE_SCHEMA_REGISTRY_URL to the registry of then; if both are lost, start "
    "from scratch with another BALANCE_APPLICATION_ID"
)
# As in `spark/java/Reading.java`. fastavro would overflow the stack.
_MOST_LEVELS = 500


class UndecodableError(Exception):
    """A frame without a header, with an unknown schema, or with a body that is not of its schema."""


class TooManyValuesError(ValueError):
    """A body that may hold more values than its bytes justify."""


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
    if named[0] == MAGIC and len(named) == ID_BYTES:
        return named + value
    if named[0] != _GUID_MAGIC or len(named) != 1 + _GUID_BYTES:
        raise PoisonRecordError(SCHEMA_GUID_UNKNOWN, f"the header {SCHEMA_HEADER} is neither an id nor a GUID")
    guid = str(UUID(bytes=named[1:]))
    schema_id = registry.id_of(guid)
    if schema_id is None:
        raise PoisonRecordError(SCHEMA_GUID_UNKNOWN, f"a record names schema {guid}, which the registry does not know")
    return frame_header(schema_id) + value


def misfit(schema: Any, record: Any) -> str:
    """Returns the first value of a record that does not fit its type, and the type; empty if none is found.

    Args:
        schema: as `parsed` returns it.
    """
    try:
        fastavro.validation.validate(record, schema)
    except fastavro.validation.ValidationError as error:
        # For a nullable type, the last error concerns the non-null type.
        wrong = error.errors[-1]
        field, wanted = wrong.field.removeprefix(f"{full_name(schema)}.") or "it", type_name(wrong.schema)
        shown, kind = repr(wrong.datum), type(wrong.datum).__name__
        shown = shown if len(shown) <= _SHOWN_CHARACTERS else f"{shown[:_SHOWN_CHARACTERS]}…"
        if kind == "int" and wanted in ("int", "long"):
            return f"{field} is {shown}, which {wanted} cannot hold"
        hint = "; give a Decimal" if wanted.startswith("decimal") else ""
        return f"{field} is {shown} of type {kind}, but {wanted} is expected{hint}"
    except Exception:  # A value of a wrong type may fail in any way.
        return ""
    return ""


def parsed(schema: Any) -> Any:
    """A schema as fastavro parses it, with UUIDs as strings: fastavro would refuse some that producers write.

    A named type may be in full at each use. Defaults are values as a record has them, because fastavro hands them on as
    they are. Raises an error of fastavro if it is no Avro schema.
    """
    named: dict[str, Any] = {}
    made = fastavro.parse_schema(rewritten(contracted(schema), _with_uuid_as_text), named)
    for field in (field for kind in named.values() for field in kind.get("fields", ()) if "default" in field):
        field["default"] = of_default(field["type"], field["default"], named)
    return made


def of_default(kind: Any, default: Any, named: Mapping[str, Any] = _NONE) -> Any:
    """Returns the value that a default in a schema stands for: text for bytes, a number for a time, parts of a record.

    One that is none of its type is returned unchanged: a record that needs it does not fit then.
    """
    if isinstance(kind, list):
        kind = next((member for member in kind if (member == "null") == (default is None)), kind[0])
    if isinstance(kind, str):
        kind = named.get(kind, {"type": kind})
    match kind["type"], default:
        case "record", dict():
            return {
                field["name"]: of_default(field["type"], default.get(field["name"], field.get("default")), named)
                for field in kind["fields"]
            }
        case "array", list():
            return [of_default(kind["items"], item, named) for item in default]
        case "map", dict():
            return {key: of_default(kind["values"], value, named) for key, value in default.items()}
        case "bytes" | "fixed", str():
            stored: Any = default.encode("latin-1", "replace")
        case "int" | "long", int():
            stored = default
        case _:
            return default
    read = fastavro.read.LOGICAL_READERS.get(f"{kind['type']}-{kind.get('logicalType')}")
    try:
        return stored if read is None else read(stored, kind, None)
    except (ArithmeticError, ValueError):
        return default


class UntrustedSchema:
    """The schema of an untrusted writer, once it is known to be safe to decode with.

    Nothing can interrupt fastavro. It follows a recursive schema as deep as the bytes say, which can end the process,
    and reads values that take no bytes as often as the schema and the counts of arrays say. A record may hold 250,000
    such values, and 4 more for each of its bytes.
    """

    def __init__(self, text: str) -> None:
        """Raises an error of fastavro if it is no Avro schema, ValueError if no record is safe to decode with it."""
        self.parsed: Any = fastavro.parse_schema(
            rewritten(json.loads(text), lambda kind: of_writer(_with_uuid_as_text(kind)))
        )
        found = _ValuesWithoutBytes()
        self._once, _ = found.of(self.parsed)
        self._per_byte = found.per_byte

    def decode(self, body: bytes, wanted: Any = None) -> Any:
        """Decodes a body; as `wanted`, a parsed schema, if that is given.

        Raises an error of fastavro if the body does not decode, TooManyValuesError if it may hold too many values.
        """
        allowed = _VALUES + _VALUES_PER_BYTE * len(body)
        if self._once + self._per_byte * len(body) > allowed:
            raise TooManyValuesError(f"it may hold more than {allowed} values that take no bytes")
        return fastavro.schemaless_reader(_Body(body), self.parsed, wanted)


class _Body(io.BytesIO):
    """A body that ends. fastavro passes over values beyond its end, however many a count announces."""

    def read(self, size: int | None = -1) -> bytes:
        """Returns so many bytes. Raises EOFError if fewer are left."""
        found = super().read(size)
        if len(found) != size:
            raise EOFError("the record ends within a value")
        return found


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

    _opened = staticmethod(opened)

    def __init__(self, registry: SchemaRegistry, schema: Schema) -> None:
        self._registry = registry
        self._wanted = expanded(schema)
        self._schema = parsed(schema)
        self._writers: dict[int, Callable[[bytes], Any]] = {}
        """Id → decoder of bodies."""

    def framed(self, value: bytes, headers: Headers) -> bytes:
        """A record's value with its frame. Raises as `framed`."""
        return framed(value, headers, self._registry)

    def decode_foreign(self, frame: bytes) -> dict[str, Any]:
        """Decodes a frame of an untrusted writer.

        Raises:
            PoisonRecordError: the bytes are no frame of this schema.
            RetriableError: the writer's schema is not cached and the registry cannot be reached.
        """
        schema_id, body = self._opened(frame)
        decode = self._writers.get(schema_id) or self._learn(schema_id)
        try:
            record = decode(body)
        except PoisonRecordError as error:
            raise PoisonRecordError(error.cause, f"a record under schema {schema_id}: {error}") from None
        except Exception as error:  # fastavro raises errors of many types
            cause = VALUES_TOO_MANY if isinstance(error, TooManyValuesError) else "body-undecodable"
            raise PoisonRecordError(cause, f"a record under schema {schema_id} does not decode: {error}") from error
        if not isinstance(record, dict):
            raise PoisonRecordError("schema-incompatible", f"schema {schema_id} is not that of a record")
        return record

    def _learn(self, schema_id: int) -> Callable[[bytes], Any]:
        registered = self._registry.writer_schema(schema_id)
        if registered is None:
            message = f"a record names schema {schema_id}, which the registry does not know"
            raise PoisonRecordError(SCHEMA_ID_UNKNOWN, message)
        if registered.problem:
            raise PoisonRecordError(registered.cause, f"schema {schema_id} {registered.problem}")
        try:
            writer = UntrustedSchema(registered.text)
            wanted = resolvable(self._wanted, writer.parsed)
            reader = self._schema if wanted is self._wanted else parsed(wanted)
        except Exception as error:  # fastavro raises errors of many types
            message = f"schema {schema_id} is no Avro schema, or no safe one: {error}"
            raise PoisonRecordError("schema-incompatible", message) from error
        if field := read_as_amount(self._wanted, writer.parsed):
            message = f"schema {schema_id} has no decimal in '{field}', which is read as one"
            raise PoisonRecordError("schema-incompatible", message)
        self._writers[schema_id] = partial(writer.decode, wanted=reader)
        return self._writers[schema_id]


class AvroCodec(AvroReader):
    """Encodes records under a registered schema, and decodes them, in either frame. Any thread may use it."""

    _opened = staticmethod(opened_own)

    def __init__(self, registry: SchemaRegistry, subject: str, schema: Schema) -> None:
        """Registers the schema. Raises as `SchemaRegistry.register`."""
        super().__init__(registry, schema)
        self._subject = subject
        self.schema_id = registry.register(subject, contracted(schema))
        self.header = frame_header(self.schema_id)
        """What precedes the body in each frame."""
        self.flat = flat_records(self._wanted, self.header)
        """What encodes records of plain values; None if the schema has others."""
        self._writers[self.schema_id] = lambda body: fastavro.schemaless_reader(io.BytesIO(body), self._schema, None)

    def encode_unchanged(self, record: Mapping[str, Any]) -> bytes | None:
        """Encodes a record of plain values that `decode` returns exactly so; None if that is not known."""
        try:
            return None if self.flat is None else self.flat.encode(record)
        except Exception:  # A value of a wrong type may fail in any way.
            return None

    def encode(self, record: Mapping[str, Any]) -> bytes:
        """Encodes a record. Raises an error of any type if the schema does not allow it; see `misfit`."""
        if (frame := self.encode_unchanged(record)) is not None:
            return frame
        body = io.BytesIO()
        body.write(self.header)
        fastavro.schemaless_writer(body, self._schema, record, strict_allow_default=True)
        return body.getvalue()

    def frame(self, body: bytes) -> bytes:
        """Returns the frame of an encoded record."""
        return self.header + body

    def reframed(self, frame: bytes) -> bytes:
        """Returns the frame of a record that another codec of the same schema has encoded."""
        return self.frame(opened_own(frame)[1])

    def look_in(self, place: Place) -> None:
        """As `SchemaRegistry.look_in`."""
        self._registry.look_in(place)

    def lacks_text(self, frame: bytes) -> bool:
        """Whether a frame names its schema by a fingerprint whose text is not known."""
        schema_id = schema_id_of(frame, takes_fingerprints=True)
        if schema_id is None or not is_fingerprint(schema_id) or schema_id in self._writers:
            return False
        return self._registry.writer_schema(schema_id) is None

    def learn(self, key: bytes, value: bytes | None) -> bool:
        """As `SchemaRegistry.learn`."""
        return self._registry.learn(key, value)

    def misfit(self, record: Any) -> str:
        """Returns which value of a record `encode` refuses, and why; empty if that is not known."""
        return misfit(self._schema, record)

    def decode(self, frame: bytes) -> dict[str, Any]:
        """Decodes a frame that the service wrote.

        Raises:
            StoreCorruptedError: the bytes are no frame.
            UnreadableRecordError: they are a frame of another schema, which this one cannot read.
            RetriableError: the writer's schema is not cached, and the registry cannot be reached or does not have it.
        """
        # `decode_foreign` says what is wrong.
        with suppress(Exception):
            if frame.startswith(self.header):
                body = io.BytesIO(frame)
                body.seek(len(self.header))
                record: Any = fastavro.schemaless_reader(body, self._schema, None)
                return cast("dict[str, Any]", record)
        try:
            return self.decode_foreign(frame)
        except PoisonRecordError as error:
            raise StoreCorruptedError(str(error)) from error

    def _learn(self, schema_id: int) -> Callable[[bytes], Any]:
        registered, at = self._registry.writer_schema(schema_id), self._registry.url
        if is_fingerprint(schema_id):
            return self._learn_own(schema_id, registered)
        if registered is None:
            raise RetriableError(
                f"the schema registry at {at} does not know schema {schema_id}, under which a record of subject "
                f"{self._subject} was written: {_RESTORE_THE_REGISTRY}"
            )
        wanted = full_name(self._schema)
        if wanted.rpartition(".")[2] not in {name.rpartition(".")[2] for name in registered.records}:
            has = " or ".join(registered.records) or "no record"
            raise UnreadableRecordError(
                f"the schema registry at {at} has lost its data, or is another than that of subject {self._subject}, "
                f"whose records are of schema {schema_id}: that is {has} there, not {wanted}; {_RESTORE_THE_REGISTRY}"
            )
        self._require_fit(schema_id, registered)
        return super()._learn(schema_id)

    def _learn_own(self, schema_id: int, known: WriterSchema | None) -> Callable[[bytes], Any]:
        if known is None:
            raise UnreadableRecordError(
                f"a record of subject {self._subject} names its schema by the fingerprint "
                f"{hexadecimal(schema_id)}, and its partition has lost the record with the text of that schema"
            )
        self._require_fit(schema_id, known)
        return super()._learn(schema_id)

    def _require_fit(self, schema_id: int, registered: WriterSchema) -> None:
        if why := difference(expanded(json.loads(registered.text)) if registered.text else "null", self._wanted):
            raise UnreadableRecordError(
                f"a record of subject {self._subject}, of schema {schema_id}, cannot be read: {why}; "
                "give back what it has there, or raise the version of the class"
            )

    def number(self, name: str) -> Callable[[bytes], Any]:
        """Returns a function that reads one field of frames that the service wrote. It is fast for numbers.

        The function raises as `decode`.
        """
        read, header = number_reader(self._schema, name), self.header
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
    """Decodes frames of any schema, of a registry or of the service, by the writer's schema. For one thread."""

    def __init__(self, registry: SchemaRegistry) -> None:
        self._registry = registry
        self._writers: dict[int, WriterSchema | None] = {}
        self._parsed: dict[int, UntrustedSchema] = {}
        self._unsafe: dict[int, str] = {}

    def framed(self, value: bytes, headers: Headers) -> bytes:
        """A record's value with its frame, as `framed`.

        Raises:
            UndecodableError: a header names no schema that the registry knows.
            RetriableError: the registry does not answer.
        """
        try:
            return framed(value, headers, self._registry)
        except (PoisonRecordError, ConfigurationError) as error:
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
                self._parsed[schema_id] = UntrustedSchema(writer.text)
            except Exception as error:  # fastavro raises errors of many types
                self._unsafe[schema_id] = str(error) or type(error).__name__
        if schema_id in self._unsafe:
            why = self._unsafe[schema_id]
            raise UndecodableError(f"schema {schema_id} is no Avro schema, or no safe one: {why}")
        try:
            return self._parsed[schema_id].decode(body)
        except Exception as error:  # fastavro raises errors of many types
            raise UndecodableError(f"it does not decode under schema {schema_id}: {error}") from error

    def _writer(self, schema_id: int) -> WriterSchema:
        if self._writers.get(schema_id) is None:
            try:
                self._writers[schema_id] = self._registry.writer_schema(schema_id)
            except ConfigurationError as error:
                # There is no registry.
                raise UndecodableError(str(error)) from None
        writer = self._writers[schema_id]
        if writer is None and is_fingerprint(schema_id):
            raise UndecodableError(
                f"it names its schema by the fingerprint {hexadecimal(schema_id)}, whose text was not found"
            )
        if writer is None:
            raise UndecodableError(f"it names schema {schema_id}, which the registry does not know")
        return writer

    @staticmethod
    def _opened(frame: bytes) -> tuple[int, bytes]:
        try:
            return opened_own(frame)
        except PoisonRecordError as error:
            raise UndecodableError(str(error)) from None


class _ValuesWithoutBytes:
    """Counts the values of a parsed schema whose encoding takes no bytes."""

    def __init__(self) -> None:
        self.per_byte = 0.0
        """How many the items of arrays and maps hold at most, for each byte of a body."""
        self._named: dict[str, tuple[int, int] | None] = {}
        self._levels: dict[str, int] = {}

    def of(self, kind: Any) -> tuple[int, int]:
        """How many of them a value holds outside of arrays and maps, and how many bytes the value takes at least.

        Raises:
            ValueError: the schema is recursive, or has array items without bytes.
        """
        if isinstance(kind, list):
            counted = [self.of(member) for member in kind]
            return max((values for values, _ in counted), default=0), 1
        if isinstance(kind, str):
            if kind in self._named and self._named[kind] is None:
                raise ValueError(f"{kind} contains itself")
            return self._named.get(kind) or ((1, 0) if kind == "null" else (0, 1))
        match kind["type"]:
            case "array":
                return self._items(kind["items"], key_bytes=0)
            case "map":
                return self._items(kind["values"], key_bytes=1)
            case "record" | "error" | "enum" | "fixed":
                return self._of_named(kind)
            case other:
                return (1, 0) if other == "null" else (0, 1)

    def _items(self, kind: Any, *, key_bytes: int) -> tuple[int, int]:
        values, size = self.of(kind)
        if size + key_bytes == 0:
            raise ValueError("an array's items take no bytes")
        # The bytes of the items of different arrays are not the same bytes.
        self.per_byte = max(self.per_byte, values / (size + key_bytes))
        return 0, 1

    def _of_named(self, kind: dict[str, Any]) -> tuple[int, int]:
        name = kind["name"]
        # fastavro allows that for the members of a union, and would decode all with the last.
        if name in self._named:
            raise ValueError(f"{name} is defined twice")
        self._named[name] = None
        match kind["type"]:
            case "enum":
                found = (0, 1)
            case "fixed":
                found = (0, kind["size"]) if kind["size"] > 0 else (1, 0)
            case _:
                counted = [self.of(field["type"]) for field in kind["fields"]]
                # The record itself takes none.
                found = 1 + sum(values for values, _ in counted), sum(size for _, size in counted)
        # Nested twice in each other, records hold twice as many at each level.
        self._named[name] = found = min(found[0], _COUNTLESS), found[1]
        self._levels[name] = 1 + max((self._within(field["type"]) for field in kind.get("fields", ())), default=0)
        if self._levels[name] > _MOST_LEVELS:
            raise ValueError(f"{name} is nested more than {_MOST_LEVELS} levels deep")
        return found

    def _within(self, kind: Any) -> int:
        """How many named types are nested in each other within a type."""
        match kind:
            case {"name": name}:
                return self._levels[name]
            case {"items": inner} | {"values": inner}:
                return self._within(inner)
            case list():
                return max(map(self._within, kind), default=0)
        return self._levels.get(kind, 0) if isinstance(kind, str) else 0
