"""The samples: every line is a record that its topic takes, and right in itself."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from balance_service.avro.codec import AvroCodec
from balance_service.avro.frames import FrameReader
from balance_service.avro.schemas import load_schema
from balance_service.devtools.local.samples import SAMPLES, SampleFile
from balance_service.devtools.produce import RecordLines
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
    """Key and value of every line."""
    registry, schema = FakeRegistry(), load_schema(RECORDS[file.topic])
    tombstones = file.topic == "symbols"
    lines = RecordLines(AvroCodec(registry, "s", schema), schema, file.key_separator, takes_tombstones=tombstones)
    frames = FrameReader(registry)
    read = map(lines.record, resource(file.path).read_bytes().splitlines())
    return [(key, None if frame is None else frames.value(frame)) for key, frame in read]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.topic)
def test_every_line_is_a_record_of_its_topic(file: SampleFile) -> None:
    assert records(file)


def test_there_is_no_file_that_nothing_loads() -> None:
    assert {path.stem for path in resource("samples").iterdir()} == {file.topic for file in FILES}


def test_an_invoice_is_the_sum_of_its_lines_and_keyed_by_its_store() -> None:
    for key, invoice in records(SampleFile("pos")):
        assert key == invoice["storeId"].encode()
        assert [line["amount"] for line in invoice["lines"]] == [
            line["quantity"] * line["unitPrice"] for line in invoice["lines"]
        ]
        assert invoice["totalAmount"] == sum((line["amount"] for line in invoice["lines"]), Decimal(0))
        assert (invoice["address"] is None) == (invoice["deliveryType"] == "TAKEAWAY")


def test_an_id_as_text_is_the_key_of_what_is_joined() -> None:
    for topic in ("players", "products"):
        assert all(key == str(record["id"]).encode() for key, record in records(SampleFile(topic)))
