"""Framed Avro: round trips, schema evolution, unsafe writer schemas, damaged frames."""

from __future__ import annotations

import copy
import io
import json
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import fastavro
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balance_service.avro.codec import AvroCodec, AvroReader, FrameReader, UndecodableError, UntrustedSchema, parsed
from balance_service.avro.frames import frame_header
from balance_service.avro.logical_types import of_writer
from balance_service.avro.schemas import load_schema, rewritten
from balance_service.engine.records import Position
from balance_service.errors import PoisonRecordError, RetriableError, StoreCorruptedError, UnreadableRecordError
from balance_service.process.package import resource
from tests.support.fakes import FakeRegistry, balance_codec, position_codec

if TYPE_CHECKING:
    from balance_service.avro.schemas import Schema

UUID = {"type": "string", "logicalType": "uuid"}
STATE = {"customerId": "Zoë", "amount": Decimal("12.34")}
FRAME = balance_codec().encode(STATE)


def decimal_of(cents: int) -> Decimal:
    return Decimal((cents < 0, tuple(map(int, str(abs(cents)))), -2))


def with_amount(**changed: Any) -> Schema:
    """BalanceState in another version."""
    schema = copy.deepcopy(load_schema("BalanceState"))
    (amount,) = [f for f in schema["fields"] if f["name"] == "amount"]
    amount["type"].update(changed)
    return schema


def written_by(registry: FakeRegistry, schema: Schema, record: dict[str, Any]) -> bytes:
    return AvroCodec(registry, "older", schema).encode(record)


def test_a_frame_is_a_zero_byte_the_schema_id_and_the_body() -> None:
    registry = FakeRegistry()
    registry.register("first", {"type": "string"})
    codec = balance_codec(registry)

    frame = codec.encode(STATE)

    assert frame[:5] == b"\x00\x00\x00\x00\x02"
    assert codec.schema_id == 2
    assert fastavro.schemaless_reader(io.BytesIO(frame[5:]), load_schema("BalanceState"), None) == STATE


@given(st.text(max_size=256), st.integers(-(10**38) + 1, 10**38 - 1))
def test_a_balance_record_round_trips(customer_id: str, cents: int) -> None:
    codec = balance_codec()
    try:
        customer_id.encode()
    except UnicodeEncodeError:
        return
    record = {"customerId": customer_id, "amount": decimal_of(cents)}

    read = codec.decode(codec.encode(record))

    assert read == record
    assert read["amount"].as_tuple().exponent == -2


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (UUID, "nonsense"),
        (UUID, "00000000-0000-0000-0000-00000000000A"),
        (["null", UUID], ""),
        ({"type": "array", "items": UUID}, ["nonsense"]),
        ({"type": "map", "values": UUID}, {"a": "nonsense"}),
        ({"type": "record", "name": "Inner", "fields": [{"name": "f", "type": UUID}]}, {"f": "nonsense"}),
    ],
    ids=repr,
)
def test_a_uuid_is_decoded_as_the_written_text(kind: Any, value: Any) -> None:
    registry = FakeRegistry()
    schema = {"type": "record", "name": "R", "fields": [{"name": "f", "type": kind}]}
    newer = {**schema, "fields": [*schema["fields"], {"name": "g", "type": "int", "default": 0}]}
    frame = written_by(registry, schema, {"f": value})

    assert AvroCodec(registry, "ours", schema).decode(frame) == {"f": value}
    assert AvroCodec(registry, "newer", newer).decode(frame) == {"f": value, "g": 0}
    assert FrameReader(registry).value(frame) == {"f": value}
    # The registered schema keeps the declared type.
    assert registry.schemas[0] == schema


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1))
def test_a_position_round_trips(position: int, epoch: int) -> None:
    codec = position_codec()

    record = Position(position, epoch, "t", 7).record()

    assert codec.decode(codec.encode(record)) == record


def test_a_record_of_an_older_schema_gets_the_defaults_of_the_newer() -> None:
    registry = FakeRegistry()
    older = written_by(registry, load_schema("BalanceState"), STATE)
    newer = copy.deepcopy(load_schema("BalanceState"))
    newer["fields"].append({"name": "events", "type": "long", "default": 0})

    assert AvroCodec(registry, "newer", newer).decode(older) == {**STATE, "events": 0}


