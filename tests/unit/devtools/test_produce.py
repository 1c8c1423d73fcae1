"""Lines as records: the key, the frame, and which record a topic takes."""

from __future__ import annotations

from decimal import Decimal

import pytest

from balance_service.avro.codec import AvroCodec
from balance_service.avro.frames import FrameReader
from balance_service.avro.schemas import load_schema
from balance_service.devtools.produce import RecordLines
from balance_service.errors import ConfigurationError, InvalidInputError
from balance_service.model.taken import taken_by
from balance_service.settings import load_settings
from balance_service.testing.fakes import FakeRegistry
from tests.support.shipped import MODELS

STATE = '{"customerId": "c", "amount": 0.10}'


def lines(key_separator: str | None = None, registry: FakeRegistry | None = None) -> RecordLines:
    schema = load_schema("BalanceState")
    return RecordLines(AvroCodec(registry or FakeRegistry(), "s", schema), schema, key_separator)


def test_a_line_without_separator_has_no_key() -> None:
    registry = FakeRegistry()

    key, frame = lines(registry=registry).record(f"{STATE}\n".encode())

    assert key is None
    assert frame is not None
    assert FrameReader(registry).value(frame) == {"customerId": "c", "amount": Decimal("0.10")}


@pytest.mark.parametrize(
    ("separator", "line", "key"),
    [
        ("|", f"c|{STATE}", "c"),
        (": ", f"c: {STATE}", "c"),
        ("\t", f"c \t{STATE}", "c "),
        ("{", f"Zoë{{{STATE}", "Zoë"),
        ("|", "c|" + STATE.replace('"c"', '"a|b"'), "c"),
    ],
)
def test_the_key_ends_at_the_first_separator(separator: str, line: str, key: str) -> None:
    assert lines(separator).record(line.encode())[0] == key.encode()


@pytest.mark.parametrize(
    ("separator", "line", "why"),
    [
        ("|", STATE.encode(), r"no key separator '\|'"),
        ("|", b"|" + STATE.encode(), r"no key before '\|'"),
        ("|", b"c|", "no JSON: Expecting value"),
        ("|", b"c|null", "BalanceState must be a JSON object, not null"),
        (None, b"c|" + STATE.encode(), "no JSON: Expecting value at character 1"),
        (None, b'{"customerId": "c"}', "'amount' is missing"),
        (None, b"\xff" + STATE.encode(), "no UTF-8 from byte 1 on"),
    ],
)
def test_a_line_that_is_no_record_says_why(separator: str | None, line: bytes, why: str) -> None:
    with pytest.raises(InvalidInputError, match=why):
        lines(separator).record(line)


def test_null_after_a_key_is_a_tombstone_where_the_topic_takes_one() -> None:
    schema = load_schema("Player")
    players = RecordLines(AvroCodec(FakeRegistry(), "s", schema), schema, "|", takes_tombstones=True)
    unkeyed = RecordLines(AvroCodec(FakeRegistry(), "s", schema), schema, None, takes_tombstones=True)

    assert players.record(b"1|null\n") == (b"1", None)
    with pytest.raises(InvalidInputError, match="Player must be a JSON object, not null"):
        unkeyed.record(b"null")
    assert taken_by("symbols", MODELS, load_settings()).tombstones
    assert not taken_by("balance", MODELS, load_settings()).tombstones


def test_a_topic_takes_the_records_that_read_models_read_there_under_the_name_that_settings_give_it() -> None:
    settings = load_settings(topic="funds", models=("activity",))

    assert taken_by("funds", MODELS, settings).records["FundsAdded"] == load_schema("FundsAdded")
    with pytest.raises(ConfigurationError, match=r"no read model reads topic 'balance'; name one of .*funds"):
        taken_by("balance", MODELS, settings)
