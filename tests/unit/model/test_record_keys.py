"""The records' own keys: the producers' bytes, the stores', and the readable form that queries have."""

from __future__ import annotations

import struct
from contextlib import suppress
from typing import TYPE_CHECKING, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balance_service.errors import InvalidInputError
from balance_service.kafka.partitioner import Partitioning, partition_of
from balance_service.model.record_keys import KEY_FORMATS, RECORD_KEY, KeyFormat, RecordKey, is_record_key

if TYPE_CHECKING:
    from uuid import UUID

FORMATS: dict[KeyFormat, st.SearchStrategy[str | int | UUID | bytes]] = {
    "string": st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=20),
    "int": st.integers(-(2**31), 2**31 - 1) | st.integers(-3, 3),
    "long": st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 3),
    "uuid": st.uuids(),
    "bytes": st.binary(min_size=1, max_size=128),
}
VALUES = st.sampled_from(KEY_FORMATS).flatmap(
    lambda form: st.tuples(st.just(form), st.lists(FORMATS[form], min_size=1, max_size=20))
)


def as_kafka_writes(form: KeyFormat, value: str | int | UUID | bytes) -> bytes:
    """Source: org.apache.kafka.common.serialization, Integer-, Long-, UUID- and StringSerializer."""
    match value:
        case int():
            return struct.pack(">i" if form == "int" else ">q", value)
        case bytes():
            return value
    return str(value).encode()


def test_the_forms_are_those_that_are_documented() -> None:
    assert [*FORMATS] == [*KEY_FORMATS] == [*get_args(KeyFormat)]


@given(VALUES)
def test_each_form_can_be_made_of_the_others(given: tuple[KeyFormat, list[str | int | UUID | bytes]]) -> None:
    form, values = given
    key_type = RecordKey.of_format(form)
    for value in values:
        sent = as_kafka_writes(form, value)
        stored = key_type.stored(sent)
        readable = value.hex() if isinstance(value, bytes) else str(value)
        assert key_type.record_key(value) == key_type.sent(stored) == sent
        assert key_type.text(stored) == key_type.shown(readable) == readable
        assert key_type.parse(readable) == key_type.of_text(readable) == stored
        assert key_type.fields(stored) == {"key": value if isinstance(value, int) else readable}


@given(VALUES)
def test_no_two_keys_are_one_and_stores_sort_them_as_values(
    given: tuple[KeyFormat, list[str | int | UUID | bytes]],
) -> None:
    form, values = given
    key_type = RecordKey.of_format(form)
    stored = {value: key_type.stored(as_kafka_writes(form, value)) for value in values}

    assert len({*stored.values()}) == len({*values})
    in_order = sorted(stored, key=lambda value: value.encode() if isinstance(value, str) else value)
    assert sorted(stored, key=stored.__getitem__) == in_order


@given(VALUES)
def test_no_key_begins_as_reserved_ones_do(given: tuple[KeyFormat, list[str | int | UUID | bytes]]) -> None:
    form, values = given
    assert all(RecordKey.of_format(form).parse(_readable(value))[0] != 0xFF for value in values)


@given(VALUES, st.integers(1, 12), st.sampled_from(["murmur2", "crc32", "fnv1a"]))
def test_a_key_is_on_the_partition_of_the_producers_bytes(
    given: tuple[KeyFormat, list[str | int | UUID | bytes]], partitions: int, partitioner: str
) -> None:
    form, values = given
    sent = [as_kafka_writes(form, value) for value in values]
    stored = [*map(RecordKey.of_format(form).stored, sent)]
    of_topic = Partitioning(partitions, partitioner, form)  # type: ignore[arg-type]

    assert [of_topic.of(key) for key in stored] == [partition_of(key, partitions, partitioner) for key in sent]  # type: ignore[arg-type]
    assert of_topic.of_keys(stored) == [of_topic.of(key) for key in stored]


def test_a_query_for_5_hashes_the_eight_bytes_of_a_long() -> None:
    five, key_type = b"\0\0\0\0\0\0\0\5", RecordKey.of_format("long")

    assert Partitioning(97, "murmur2", "long").of(key_type.parse("5")) == partition_of(five, 97)
    assert key_type.sent(key_type.parse("5")) == five


@pytest.mark.parametrize("number", [-1, 0, 2**63 - 1, -(2**63)])
def test_every_long_is_a_key(number: int) -> None:
    key_type = RecordKey.of_format("long")
    assert key_type.text(key_type.stored(struct.pack(">q", number))) == str(number)


