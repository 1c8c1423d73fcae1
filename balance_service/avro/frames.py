"""The two frames of Avro records, which name the schema of the body behind them.

 - of a schema registry: 0x00 and the schema's id, 4 bytes, big-endian;
 - of the service's own records, if their application has no registry: C3 01 and a fingerprint of the schema, 8 bytes,
   little-endian. `own_schemas` finds the schema of a fingerprint.

Both are one number here: ids are below 2^32, and fingerprints are all other numbers of 64 bits, with a sign.

Sources: Confluent Schema Registry, "Wire format"; Avro 1.12 specification, "Single-object encoding" and "Parsing
Canonical Form for Schemas".
"""

from __future__ import annotations

import json
import struct
from typing import Any

from fastavro.schema import fingerprint as fastavro_fingerprint

from balance_service.avro.named_types import contracted
from balance_service.avro.schemas import full_name
from balance_service.errors import ConfigurationError, PoisonRecordError

MAGIC = 0
SINGLE_OBJECT = b"\xc3\x01"
ID_BYTES = 5
_ID, _FINGERPRINT = struct.Struct(">bI"), struct.Struct("<2sq")
_NAMED = ("record", "error", "enum", "fixed")
_PRIMITIVES = frozenset({"null", "boolean", "int", "long", "float", "double", "bytes", "string"})
_COMPLEX = frozenset({*_NAMED, *_PRIMITIVES, "array", "map"})
# The Parsing Canonical Form has the first ones, in this order. The others tell values apart that have one encoding.
_KEPT = ("symbols", "items", "values", "size", "logicalType", "precision", "scale")
_JSON_SPACE = b" \t\r\n"
# `java/Resolving.java` says these too.
_IS_JSON = (
    "the value is a JSON document, and not an Avro record under a schema of the registry: "
    'declare format="json" for the topic, or let its producer use an Avro serializer'
)


SCHEMA_PREFIX = b"\xffschema/"
"""Begins the keys of records that have the text of a schema; its fingerprint follows, in 16 hexadecimal digits."""


def schema_key(schema_id: int) -> bytes:
    """The key of the record with the text of a schema, which has this fingerprint."""
    return SCHEMA_PREFIX + hexadecimal(schema_id).encode()


def hexadecimal(schema_id: int) -> str:
    """A fingerprint in 16 digits."""
    return f"{schema_id & (1 << 64) - 1:016x}"


def is_fingerprint(schema_id: int) -> bool:
    """Whether a number names a schema by its fingerprint, and is no id of a registry."""
    return not 0 <= schema_id < 1 << 32


def frame_header(schema_id: int) -> bytes:
    """The first bytes of every frame under a schema."""
    return _FINGERPRINT.pack(SINGLE_OBJECT, schema_id) if is_fingerprint(schema_id) else _ID.pack(MAGIC, schema_id)


def opened(frame: bytes) -> tuple[int, bytes]:
    """The schema's id and the body of a frame of a registry. Raises PoisonRecordError for other bytes."""
    if len(frame) < ID_BYTES:
        raise PoisonRecordError("frame-missing", _json_or(frame, f"a record of {len(frame)} bytes has no frame"))
    magic, schema_id = _ID.unpack_from(frame)
    if magic != MAGIC:
        why = f"a record's frame starts with {frame[0]}, not {MAGIC}"
        raise PoisonRecordError("magic-byte-unknown", _json_or(frame, why))
    return schema_id, frame[ID_BYTES:]


def opened_own(frame: bytes) -> tuple[int, bytes]:
    """As `opened`, of a record of the service, which may have either frame."""
    if not frame.startswith(SINGLE_OBJECT) or len(frame) < _FINGERPRINT.size:
        return opened(frame)
    schema_id = _FINGERPRINT.unpack_from(frame)[1]
    if not is_fingerprint(schema_id):
        raise PoisonRecordError(
            "magic-byte-unknown", "a record names a fingerprint that the service gives to no schema"
        )
    return schema_id, frame[_FINGERPRINT.size :]


def schema_id_of(frame: bytes | None, *, takes_fingerprints: bool = False) -> int | None:
    """The schema's id of a frame of a registry, or of either frame; None if the bytes are no such frame."""
    try:
        return None if frame is None else (opened_own if takes_fingerprints else opened)(frame)[0]
    except PoisonRecordError:
        return None


def fingerprint_of(schema: Any) -> int:
    """The fingerprint of a schema: CRC-64-AVRO of its Parsing Canonical Form with logical types.

    The form of the specification leaves those out. Two decimals that differ in their scale would have one fingerprint,
    and a record under one would be read as another amount.

    Raises:
        ConfigurationError: the fingerprint looks like an id of a registry, as one of 4 billion does.
    """
    text = json.dumps(_canonical(contracted(schema), ""), separators=(",", ":"), ensure_ascii=False)
    (found,) = struct.unpack("<q", bytes.fromhex(fastavro_fingerprint(text, "CRC-64-AVRO")))
    if not is_fingerprint(found):
        raise ConfigurationError(
            f"the schema of {full_name(schema)} has a fingerprint that looks like an id of a registry: rename a field"
        )
    return int(found)


def _canonical(kind: Any, namespace: str) -> Any:
    match kind:
        case str():
            is_known = "." in kind or kind in _PRIMITIVES or not namespace
            return kind if is_known else f"{namespace}.{kind}"
        case list():
            return [_canonical(member, namespace) for member in kind]
    if isinstance(kind["type"], dict | list) and "logicalType" not in kind:
        return _canonical(kind["type"], namespace)
    made: dict[str, Any] = {}
    if kind["type"] in _NAMED:
        made["name"] = full_name({"namespace": namespace, **kind})
        namespace = made["name"].rpartition(".")[0]
    made["type"] = _canonical(kind["type"], namespace) if kind["type"] not in _COMPLEX else kind["type"]
    if "fields" in kind:
        made["fields"] = [
            {"name": field["name"], "type": _canonical(field["type"], namespace)} for field in kind["fields"]
        ]
    for name in _KEPT:
        if name in kind:
            made[name] = _canonical(kind[name], namespace) if name in ("items", "values") else kind[name]
    return made["type"] if made.keys() == {"type"} else made


def _json_or(value: bytes, why: str) -> str:
    text = value.strip(_JSON_SPACE)
    return _IS_JSON if text[:1] + text[-1:] in (b"{}", b"[]") else why
