"""Columns as rows: the same as Arrow itself makes of them, of any types, nulls, slices and chunks."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balance_service.avro.arrow_rows import rows_of, values_of

if TYPE_CHECKING:
    from collections.abc import Callable

PLAIN: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.string(): st.text(max_size=3),
    pa.binary(): st.binary(max_size=3),
    pa.bool_(): st.booleans(),
    pa.float64(): st.floats(allow_nan=False),
    pa.decimal128(38, 2): st.decimals(places=2, allow_nan=False, allow_infinity=False, min_value=-(10**30)),
    pa.timestamp("us", "UTC"): st.integers(0, 10**15),
    pa.map_(pa.string(), pa.int32()): st.dictionaries(st.text(max_size=2), st.integers(0, 9), max_size=2).map(
        lambda value: list(value.items())
    ),
}
Typed = tuple[pa.DataType, st.SearchStrategy[Any]]


def struct_of(fields: list[Typed]) -> Typed:
    kind = pa.struct([(f"f{number}", field) for number, (field, _) in enumerate(fields)])
    members = {f"f{number}": value | st.none() for number, (_, value) in enumerate(fields)}
    return kind, st.fixed_dictionaries(members)


def list_of(element: Typed) -> Typed:
    return pa.list_(element[0]), st.lists(element[1] | st.none(), max_size=3)


TYPES = st.recursive(
    st.sampled_from(sorted(PLAIN.items(), key=str)),
    lambda inner: st.lists(inner, max_size=3).map(struct_of) | inner.map(list_of),
    max_leaves=5,
)


@given(st.data())
def test_rows_equal_those_of_to_pylist(data: st.DataObject) -> None:
    kind, value = data.draw(TYPES)
    chunks = data.draw(st.lists(st.lists(value | st.none(), max_size=4), min_size=1, max_size=3))
    column = pa.chunked_array([pa.array(chunk, kind) for chunk in chunks], kind)
    table = pa.table({"one": column, "offset": pa.array(range(len(column)))})
    first = data.draw(st.integers(0, len(column)))
    for rows in (table, table.slice(first), table.combine_chunks().slice(first)):
        assert rows_of(rows) == rows.to_pylist(maps_as_pydicts="strict")
        for batch in rows.to_batches():
            assert rows_of(batch) == batch.to_pylist(maps_as_pydicts="strict")


@pytest.mark.parametrize(
    ("kind_of", "most"), [(pa.decimal32, 9), (pa.decimal64, 18), (pa.decimal128, 38), (pa.decimal256, 76)]
)
@given(st.data())
def test_a_decimal_has_the_same_digits_as_in_to_pylist(
    kind_of: Callable[[int, int], pa.DataType], most: int, data: st.DataObject
) -> None:
    scale = data.draw(st.integers(-most, most))
    kind = kind_of(most, scale)
    numbers = data.draw(st.lists(st.integers(-9, 9) | st.integers(-(10**most) + 1, 10**most - 1), max_size=5))
    # Of their bytes: of few digits and a negative scale, Arrow makes no decimal by itself.
    stored = b"".join(number.to_bytes(kind.byte_width, "little", signed=True) for number in numbers)
    column = pa.Array.from_buffers(kind, len(numbers), [None, pa.py_buffer(stored)])

    digits = [Decimal((number < 0, tuple(map(int, str(abs(number)))), -scale)) for number in numbers]
    assert repr(values_of(column)) == repr(column.to_pylist()) == repr(digits)


MAP = pa.map_(pa.string(), pa.int32())


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.list_(MAP), [[("a", 1)]]),
        (pa.large_list(MAP), [[("a", 1)]]),
        (pa.map_(pa.string(), MAP), [("x", [("a", 1)])]),
        (pa.map_(pa.string(), pa.struct([("f", MAP)])), [("x", {"f": [("a", 1)]})]),
    ],
    ids=str,
)
def test_a_map_is_a_dict_within_any_type(kind: pa.DataType, value: Any) -> None:
    assert "{'a': 1}" in repr(values_of(pa.array([value], kind)))


def test_a_map_with_a_duplicate_key_is_refused() -> None:
    column = pa.array([[("a", 1), ("a", 2)]], pa.map_(pa.string(), pa.int32()))

    with pytest.raises(KeyError, match="a"):
        values_of(column)


def test_rows_without_columns_keep_their_count() -> None:
    assert values_of(pa.array([{}, None, {}], pa.struct([]))) == [{}, None, {}]
