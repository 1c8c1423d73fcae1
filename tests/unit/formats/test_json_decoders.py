"""Spark's decoder of JSON and Python's: the same documents have the same values, or the same causes and details."""

from __future__ import annotations

import copy
import json
import math
import os
import random
from datetime import UTC, datetime
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)

from balance_service.errors import PoisonRecordError
from balance_service.formats.json_format import JsonCodec
from balance_service.formats.json_rows import JsonRows
from balance_service.formats.json_values import JsonRecords
from balance_service.model.stage import Stage
from balance_service.spark.session import any_session
from tests.unit.formats.corpus import ANY, DOCUMENTS, FIELDS, STRICT, TYPES
from tests.unit.formats.suite import INVALID, KEPT, LIMITS, VALID

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark.sql import SparkSession

_HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
_SYNTAX = "it is not JSON"
_SUITE = "JSON_TEST_SUITE"
Document = bytes | tuple[bytes, bytes]


@pytest.fixture(scope="module")
def spark() -> SparkSession:
    return any_session()


def stage(*schemas: Mapping[str, Any], **more: Any) -> Stage:
    named = {schema["name"]: copy.deepcopy(dict(schema)) for schema in schemas}
    return Stage(name="s", owner="s", source="t", schemas=named, **{"format": "json", **more})


def by_spark(spark: SparkSession, of: Stage, documents: Sequence[Document]) -> list[Any]:
    """Returns the cause and the detail, or the record's name and the record, of each document."""
    rows = JsonRows(spark._jvm, of, [json.dumps(schema) for schema in of.schemas.values()])
    records = [
        {"value": one[0], "headers": [{"key": of.told.header, "value": one[1]}]}
        if isinstance(one, tuple)
        else {"value": one, "headers": None}
        for one in documents
    ]
    frame: Any = spark.createDataFrame(
        pa.Table.from_pylist(records, pa.schema({"value": pa.binary(), "headers": _HEADERS}))
    )
    read = frame.select(rows.of(F.col("value"), F.col("headers")).alias("read")).toArrow()["read"].to_pylist()
    found: list[Any] = []
    for row in read:
        records_set = [name for name in of.schemas if row[name] is not None]
        if row["cause"] is not None:
            found.append((row["cause"], row["detail"]))
            assert not records_set
        else:
            (record,) = records_set
            found.append((record, plain(row[record])))
    return found


def by_python(of: Stage, documents: Sequence[Document]) -> list[Any]:
    told = of.told
    records = JsonRecords(of.schemas.values(), told.field, told.data, told.schema)
    found: list[Any] = []
    for one in documents:
        value, kind = one if isinstance(one, tuple) else (one, b"")
        try:
            found.append(records.read(value, kind.decode()))
        except PoisonRecordError as error:
            found.append((error.cause, error.detail))
    return found


@st.composite
def documents(draw: st.DrawFn) -> bytes:
    """Objects of the fields of the corpus and others, with any values, and with some bytes changed."""
    space = st.sampled_from(["", "", "", " ", "\n\t"])
    texts = st.one_of(
        st.text(max_size=6).map(json.dumps),
        st.text(max_size=6).map(lambda text: json.dumps(text, ensure_ascii=False).encode(errors="replace").decode()),
        st.from_regex(r"\A\"(?:\\u[dD][89a-fA-F][0-9a-f]{2}|\\[\"\\/bfnrtu]|[ -!#-Z])*\"\Z"),
        st.sampled_from([f'"{text}"' for _, text, _ in FIELDS if len(text) < 40 and '"' not in text]),
    )
    numbers = st.from_regex(r"\A-?(?:0|[1-9][0-9]{0,24})(?:\.[0-9]{1,24})?(?:[eE][+-]?[0-9]{1,12})?\Z")
    known = st.sampled_from([text for _, text, _ in FIELDS if len(text) < 200])
    single = st.one_of(texts, numbers, known, st.sampled_from(["true", "false", "null"]))

    def nested(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        member = st.builds(lambda name, between, value: f"{name}{between}:{between}{value}", texts, space, inner)
        return st.one_of(
            st.lists(inner, max_size=4).map(lambda items: f"[{','.join(items)}]"),
            st.lists(member, max_size=4).map(lambda items: f"{{{', '.join(items)}}}"),
        )

    values = st.recursive(single, nested, max_leaves=8)
    names = st.one_of(st.sampled_from([f'"{name}"' for name in TYPES]), texts)
    members = draw(st.lists(st.tuples(names, space, values), max_size=6))
    inside = ",".join(f"{name}{between}:{between}{value}" for name, between, value in members)
    document = bytearray(f"{{{inside}}}".encode(errors="replace"))
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(document) - 1))
        document[at : at + draw(st.integers(0, 1))] = draw(st.binary(max_size=2))
        document = document or bytearray(b"{}")
    return draw(st.sampled_from([b"", b"", b"\0\0\0\0\7"])) + bytes(document)


