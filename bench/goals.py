"""The goals for figures of a run. Goals for ratios depend on the peer."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.figures import NAMES, Key
from bench.first_event import CASE
from bench.generations import building_case, comparison_case, rebuild_case, switch_case
from bench.listeners import cost_case, delay_case
from bench.moves import many_case
from bench.plan import CUSTOMERS, EVENTS, GENERATIONS, LONG_EVENTS, PROXIED, read_case, replay_case
from bench.schema_ids import ids_case
from bench.sides import BEFORE, OURS, THEIRS
from bench.tasks import tasks_case

if TYPE_CHECKING:
    from bench.figures import Figures


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound on the median of our figure, or on its ratio to the peer's."""

    bound: float
    at_least: bool
    of_ratio: bool
    every: bool = False
    """Whether every repetition must meet the goal, not only the median."""
    up_to: float | None = None
    """The other bound, if there are two."""

    def __str__(self) -> str:
        sign, times = "≥" if self.at_least else "≤", "×" if self.of_ratio else ""
        bound = f"{sign} {self.bound:,g}" if self.up_to is None else f"{self.bound:,g} to {self.up_to:,g}"
        return f"{bound}{times}{' in each' if self.every else ''}"

    def is_met(self, figures: Figures, key: Key) -> bool | None:
        """None if it was not measured."""
        values = figures.ratios(key) if self.of_ratio else figures.values(key, OURS)
        if not values:
            return None
        if not self.every:
            return self._allows(statistics.median(values))
        return len(values) >= len(figures.values(key, OURS)) and all(map(self._allows, values))

    def _allows(self, value: float) -> bool:
        if self.up_to is not None and value > self.up_to:
            return False
        return value >= self.bound if self.at_least else value <= self.bound


def goal_of(key: Key, peer: str) -> Goal | None:
    """The goal for a figure in a comparison with this peer; None if there is none."""
    return _ABSOLUTE.get(key) or _BESIDE[peer].get(key)


def goals_beside(peer: str) -> list[Key]:
    """All figures with a goal in a comparison with this peer."""
    return [*_ABSOLUTE, *_BESIDE[peer]]


def _at_least(bound: float, *, ratio: bool = False, every: bool = False, up_to: float | None = None) -> Goal:
    return Goal(bound, at_least=True, of_ratio=ratio, every=every, up_to=up_to)


def _at_most(bound: float, *, ratio: bool = False, every: bool = False) -> Goal:
    return Goal(bound, at_least=False, of_ratio=ratio, every=every)


def _key(measure: str, case: str, name: str) -> Key:
    return Key(measure, case, NAMES[name])


def _replays() -> dict[Key, Goal]:
    """Goals for the repetitions at each size, and for the long pair."""
    goals = {}
    for events, customers in [(EVENTS, n) for n in CUSTOMERS] + [(LONG_EVENTS, CUSTOMERS[0])]:
        case = replay_case(events, customers)
        few = customers <= _FEW_CUSTOMERS
        goals[_key("replay", case, "rate")] = _at_least(1.5 if few else 2.5, ratio=True)
        goals[_key("replay", case, "rate_with_start")] = _at_least(1.2 if few else 2.0, ratio=True)
        goals[_key("replay", case, "cpu_with_start")] = _at_most(0.6, ratio=True)
    return goals


