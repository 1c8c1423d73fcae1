"""The plan of a run, drawn from a seed that reproduces it, and fail points that all instances share."""

from __future__ import annotations

import math
import os
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from tests.chaos.cluster import Strike

POINTS = (
    "batch-read",
    "letters-read",
    "folded",
    "begun",
    "produced",
    "committed",
    "part-stored",
    "stored",
    "fenced",
    "restored",
    "position-written",
    "others-fenced",
)
PARTS_POINT = "part-stored"
"""Reached only with small parts."""
OPENING_POINTS = ("fenced", "restored", "position-written")
SWITCH_POINT = "others-fenced"
"""Reached only when another generation begins to send the outputs."""
INSTANCE_FAULTS = (
    "kill",
    *(f"kill-at-{point}" for point in POINTS),
    "pause",
    "pause-at-begun",
    "pause-at-produced",
    "remove",
    "silence",
)
STORE_FAULTS = ("delete-store", "damage-store")
BROKER_FAULTS = ("restart-broker", "kill-broker-long", "kill-leader", "kill-coordinator", "lose-isr")
BROKERS = int(os.environ.get("CHAOS_BROKERS") or 1)
"""Of a run: 1, or 3, whose leaders and coordinators are killed in turn, and two of which are down at once."""
PARTITIONS = (4, 8)
"""Of a run, while two generations live; with 8, each instance reads several in one query of Spark."""
FAULTS = (*INSTANCE_FAULTS, *STORE_FAULTS, *BROKER_FAULTS)

_SHORT = {
    "kill": 5,
    **{f"kill-at-{point}": 1 for point in POINTS},
    "pause-at-begun": 1,
    "silence": 1,
    "delete-store": 1,
    "damage-store": 1,
    "restart-broker": 1,
}
_FULL_ROUND = {
    "kill": 10,
    **{f"kill-at-{point}": 1 for point in POINTS},
    "pause": 1,
    "pause-at-begun": 1,
    "remove": 2,
    "silence": 1,
    "delete-store": 1,
    "damage-store": 1,
    "restart-broker": 2,
}
_OF_THREE = ("kill-leader", "kill-coordinator", "lose-isr")
# For one processor per instance and one for the broker. With fewer, rounds take longer, and fewer are played.
_MINUTES_PER_ROUND = 3
# The suite plays balances, then systems; each needs this time for its start and its final comparison.
_RUNS = 2
_OUTSIDE_ROUNDS_SECONDS = 90.0
_LANES = 3
# Maximum number of consecutive faults of one instance.
_IN_A_ROW = 3
_LEAVE_IT_DOWN = ("kill", "remove")


@dataclass(frozen=True, slots=True)
class Round:
    """The faults between two recoveries."""

    chunks: tuple[tuple[tuple[str, ...], ...], ...]
    """By instance: its faults in chunks; the instance is up after each chunk."""
    store_faults: tuple[str, ...]
    broker_faults: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """The parameters of a run."""

    seed: int
    rounds: tuple[Round, ...]
    head_start: int
    """Number of events appended before any instance starts."""
    rate: float
    reads_per_second: float
    standbys: int
    partitions: int
    early_customers: int
    stops_early: bool
    """Whether the run ends at the first violation."""
    seconds: float = math.inf
    """A round starts only if it would end within this time, judged by the longest so far."""

    @property
    def counts(self) -> dict[str, int]:
        """Returns the planned number of each fault."""
        counts = dict.fromkeys(FAULTS, 0)
        for each in self.rounds:
            played = [fault for lane in each.chunks for chunk in lane for fault in chunk]
            for fault in (*played, *each.store_faults, *each.broker_faults):
                counts[fault] += 1
        return counts


def plan_from_environment() -> Plan:
    """Returns the plan that the environment asks for.

    `CHAOS_SEED` reproduces a run with the same `CHAOS_BROKERS`. `CHAOS_MINUTES` makes the suite take that many minutes,
    with at least one round of each run. `CHAOS_FAULTS` sets the faults of a short run: comma-separated `fault` or
    `fault=times`, or `none`. `CHAOS_PARTITIONS` is the number of partitions; by default, the seed draws one of
    PARTITIONS, and in CI, which has two processors for all instances and a limited time, it is the least. With
    `CHAOS_STOP_EARLY` a run ends soon after the first violation.
    """
    # CI results must not vary within a day, but the faults should vary over time.
    today = int(time.strftime("%Y%m%d", time.gmtime()))
    drawn = today if os.environ.get("CI") else random.SystemRandom().randrange(10**6)
    seed = int(os.environ.get("CHAOS_SEED") or drawn)
    chooser = random.Random(seed)
    some = PARTITIONS[:1] if os.environ.get("CI") else PARTITIONS
    partitions = int(os.environ.get("CHAOS_PARTITIONS") or random.Random(f"{seed}-partitions").choice(some))
    minutes = float(os.environ.get("CHAOS_MINUTES") or 0)
    named = os.environ.get("CHAOS_FAULTS")
    if minutes:
        rounds = [_of_brokers(_FULL_ROUND) for _ in range(max(1, round(minutes / _MINUTES_PER_ROUND)))]
        rounds[0]["kill-broker-long"] = 1
        for number, each in enumerate(rounds):
            if number % 2:
                each["pause-at-produced"] = each.pop("pause-at-begun")
        drawn_rounds = tuple(_draw(chooser, each) for each in rounds)
        seconds = 60 * minutes / _RUNS - _OUTSIDE_ROUNDS_SECONDS
        return Plan(seed, drawn_rounds, 300_000, 400.0, 300.0, 1, partitions, 2_000, False, seconds)
    counts = _of_brokers(_SHORT) if named is None else _named(named)
    head_start = 3_000 if named is None else 1_000
    stops_early = bool(os.environ.get("CHAOS_STOP_EARLY"))
    return Plan(seed, (_draw(chooser, counts),), head_start, 300.0, 250.0, 1, partitions, 400, stops_early)