def plain(value: Any) -> Any:
    """Returns a value of Arrow as Avro's: maps are lists of pairs there."""
    if isinstance(value, dict):
        return {name: plain(member) for name, member in value.items()}
    if isinstance(value, list):
        if value and isinstance(value[0], tuple):
            return {name: plain(member) for name, member in value}
        return [plain(member) for member in value]
    return value.astimezone(UTC) if isinstance(value, datetime) and value.tzinfo is not None else value


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(one[1], str) and one[1].startswith(_SYNTAX):
        return isinstance(other, tuple) and one[0] == other[0] and str(other[1]).startswith(_SYNTAX)
    return repr(one) == repr(other)


def differences(spark: SparkSession, of: Stage, documents: Sequence[Document]) -> list[Any]:
    both = zip(documents, by_spark(spark, of, documents), by_python(of, documents), strict=True)
    return [(document, one, other) for document, one, other in both if not alike(one, other)]


def test_both_decoders_read_the_corpus_alike_and_as_it_says(spark: SparkSession) -> None:
    of = stage(ANY)
    given = [f'{{"{name}": {text}}}'.encode() for name, text, _ in FIELDS]

    assert differences(spark, of, given) == []

    for (name, text, wanted), (first, found) in zip(FIELDS, by_python(of, given), strict=True):
        if isinstance(wanted, tuple):
            assert (first, *wanted) == (wanted[0], *wanted), (name, text, first, found)
            assert first == wanted[0], (name, text, found)
        else:
            assert first == "Any", (name, text, first, found)
            assert repr(found.get(name)) == repr(wanted), (name, text)


def test_both_decoders_refuse_the_same_documents(spark: SparkSession) -> None:
    of = stage(ANY)
    given = [document for document, _ in DOCUMENTS]

    assert differences(spark, of, given) == []

    for (document, wanted), (first, found) in zip(DOCUMENTS, by_python(of, given), strict=True):
        assert first == (wanted or "Any"), (document, found)


@pytest.mark.parametrize(
    ("documents", "is_json"),
    [(VALID, True), (KEPT, True), (INVALID, False), (LIMITS, False)],
    ids=["valid", "kept", "invalid", "limits"],
)
def test_hostile_documents_are_read_alike_and_only_json_is_taken(
    spark: SparkSession, documents: Sequence[bytes], is_json: bool
) -> None:
    of = stage(ANY)
    # Also as a field that is passed over: its value is checked all the same.
    inside = [b'{"other":' + document + b"}" for document in documents]

    assert differences(spark, of, [*documents, *inside]) == []

    for found, wanted in ((by_python(of, documents), "json-misfit"), (by_python(of, inside), "Any")):
        for document, (first, _) in zip(documents, found, strict=True):
            kept = {wanted, "Any", "field-null"} if is_json else {"json-malformed"}
            assert first in kept, document


@pytest.mark.skipif(not os.environ.get(_SUITE), reason=f"{_SUITE} names no folder with the documents of a public suite")
def test_the_documents_of_a_public_suite_are_read_alike(spark: SparkSession) -> None:
    of, files = stage(ANY), sorted(Path(os.environ[_SUITE]).glob("*.json"))
    documents = [file.read_bytes() for file in files]

    assert differences(spark, of, [*documents, *(b'{"other":' + one + b"}" for one in documents)]) == []

    found = {
        file.name: first != "json-malformed" for file, (first, _) in zip(files, by_python(of, documents), strict=True)
    }
    assert [name for name, is_taken in found.items() if is_taken and name.startswith("n_")] == []
    # Names twice are JSON that is refused.
    refused = [name for name, is_taken in found.items() if not is_taken and name.startswith("y_")]
    assert all("duplicated_key" in name for name in refused)