@pytest.mark.parametrize(
    ("form", "key", "said"),
    [
        ("int", b"\0" * 8, "not an int, which takes 4 bytes"),
        ("int", b"", "not an int"),
        ("long", b"\0" * 4, "not a long, which takes 8 bytes"),
        ("long", b"5", "name the `key_format` of the topic's producers"),
        ("bytes", b"", "not 1 to 128 bytes"),
        ("bytes", b"\0" * 129, "not 1 to 128 bytes"),
        ("string", b"\xff", "not text of 1 to 256 bytes of UTF-8"),
        ("string", b"", "not text"),
        ("string", b"a\nb", "without control characters"),
        ("string", b"a" * 257, "not text"),
        ("uuid", b"\0" * 16, "not a UUID as text in lower case"),
        ("uuid", b"123E4567-E89B-12D3-A456-426614174000", "not a UUID"),
        ("uuid", b"123e4567e89b12d3a456426614174000", "not a UUID"),
        ("uuid", b"\xff" * 36, "not a UUID"),
    ],
)
def test_a_key_of_another_form_is_refused(form: KeyFormat, key: bytes, said: str) -> None:
    key_type = RecordKey.of_format(form)
    with pytest.raises(InvalidInputError, match=said):
        key_type.fields(key_type.stored(key))


@given(st.sampled_from(KEY_FORMATS), st.binary(max_size=20))
def test_a_key_is_refused_or_kept_as_it_is(form: KeyFormat, key: bytes) -> None:
    key_type = RecordKey.of_format(form)
    with suppress(InvalidInputError):
        (value,) = key_type.fields(key_type.stored(key)).values()
        assert key_type.sent(key_type.encode(value)) == key


@pytest.mark.parametrize(
    ("form", "asked", "key"),
    [
        ("uuid", "123E4567-E89B-12d3-A456-426614174000", "123e4567-e89b-12d3-a456-426614174000"),
        ("bytes", "00FF", "00ff"),
        ("long", "-5", "-5"),
    ],
)
def test_a_query_may_write_a_key_otherwise(form: KeyFormat, asked: str, key: str) -> None:
    key_type = RecordKey.of_format(form)
    assert key_type.text(key_type.parse(asked)) == key_type.shown(asked) == key


@pytest.mark.parametrize(
    ("form", "asked", "said"),
    [
        ("int", str(2**31), "at most 32 bits"),
        ("int", str(-(2**31) - 1), "at most 32 bits"),
        ("long", str(2**63), "at most 64 bits"),
        ("long", "05", "a number"),
        ("uuid", "123e4567-e89b-12d3-a456-42661417400", "must be a UUID"),
        ("uuid", "{123e4567-e89b-12d3-a456-426614174000}", "must be a UUID"),
        ("bytes", "0", "hexadecimal digits"),
        ("bytes", "", "hexadecimal digits"),
        ("bytes", "0g", "hexadecimal digits"),
        ("bytes", "00" * 129, "1 to 128 bytes"),
        ("string", "", "1 to 256 bytes"),
    ],
)
def test_a_text_that_is_no_key_is_refused(form: KeyFormat, asked: str, said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        RecordKey.of_format(form).parse(asked)


@given(VALUES, st.data())
def test_a_range_has_the_keys_from_its_first_to_its_last(
    given: tuple[KeyFormat, list[str | int | UUID | bytes]], data: st.DataObject
) -> None:
    form, values = given
    key_type = RecordKey.of_format(form)
    keys = sorted({key_type.parse(_readable(value)) for value in values})
    first, last = sorted([data.draw(st.sampled_from(keys)), data.draw(st.sampled_from(keys))])
    start, stop = key_type.range(key_type.text(first), key_type.text(last))

    assert [key for key in keys if start <= key < stop] == [key for key in keys if first <= key <= last]


@given(st.lists(st.binary(min_size=1, max_size=3) | st.sampled_from([b"\xff", b"\xff\xff", b"\xfe\xff"]), max_size=20))
def test_a_prefix_of_bytes_is_named_in_hexadecimal_digits(values: list[bytes]) -> None:
    key_type = RecordKey.of_format("bytes")
    for prefix in (b"\xff", b"\0", b"\xfe\xff"):
        start, stop = key_type.range(prefix=prefix.hex().upper())
        found = {value for value in values if start <= key_type.parse(value.hex()) < stop}
        assert found == {value for value in values if value.startswith(prefix)}


def test_a_prefix_of_uuids_may_be_written_in_any_case() -> None:
    key_type = RecordKey.of_format("uuid")
    start, stop = key_type.range(prefix="123E")
    assert start <= key_type.parse("123e4567-e89b-12d3-a456-426614174000") < stop


def test_a_prefix_of_numbers_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="prefix requires text keys"):
        RecordKey.of_format("long").range(prefix="1")
    with pytest.raises(InvalidInputError, match="prefix must be bytes in hexadecimal digits"):
        RecordKey.of_format("bytes").range(prefix="f")


def test_a_column_called_key_is_not_the_records_key() -> None:
    assert is_record_key(RECORD_KEY)
    assert not is_record_key("key")


def _readable(value: str | int | UUID | bytes) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
