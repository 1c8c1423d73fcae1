"""How much is measured."""

from __future__ import annotations

from dataclasses import dataclass

MEASURES = ("replay", "scaling", "restore", "freshness", "reads", "moves")


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of one run. `customers`: the first is replayed `repetitions` times, and is what scaling replays.

    As often is the changelog restored.
    """

    measures: tuple[str, ...]
    events: int
    customers: tuple[int, ...]
    repetitions: int
    keys: int
    small_events: int
    rates: tuple[int, ...]
    warm_seconds: float
    probes: int
    connections: tuple[int, ...]
    read_rates: tuple[int, ...]
    read_seconds: float
    proxied: bool


FULL = Plan(
    measures=MEASURES,
    events=10_000_000,
    customers=(100_000, 10_000, 1_000_000),
    repetitions=3,
    keys=1_000_000,
    small_events=200_000,
    rates=(1_000, 10_000, 50_000),
    warm_seconds=20.0,
    probes=200,
    connections=(16, 64),
    read_rates=(0, 20_000),
    read_seconds=8.0,
    proxied=True,
)
QUICK = Plan(
    measures=("replay", "freshness", "reads"),
    events=3_500_000,
    customers=(100_000,),
    repetitions=1,
    keys=100_000,
    small_events=100_000,
    rates=(1_000,),
    warm_seconds=5.0,
    probes=100,
    connections=(16,),
    read_rates=(0,),
    read_seconds=5.0,
    proxied=False,
)
SMOKE = Plan(
    measures=MEASURES,
    events=50_000,
    customers=(1_000, 100),
    repetitions=2,
    keys=20_000,
    small_events=5_000,
    rates=(100, 500),
    warm_seconds=0.0,
    probes=10,
    connections=(2,),
    read_rates=(0, 100),
    read_seconds=1.0,
    proxied=True,
)
