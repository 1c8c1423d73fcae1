"""What is to be reached, figure by figure, in one run. Ratios depend on the peer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.figures import NAMES, Key
from bench.sides import BEFORE, OURS, THEIRS

if TYPE_CHECKING:
    from bench.figures import Figures


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound of our figure, or of its ratio to the peer's."""

    bound: float
    at_least: bool
    of_ratio: bool

    def __str__(self) -> str:
        sign, times = "≥" if self.at_least else "≤", "×" if self.of_ratio else ""
        return f"{sign} {self.bound:,g}{times}"

    def is_met(self, figures: Figures, key: Key) -> bool | None:
        """None if it was not measured."""
        value = figures.ratio(key) if self.of_ratio else figures.median(key, OURS)
        if value is None:
            return None
        return value >= self.bound if self.at_least else value <= self.bound


def goal_of(key: Key, peer: str) -> Goal | None:
    """The goal for a figure beside this peer, if there is one."""
    return _ABSOLUTE.get(key) or _BESIDE[peer].get(key)


def _at_least(bound: float, *, ratio: bool = False) -> Goal:
    return Goal(bound, at_least=True, of_ratio=ratio)


def _at_most(bound: float, *, ratio: bool = False) -> Goal:
    return Goal(bound, at_least=False, of_ratio=ratio)


def _key(measure: str, case: str, name: str) -> Key:
    return Key(measure, case, NAMES[name])


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
    _key("start", "clean, jars present", "ready"): _at_most(5),
}
_BESIDE = {
    THEIRS: {
        _key("replay", "100,000 customers", "rate"): _at_least(3.0, ratio=True),
        _key("replay", "10,000 customers", "rate"): _at_least(3.0, ratio=True),
        _key("replay", "1,000,000 customers", "rate"): _at_least(2.0, ratio=True),
        _key("replay", "100,000 customers", "cpu_with_start"): _at_most(0.5, ratio=True),
        _key("replay", "100,000 customers", "evenness"): _at_least(0.9),
        _key("replay", "1,000,000 customers", "memory"): _at_most(1_500),
        _key("rewards", "100,000 cards", "rate_with_start"): _at_least(1.0, ratio=True),
        _key("restore", "1,000,000 keys", "keys"): _at_least(1.0, ratio=True),
        _key("reads", "local, 16 connections, at rest", "requests"): _at_least(15_000),
        _key("reads", "local, 16 connections, at rest", "p99"): _at_most(2),
        _key("reads", "local, 16 connections, 20,000 events/s", "p99"): _at_most(20),
        _key("reads", "proxied, 16 connections, at rest", "requests"): _at_least(6_000),
        _key("reads", "proxied, 16 connections, at rest", "p99"): _at_most(5),
    },
    BEFORE: {
        _key("replay", "10,000 customers", "rate_with_start"): _at_least(0.97, ratio=True),
        _key("replay", "100,000 customers", "rate_with_start"): _at_least(0.97, ratio=True),
        _key("replay", "1,000,000 customers", "rate_with_start"): _at_least(0.97, ratio=True),
        _key("replay", "100,000 customers", "memory"): _at_most(0.75, ratio=True),
        _key("freshness", "1,000 events/s", "cpu_event"): _at_most(0.7, ratio=True),
        _key("freshness", "10,000 events/s", "cpu_event"): _at_most(0.7, ratio=True),
        _key("reads", "local, 16 connections, 20,000 events/s", "requests"): _at_least(1.2, ratio=True),
    },
}