# The differences are shown by themselves, and each step of shrinking would be a job of Spark.
@settings(max_examples=15, deadline=None, suppress_health_check=[*HealthCheck], phases=[Phase.explicit, Phase.generate])
@given(st.lists(documents(), min_size=30, max_size=50))
def test_documents_of_any_form_are_read_alike(spark: SparkSession, some: list[bytes]) -> None:
    found = differences(spark, stage(ANY), some)

    # Of a document with several faults, each parser may name another one first.
    assert [one for one in found if not one[1][0] == one[2][0] == "json-malformed"] == []


def test_a_detail_has_the_path() -> None:
    documents = [
        b'{"lines": [{"price": 1}, {"price": "x"}]}',
        b'{"inner": {"id": "x", "count": 1.5}}',
        b'{"map": {"a": 1.005}}',
        b'{"other": [{"a": {"b": 1, "b": 2}}]}',
        b'{"other": [{"a": "\\ud800"}]}',
        b'{"inner": {}}',
    ]

    assert by_python(stage(ANY), documents) == [
        ("json-misfit", "lines[].price is a string, and a number is expected"),
        ("json-misfit", "inner.count is no whole number of 64 bits"),
        ("decimal-loses-digits", "map{} has more digits than decimal(10,2)"),
        ("json-malformed", "other[].a.b is there twice"),
        ("json-malformed", "other[].a has half of a surrogate pair"),
        ("field-missing", "inner.id is missing, and has no default"),
    ]


def test_missing_fields_have_their_default_or_are_dead_letters(spark: SparkSession) -> None:
    documents = [
        b'{"id": "x", "amount": "1.50", "note": null}',
        b'{"id": "x", "amount": 1.5, "note": "n", "tags": []}',
        b'{"id": "x", "amount": 1.5}',
        b'{"amount": 1.5, "note": null}',
        b'{"id": null, "amount": 1.5, "note": null}',
        b'{"id": "x", "amount": null, "note": null}',
    ]
    of = stage(STRICT)

    assert differences(spark, of, documents) == []
    assert [first for first, _ in by_python(of, documents)] == [
        *("Strict", "Strict", "field-missing", "field-missing", "field-null", "field-null")
    ]


def test_a_field_or_a_header_tells_the_record(spark: SparkSession) -> None:
    placed = {"type": "record", "name": "Placed", "kind": "order.placed", "fields": [{"name": "id", "type": "string"}]}
    gone = {"type": "record", "name": "Gone", "namespace": "a", "fields": [{"name": "id", "type": "string"}]}
    documents: list[Document] = [
        b'{"kind": "order.placed", "id": "1"}',
        b'{"id": "1", "kind": "Gone"}',
        b'{"id": "1", "kind": "a.Gone"}',
        b'{"id": "1", "kind": "Placed"}',
        b'{"id": "1"}',
        b'{"id": "1", "kind": 1}',
        b'{"id": "1", "kind": null}',
        b'{"kind": "x", "kind": "y"}',
        b"[]",
        b'{"kind": "Gone", "id": 1}',
        b'{"kind": "Gone", "other": "\\ud800"}',
    ]
    by_field, by_header = stage(placed, gone, type="kind"), stage(placed, gone, type="header:kind")

    assert differences(spark, by_field, documents) == []
    assert [first for first, _ in by_python(by_field, documents)] == [
        *("Placed", "Gone", "Gone", "ignored", "json-misfit", "json-misfit", "json-misfit", "json-malformed"),
        *("json-misfit", "json-misfit", "json-malformed"),
    ]

    headed: list[Document] = [(b'{"id": "1"}', b"order.placed"), (b'{"id": "1"}', b"other"), b'{"id": "1"}']
    assert differences(spark, by_header, headed) == []
    assert [first for first, _ in by_python(by_header, headed)] == ["Placed", "ignored", "json-misfit"]


