"""A number that is read without decoding the record equals the decoded one."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balance_service.avro.codec import AvroCodec, parsed
from balance_service.avro.number_reader import number_reader
from balance_service.errors import StoreCorruptedError
from tests.support.fakes import balance_codec

if TYPE_CHECKING:
    from collections.abc import Callable

DECIMAL = {"type": "bytes", "logicalType": "decimal", "precision": 38, "scale": 2}
_LONGS = st.integers(-(2**63), 2**63 - 1)
_DECIMALS = st.integers(-(10**38) + 1, 10**38 - 1).map(lambda unscaled: Decimal(f"{unscaled}e-2"))
NUMBERS: dict[str, tuple[Any, st.SearchStrategy[Any]]] = {
    "int": ("int", st.integers(-(2**31), 2**31 - 1)),
    "long": ("long", _LONGS),
    "float": ("float", st.floats(width=32)),
    "double": ("double", st.floats()),
    "decimal": (DECIMAL, _DECIMALS),
    "perhaps": (["null", DECIMAL], st.none() | _DECIMALS),
    "perhaps_not": (["long", "null"], st.none() | _LONGS),
}
BEFORE: dict[str, tuple[Any, st.SearchStrategy[Any]]] = {
    "text": ("string", st.text(st.characters(codec="utf-8"))),
    "raw": ("bytes", st.binary()),
    "truth": ("boolean", st.booleans()),
    "nothing": ("null", st.none()),
    "one_of": (["null", "string", "long"], st.none() | st.text(st.characters(codec="utf-8")) | _LONGS),
    "name": ({"type": "string", "logicalType": "uuid"}, st.uuids().map(str)),
}


class Registry:
    """Gives every schema the same id."""

    def register(self, subject: str, schema: Any) -> int:
        return 7


ALL = BEFORE | NUMBERS
SCHEMA = {
    "type": "record",
    "name": "State",
    "fields": [{"name": name, "type": kind} for name, (kind, _) in ALL.items()],
}
REGISTRY: Any = Registry()
CODEC = AvroCodec(REGISTRY, "subject", SCHEMA)


@given(st.fixed_dictionaries({name: values for name, (_, values) in ALL.items()}))
def test_a_number_equals_that_of_the_decoded_record(state: dict[str, Any]) -> None:
    frame = CODEC.encode(state)
    decoded = CODEC.decode(frame)

    for name in NUMBERS:
        # That no number is equal to itself is said by its text.
        assert repr(CODEC.number(name)(frame)) == repr(decoded[name])


@pytest.mark.parametrize("name", NUMBERS)
def test_the_fields_before_a_number_are_skipped_and_not_decoded(name: str) -> None:
    assert number_reader(parsed(SCHEMA), name) is not None


@pytest.mark.parametrize("kind", [{"type": "array", "items": "long"}, {"type": "map", "values": "long"}])
def test_a_number_after_an_array_or_map_is_decoded_with_the_record(kind: Any) -> None:
    schema = {"type": "record", "name": "S", "fields": [{"name": "a", "type": kind}, {"name": "n", "type": "long"}]}
    codec = AvroCodec(REGISTRY, "subject", schema)

    assert number_reader(parsed(schema), "n") is None
    assert codec.number("n")(codec.encode({"a": [1] if kind["type"] == "array" else {"k": 1}, "n": 3})) == 3


def cut(frame: bytes) -> bytes:
    return frame[:-1]


def of_no_schema(frame: bytes) -> bytes:
    return b"\1" + frame[1:]


@pytest.mark.parametrize("damage", [cut, of_no_schema])
def test_a_damaged_frame_has_no_number(damage: Callable[[bytes], bytes]) -> None:
    codec = balance_codec()
    frame = codec.encode({"customerId": "c", "amount": Decimal("12.34")})
    assert codec.number("amount")(frame) == Decimal("12.34")

    with pytest.raises(StoreCorruptedError):
        codec.number("amount")(damage(frame))
