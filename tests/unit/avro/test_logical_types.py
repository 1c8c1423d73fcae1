"""Times that Kafka Connect names, nanoseconds, UUIDs of 16 bytes, and decimals of untrusted writers."""

from __future__ import annotations

import io
import json
from datetime import UTC, date, datetime
from typing import Any

import fastavro
import pytest

from balance_service.avro.codec import AvroCodec, AvroReader, FrameReader
from balance_service.avro.frames import frame_header
from balance_service.avro.logical_types import with_times
from balance_service.avro.schemas import Schema, simple_name
from balance_service.avro.writer_schema import WriterSchema
from balance_service.errors import PoisonRecordError
from balance_service.testing.fakes import FakeRegistry

AT = datetime(2026, 1, 2, 3, 4, 5, 678_901, UTC)
MILLIS = AT.replace(microsecond=678_000)
MICROS = 1_767_323_045_678_901
TEXT = "0f0e0d0c-0b0a-0908-0706-050403020100"
BYTES = bytes(range(15, -1, -1))
OF_BYTES = {"type": "fixed", "name": "Uuid", "size": 16, "logicalType": "uuid"}
OF_TEXT = {"type": "string", "logicalType": "uuid"}


def record(*kinds: Any) -> Schema:
    return {"type": "record", "name": "R", "fields": [{"name": f"f{n}", "type": kind} for n, kind in enumerate(kinds)]}


def connect(plain: str, name: str, **more: Any) -> dict[str, Any]:
    return {"type": plain, "connect.version": 1, "connect.name": name, **more}


def logical(name: str) -> dict[str, Any]:
    return {"type": "int" if name == "date" else "long", "logicalType": name}


def read(written: Any, value: Any, wanted: Any | None = None) -> Any:
    """Returns what a value, given in the encoding of a plain type, is read as."""
    registry = FakeRegistry()
    schema_id = registry.register("s", record(written))
    body = io.BytesIO()
    fastavro.schemaless_writer(body, fastavro.parse_schema(record(plain(written))), {"f0": value})
    frame = frame_header(schema_id) + body.getvalue()
    found = (
        FrameReader(registry).value(frame)
        if wanted is None
        else AvroReader(registry, record(wanted)).decode_foreign(frame)
    )
    return found["f0"]


def plain(kind: Any) -> Any:
    if isinstance(kind, list):
        return [plain(member) for member in kind]
    return {k: v for k, v in kind.items() if k != "logicalType"} if isinstance(kind, dict) else kind