def test_cloud_events_are_read_in_both_modes(spark: SparkSession) -> None:
    placed = {"type": "record", "name": "Placed", "kind": "com.x.placed", "fields": [{"name": "id", "type": "long"}]}
    of = stage(placed, format="cloudevents")
    documents: list[Document] = [
        b'{"specversion": "1.0", "type": "com.x.placed", "data": {"id": 1, "more": 2}, "source": "/x"}',
        b'{"specversion": "1.0", "data": {"id": 1}, "type": "com.x.placed"}',
        b'{"specversion": "1.0", "type": "com.x.other", "data": {"id": 1}}',
        b'{"specversion": "1.0", "type": "com.x.placed", "data_base64": "AA=="}',
        b'{"specversion": "1.0", "type": "com.x.placed", "data": {"id": 1.5}}',
        b'{"specversion": "1.0", "type": "com.x.placed", "data": null}',
        b'{"id": 1}',
        (b'{"id": 1}', b"com.x.placed"),
        (b'{"id": 1}', b"com.x.other"),
    ]

    assert differences(spark, of, documents) == []
    assert [first for first, _ in by_python(of, documents)] == [
        *("Placed", "Placed", "ignored", "field-missing", "json-misfit", "field-null", "json-misfit", "Placed"),
        "ignored",
    ]