_MONEY = {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}
_PART = {
    "type": "record",
    "name": "Part",
    "fields": [{"name": "price", "type": _MONEY, "default": "d"}, {"name": "of", "type": ["null", "string"]}],
}


@pytest.mark.parametrize(
    ("kind", "default", "value"),
    [
        (_MONEY, "\x01\x00", Decimal("2.56")),
        ([_MONEY, "null"], "d", Decimal("1.00")),
        (["null", _MONEY], None, None),
        ({**_MONEY, "type": "fixed", "name": "Cents", "size": 2, "precision": 4}, "\x01\x00", Decimal("2.56")),
        ("bytes", "\u00ff", b"\xff"),
        ({"type": "long", "logicalType": "timestamp-micros"}, 1_000_000, datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)),
        ({"type": "int", "logicalType": "date"}, 1, date(1970, 1, 2)),
        ({"type": "array", "items": _MONEY}, ["d"], [Decimal("1.00")]),
        ({"type": "map", "values": "bytes"}, {"a": "\u00ff"}, {"a": b"\xff"}),
        (_PART, {"of": None}, {"price": Decimal("1.00"), "of": None}),
        ("string", "\u00ff", "\u00ff"),
        ("long", 7, 7),
    ],
)
def test_a_default_is_the_value_that_it_stands_for(kind: Any, default: Any, value: Any) -> None:
    registry = FakeRegistry()
    added = [{"name": "f", "type": kind, "default": default}]
    older, newer = (
        AvroCodec(registry, "r", {"type": "record", "name": "R", "fields": fields}) for fields in ([], added)
    )

    # As a producer leaves it out, and as an older record does not have it.
    assert newer.decode(newer.encode({})) == {"f": value}
    assert newer.decode(older.encode({})) == {"f": value}


def test_a_schema_with_a_default_that_is_none_of_its_type_can_be_used() -> None:
    field = {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}, "default": 1 << 62}
    codec = AvroCodec(FakeRegistry(), "r", {"type": "record", "name": "R", "fields": [field]})

    assert codec.decode(codec.encode({"at": datetime(1970, 1, 1, tzinfo=UTC)})) == {
        "at": datetime(1970, 1, 1, tzinfo=UTC)
    }


def test_a_record_of_a_newer_schema_is_decoded_without_its_unknown_fields() -> None:
    registry = FakeRegistry()
    newer = copy.deepcopy(load_schema("BalanceState"))
    newer["fields"].append({"name": "events", "type": "long", "default": 0})
    frame = written_by(registry, newer, {**STATE, "events": 7})

    assert balance_codec(registry).decode(frame) == STATE


def test_a_narrower_decimal_of_an_older_writer_is_decoded_exactly() -> None:
    registry = FakeRegistry()
    frame = written_by(registry, with_amount(precision=18), STATE)

    assert balance_codec(registry).decode(frame) == STATE


@pytest.mark.parametrize(("scale", "amount"), [(0, "12"), (1, "12.5"), (4, "12.3400")])
def test_another_scale_never_changes_an_amount(scale: int, amount: str) -> None:
    registry = FakeRegistry()
    record = {"customerId": "c1", "amount": Decimal(amount)}
    frame = written_by(registry, with_amount(scale=scale), record)

    assert balance_codec(registry).decode(frame)["amount"] == Decimal(amount)


def record_of(name: str, *kinds: Any) -> dict[str, Any]:
    """A record schema with fields of these types."""
    return {"type": "record", "name": name, "fields": [{"name": f"f{i}", "type": kind} for i, kind in enumerate(kinds)]}


