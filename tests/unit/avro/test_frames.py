"""The two frames of Avro records, and the fingerprints of schemas."""

from __future__ import annotations

import copy
import json
from typing import Any

import fastavro
import pytest
from fastavro.schema import fingerprint, to_parsing_canonical_form
from hypothesis import given
from hypothesis import strategies as st

from balance_service.avro.frames import (
    fingerprint_of,
    frame_header,
    is_fingerprint,
    opened,
    opened_own,
    schema_id_of,
    schema_key,
)
from balance_service.avro.schemas import load_schema
from balance_service.errors import PoisonRecordError

ids = st.integers(0, 2**32 - 1)
fingerprints = st.integers(-(2**63), 2**63 - 1).filter(is_fingerprint)


def record(*types: Any, name: str = "Of") -> Any:
    return {"type": "record", "name": name, "fields": [{"name": f"f{n}", "type": kind} for n, kind in enumerate(types)]}


def decimal(scale: int, precision: int = 20) -> Any:
    return {"type": "bytes", "logicalType": "decimal", "precision": precision, "scale": scale}


@pytest.mark.parametrize(
    "schema",
    [
        record("null", "int", "string", ["null", "double"]),
        record({"type": "array", "items": "long"}, {"type": "map", "values": "bytes"}),
        record({"type": "enum", "name": "E", "symbols": ["A", "B"]}, "E", {"type": "fixed", "name": "F", "size": 4}),
        {**record(record("int", name="Inner"), "Inner"), "namespace": "some.space", "doc": "passed over"},
        load_schema("Position"),
        load_schema("Letter"),
        load_schema("ApplicationServer"),
    ],
    ids=json.dumps,
)
def test_a_fingerprint_is_that_of_avros_specification_for_schemas_without_logical_types(schema: Any) -> None:
    canonical = to_parsing_canonical_form(fastavro.parse_schema(copy.deepcopy(schema)))

    assert frame_header(fingerprint_of(schema)).hex() == "c301" + fingerprint(canonical, "CRC-64-AVRO")


def test_the_frame_is_that_of_the_specification() -> None:
    # CRC-64-AVRO of "null" is 63dd24e7cc258f8a: see "Schema Fingerprints". It is written with its least byte first.
    assert frame_header(0x63DD24E7CC258F8A) == bytes.fromhex("c3018a8f25cce724dd63")


def test_what_tells_amounts_apart_is_part_of_a_fingerprint() -> None:
    kinds = [
        *(decimal(scale, precision) for scale in (0, 2, 4) for precision in (20, 38)),
        "bytes",
        "long",
        {"type": "long", "logicalType": "timestamp-millis"},
        {"type": "long", "logicalType": "timestamp-micros"},
        {"type": "int", "logicalType": "date"},
    ]

    for wrap in (lambda kind: kind, lambda kind: ["null", kind], lambda kind: {"type": "array", "items": kind}):
        assert len({fingerprint_of(record(wrap(kind))) for kind in kinds}) == len(kinds)


def test_what_changes_no_value_is_no_part_of_a_fingerprint() -> None:
    plain, told = record("int"), record("int")
    told |= {"doc": "Says more.", "aliases": ["Was"]}
    told["fields"][0] |= {"default": 7, "doc": "A field."}

    assert fingerprint_of(plain) == fingerprint_of(told)


@given(ids, st.binary())
def test_a_frame_with_an_id_is_opened_as_either(schema_id: int, body: bytes) -> None:
    frame = frame_header(schema_id) + body

    assert opened(frame) == opened_own(frame) == (schema_id, body)


@given(fingerprints, st.binary())
def test_a_frame_with_a_fingerprint_is_opened_as_the_services_own_alone(schema_id: int, body: bytes) -> None:
    frame = frame_header(schema_id) + body

    assert opened_own(frame) == (schema_id, body)
    assert schema_id_of(frame, takes_fingerprints=True) == schema_id
    assert schema_id_of(frame) is None
    with pytest.raises(PoisonRecordError, match="starts with 195, not 0"):
        opened(frame)


def test_a_fingerprint_that_could_be_an_id_is_none() -> None:
    with pytest.raises(PoisonRecordError, match="gives to no schema"):
        opened_own(b"\xc3\x01" + (7).to_bytes(8, "little") + b"body")
    assert schema_id_of(b"\xc3\x01" + bytes(3), takes_fingerprints=True) is None


def test_keys_of_texts_are_reserved() -> None:
    assert schema_key(-1) == b"\xffschema/ffffffffffffffff"
    assert schema_key(0x63DD24E7CC258F8A) == b"\xffschema/63dd24e7cc258f8a"
