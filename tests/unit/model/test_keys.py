"""Keys as bytes: text as UTF-8, numbers in an encoding that sorts in numeric order, and columns one after another."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balance_service.errors import InvalidInputError
from balance_service.model.keys import ColumnKey, CompositeKey

LONGS = st.integers(-(2**63), 2**63 - 1) | st.integers(-300, 300)
NUMBER, TEXT = ColumnKey("product_id", is_number=True), ColumnKey("customerId", is_number=False)


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
    assert ColumnKey.from_column("c", kind) == ColumnKey("c", is_number=is_number)


def test_columns_of_other_types_cannot_be_keys() -> None:
    assert ColumnKey.from_column("c", "double") is None


TEXTS = st.text(alphabet=st.sampled_from("\0\1\2a\xff~\U0010ffff") | st.characters(codec="utf-8"), max_size=6)
VALUES = st.tuples(TEXTS, LONGS, TEXTS)
CARD, DAY, SHOP = (
    ColumnKey("card", is_number=False),
    ColumnKey("day", is_number=True),
    ColumnKey("shop", is_number=False),
)
COMPOSITE = CompositeKey((CARD, DAY, SHOP))
NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1, max_size=6)
VALID = st.tuples(NAMES, LONGS, NAMES)


def key_of(values: tuple[str, int, str]) -> bytes:
    return COMPOSITE.of(dict(zip(COMPOSITE.columns, values, strict=True)))


def in_order(values: tuple[str, int, str]) -> tuple[bytes, int, bytes]:
    """What composite keys are ordered by."""
    return values[0].encode(), values[1], values[2].encode()


@given(st.lists(VALUES, unique=True))
def test_composite_keys_differ_and_sort_as_their_columns_do(many: list[tuple[str, int, str]]) -> None:
    keys = {key_of(values): values for values in many}

    assert len(keys) == len(many)
    assert [keys[key] for key in sorted(keys)] == sorted(many, key=in_order)
    assert not any(key.startswith(b"\xff") for key in keys)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("ab", "c"), ("a", "bc")),
        (("a", ""), ("", "a")),
        (("a\0", "b"), ("a", "\0b")),
        (("a\0\1", "b"), ("a", "\1b")),
        (("a\0\1b", ""), ("a", "b")),
    ],
)
def test_the_end_of_a_column_is_part_of_the_key(one: tuple[str, str], other: tuple[str, str]) -> None:
    texts = CompositeKey((CARD, SHOP))

    assert texts.of({"card": one[0], "shop": one[1]}) != texts.of({"card": other[0], "shop": other[1]})


@given(VALID)
def test_a_composite_key_is_read_back(values: tuple[str, int, str]) -> None:
    key = key_of(values)
    fields = dict(zip(COMPOSITE.columns, values, strict=True))

    assert COMPOSITE.fields(key) == COMPOSITE.shown(COMPOSITE.text(key)) == fields
    assert COMPOSITE.parse(COMPOSITE.text(key)) == COMPOSITE.of_text(COMPOSITE.text(key)) == key
    assert COMPOSITE.text_of_shown(fields) == COMPOSITE.text(key)


def test_a_composite_key_is_named_by_its_columns() -> None:
    assert COMPOSITE.text(key_of(("Zoë&1", -20, "a b"))) == "card=Zo%C3%AB%261&day=-20&shop=a%20b"
    assert COMPOSITE.parse("shop=s&card=c&day=1") == key_of(("c", 1, "s"))


@given(st.lists(VALID, unique=True, max_size=30), VALID, LONGS)
def test_the_keys_with_the_same_first_columns_are_one_range(
    many: list[tuple[str, int, str]], one: tuple[str, int, str], to: int
) -> None:
    card, day, shop = one
    everything = [*many, one, (card, day, shop + "x"), (card + "x", day, shop), (card, to, shop)]

    def found(**given: Any) -> set[tuple[str, int, str]]:
        start, stop = COMPOSITE.range(**given)
        return {values for values in everything if start <= key_of(values) < stop}

    within = {"card": card}
    assert found() == {*everything}
    assert found(within=within) == {values for values in everything if values[0] == card}
    both = {**within, "day": str(day)}
    assert found(within=both) == {values for values in everything if values[:2] == (card, day)}
    ranged = {values for values in everything if values[0] == card and day <= values[1] <= to}
    assert found(within=within, start=str(day), end=str(to)) == ranged
    begun = {values for values in everything if values[:2] == (card, day) and values[2].startswith(shop)}
    assert found(within=both, prefix=shop) == begun
    assert found(within={**both, "shop": shop}) == {one}
    assert found(start=card, end=card) == {values for values in everything if values[0] == card}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"within": {"day": "1"}}, "card is missing: a range is one of the first columns of the key"),
        ({"within": {"city": "x"}}, "the key has no city: its columns are card, day, shop"),
        ({"within": {"card": "c"}, "start": "x"}, "day must be a number of at most 64 bits"),
        ({"within": {"card": "c"}, "prefix": "1"}, "prefix requires text, and day is a number"),
        ({"within": {"card": "c", "day": "1", "shop": "s"}, "start": "x"}, "and all are given"),
        ({"within": {"card": ""}}, "card must have 1 to 256 bytes"),
    ],
)
def test_a_range_that_composite_keys_do_not_have_is_refused(given: Any, why: str) -> None:
    with pytest.raises(InvalidInputError, match=why):
        COMPOSITE.range(**given)


@pytest.mark.parametrize(
    "text", ["", "c1", "card=c1", "card=c&day=1", "card=c&day=1&shop=s&city=x", "card=a&card=b&day=1"]
)
def test_a_text_without_the_columns_is_no_composite_key(text: str) -> None:
    with pytest.raises(InvalidInputError, match="the key must be of the form card=…&day=…&shop=…"):
        COMPOSITE.parse(text)


@pytest.mark.parametrize(
    ("key", "why"),
    [
        (b"", "card has no end"),
        (b"c", "card has no end"),
        (b"c\0", "card has no end"),
        (b"c\0\3", "card has no end"),
        (b"c\0\1", "takes 8 bytes, not 0"),
        (b"c\0\1" + bytes(7), "takes 8 bytes, not 7"),
        (b"c\0\1" + bytes(8), "shop has no end"),
        (b"c\0\1" + bytes(8) + b"s\0\1\0", "the key has 1 bytes after shop"),
        (b"\0\1" + bytes(8) + b"s\0\1", "card must have 1 to 256 bytes"),
        (b"\xc3\0\1" + bytes(8) + b"s\0\1", "card is not UTF-8"),
        (b"c\0\2\0\1" + bytes(8) + b"s\0\1", "card must not contain control characters"),
        (b"c" * 248 + b"\0\1" + bytes(8) + b"s\0\1", "card and day and shop together must have at most 256 bytes"),
        (b"\xff\0\1" + bytes(8) + b"s\0\1", "the key would begin with 0xFF"),
    ],
)
def test_bytes_that_are_no_composite_key_are_refused(key: bytes, why: str) -> None:
    with pytest.raises(InvalidInputError, match=why):
        COMPOSITE.fields(key)


@given(st.binary(max_size=40))
def test_bytes_are_a_composite_key_in_one_way_or_none(key: bytes) -> None:
    with suppress(InvalidInputError):
        assert COMPOSITE.of(COMPOSITE.fields(key)) == key


def test_a_key_that_would_begin_as_reserved_ones_do_is_refused() -> None:
    days = CompositeKey((DAY, CARD))

    with pytest.raises(InvalidInputError, match="day is too great: the key would begin with 0xFF"):
        days.parse(f"day={2**63 - 1}&card=c1")


@pytest.mark.parametrize("shown", ["card=c&day=1&shop=s", {"card": "c"}, {"card": "c", "day": "x", "shop": "s"}, None])
def test_what_no_answer_shows_is_no_key(shown: Any) -> None:
    with pytest.raises(TypeError):
        COMPOSITE.text_of_shown(shown)