def array_of(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


def doubled(times: int) -> dict[str, Any]:
    """A record that takes no bytes and has this power of two values."""
    kind = record_of("R0", "null")
    for i in range(times):
        kind = record_of(f"R{i + 1}", kind, f"R{i}")
    return kind


def read_with_more(kind: Any, body: bytes = bytes(4)) -> dict[str, Any]:
    """Decodes a balance whose writer added a field of this type, by default with the shortest value."""
    registry = FakeRegistry()
    schema = copy.deepcopy(load_schema("BalanceState"))
    schema["fields"].append({"name": "more", "type": kind})
    schema_id = registry.register("newer", schema)
    return AvroReader(registry, load_schema("BalanceState")).decode_foreign(frame_header(schema_id) + FRAME[5:] + body)


SIZE_0 = {"type": "fixed", "name": "F", "size": 0}


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (record_of("N", ["null", "N"]), "N contains itself"),
        (record_of("N", array_of(record_of("M", "N"))), "N contains itself"),
        (array_of("null"), "an array's items take no bytes"),
        (array_of({"type": "null"}), "an array's items take no bytes"),
        (array_of(record_of("M")), "an array's items take no bytes"),
        (array_of(SIZE_0), "an array's items take no bytes"),
        (array_of(record_of("M", "null", record_of("O", SIZE_0))), "an array's items take no bytes"),
        (record_of("M", record_of("O", "null"), array_of("O")), "an array's items take no bytes"),
        (["null", {"type": "map", "values": array_of("null")}], "an array's items take no bytes"),
    ],
    ids=str,
)
def test_a_writer_schema_under_which_a_few_bytes_decode_endlessly_is_refused(kind: Any, why: str) -> None:
    with pytest.raises(PoisonRecordError, match=why) as refused:
        read_with_more(kind)

    assert refused.value.cause == "schema-incompatible"


def test_a_record_that_may_hold_more_values_than_its_bytes_justify_is_refused() -> None:
    wide = array_of(record_of("W", "int", *["null"] * 10_000))
    few, many = b"\x02\x00\x00", b"\x80\x02" + bytes(128) + b"\x00"

    assert read_with_more(wide, few) == STATE
    assert read_with_more(doubled(16)) == STATE
    for kind, body in ((doubled(60), b""), (wide, many)):
        with pytest.raises(PoisonRecordError, match="it may hold more than") as refused:
            read_with_more(kind, body)
        assert refused.value.cause == "values-too-many"


def test_a_writer_schema_cannot_make_fastavro_decode_with_unchecked_types() -> None:
    schema = record_of("R", record_of("N", "int"), array_of("N"))
    forged = {**schema, "__fastavro_parsed": True, "__named_schemas": {"N": record_of("N", "N")}}

    assert UntrustedSchema(json.dumps(forged)).parsed["__named_schemas"]["N"]["fields"][0]["type"] == "int"


def test_a_writer_schema_that_defines_a_name_twice_is_refused() -> None:
    registry = FakeRegistry()
    twice = [record_of("N", "int"), record_of("R", array_of("N")), record_of("N")]
    schema_id = registry.register("newer", twice)  # type: ignore[arg-type]

    with pytest.raises(PoisonRecordError, match="N is defined twice"):
        AvroReader(registry, load_schema("BalanceState")).decode_foreign(frame_header(schema_id) + bytes(4))


@pytest.mark.parametrize(
    "kind",
    [
        doubled(2),
        array_of(["null", "int"]),
        array_of(record_of("M", "null", "boolean")),
        array_of(array_of("int")),
        record_of("M", record_of("O", "int"), array_of("O"), "O"),
        array_of({"type": "fixed", "name": "F", "size": 1}),
        array_of({"type": "enum", "name": "E", "symbols": ["A"]}),
    ],
    ids=str,
)
def test_a_writer_schema_that_only_resembles_an_endless_one_is_accepted(kind: Any) -> None:
    assert read_with_more(kind) == STATE


@pytest.mark.parametrize("name", sorted(file.stem for file in resource("schemas").glob("*.avsc")))
def test_every_shipped_schema_is_safe_to_decode_with(name: str) -> None:
    schema = load_schema(name)

    assert UntrustedSchema(json.dumps(schema)).parsed == parsed(rewritten(schema, of_writer))


@pytest.mark.parametrize("magic", [1, 0x7F, 0x80, 0xFF])
def test_a_frame_with_another_magic_byte_is_damaged(magic: int) -> None:
    with pytest.raises(StoreCorruptedError, match="frame starts with"):
        balance_codec().decode(bytes([magic]) + FRAME[1:])


@pytest.mark.parametrize("length", range(len(FRAME)))
def test_a_truncated_frame_is_damaged(length: int) -> None:
    with pytest.raises(StoreCorruptedError):
        balance_codec().decode(FRAME[:length])


def test_a_frame_with_an_unknown_schema_waits_for_the_registrys_data() -> None:
    with pytest.raises(RetriableError, match=r"registry at http://registry does not know schema 99.* subject states "):
        balance_codec().decode(b"\x00\x00\x00\x00\x63" + FRAME[5:])


