"""The sample files: each line is a valid and consistent record of its topic."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from balance_service.avro.codec import AvroCodec, FrameReader
from balance_service.avro.from_json import record_line
from balance_service.avro.schemas import load_schema
from balance_service.devtools.local.samples import SAMPLES, SampleFile
from balance_service.process.package import resource
from balance_service.testing.fakes import FakeRegistry

FILES = sorted({file for samples in SAMPLES.values() for file in samples.files}, key=lambda file: file.topic)
RECORDS = {
    "players": "Player",
    "pos": "PosInvoice",
    "products": "Product",
    "score-events": "ScoreEvent",
    "symbols": "Symbol",
}


def records(file: SampleFile) -> list[tuple[bytes | None, Any]]:
    """Key and value of each line, after encoding and decoding."""
    registry, schema = FakeRegistry(), load_schema(RECORDS[file.topic])
    codec, frames, read = AvroCodec(registry, "s", schema), FrameReader(registry), []
    for line in resource(file.path).read_bytes().splitlines():
        key, record = record_line(line, schema, file.key_separator, takes_tombstones=file.topic == "symbols")
        read.append((key, None if record is None else frames.value(codec.encode(record))))
    return read


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.topic)
def test_every_line_is_a_record_of_its_topic(file: SampleFile) -> None:
    assert records(file)


def test_every_file_is_used() -> None:
    assert {path.stem for path in resource("samples").iterdir()} == {file.topic for file in FILES}


def test_an_invoice_is_the_sum_of_its_lines_and_has_its_store_as_key() -> None:
    for key, invoice in records(SampleFile("pos")):
        assert key == invoice["storeId"].encode()
        assert [line["amount"] for line in invoice["lines"]] == [
            line["quantity"] * line["unitPrice"] for line in invoice["lines"]
        ]
        assert invoice["totalAmount"] == sum((line["amount"] for line in invoice["lines"]), Decimal(0))
        assert (invoice["address"] is None) == (invoice["deliveryType"] == "TAKEAWAY")


def test_the_key_of_a_joined_row_is_its_id_as_text() -> None:
    for topic in ("players", "products"):
        assert all(key == str(record["id"]).encode() for key, record in records(SampleFile(topic)))
