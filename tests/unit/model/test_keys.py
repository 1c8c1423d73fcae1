"""Keys as bytes: text as UTF-8, numbers in an encoding that sorts in numeric order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balance_service.errors import InvalidInputError
from balance_service.kafka.partitioner import partition_of, partitions_of_keys
from balance_service.model.keys import KeyType

LONGS = st.integers(-(2**63), 2**63 - 1) | st.integers(-300, 300)
NUMBER, TEXT = KeyType("product_id", is_number=True), KeyType("customerId", is_number=False)


@given(st.lists(LONGS))
def test_encoded_numbers_sort_in_numeric_order(numbers: list[int]) -> None:
    assert [NUMBER.decode(key) for key in sorted(map(NUMBER.encode, numbers))] == sorted(numbers)


@given(LONGS)
def test_a_query_names_a_number_by_its_decimal_digits(number: int) -> None:
    assert NUMBER.parse(str(number)) == NUMBER.encode(number)
    assert len(NUMBER.encode(number)) == 8


@pytest.mark.parametrize("text", ["", "x", "1.0", "01", "-0", "+1", " 1", str(2**63), "1" * 30, "\u0661"])
def test_a_text_that_is_not_a_number_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match="product_id must be a number"):
        NUMBER.parse(text)


def test_bytes_that_are_not_a_number_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="takes 8 bytes, not 3"):
        NUMBER.decode(b"abc")


def test_text_is_encoded_as_utf_8() -> None:
    assert TEXT.encode("é") == TEXT.parse("é") == "é".encode()
    assert TEXT.decode("é".encode()) == "é"
    with pytest.raises(InvalidInputError, match="customerId is not UTF-8"):
        TEXT.decode(b"\xff")


@pytest.mark.parametrize(("kind", "is_number"), [("string", False), ("int", True), (["null", "long"], True)])
def test_columns_of_text_and_whole_numbers_can_be_keys(kind: object, is_number: bool) -> None:
    assert KeyType.from_column("c", kind) == KeyType("c", is_number=is_number)


def test_columns_of_other_types_cannot_be_keys() -> None:
    assert KeyType.from_column("c", "double") is None


@given(st.lists(st.binary(max_size=20), max_size=60), st.integers(1, 12))
def test_the_partitions_of_many_keys_are_those_of_each(keys: list[bytes], partitions: int) -> None:
    assert partitions_of_keys(keys, partitions) == [partition_of(key, partitions) for key in keys]