def _of_brokers(counts: Mapping[str, int]) -> dict[str, int]:
    """Returns the faults of a round, with those of three brokers for each restart of a single one."""
    if BROKERS == 1:
        return dict(counts)
    return {**counts, "restart-broker": 0, **dict.fromkeys(_OF_THREE, counts["restart-broker"])}


def _named(text: str) -> dict[str, int]:
    counts: dict[str, int] = {}
    for part in text.split(","):
        name, _, times = part.strip().partition("=")
        if name not in ("none", *FAULTS):
            raise ValueError(f"CHAOS_FAULTS: '{name}' is none of {', '.join(FAULTS)}")
        if name != "none":
            counts[name] = int(times or 1)
    return counts


def _draw(chooser: random.Random, counts: dict[str, int]) -> Round:
    def drawn(names: tuple[str, ...]) -> list[str]:
        faults = [name for name in names for _ in range(counts.get(name, 0))]
        chooser.shuffle(faults)
        return faults

    lanes: list[list[tuple[str, ...]]] = [[] for _ in range(_LANES)]
    for chunk in _chunks(chooser, drawn(INSTANCE_FAULTS)):
        # Only the first instance connects to the broker through the proxy.
        lane = lanes[0] if "silence" in chunk else min(lanes, key=lambda lane: sum(len(each) for each in lane))
        lane.insert(chooser.randint(0, len(lane)), chunk)
    return Round(tuple(tuple(lane) for lane in lanes), tuple(drawn(STORE_FAULTS)), tuple(drawn(BROKER_FAULTS)))


def _chunks(chooser: random.Random, faults: list[str]) -> list[tuple[str, ...]]:
    """Groups faults into chunks. A fault that needs an armed start follows one that left the instance down."""
    chunks = [[fault] for fault in faults if "-at-" not in fault]
    for armed in (fault for fault in faults if "-at-" in fault):
        fitting = [c for c in chunks if c[0] in _LEAVE_IT_DOWN and len(c) < _IN_A_ROW and "pause" not in c[-1]]
        if fitting:
            min(fitting, key=len).append(armed)
        else:
            chunks.append([armed])
    chooser.shuffle(chunks)
    return [tuple(chunk) for chunk in chunks]


# The number of times a process passes a point before it dies there, so that each of its stages has committed.
_TURNS = (4, 16)
# Three instances share ten partitions: each opens at least three tasks.
_FEW_TURNS = (1, 3)
_RARE_POINTS = {*OPENING_POINTS, SWITCH_POINT, "letters-read"}


class Offers:
    """The fail points of one round, offered to all instances one at a time: the first instance to reach one dies there.

    The group decides which partitions an instance gets, and some partitions have no work for some points. A point armed
    in a single instance may never be reached; an offered one strikes the instance that has the work. With two points at
    a time, a rare one would wait, because processes would die at the other one first.
    """

    def __init__(self, folder: Path, points: Iterable[str], chooser: random.Random) -> None:
        """Args:
        folder: created here; holds a file for the offered point.
        """
        folder.mkdir()
        self._folder = folder
        self.left = list(points)
        """The points that have not struck yet; the first is offered now or next."""
        self._chooser = chooser
        self._offered_at: float | None = None

    @property
    def in_parts(self) -> bool:
        """Whether started instances must use small parts, so that the point between two parts is reached."""
        return PARTS_POINT in self.left

    def offer(self) -> None:
        """Offers the next point. Call it before an instance starts, because tasks are opened mostly then."""
        if self.left and self._offered_at is None:
            self._offered_at = time.time()
            (self._folder / self.left[0]).touch()

    def specification(self) -> str:
        """Returns the setting that makes a process die at any offered point."""
        turns = {point: self._chooser.randint(*(_FEW_TURNS if point in _RARE_POINTS else _TURNS)) for point in POINTS}
        return ",".join([*(f"{point}=kill@{turn}" for point, turn in turns.items()), f"claims={self._folder}"])

    def taken(self, strike: Strike) -> float:
        """Records a strike; returns the seconds since the point was offered."""
        point, offered_at = self.left.pop(0), self._offered_at
        assert point == strike.point
        assert offered_at is not None
        self._offered_at = None
        return strike.at - offered_at
