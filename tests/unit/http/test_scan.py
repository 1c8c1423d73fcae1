"""Scans: the merged answers of several instances equal the answer of one instance with all partitions."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from balance_service.engine.records import Position
from balance_service.http import scan
from balance_service.http.routing import LocalCopy
from balance_service.http.scan import CountScan, EntriesScan, TopScan
from balance_service.model.keys import ColumnKey
from tests.support.querying import read_to_its_end

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from balance_service.http.scan import Scan

_KEYS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1, max_size=4)
_AMOUNTS = st.decimals(-1000, 1000, places=2)
_STATES = st.dictionaries(_KEYS, _AMOUNTS, max_size=30)
_BOUNDS = st.none() | _KEYS


class View:
    """A store with some states."""

    def __init__(self, states: Mapping[str, Any]) -> None:
        self._states = sorted((key.encode(), str(amount).encode()) for key, amount in states.items())

    def scan(self, start: bytes, stop: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        return [state for state in self._states if start <= state[0] < stop][:limit]


def copies(states: Mapping[str, Any], partitions: Sequence[int]) -> list[LocalCopy]:
    """Some of three partitions."""
    found = []
    for partition in partitions:
        own = {key: amount for key, amount in states.items() if sum(key.encode()) % 3 == partition}
        view: Any = View(own)
        position = Position(0, 1, "id", keys=len(own))
        found.append(LocalCopy(partition, view, view, position, was_owned=True, is_frozen=False))
    return found


def answer(question: Scan[Any], states: Mapping[str, Decimal], instances: Sequence[Sequence[int]]) -> Any:
    """Merges the answers of instances with some partitions each, decimals as their digits."""
    first, *others = (read_to_its_end(question.read(copies(states, some), _view)) for some in instances)
    # As peers send it.
    parts = [first, *(question.parse(question.encode(part)) for part in others)]
    return json.loads(question.encode(question.merge(parts)), parse_float=Decimal, parse_int=Decimal)


def _view(frame: bytes) -> Mapping[str, Any]:
    return {"amount": Decimal(frame.decode())}


def _value(frame: bytes) -> Decimal:
    return Decimal(frame.decode())


def pairs(body: Any) -> list[tuple[str, Decimal]]:
    return [(entry["key"], entry["value"]["amount"]) for entry in body["entries"]]


def in_range(key: str, question: EntriesScan) -> bool:
    return (
        (question.start is None or question.start <= key)
        and (question.end is None or key <= question.end)
        and (question.after is None or question.after < key)
        and key.startswith(question.prefix or "")
    )


NUMBERS = ColumnKey("id", is_number=True)
_NUMBERS = st.integers(-12, 12) | st.integers(-(2**62), 2**62)


@pytest.mark.parametrize("instances", [[[0, 1, 2]], [[0], [1, 2]]])
@given(states=st.dictionaries(_NUMBERS, _AMOUNTS, max_size=30), ends=st.tuples(_NUMBERS, _NUMBERS))
def test_number_keys_are_ordered_as_numbers(
    instances: list[list[int]], states: dict[int, Decimal], ends: tuple[int, int]
) -> None:
    start, end = min(ends), max(ends)
    question = EntriesScan(start=str(start), end=str(end), limit=1000, key_type=NUMBERS)
    stored = [
        (number % 3, Position(0, 1, "id"), (NUMBERS.encode(number), str(amount).encode()))
        for number, amount in states.items()
    ]

    def copies_of(partitions: Sequence[int]) -> list[LocalCopy]:
        views: list[Any] = []
        for partition in partitions:
            view: Any = View({})
            view._states = sorted(state for own, _, state in stored if own == partition)
            views.append(LocalCopy(partition, view, view, Position(0, 1, "id"), was_owned=True, is_frozen=False))
        return views

    parts = [read_to_its_end(question.read(copies_of(partitions), _view)) for partitions in instances]
    found = json.loads(question.encode(question.merge(parts)), parse_float=Decimal, parse_int=Decimal)

    assert pairs(found) == [(str(n), amount) for n, amount in sorted(states.items()) if start <= n <= end]


@pytest.mark.parametrize("instances", [[[0, 1, 2]], [[0], [1, 2]], [[0], [1], [2]]])
@given(states=_STATES, start=_BOUNDS, end=_BOUNDS, prefix=_BOUNDS, after=_BOUNDS, limit=st.integers(1, 40))
def test_entries_are_the_sorted_union_of_all_partitions(
    instances: list[list[int]],
    states: dict[str, Decimal],
    start: str | None,
    end: str | None,
    prefix: str | None,
    after: str | None,
    limit: int,
) -> None:
    question = EntriesScan(start=start, end=end, prefix=prefix, after=after, limit=limit)
    wanted = [(key, amount) for key, amount in sorted(states.items()) if in_range(key, question)]

    found = answer(question, states, instances)

    assert pairs(found) == wanted[:limit]
    assert found["next"] == (wanted[limit - 1][0] if len(wanted) > limit else None)


@pytest.mark.shows("whole-range")
@given(states=_STATES, limit=st.integers(1, 7))
def test_pages_contain_every_key_once(states: dict[str, Decimal], limit: int) -> None:
    found: list[tuple[str, Decimal]] = []
    after = None
    while True:
        page = answer(EntriesScan(after=after, limit=limit), states, [[0], [1, 2]])
        found += pairs(page)
        after = page["next"]
        if after is None:
            break

    assert found == sorted(states.items())


@given(states=_STATES, most=st.sampled_from([1, 100]))
def test_pages_truncated_by_size_lose_no_entry(states: dict[str, Decimal], most: int) -> None:
    found: list[tuple[str, Decimal]] = []
    after = None
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(scan, "MAX_BYTES", most)
        while True:
            page = answer(EntriesScan(after=after, limit=1000), states, [[0], [1], [2]])
            found += pairs(page)
            after = page["next"]
            if after is None:
                break

    assert found == sorted(states.items())


@given(states=_STATES, limit=st.integers(1, 40))
def test_the_merged_top_is_the_top_of_all_entries(states: dict[str, Decimal], limit: int) -> None:
    found = answer(TopScan(by="amount", value=_value, limit=limit), states, [[0], [1], [2]])

    assert pairs(found) == sorted(states.items(), key=lambda state: (-state[1], state[0]))[:limit]
    assert "next" not in found


@example(states=dict.fromkeys("abcdef", 0.1), limit=4)
@example(states=dict.fromkeys("abcdef", 1e-07), limit=4)
@example(states=dict.fromkeys("abcdef", 1e16), limit=4)
@given(states=st.dictionaries(_KEYS, st.sampled_from([-0.3, 0.1, 1e-07, 1e16]), max_size=30), limit=st.integers(1, 40))
def test_equal_doubles_of_this_instance_and_of_peers_are_in_the_order_of_keys(
    states: dict[str, float], limit: int
) -> None:
    def view(frame: bytes) -> Mapping[str, Any]:
        return {"score": float(frame)}

    question = TopScan(by="score", value=float, limit=limit)
    for here in range(3):
        parts = [read_to_its_end(question.read(copies(states, [p]), view)) for p in range(3)]
        # As peers send it.
        parts = [part if p == here else question.parse(question.encode(part)) for p, part in enumerate(parts)]
        found = json.loads(question.encode(question.merge(parts)))

        best = sorted(states.items(), key=lambda state: (-state[1], state[0]))[:limit]
        assert [(entry["key"], entry["value"]["score"]) for entry in found["entries"]] == best


@given(states=_STATES, limit=st.integers(1, 40))
def test_a_top_truncated_by_size_says_so_and_its_entries_are_right(states: dict[str, Decimal], limit: int) -> None:
    wanted = sorted(states.items(), key=lambda state: (-state[1], state[0]))[:limit]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(scan, "MAX_BYTES", 100)
        found = answer(TopScan(by="amount", value=_value, limit=limit), states, [[0], [1], [2]])

    told = pairs(found)
    assert told == wanted[: len(told)]
    assert found.get("next") == (told[-1][0] if len(told) < len(wanted) else None)


@pytest.mark.shows("whole-range")
@given(states=_STATES)
def test_keys_are_counted_over_all_partitions(states: dict[str, Decimal]) -> None:
    assert answer(CountScan(), states, [[0, 2], [1]]) == {"count": len(states)}


def test_digits_are_kept_when_answers_are_merged() -> None:
    long = Decimal("12345678901234567890123456789012.10")
    scan = EntriesScan()
    bodies = [scan.encode(read_to_its_end(scan.read(copies({"a": long}, [p]), _view))) for p in range(3)]

    merged = scan.encode(scan.merge([scan.parse(body) for body in bodies]))

    assert merged == next(body for body in bodies if str(long) in body)