_FEW_CUSTOMERS = 10_000
_ABSOLUTE = {
    _key("freshness", "1 event/s", "p50"): _at_most(25),
    _key("freshness", "1 event/s", "p99"): _at_most(80),
    _key("freshness", "1,000 events/s", "p50"): _at_most(25),
    _key("freshness", "1,000 events/s", "p99"): _at_most(80),
    _key("freshness", "10,000 events/s", "p50"): _at_most(25),
    _key("freshness", "10,000 events/s", "p99"): _at_most(100),
    _key("freshness", "50,000 events/s", "p50"): _at_most(90),
    _key("freshness", "50,000 events/s", "p99"): _at_most(400),
    _key("freshness", "leaderboard, 1,000 scores/s", "p50"): _at_most(80),
    _key("idle", "one instance", "idle"): _at_most(2),
    _key("tasks", tasks_case(64), "caught_up"): _at_most(12),
    _key("tasks", tasks_case(64), "cpu_start"): _at_most(18),
    _key("tasks", tasks_case(64), "idle"): _at_most(4),
    _key("tasks", tasks_case(64), "memory"): _at_most(850),
    _key("tasks", tasks_case(64), "threads"): _at_most(500),
    _key("tasks", tasks_case(128), "caught_up"): _at_most(20),
    **{
        _key("moves", many_case(64, what), name): _at_most(bound)
        for what, bound in (("moves", 3_000), ("stays", 300))
        for name in ("silence", "stall")
    },
    _key("ids", ids_case(400), "new_id"): _at_most(2),
    _key("ids", ids_case(400), "stall"): _at_most(200),
    _key("ids", ids_case(400), "of_few"): _at_most(1.1),
    _key("first", CASE, "first_event"): _at_most(5.2),
    _key("first", CASE, "after_ready"): _at_most(100),
    _key("listeners", delay_case(100), "p50"): _at_most(5),
    _key("listeners", delay_case(100), "p99"): _at_most(25),
    _key("listeners", cost_case(1_000), "of_none"): _at_least(0.9),
    _key("listeners", cost_case(1_000), "each"): _at_most(60),
    _key("start", "clean, jars present", "ready"): _at_most(5),
}
_BESIDE = {
    THEIRS: {
        **_replays(),
        _key("replay", replay_case(EVENTS, 100_000), "evenness"): _at_least(0.9),
        _key("replay", replay_case(EVENTS, 1_000_000), "memory"): _at_most(1_500),
        _key("postgresql", replay_case(EVENTS, 100_000), "rate"): _at_least(4.0, ratio=True),
        _key("json", replay_case(EVENTS, 100_000), "rate"): _at_least(0.6, ratio=True),
        _key("scaling", "2 instances", "of_one"): _at_least(0.95),
        _key("scaling", "3 instances", "of_one"): _at_least(0.95),
        _key("rewards", "100,000 cards", "rate_with_start"): _at_least(1.0, ratio=True),
        _key("rewards", "100,000 cards", "cpu_with_start"): _at_most(45),
        _key("purchases", "200,000 invoices", "rate_with_start"): _at_least(1.0, ratio=True),
        _key("own", "100,000 cards", "rate_with_start"): _at_least(0.8, ratio=True),
        _key("restore", "1,000,000 keys", "keys"): _at_least(1.1, ratio=True, every=True),
        _key(GENERATIONS, rebuild_case(EVENTS), "rate"): _at_least(0.8, ratio=True),
        _key(GENERATIONS, building_case(1_000, None), "p50"): _at_most(3, ratio=True),
        _key(GENERATIONS, building_case(1_000, 20_000), "p50"): _at_most(1.3, ratio=True),
        # A look is up to 0.1 s later than the advance that it sees.
        _key(GENERATIONS, building_case(1_000, 20_000), "of_most"): _at_least(0.9, up_to=1.02, every=True),
        _key(GENERATIONS, comparison_case(1_000_000), "compared"): _at_most(20),
        _key(GENERATIONS, comparison_case(1_000_000), "p50"): _at_most(2, ratio=True),
        _key(GENERATIONS, comparison_case(1_000_000), "p99"): _at_most(2, ratio=True),
        **{
            _key(GENERATIONS, switch_case(instances), name): _at_most(bound, every=True)
            for instances in (2, 3)
            for name, bound in (("silence", 300), ("stall", 300), ("refused", 0))
        },
        **{
            _key("reads", read_case("local", connections, rate, headers=headers), "requests"): _at_least(
                0.8, ratio=True
            )
            for rate in (0, 20_000)
            for connections in (16, 64)
            for headers in (False, True)
        },
        _key("reads", read_case("local", 16, 0), "p99"): _at_most(2),
        _key("reads", read_case("local", 16, 20_000), "p99"): _at_most(20),
        _key("reads", read_case(PROXIED, 16, 0), "requests"): _at_least(6_000),
        _key("reads", read_case(PROXIED, 16, 0), "p99"): _at_most(5),
    },
    BEFORE: {
        **{
            _key("replay", replay_case(EVENTS, customers), "rate_with_start"): _at_least(0.97, ratio=True)
            for customers in CUSTOMERS
        },
        _key("replay", replay_case(EVENTS, 100_000), "memory"): _at_most(0.75, ratio=True),
        _key("freshness", "1,000 events/s", "cpu_event"): _at_most(0.7, ratio=True),
        _key("freshness", "10,000 events/s", "cpu_event"): _at_most(0.7, ratio=True),
        _key("reads", read_case("local", 16, 20_000), "requests"): _at_least(1.2, ratio=True),
    },
}
