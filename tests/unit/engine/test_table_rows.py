"""Records of a table as rows: the keys of tables of numbers, which stores have in another form."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import structlog

from balance_service.engine.misplaced import MisplacedKeys
from balance_service.engine.outputs import SENDER_HEADER
from balance_service.engine.table_partition import TableRows
from balance_service.kafka.partitioner import Partitioning, partition_of
from balance_service.model.record_keys import KEY_FORMAT_HEADER, KeyFormat, RecordKey

PARTITIONS = 3
SENT, MARKED = (SENDER_HEADER, b"app-days:topic"), (KEY_FORMAT_HEADER, b"long")


class Record:
    """A record without a value, which deletes a row."""

    def __init__(self, key: bytes | None, *headers: tuple[str, bytes]) -> None:
        self._key, self._headers = key, [*headers]

    def key(self) -> bytes | None:
        return self._key

    def value(self) -> None: ...

    def headers(self) -> list[tuple[str, bytes]]:
        return self._headers

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return 7

    def timestamp(self) -> tuple[int, int]:
        return 1, 1000


def rows_of(form: KeyFormat, *records: Any) -> tuple[list[bytes | None], dict[str, int]]:
    """The keys of some records' rows, each read from the partition of its key, and the causes of those without."""
    skipped: dict[str, int] = {}
    keys: list[bytes | None] = []
    codec: Any = None
    for record in records:
        misplaced = MisplacedKeys("days", Partitioning(PARTITIONS, "murmur2", form))
        rows = TableRows(codec, misplaced, partition_of(record.key() or b"", PARTITIONS), structlog.get_logger())
        found = rows.of(record)
        keys.append(None if found is None else found[0])
        skipped |= {cause: skipped.get(cause, 0) + count for cause, count in rows.skipped.items()}
    return keys, skipped


def long(number: int) -> bytes:
    return struct.pack(">q", number)


@pytest.mark.parametrize("number", [-1, 0, 5, 2**63 - 1, -(2**63)])
def test_the_row_of_a_long_is_found_by_the_number(number: int) -> None:
    assert rows_of("long", Record(long(number))) == ([RecordKey.of_format("long").encode(number)], {})


def test_an_int_takes_four_bytes() -> None:
    found = rows_of("int", Record(b"\xff" * 4), Record(long(1)))

    assert found == ([RecordKey.of_format("int").encode(-1), None], {"key-malformed": 1})


def test_text_that_begins_with_the_reserved_byte_is_no_row() -> None:
    assert rows_of("string", Record(b"\xff1"), Record(b"1")) == ([None, b"1"], {"key-reserved": 1})


def test_of_a_topic_written_half_by_the_former_form_only_longs_are_rows() -> None:
    """A number in our order would be another number as a long: 5 would be -2**63 + 5."""
    numbers = [-1, 0, 5, 2**63 - 1]
    former = [Record((number + 2**63).to_bytes(8, "big"), SENT) for number in numbers]
    later = [Record(long(number), SENT, MARKED) for number in numbers]
    foreign = [Record(long(9))]

    keys, skipped = rows_of("long", *former, *later, *foreign)

    assert keys == [None] * 4 + [RecordKey.of_format("long").encode(number) for number in (*numbers, 9)]
    assert skipped == {"key-malformed": 4}