def test_decoding_is_retriable_while_the_registry_is_down() -> None:
    registry = FakeRegistry()
    codec = balance_codec(registry)
    frame = written_by(registry, with_amount(precision=18), STATE)
    registry.is_up = False

    with pytest.raises(RetriableError):
        codec.decode(frame)
    registry.is_up = True
    assert codec.decode(frame) == STATE


def test_a_cached_schema_needs_no_registry() -> None:
    registry = FakeRegistry()
    codec = balance_codec(registry)
    frame = written_by(registry, with_amount(precision=18), STATE)
    codec.decode(frame)
    registry.is_up = False

    assert codec.decode(frame) == STATE


@pytest.mark.parametrize("schema", [load_schema("Position"), {"type": "string"}], ids=lambda schema: schema["type"])
def test_a_frame_of_another_record_type_is_of_another_registry(schema: Any) -> None:
    registry = FakeRegistry()
    frame = frame_header(registry.register("other", schema)) + FRAME[5:]

    with pytest.raises(UnreadableRecordError) as refused:
        balance_codec(registry).decode(frame)
    said = str(refused.value)
    assert "the schema registry at http://registry has lost its data, or is another than that of subject states" in said
    assert "start from scratch with another BALANCE_APPLICATION_ID" in said
    assert ("Position there" if schema["type"] == "record" else "no record there") in said


def test_a_state_of_another_type_is_named_with_both_types_and_is_not_damaged() -> None:
    registry = FakeRegistry()
    schema = {"type": "record", "name": "P", "fields": [{"name": "points", "type": "long"}]}
    frame = written_by(registry, schema, {"points": 3})
    now = AvroCodec(registry, "states", {**schema, "fields": [{"name": "points", "type": "string"}]})

    for read in (now.decode, now.number("points")):
        with pytest.raises(UnreadableRecordError, match="'points' is a long there and a string here; give back what"):
            read(frame)


@given(st.binary(max_size=100))
def test_any_bytes_decode_or_are_damaged(body: bytes) -> None:
    codec = balance_codec()
    try:
        record = codec.decode(FRAME[:5] + body)
    except StoreCorruptedError:
        return
    assert set(record) == {"customerId", "amount"}


def test_an_amount_with_too_many_decimals_is_refused_and_not_rounded() -> None:
    with pytest.raises(ValueError, match="Scale"):
        balance_codec().encode({"customerId": "c1", "amount": Decimal("0.001")})


# Frames of any schema


@pytest.fixture
def registry() -> FakeRegistry:
    return FakeRegistry()


def test_a_frame_is_decoded_by_the_schema_that_it_names(registry: FakeRegistry) -> None:
    frame = AvroCodec(registry, "states", load_schema("BalanceState")).encode({**STATE, "amount": Decimal("12.30")})
    other = AvroCodec(registry, "players", load_schema("Player")).encode({"id": 1, "name": "Elyse"})
    reader = FrameReader(registry)

    assert reader.record(frame) == "parts.code.balance.state.BalanceState"
    assert reader.value(frame) == {**STATE, "amount": Decimal("12.30")}
    assert str(reader.value(frame)["amount"]) == "12.30"
    assert reader.value(other) == {"id": 1, "name": "Elyse"}


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (b"", "a record of 0 bytes has no frame"),
        (b"\x00\x00\x00\x00", "a record of 4 bytes has no frame"),
        (b"\x01\x00\x00\x00\x01", "a record's frame starts with 1, not 0"),
        (b"{}", "the value is a JSON document, and not an Avro record"),
        (b' {"amount": 1}\n', "the value is a JSON document, and not an Avro record"),
        (b"[1, 2, 3]", "the value is a JSON document, and not an Avro record"),
        (b"{amount", "a record's frame starts with 123, not 0"),
        (frame_header(7), "it names schema 7, which the registry does not know"),
        (frame_header(1), "it does not decode under schema 1: "),
        (frame_header(2), "schema 2 is no Avro schema, or no safe one: n.Node contains itself"),
        (frame_header(3), "schema 3 is no Avro schema, or no safe one: nothing"),
        (frame_header(4) + b"\0", "schema 4 is no Avro schema, or no safe one: an array's items take no bytes"),
        (frame_header(5), "schema 5 is no Avro schema, or no safe one: "),
    ],
)
def test_an_undecodable_frame_is_refused_with_the_reason(registry: FakeRegistry, frame: bytes, why: str) -> None:
    registry.register("states", load_schema("BalanceState"))
    node = {"type": "record", "name": "Node", "namespace": "n", "fields": [{"name": "next", "type": "n.Node"}]}
    registry.register("nodes", node)
    registry.register("unknown", {"type": "record", "name": "R", "fields": [{"name": "f", "type": "nothing"}]})

    registry.register("endless", {"type": "array", "items": "null"})
    registry.register("sizeless", {"type": "fixed", "name": "F"})

    with pytest.raises(UndecodableError) as undecodable:
        FrameReader(registry).value(frame)

    assert str(undecodable.value).startswith(why)


