"""How much is measured."""

from __future__ import annotations

from dataclasses import dataclass, replace

MEASURES = ("replay", "scaling", "restore", "freshness", "reads", "moves", "rewards", "leaderboard")


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of one run."""

    measures: tuple[str, ...]
    events: int
    customers: tuple[int, ...]
    """Scaling replays the first of them, too."""
    replays: tuple[int, ...]
    """How often each side replays, for each of `customers`."""
    restores: int
    repetitions: int
    """How often each side has its freshness and its reads measured."""
    keys: int
    small_events: int
    rates: tuple[int, ...]
    warm_seconds: float
    probes: int
    lone_probes: int
    """At 1 event/s."""
    connections: tuple[int, ...]
    read_rates: tuple[int, ...]
    read_seconds: float
    proxied: bool
    invoices: int
    cards: int
    rewards: int
    """How often each side replays the invoices."""
    players: int
    """Rows of the table that scores are joined with."""
    scores: int
    """A second."""


FULL = Plan(
    measures=MEASURES,
    events=10_000_000,
    customers=(100_000, 10_000, 1_000_000),
    replays=(3, 1, 1),
    restores=3,
    repetitions=1,
    keys=1_000_000,
    small_events=200_000,
    rates=(1, 1_000, 10_000, 50_000),
    warm_seconds=20.0,
    probes=200,
    lone_probes=40,
    connections=(16, 64),
    read_rates=(0, 20_000),
    read_seconds=8.0,
    proxied=True,
    invoices=2_000_000,
    cards=100_000,
    rewards=3,
    players=200_000,
    scores=1_000,
)
PAIRS = replace(
    FULL,
    measures=("replay", "restore", "freshness", "reads", "moves"),
    events=4_000_000,
    replays=(3, 3, 3),
    restores=1,
    repetitions=3,
    warm_seconds=10.0,
    probes=150,
    connections=(16,),
    proxied=False,
)
"""Beside an earlier checkout: small differences count, so the goals' figures are medians of three pairs."""
QUICK = Plan(
    measures=("replay", "freshness", "reads"),
    events=3_500_000,
    customers=(100_000,),
    replays=(1,),
    restores=1,
    repetitions=1,
    keys=100_000,
    small_events=100_000,
    rates=(1_000,),
    warm_seconds=5.0,
    probes=100,
    lone_probes=0,
    connections=(16,),
    read_rates=(0,),
    read_seconds=5.0,
    proxied=False,
    invoices=500_000,
    cards=100_000,
    rewards=1,
    players=20_000,
    scores=1_000,
)
SMOKE = Plan(
    measures=MEASURES,
    events=50_000,
    customers=(1_000, 100),
    replays=(2, 1),
    restores=2,
    repetitions=2,
    keys=20_000,
    small_events=5_000,
    rates=(1, 100, 500),
    warm_seconds=0.0,
    probes=10,
    lone_probes=4,
    connections=(2,),
    read_rates=(0, 100),
    read_seconds=1.0,
    proxied=True,
    invoices=20_000,
    cards=1_000,
    rewards=2,
    players=1_000,
    scores=100,
)
