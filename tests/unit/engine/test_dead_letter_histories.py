"""Any sequence of failures, retries, decisions, restarts and rebuilds gives the state that a plain list predicts.

The list has all events in order and those that were discarded. Every other event must count once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balance_service.read_models.activity import Activity
from balance_service.read_models.balance import Balance
from balance_service.testing import Driver
from tests.unit.engine.test_dead_letters import INCOMPATIBLE, UNKNOWN, Named, funds, told

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from balance_service.model.read_model import ReadModel

Step = tuple[str, Any]

_KEYS = st.sampled_from("ab")
_CAUSES = st.sampled_from([None, None, UNKNOWN, INCOMPATIBLE])
_ARRIVALS = st.tuples(st.just("arrive"), st.lists(st.tuples(_KEYS, _CAUSES), min_size=1, max_size=5))
_STEPS = st.one_of(
    _ARRIVALS,
    _ARRIVALS,
    st.tuples(st.just("mend"), st.sampled_from([UNKNOWN, INCOMPATIBLE])),
    st.tuples(st.just("advance"), st.sampled_from([5, 60, 3_000])),
    st.tuples(st.sampled_from(["discard", "redrive"]), st.integers(0, 20)),
    st.tuples(st.sampled_from(["restart", "rebuild", "redeliver"]), st.none()),
)


@dataclass
class History:
    """The events of a read model, and those that were discarded."""

    driver: Driver
    make: Callable[[int, str, str | None], Any]
    """Makes an event of its number, its key and the cause that makes it unreadable."""
    events: list[tuple[str, int]] = field(default_factory=list)
    discarded: set[int] = field(default_factory=set)

    def play(self, steps: Sequence[Step]) -> None:
        for name, what in steps:
            getattr(self, f"_{name}")(what)
        self._heal()

    def counted(self, key: str) -> list[int]:
        """Returns the numbers of the events of a key that count, in order."""
        return [n for offset, (of, n) in enumerate(self.events) if of == key and offset not in self.discarded]

    def _arrive(self, some: list[tuple[str, str | None]]) -> None:
        arrived = []
        for key, cause in some:
            arrived.append(self.make(len(self.events), key, cause))
            self.events.append((key, len(self.events)))
        self.driver.given(*arrived)

    def _mend(self, cause: str) -> None:
        self.driver.mend(cause)

    def _advance(self, minutes: int) -> None:
        self.driver.advance(minutes=minutes)

    def _discard(self, offset: int) -> None:
        if any(letter.offset == offset and letter.status.is_open for letter in self.driver.letters()):
            self.discarded.add(offset)
            self.driver.discard(offset)

    def _redrive(self, offset: int) -> None:
        found = [letter for letter in self.driver.letters() if letter.offset == offset]
        if found and found[0].status.value in ("scheduled", "waiting", "parked"):
            self.driver.redrive(offset)

    def _restart(self, _: None) -> None:
        self.driver.restart()

    def _rebuild(self, _: None) -> None:
        self.driver.rebuild()

    def _redeliver(self, _: None) -> None:
        if self.events:
            self.driver.redeliver()

    def _heal(self) -> None:
        """Makes every event readable, and has every dead letter retried."""
        self.driver.mend(UNKNOWN).mend(INCOMPATIBLE)
        self.driver.redrive(*(at.offset for at in self.driver.letters() if at.status.value in ("waiting", "parked")))
        self.driver.advance(minutes=72 * 5)


def money(number: int, key: str, cause: str | None) -> Any:
    return funds(f"{number + 1}.00", key, cause)


def name(number: int, key: str, cause: str | None) -> Any:
    return told(f"n{number}", key, cause)


@pytest.mark.shows("retried-once", "discarded")
@pytest.mark.parametrize("after", ["", "rebuilt"])
@given(steps=st.lists(_STEPS, max_size=12))
@settings(max_examples=60, deadline=None)
def test_every_event_that_is_not_discarded_counts_once(after: str, steps: list[Step]) -> None:
    with Driver(Balance()) as driver:
        history = History(driver, money)
        history.play(steps)
        if after:
            driver.rebuild()

        for key in "ab":
            expected = sum(number + 1 for number in history.counted(key))
            assert driver.view(key) == ({"amount": Decimal(expected)} if expected else None)
        assert all(not letter.status.is_open for letter in driver.letters())


@pytest.mark.shows("key-order")
@pytest.mark.parametrize("after", ["", "rebuilt"])
@given(steps=st.lists(_STEPS, max_size=12))
@settings(max_examples=60, deadline=None)
def test_if_order_matters_states_follow_the_sources_order(after: str, steps: list[Step]) -> None:
    with Driver(Named()) as driver:
        history = History(driver, name)
        history.play(steps)
        sent = driver.emitted("test-names")
        if after:
            driver.rebuild()

        for key in "ab":
            expected = [f"n{number}" for number in history.counted(key)]
            assert driver.view(key) == ({"names": expected} if expected else None)
        # Each event that counts is sent once, with the state after it; a rebuild sends nothing.
        assert driver.emitted("test-names") == sent
        of_key = {key: [r["names"] for r in sent if r is not None and r["id"] == key] for key in "ab"}
        for key, names in of_key.items():
            names_so_far = [f"n{number}" for number in history.counted(key)]
            assert names == [names_so_far[: n + 1] for n in range(len(names_so_far))]


@given(steps=st.lists(_STEPS, max_size=12))
@settings(max_examples=30, deadline=None)
def test_a_model_with_several_folds_counts_every_event_once(steps: list[Step]) -> None:
    model: ReadModel = Activity()
    with Driver(model) as driver:
        history = History(driver, money)
        history.play(steps)

        for key in "ab":
            view, numbers = driver.view(key), history.counted(key)
            assert (None if view is None else view["additions"]) == (len(numbers) or None)
            assert (None if view is None else view["greatest"]) == (max(numbers, default=-1) + 1 or None)
