"""Spark's decoder of JSON and Python's: the same documents have the same values, or the same causes and details."""

from __future__ import annotations

import copy
import json
import math
import random
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)

from balance_service.errors import PoisonRecordError
from balance_service.formats.json_format import JsonCodec
from balance_service.formats.json_rows import JsonRows
from balance_service.formats.json_values import JsonRecords
from balance_service.model.stage import Stage
from balance_service.spark.session import any_session
from tests.unit.formats.corpus import ANY, DOCUMENTS, FIELDS, STRICT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark.sql import SparkSession

_HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
_SYNTAX = "it is not JSON"
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
    records = JsonRecords(of.schemas.values(), told.field, told.data)
    found: list[Any] = []
    for one in documents:
        value, kind = one if isinstance(one, tuple) else (one, b"")
        try:
            found.append(records.read(value, kind.decode()))
        except PoisonRecordError as error:
            found.append((error.cause, error.detail))
    return found


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


def test_random_decimals_are_exact_or_dead_letters(spark: SparkSession) -> None:
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