@pytest.mark.timeout(36_000)
def test_random_decimals_of_all_scales_are_exact_or_dead_letters(spark: SparkSession) -> None:
    chosen, each = random.Random(50), -(-int(os.environ.get("RANDOM_DECIMALS", "4000")) // 39)
    counts = dict.fromkeys(("exact", "lost", "misfits"), 0)
    for scale in range(39):
        precision = chosen.randint(max(scale, 1), 38)
        kind = {"type": "bytes", "logicalType": "decimal", "precision": precision, "scale": scale}
        of = stage({"type": "record", "name": "D", "fields": [{"name": "d", "type": kind}]})
        texts = [_number(chosen) for _ in range(each)]
        given = [f'{{"d":{quote}{text}{quote}}}'.encode() for text in texts for quote in [chosen.choice(["", '"'])]]
        found = by_python(of, given)

        assert [*map(repr, by_spark(spark, of, given))] == [*map(repr, found)]

        for text, (first, value) in zip(texts, found, strict=True):
            exact = _exact_at(text, precision, scale)
            assert (first, value["d"] if first == "D" else None) == (
                ("decimal-loses-digits", None) if exact is None else ("D", exact)
            ), (text, kind)
            counts["lost" if exact is None else "exact"] += 1
    assert min(counts["exact"], counts["lost"]) > each


def _number(chosen: random.Random) -> str:
    digits = "".join(chosen.choices("0123456789", k=chosen.randint(1, chosen.choice([3, 12, 45]))))
    point = chosen.randint(0, len(digits))
    whole, fraction = (digits[:point].lstrip("0") or "0"), digits[point:]
    text = chosen.choice(["", "-"]) + whole + (f".{fraction}" if fraction else "")
    return text + chosen.choice(["", "", "", f"e{chosen.randint(-40, 40)}", f"E+{chosen.randint(0, 40)}"])


def _exact_at(text: str, precision: int, scale: int) -> Decimal | None:
    """Returns a number as a decimal, by another way than the decoders'; None if it has more digits."""
    number = Fraction(text) * 10**scale
    if number.denominator != 1 or abs(number) >= 10**precision:
        return None
    return Decimal((int(number < 0), [*map(int, str(abs(number.numerator)))], -scale))


def test_random_numbers_are_read_alike(spark: SparkSession) -> None:
    chosen, documents = random.Random(50), []
    for _ in range(4_000):
        digits = "".join(chosen.choices("0123456789", k=chosen.randint(1, 45)))
        point = chosen.randint(0, len(digits))
        whole, fraction = (digits[:point].lstrip("0") or "0"), digits[point:]
        text = chosen.choice(["", "-"]) + whole + (f".{fraction}" if fraction else "")
        text += chosen.choice(["", "", "", f"e{chosen.randint(-40, 40)}"])
        field = chosen.choice(["money", "wide", "n", "real"])
        quote = chosen.choice(["", '"']) if field in ("money", "wide") else ""
        documents.append(f'{{"{field}": {quote}{text}{quote}}}'.encode())

    assert differences(spark, stage(ANY), documents) == []


def test_random_times_are_read_alike(spark: SparkSession) -> None:
    chosen, documents = random.Random(50), []
    for _ in range(3_000):
        day = f"{chosen.randint(0, 9999):04}-{chosen.randint(0, 13):02}-{chosen.randint(0, 32):02}"
        time = f"{chosen.randint(0, 24):02}:{chosen.randint(0, 60):02}:{chosen.randint(0, 60):02}"
        fraction = chosen.choice(["", ".", f".{chosen.randint(0, 9999999)}", f".{chosen.randint(0, 999):03}"])
        text = day + chosen.choice("TTT t") + time + fraction + chosen.choice(["Z", "Z", "z", "", "+01:00", "-0930"])
        if chosen.random() < 0.1:
            at = chosen.randrange(len(text))
            text = text[:at] + chosen.choice("0-:TZ x٣") + text[at + 1 :]
        documents.append(f'{{"{chosen.choice(["at", "ms", "ns", "local"])}": "{text}"}}'.encode())

    assert differences(spark, stage(ANY), documents) == []


def test_what_the_codec_writes_is_read_as_it_was(spark: SparkSession) -> None:
    codec, of = JsonCodec(dict(ANY)), stage(ANY)
    records = [{name: wanted} for name, _, wanted in FIELDS if not isinstance(wanted, tuple) and name != "other"]
    whole = [codec.decode(codec.encode(record)) for record in records]

    assert differences(spark, of, [codec.encode(record) for record in records]) == []
    for record, found in zip(records, whole, strict=True):
        for name, value in record.items():
            assert found[name] == value


def test_json_has_no_form_of_nan() -> None:
    codec = JsonCodec(dict(ANY))
    for value in (math.nan, math.inf):
        with pytest.raises(PoisonRecordError, match="is no number of JSON"):
            codec.encode({"real": value})


def test_a_document_holds_a_bounded_number_of_values(spark: SparkSession) -> None:
    fields = [{"name": f"f{n}", "type": ["null", "long"], "default": None} for n in range(200)]
    inner = {"type": "record", "name": "Inner", "fields": fields}
    many = {"type": "record", "name": "Many", "fields": [{"name": "all", "type": {"type": "array", "items": inner}}]}
    documents = [b'{"all": [' + b",".join([b"{}"] * count) + b"]}" for count in (10, 20_000)]

    assert differences(spark, stage(many), documents) == []
    assert by_python(stage(many), documents)[1][0] == "values-too-many"


def test_a_document_of_more_than_16_mib_is_refused(spark: SparkSession) -> None:
    documents = [b'{"other": "' + b"x" * ((16 << 20) - 13 + more) + b'"}' for more in (0, 1)]

    assert differences(spark, stage(ANY), documents) == []
    assert [first for first, _ in by_python(stage(ANY), documents)] == ["Any", "json-malformed"]


def test_documents_of_kafka_connect_are_read_with_their_schema_and_without(spark: SparkSession) -> None:
    row = {
        "type": "record",
        "name": "Row",
        "fields": [{"name": "id", "type": "long"}, {"name": "payload", "type": ["null", "string"], "default": None}],
    }
    of = stage(row, format="connect")
    given: list[Document] = [
        b'{"id": 1}',
        b'{"schema": {"type": "struct"}, "payload": {"id": 1}}',
        b'{"payload": {"id": 1}, "schema": null}',
        b'{"schema": {}, "payload": {"id": 1.5}}',
        b'{"schema": {}, "payload": null}',
        b'{"schema": {}, "payload": []}',
        b'{"schema": {}, "payload": {"id": 1, "id": 2}}',
        b'{"schema": {"a": 1, "a": 2}, "payload": {"id": 1}}',
        b'{"schema": {}, "payload": {"id": 1}} x',
        # The row of a table with such columns.
        b'{"schema": "s", "payload": "p", "id": 1}',
        b'{"payload": "p", "id": 1}',
        b'{"schema": {}}',
        b'{"payload": {"id": 1}}',
        b"null",
        b"[]",
        b"",
        # What Debezium sends to say no more than that.
        b'{"ts_ms": 1}',
        b'{"schema": {}, "payload": {"ts_ms": 1, "ts_us": 2}}',
        b'{"ts_ms": 1, "more": 2}',
        b'{"status": "END", "data_collections": [], "event_count": 1, "ts_ms": 1}',
        b'{"status": "END", "id": "1", "data_collections": [], "event_count": 1, "ts_ms": 1}',
        b'{"status": "END", "data_collections": [], "event_count": 1, "id": 1}',
        b'{"op": "m", "ts_ms": 1, "source": {"id": 5}, "message": {"prefix": "p", "content": "AA=="}}',
        b'{"op": "m", "ts_ms": 1, "message": {}}',
    ]

    assert differences(spark, of, given) == []
    assert [first for first, _ in by_python(of, given)] == [
        *("Row", "Row", "Row", "json-misfit", "field-null", "json-misfit", *["json-malformed"] * 3),
        *("Row", "Row", "field-missing", "json-misfit", "field-null", "json-misfit", "json-malformed"),
        *("ignored", "ignored", "field-missing", "field-missing", "json-misfit", "Row", "ignored", "field-missing"),
    ]


_CONNECT, _DEBEZIUM = "org.apache.kafka.connect.data.", "io.debezium.time."
_UNSCALED = {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2, "json": "base64"}
_MILLIS = {"type": "long", "logicalType": "timestamp-millis", "json": "epoch-millis"}
_MICROS = {"type": "long", "logicalType": "timestamp-micros", "json": "epoch-micros"}
_DAYS = {"type": "int", "logicalType": "date", "json": "epoch-days"}
_ITEM = {"type": "record", "name": "Item", "fields": [{"name": "price", "type": _UNSCALED}]}
_OF_UNITS: dict[str, tuple[Any, Any]] = {
    # Each field's type, and a value that any unit has.
    "ms": (_MILLIS, 5),
    "us": (_MICROS, 5),
    "day": (_DAYS, 5),
    "price": (_UNSCALED, "BNI="),
    "plain": ("long", 5),
    "items": ({"type": "array", "items": _ITEM}, [{"price": "BNI="}]),
    "named": ({"type": "map", "values": _MICROS}, {"a": 5}),
}


def _of(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "int64", "optional": True, "name": name, "version": 1, **more}


def _decimal_of(scale: object) -> dict[str, Any]:
    return _of(f"{_CONNECT}Decimal", type="bytes", parameters={"scale": scale})


@pytest.mark.parametrize(
    ("field", "said", "detail"),
    [
        ("ms", _of(f"{_CONNECT}Timestamp"), ""),
        ("ms", _of(f"{_DEBEZIUM}Timestamp"), ""),
        ("ms", _of(f"{_DEBEZIUM}MicroTimestamp"), "ms is of io.debezium.time.MicroTimestamp by"),
        ("ms", _of(f"{_CONNECT}Date"), "ms is of org.apache.kafka.connect.data.Date by"),
        ("us", _of(f"{_DEBEZIUM}MicroTimestamp"), ""),
        ("us", _of(f"{_DEBEZIUM}Timestamp"), "us is of io.debezium.time.Timestamp by the document's schema, and the"),
        ("us", _of(f"{_CONNECT}Timestamp"), "us is of org.apache.kafka.connect.data.Timestamp by"),
        ("us", _of(f"{_DEBEZIUM}NanoTimestamp"), "us is of io.debezium.time.NanoTimestamp by"),
        ("us", _of(f"{_DEBEZIUM}MicroTime"), "us is of io.debezium.time.MicroTime by"),
        ("day", _of(f"{_CONNECT}Date"), ""),
        ("day", _of(f"{_DEBEZIUM}Date"), ""),
        ("day", _of(f"{_DEBEZIUM}Year"), "day is of io.debezium.time.Year by"),
        ("price", _decimal_of("2"), ""),
        ("price", _decimal_of("4"), "price is a decimal of scale 4 by the document's schema, and the reader has 2"),
        ("price", _decimal_of("-2"), "price is a decimal of scale -2 by"),
        ("items", {"type": "array", "items": {"type": "struct", "fields": [{"field": "price", **_decimal_of("3")}]}},
         "items[].price is a decimal of scale 3 by"),
        ("items", {"type": "array", "items": {"type": "struct", "fields": [{"field": "price", **_decimal_of("2")}]}},
         ""),
        ("named", {"type": "map", "values": _of(f"{_DEBEZIUM}Timestamp")}, "named{} is of io.debezium.time.Timestamp"),
        # The unit of a field without a form is not compared, nor is that of a schema without a name that tells.
        ("plain", _of(f"{_DEBEZIUM}Timestamp"), ""),
        ("us", {"type": "int64"}, ""),
        ("us", _of("acme.Instant"), ""),
        ("us", _of("Timestamp"), ""),
        # Schemas of no known form say nothing.
        ("us", {"type": "int64", "name": 7}, ""),
        ("price", _decimal_of(4), ""),
        ("price", _of(f"{_CONNECT}Decimal", parameters="4"), ""),
        ("items", {"type": "array", "items": [1]}, ""),
        ("named", "struct", ""),
    ],
)  # fmt: skip
def test_a_unit_or_a_scale_that_the_schema_of_a_document_says_is_that_of_the_reader(
    spark: SparkSession, field: str, said: Any, detail: str
) -> None:
    kind, value = _OF_UNITS[field]
    of = stage({"type": "record", "name": "Row", "fields": [{"name": field, "type": kind}]}, format="connect")
    of_field = {**said, "field": field} if isinstance(said, dict) else said
    schema = {"type": "struct", "fields": [{"type": "string", "field": "other"}, 5, of_field]}
    texts = [
        json.dumps({"schema": schema, "payload": {field: value}}),
        json.dumps({"payload": {field: value}, "schema": schema}),
    ]
    given: list[Document] = [*map(str.encode, texts), b"\0\0\0\0\7" + texts[0].encode()]

    assert differences(spark, of, given) == []

    for first, found in by_python(of, given):
        assert (first, found[: len(detail)] if detail else "") == ("json-misfit" if detail else "Row", detail)


def test_the_schema_of_each_document_is_compared_although_the_last_one_is_remembered(spark: SparkSession) -> None:
    inner = {"type": "record", "name": "Value", "fields": [{"name": "at", "type": _MICROS}]}
    of = stage(
        {"type": "record", "name": "Envelope", "fields": [{"name": "after", "type": ["null", inner], "default": None}]},
        format="connect",
    )

    def document(name: str, space: str, value: str = '{"after":{"at":5}}') -> bytes:
        schema = _of(name)
        of_value = json.dumps([{"type": "struct", "field": "after", "fields": [{**schema, "field": "at"}]}])
        return f'{space}{{{space}"schema":{space}{{"fields":{of_value}}}{space},"payload":{value}{space}}}'.encode()

    chosen = random.Random(119)
    # Two names of one length, and spaces that move the schema.
    names = [f"{_DEBEZIUM}MicroTimestamp", f"{_DEBEZIUM}MicroTimestamq", f"{_DEBEZIUM}Timestamp"]
    given = [
        chosen.choice([b"", b"\0\0\0\0\7"]) + document(name, chosen.choice(["", " ", "\n \t"]))
        for name in chosen.choices(names, k=300)
    ]
    given += [document(names[0], "", '{"after":{"at":"x"}}'), document(names[2], "", '{"after":{"at":"x"}}')]
    given += [document(names[2], "", "{"), document(names[2], "", "null"), document(names[0], "", "null")]

    assert differences(spark, of, given) == []

    found = by_python(of, given)
    for one, (first, _) in zip(given[:300], found, strict=False):
        assert first == ("Envelope" if f'{names[0]}"'.encode() in one else "json-misfit")
    assert found[300:302] == [
        ("json-misfit", "after.at is a string, and a number is expected"),
        (
            "json-misfit",
            "after.at is of io.debezium.time.Timestamp by the document's schema, and the reader has epoch-micros",
        ),
    ]
    assert [first for first, _ in found[302:]] == ["json-malformed", "json-misfit", "field-null"]