TIMES = [
    (connect("long", "io.debezium.time.Timestamp"), MICROS // 1000, "timestamp-millis", MILLIS),
    (connect("long", "io.debezium.time.MicroTimestamp"), MICROS, "timestamp-micros", AT),
    (connect("long", "io.debezium.time.NanoTimestamp"), MICROS * 1000 + 999, "timestamp-nanos", AT),
    (connect("int", "io.debezium.time.Date"), 20_455, "date", date(2026, 1, 2)),
    (connect("long", "org.apache.kafka.connect.data.Timestamp"), MICROS // 1000, "timestamp-millis", MILLIS),
    (connect("int", "org.apache.kafka.connect.data.Date"), 20_455, "date", date(2026, 1, 2)),
]


@pytest.mark.parametrize(("written", "value", "name", "right"), TIMES, ids=lambda part: str(part)[-40:])
def test_a_time_that_only_its_connect_name_tells_is_that_time(written: Any, value: int, name: str, right: Any) -> None:
    assert with_times(written) == {**written, "logicalType": name}
    assert read(written, value) == right
    assert read(["null", written], value, ["null", logical(name)]) == right


@pytest.mark.parametrize(("written", "value", "name", "right"), TIMES, ids=lambda part: str(part)[-40:])
def test_a_time_of_connect_is_a_number_to_a_reader_of_numbers(
    written: Any,
    value: int,
    name: str,
    right: Any,
) -> None:
    assert read(written, value, written["type"]) == value
    assert read(["null", written], value, ["null", written["type"]]) == value


def test_a_time_of_connect_has_no_zone_for_a_reader_of_such_times() -> None:
    written = connect("long", "io.debezium.time.MicroTimestamp")

    assert read(written, MICROS, logical("local-timestamp-micros")) == AT.replace(tzinfo=None)


@pytest.mark.parametrize(
    "kind",
    [
        connect("int", "io.debezium.time.Time"),
        connect("long", "io.debezium.time.NanoTime"),
        connect("int", "io.debezium.time.Year"),
        connect("string", "io.debezium.time.ZonedTimestamp"),
        connect("string", "io.debezium.time.Timestamp"),
        connect("long", "org.apache.kafka.connect.data.Timestamp", logicalType="timestamp-micros"),
        {"type": "long", "connect.name": {"io": "debezium"}},
        "long",
    ],
    ids=str,
)
def test_other_types_are_unchanged(kind: Any) -> None:
    assert with_times(record(kind)) == record(kind)


def test_the_deepest_schema_of_a_registry_has_its_times() -> None:
    kind: Any = connect("long", "io.debezium.time.Timestamp")
    for _ in range(450):
        kind = {"type": "array", "items": kind}

    assert '"timestamp-millis"' in WriterSchema.from_schema(kind).text


@pytest.mark.parametrize("name", ["timestamp-nanos", "local-timestamp-nanos"])
@pytest.mark.parametrize("at", [AT, datetime(1969, 12, 31, 23, 59, 59, 999_999, UTC), datetime(1678, 1, 1, tzinfo=UTC)])
def test_nanoseconds_are_read_and_written_to_microseconds(name: str, at: datetime) -> None:
    value = at if name == "timestamp-nanos" else at.replace(tzinfo=None)
    codec = AvroCodec(FakeRegistry(), "s", record(logical(name)))

    assert codec.decode(codec.encode({"f0": value})) == {"f0": value}


def test_a_part_of_a_microsecond_before_1970_belongs_to_the_microsecond_before() -> None:
    assert read(logical("timestamp-nanos"), -1) == datetime(1969, 12, 31, 23, 59, 59, 999_999, UTC)


FORMS = [
    (OF_BYTES, BYTES, OF_BYTES),
    (OF_BYTES, BYTES, {**OF_BYTES, "name": "Id"}),
    (OF_BYTES, BYTES, OF_TEXT),
    (OF_BYTES, BYTES, "string"),
    (OF_TEXT, TEXT, OF_BYTES),
    (OF_TEXT, TEXT, OF_TEXT),
    (OF_TEXT, TEXT, "string"),
    ("string", TEXT, OF_BYTES),
    ("string", TEXT, OF_TEXT),
]


@pytest.mark.parametrize(("written", "value", "wanted"), FORMS, ids=str)
def test_a_uuid_of_any_form_is_its_text(written: Any, value: Any, wanted: Any) -> None:
    assert read(written, value, wanted) == TEXT
    assert read(["null", written], value, ["null", wanted]) == TEXT
    assert read(["null", written], value, wanted) == TEXT
    assert read(written, value, [wanted, "null"]) == TEXT
    assert read(["null", written], None, ["null", wanted]) is None
    assert read({"type": "array", "items": written}, [value], {"type": "array", "items": wanted}) == [TEXT]
    assert read({"type": "map", "values": written}, {"k": value}, {"type": "map", "values": wanted}) == {"k": TEXT}
    inner = [{"type": "record", "name": "I", "fields": [{"name": "u", "type": kind}]} for kind in (written, wanted)]
    assert read(inner[0], {"u": value}, inner[1]) == {"u": TEXT}


def test_a_union_of_both_forms_is_read_as_text() -> None:
    assert read(["null", OF_BYTES, "string"], BYTES, ["null", "string"]) == TEXT
    assert read(["null", OF_BYTES, "string"], "other", ["null", "string"]) == "other"


def test_a_uuid_of_bytes_that_is_used_twice_is_read_at_each_use() -> None:
    registry = FakeRegistry()
    codec = AvroCodec(registry, "s", record(OF_BYTES, OF_BYTES, ["null", OF_BYTES]))
    frame = codec.encode({"f0": TEXT, "f1": TEXT, "f2": TEXT})

    assert frame[5:] == BYTES + BYTES + b"\x02" + BYTES
    assert AvroReader(registry, record("string", OF_TEXT, ["null", OF_BYTES])).decode_foreign(frame) == codec.decode(
        frame
    )
    assert codec.decode(frame) == {"f0": TEXT, "f1": TEXT, "f2": TEXT}


def test_text_that_is_no_uuid_is_the_text_that_was_written() -> None:
    assert read(OF_TEXT, "Nonsense", OF_BYTES) == "Nonsense"


def test_a_fixed_of_another_size_is_no_uuid() -> None:
    kind = {**OF_BYTES, "size": 4}

    assert simple_name(kind) == "fixed"
    assert read(kind, b"abcd") == b"abcd"


def test_a_writers_schema_keeps_its_text_without_such_times() -> None:
    schema = record("long", OF_BYTES)

    assert WriterSchema.from_schema(schema).text == json.dumps(schema)


def decimal(precision: int, scale: int, plain: str = "bytes") -> dict[str, Any]:
    return {"type": plain, "logicalType": "decimal", "precision": precision, "scale": scale}


def many(kind: Any) -> dict[str, Any]:
    return {"type": "array", "items": kind}


LONG = 123456789012345678901234567890123456


@pytest.mark.parametrize(
    ("written", "number", "wanted", "value"),
    [
        (decimal(38, 2), 123456, decimal(38, 2), "1234.56"),
        (decimal(38, 2), -123, decimal(38, 2), "-1.23"),
        (decimal(38, 2), LONG, decimal(38, 2), "1234567890123456789012345678901234.56"),
        (decimal(4, 2), 123, decimal(38, 4), "1.2300"),
        (decimal(4, 2), 200, ["null", decimal(38, 1)], "2.0"),
        (decimal(4, 2), -200, decimal(38, 1), "-2.0"),
        (["null", decimal(4, 2)], 200, ["null", decimal(38, 2)], "2.00"),
        (decimal(4, 2), 0, decimal(38, 2), "0.00"),
        # An operator is shown the amount as the writer has it.
        (decimal(4, 2), 123456, None, "1234.56"),
        (decimal(38, 2), LONG, None, "1234567890123456789012345678901234.56"),
    ],
    ids=str,
)
def test_a_decimal_of_an_untrusted_writer_is_read_exactly(written: Any, number: int, wanted: Any, value: str) -> None:
    data = number.to_bytes(number.bit_length() // 8 + 1, "big", signed=True)

    assert str(read(written, data, wanted)) == value


@pytest.mark.parametrize(
    ("written", "data", "wanted", "cause"),
    [
        # fastavro reads 1235, and 0.00.
        (decimal(4, 2), b"\x01\xe2\x40", decimal(38, 2), "decimal-loses-digits"),
        (decimal(4, 2), b"", decimal(38, 2), "body-undecodable"),
        (decimal(4, 2), b"\x7b", decimal(38, 1), "decimal-loses-digits"),
        (decimal(4, 2), b"\x85", decimal(38, 1), "decimal-loses-digits"),
        (decimal(38, 0), LONG.to_bytes(16, "big"), decimal(38, 4), "decimal-loses-digits"),
        (decimal(5000, 0), b"\x7f" * 4000, decimal(38, 0), "decimal-loses-digits"),
        (decimal(4, 2), b"\x7b", "bytes", "schema-incompatible"),
        ("bytes", b"\x05", decimal(38, 2), "schema-incompatible"),
        (["null", "bytes"], b"\x05", ["null", decimal(38, 2)], "schema-incompatible"),
        ("string", "5", decimal(38, 2), "schema-incompatible"),
        (many("bytes"), [b"\x05"], many(decimal(38, 2)), "schema-incompatible"),
    ],
    ids=lambda of: str(of)[:40],
)
def test_what_is_not_exactly_a_decimal_is_refused(written: Any, data: Any, wanted: Any, cause: str) -> None:
    with pytest.raises(PoisonRecordError) as refused:
        read(written, data, wanted)

    assert refused.value.cause == cause


def test_bytes_that_a_reader_takes_by_an_alias_are_no_decimal_either() -> None:
    registry = FakeRegistry()
    amount = {"name": "amount", "aliases": ["f0"], "type": decimal(38, 2)}
    schema_id = registry.register("s", record("bytes"))

    with pytest.raises(PoisonRecordError, match="no decimal in 'f0'"):
        AvroReader(registry, {**record(), "fields": [amount]}).decode_foreign(frame_header(schema_id) + b"\x02\x05")
