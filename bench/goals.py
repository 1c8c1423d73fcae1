"""What is to be reached, figure by figure, in one run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.figures import NAMES, Key
from bench.sides import OURS

if TYPE_CHECKING:
    from bench.figures import Figures


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound of our figure, or of its ratio to theirs."""

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


def goal_of(key: Key) -> Goal | None:
    """The goal for a figure, if there is one."""
    return _GOALS.get(key)


def _at_least(bound: float, *, ratio: bool = False) -> Goal:
    return Goal(bound, at_least=True, of_ratio=ratio)


def _at_most(bound: float, *, ratio: bool = False) -> Goal:
    return Goal(bound, at_least=False, of_ratio=ratio)


def _key(measure: str, case: str, name: str) -> Key:
    return Key(measure, case, NAMES[name])


_GOALS = {
    _key("replay", "100,000 customers", "rate"): _at_least(3.0, ratio=True),
    _key("replay", "10,000 customers", "rate"): _at_least(3.0, ratio=True),
    _key("replay", "1,000,000 customers", "rate"): _at_least(2.0, ratio=True),
    _key("replay", "100,000 customers", "cpu_with_start"): _at_most(0.5, ratio=True),
    _key("replay", "100,000 customers", "evenness"): _at_least(0.9),
    _key("replay", "1,000,000 customers", "memory"): _at_most(1_500),
    _key("restore", "1,000,000 keys", "keys"): _at_least(1.0, ratio=True),
    _key("freshness", "1,000 events/s", "p50"): _at_most(120),
    _key("freshness", "1,000 events/s", "p99"): _at_most(250),
    _key("freshness", "50,000 events/s", "p99"): _at_most(500),
    _key("idle", "one instance", "idle"): _at_most(10),
    _key("reads", "local, 16 connections, at rest", "requests"): _at_least(15_000),
    _key("reads", "local, 16 connections, at rest", "p99"): _at_most(2),
    _key("reads", "local, 16 connections, 20,000 events/s", "p99"): _at_most(20),
    _key("reads", "proxied, 16 connections, at rest", "requests"): _at_least(6_000),
    _key("reads", "proxied, 16 connections, at rest", "p99"): _at_most(5),
    _key("start", "clean, jars present", "ready"): _at_most(8),
}