UNION = ["null", record_of("a.R", "string"), record_of("b.R", "int")]


def in_union(registry: FakeRegistry, value: Any) -> bytes:
    """A frame under `UNION`."""
    schema_id = registry.register("union", UNION)  # type: ignore[arg-type]
    body = io.BytesIO()
    fastavro.schemaless_writer(body, fastavro.parse_schema(UNION, named_schemas={}), value)
    return frame_header(schema_id) + body.getvalue()


@pytest.mark.parametrize(
    ("value", "record", "shown"),
    [(("a.R", {"f0": "x"}), "a.R", {"f0": "x"}), (("b.R", {"f0": 7}), "b.R", {"f0": 7}), (None, "", None)],
)
def test_a_frame_of_a_union_has_the_record_that_was_written(
    registry: FakeRegistry, value: Any, record: str, shown: Any
) -> None:
    frame, reader = in_union(registry, value), FrameReader(registry)

    assert (reader.record(frame), reader.value(frame)) == (record, shown)


def test_a_record_in_a_union_is_read_by_its_name(registry: FakeRegistry) -> None:
    reader = AvroReader(registry, record_of("b.R", "int"))

    assert reader.decode_foreign(in_union(registry, ("b.R", {"f0": 7}))) == {"f0": 7}
    for other in (("a.R", {"f0": "x"}), None):
        with pytest.raises(PoisonRecordError):
            reader.decode_foreign(in_union(registry, other))


@pytest.mark.parametrize("of_header", [b"\x01" + bytes(15) + b"\x01", b"\x00\x00\x00\x00\x01"], ids=["guid", "id"])
def test_a_value_whose_schema_a_header_names_gets_its_frame(registry: FakeRegistry, of_header: bytes) -> None:
    codec = AvroCodec(registry, "states", load_schema("BalanceState"))
    body = codec.encode(STATE)[5:]
    named = [("a", b"1"), ("__value_schema_id", b"old"), ("__value_schema_id", of_header), ("b", b"\x01")]

    frame = FrameReader(registry).framed(body, named)

    assert frame == codec.encode(STATE)
    assert codec.framed(body, named) == frame


@pytest.mark.parametrize(
    "headers", [[], [("__key_schema_id", b"\x01" + bytes(16))], [("__value_schema_id", None)]], ids=str
)
def test_a_value_without_that_header_is_its_frame(registry: FakeRegistry, headers: Any) -> None:
    assert FrameReader(registry).framed(FRAME, headers) == FRAME


@pytest.mark.parametrize(
    ("of_header", "problem"),
    [
        (b"\x01" + bytes(16), "00000000-0000-0000-0000-000000000000, which the registry does not"),
        (b"\x01" + bytes(15), "neither an id nor a GUID"),
        (b"\x02" + bytes(16), "neither an id nor a GUID"),
        (b"\x00", "neither an id nor a GUID"),
    ],
)
def test_a_header_that_names_no_known_schema_is_refused_even_if_the_value_is_a_frame(
    registry: FakeRegistry, of_header: bytes, problem: str
) -> None:
    headers = [("__value_schema_id", of_header)]

    with pytest.raises(PoisonRecordError, match=problem) as refused:
        balance_codec(registry).framed(FRAME, headers)
    with pytest.raises(UndecodableError, match=problem):
        FrameReader(registry).framed(FRAME, headers)

    assert refused.value.cause == "schema-guid-unknown"


def test_the_record_name_of_a_frame_needs_no_safe_schema(registry: FakeRegistry) -> None:
    registry.register("nodes", {"type": "record", "name": "N", "fields": [{"name": "next", "type": "N"}]})

    assert FrameReader(registry).record(frame_header(1)) == "N"


def test_a_frame_is_not_undecodable_while_the_registry_is_down(registry: FakeRegistry) -> None:
    registry.is_up = False

    with pytest.raises(RetriableError):
        FrameReader(registry).value(frame_header(1))
