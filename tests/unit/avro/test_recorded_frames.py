"""Records of the service that a former version wrote without a registry: `tests/data/frames.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from balance_service.avro.frames import SCHEMA_PREFIX
from balance_service.avro.own_schemas import OwnSchemas
from balance_service.avro.registry import NoRegistry
from balance_service.avro.schemas import load_schema
from balance_service.model.json_view import exact_json

RECORDED = json.loads((Path(__file__).parents[2] / "data/frames.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("one", RECORDED, ids=[one["record"] for one in RECORDED])
def test_recorded_frames_are_read(one: dict[str, Any]) -> None:
    schemas = OwnSchemas(NoRegistry())
    key = SCHEMA_PREFIX + one["fingerprint"].encode()
    assert schemas.learn(key, one["text"].encode())
    codec = schemas.codec("topic", load_schema(one["record"]))

    read = json.loads(exact_json(codec.decode(bytes.fromhex(one["frame"]))), parse_float=str)

    assert known(read, one["value"]) == one["value"]


def known(read: Any, recorded: Any) -> Any:
    """Returns what is read, without fields that a later schema has added."""
    match recorded:
        case dict():
            return {name: known(read[name], value) for name, value in recorded.items()}
        case list() if len(recorded) == len(read):
            return [known(one, of) for one, of in zip(read, recorded, strict=True)]
    return read


def test_each_record_of_the_service_is_recorded() -> None:
    assert {one["record"] for one in RECORDED} >= {
        "ApplicationServer",
        "BalanceState",
        "DeadLetterDecision",
        "Generations",
        "IdempotencyMarker",
        "Letter",
        "Position",
    }
