"""Frames of any schema: read as they were written, or said not to be readable and why."""

from __future__ import annotations

from decimal import Decimal

import pytest

from balance_service.avro.codec import AvroCodec, frame_header
from balance_service.avro.frames import FrameReader, UndecodableError
from balance_service.avro.schemas import load_schema
from balance_service.errors import RetriableError
from balance_service.testing.fakes import FakeRegistry

STATE = {"customerId": "Zoë", "amount": Decimal("12.30")}


@pytest.fixture
def registry() -> FakeRegistry:
    return FakeRegistry()


def test_a_frame_is_read_by_the_schema_that_it_names(registry: FakeRegistry) -> None:
    frame = AvroCodec(registry, "states", load_schema("BalanceState")).encode(STATE)
    other = AvroCodec(registry, "players", load_schema("Player")).encode({"id": 1, "name": "Elyse"})
    reader = FrameReader(registry)

    assert reader.record(frame) == "parts.code.balance.state.BalanceState"
    assert reader.value(frame) == STATE
    assert str(reader.value(frame)["amount"]) == "12.30"
    assert reader.value(other) == {"id": 1, "name": "Elyse"}


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (b"", "a record of 0 bytes has no frame"),
        (b"\x00\x00\x00\x00", "a record of 4 bytes has no frame"),
        (b"\x01\x00\x00\x00\x01", "a record's frame starts with 1, not 0"),
        (frame_header(7), "it names schema 7, which the registry does not know"),
        (frame_header(1), "it does not decode under schema 1: "),
        (frame_header(2), "schema 2 is recursive, has items of no bytes, or is no Avro schema"),
        (frame_header(3), "schema 3 is recursive, has items of no bytes, or is no Avro schema"),
        (frame_header(4) + b"\0", "schema 4 is recursive, has items of no bytes, or is no Avro schema"),
        (frame_header(5), "schema 5 is recursive, has items of no bytes, or is no Avro schema"),
    ],
)
def test_what_cannot_be_read_says_why(registry: FakeRegistry, frame: bytes, why: str) -> None:
    registry.register("states", load_schema("BalanceState"))
    node = {"type": "record", "name": "Node", "namespace": "n", "fields": [{"name": "next", "type": "n.Node"}]}
    registry.register("nodes", node)
    registry.register("unknown", {"type": "record", "name": "R", "fields": [{"name": "f", "type": "nothing"}]})

    registry.register("endless", {"type": "array", "items": "null"})
    registry.register("sizeless", {"type": "fixed", "name": "F"})

    with pytest.raises(UndecodableError) as undecodable:
        FrameReader(registry).value(frame)

    assert str(undecodable.value).startswith(why)


def test_the_name_of_a_record_needs_no_schema_that_can_be_read(registry: FakeRegistry) -> None:
    registry.register("nodes", {"type": "record", "name": "N", "fields": [{"name": "next", "type": "N"}]})

    assert FrameReader(registry).record(frame_header(1)) == "N"


def test_a_registry_that_is_away_is_not_a_reason_to_call_a_frame_undecodable(registry: FakeRegistry) -> None:
    registry.is_up = False

    with pytest.raises(RetriableError):
        FrameReader(registry).value(frame_header(1))
