"""The sizes of runs, and the names of their cases."""

from __future__ import annotations

from dataclasses import dataclass, replace

MEASURES = (
    "replay",
    "scaling",
    "restore",
    "freshness",
    "reads",
    "committed",
    "moves",
    "tasks",
    "ids",
    "first",
    "listeners",
    "rewards",
    "purchases",
    "own",
    "leaderboard",
    "postgresql",
    "quix",
    "json",
)
GENERATIONS = "generations"
"""The measure that has a run of its own."""
EVENTS = 3_000_000
LONG_EVENTS = 10_000_000
CUSTOMERS = (100_000, 10_000, 1_000_000)


def replay_case(events: int, customers: int) -> str:
    """The case of a replay of these numbers of events and customers."""
    return f"{customers:,} customers, {events:,} events"


PROXIED = "proxied (the peer is a sample server on the JDK’s HttpServer)"


def read_case(kind: str, connections: int, rate: int, *, headers: bool = False) -> str:
    """The case of reads while events arrive at a rate, with or without the headers of an ingress."""
    load = f"{rate:,} events/s" if rate else "at rest"
    return f"{kind}, {connections} connections, {load}{', an ingress’ headers' if headers else ''}"


@dataclass(frozen=True, slots=True)
class Plan:
    """The sizes of a run."""

    measures: tuple[str, ...]
    repetitions: int
    """Repetitions of measures that a run does not take only once."""
    events: int
    customers: tuple[int, ...]
    """Sizes of replays; most measures use the first."""
    long_events: int
    """Events of the single long replay, with the first of `customers`; 0 for none."""
    commit_intervals_ms: tuple[int, ...]
    """Commit intervals of Kafka Streams, each with the record cache on and off."""
    committed_intervals_ms: tuple[int, ...]
    """The same for `committed`, where an interval is also the age of an answer."""
    scaled_events: int
    """Events of the replays by one, two and three instances."""
    keys: int
    small_events: int
    rates: tuple[int, ...]
    tried_rate: int
    """The rate at which settings of Kafka Streams are tried."""
    idle_seconds: float
    warm_seconds: float
    probes: int
    lone_probes: int
    """Probes at 1 event/s."""
    connections: tuple[int, ...]
    read_rates: tuple[int, ...]
    headers: tuple[bool, ...]
    """Whether reads also have the headers of an ingress."""
    read_seconds: float
    proxied: int
    """Repetitions of proxied reads."""
    tasks: tuple[tuple[int, int], ...]
    """Number of models and of partitions; the moves of many tasks use the last but one."""
    waiting_events: int
    schema_ids: tuple[int, ...]
    starts: int
    """Number of starts in `first`."""
    listeners: tuple[int, int]
    """Listeners whose delay, and whose cost, is measured."""
    invoices: int
    cards: int
    rewards: int
    """Repetitions of `committed`, `rewards`, `purchases` and `own`."""
    players: int
    """Rows of the table of players."""
    scores: int
    """Scores per second."""
    builds: int
    """Repetitions of `generations`."""
    max_rate: int
    """The bound of a rebuild's rate."""
    switched: tuple[int, ...]
    """Numbers of instances that switch."""
    quix_events: int


FULL = Plan(
    measures=MEASURES,
    repetitions=5,
    events=EVENTS,
    customers=CUSTOMERS,
    long_events=LONG_EVENTS,
    commit_intervals_ms=(100, 1_000, 5_000),
    committed_intervals_ms=(20, 100),
    scaled_events=1_500_000,
    keys=1_000_000,
    small_events=100_000,
    rates=(1, 1_000, 10_000, 50_000),
    tried_rate=1_000,
    idle_seconds=10.0,
    warm_seconds=6.0,
    probes=80,
    lone_probes=8,
    connections=(16, 64),
    read_rates=(0, 20_000),
    headers=(False, True),
    read_seconds=3.0,
    proxied=3,
    tasks=((1, 2), (1, 32), (2, 32), (2, 64)),
    waiting_events=20_000,
    schema_ids=(1, 400),
    starts=10,
    listeners=(100, 1_000),
    invoices=200_000,
    cards=100_000,
    rewards=3,
    players=200_000,
    scores=1_000,
    builds=2,
    max_rate=20_000,
    switched=(2, 3),
    quix_events=200_000,
)
PAIRS = replace(
    FULL,
    measures=("replay", "restore", "freshness", "reads", "moves", "tasks", "ids", "first", "listeners"),
    repetitions=3,
    long_events=0,
    warm_seconds=10.0,
    probes=150,
    lone_probes=40,
    connections=(16,),
    headers=(False,),
    read_seconds=8.0,
    proxied=0,
)
"""For a comparison with an earlier checkout: three pairs of each."""
QUICK = replace(
    FULL,
    measures=("replay", "freshness", "reads"),
    repetitions=1,
    events=2_500_000,
    customers=CUSTOMERS[:1],
    long_events=0,
    commit_intervals_ms=(1_000,),
    rates=(1_000,),
    idle_seconds=5.0,
    warm_seconds=4.0,
    probes=60,
    connections=(16,),
    read_rates=(0,),
    headers=(False,),
    proxied=0,
)
SMOKE = replace(
    FULL,
    repetitions=2,
    events=50_000,
    customers=(1_000, 100),
    long_events=100_000,
    commit_intervals_ms=(1_000,),
    committed_intervals_ms=(100,),
    scaled_events=20_000,
    keys=20_000,
    small_events=5_000,
    rates=(1, 100, 500),
    tried_rate=100,
    idle_seconds=1.0,
    warm_seconds=0.0,
    probes=10,
    lone_probes=4,
    connections=(2,),
    read_rates=(0, 100),
    read_seconds=1.0,
    proxied=1,
    tasks=((1, 2), (2, 2), (2, 4)),
    waiting_events=1_000,
    schema_ids=(1, 3),
    starts=2,
    listeners=(10, 20),
    invoices=20_000,
    cards=1_000,
    rewards=2,
    players=1_000,
    scores=100,
    builds=2,
    max_rate=10_000,
    switched=(2,),
    quix_events=2_000,
)


def tried(plan: Plan) -> Plan:
    """Sizes for trials of settings of Kafka Streams."""
    return replace(
        plan,
        rates=(plan.tried_rate,),
        idle_seconds=0.0,
        warm_seconds=plan.warm_seconds / 2,
        probes=plan.probes // 2,
        connections=plan.connections[:1],
        read_rates=plan.read_rates[-1:],
        headers=(False,),
    )
