"""Replay: the time and cost to fold a topic from offset 0 to its end.

A replay is complete when every event is durably committed in Kafka. For this service, positions show that, which
advance after their transaction is committed; for other sides, the committed offsets of their groups, which are part of
their transactions. Both are polled every 30 ms. Time is measured from the start of the process, and from the moment
when the stores of all partitions are open and folding begins. The second half is the time from the first poll at which
half of the events are folded, committed or not, to the poll at which all are, so it excludes the last commit. A replay
whose batches are so large that this first poll has three quarters of the events has no second half.
"""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.cluster import Cluster
from bench.usage import Meter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from balance_service.devtools.local.stack import LocalStack
    from bench.load import Load
    from bench.sides import Instance, Side

_MILLION = 1e6
_LOOK_EVERY_SECONDS = 0.2
_TOO_LATE = 0.75
"""Share of the events from which on a poll is not taken as the middle: the rest may take less than a poll."""


@dataclass(frozen=True, slots=True)
class Replay:
    """A replay. Times are monotonic; `applied` has polls of the number of folded events, committed or not."""

    started: float
    running: float
    done: float
    applied: Sequence[tuple[float, int]]
    events: int
    cpu_seconds: float
    cpu_seconds_to_running: float
    peak_bytes: int
    memory: Sequence[tuple[float, int]]
    before: int = 0
    """Events that were committed before all stores were open, by instances that began earlier."""

    @property
    def rate(self) -> float:
        """Events per second since all stores are open."""
        return (self.events - self.before) / (self.done - self.running)

    @property
    def rate_with_start(self) -> float:
        """Events per second, including the start of the process."""
        return self.events / (self.done - self.started)

    @property
    def second_half(self) -> float | None:
        """Events per second since the first poll with half of the events; None if that poll has three quarters."""
        (middle, half), (end, every) = self._first_look(self.events / 2), self._first_look(self.events)
        return (every - half) / (end - middle) if half < _TOO_LATE * self.events else None

    @property
    def evenness(self) -> float | None:
        """Rate of the second half divided by the rate of the first half."""
        middle, half = self._first_look(self.events / 2)
        return self.second_half * (middle - self.running) / half if self.second_half else None

    @property
    def memory_growth(self) -> float | None:
        """Median memory in the last quarter of the replay divided by that in the second quarter."""
        quarter = (self.done - self.running) / 4
        second = self._held(self.running + quarter, self.running + 2 * quarter)
        last = self._held(self.done - quarter, self.done)
        return statistics.median(last) / statistics.median(second) if second and last else None

    def _first_look(self, events: float) -> tuple[float, int]:
        """The first poll with at least this many folded events: time and number. Batches are not divided."""
        looks = (*self.applied, (self.done, self.events))
        return next(look for look in looks if look[1] >= events)

    def figures(self) -> dict[str, float | None]:
        """Name → figure of one instance."""
        millions = self.events / _MILLION
        return {
            "rate": self.rate,
            "rate_with_start": self.rate_with_start,
            "second_half": self.second_half,
            "evenness": self.evenness,
            "cpu": (self.cpu_seconds - self.cpu_seconds_to_running) / millions,
            "cpu_with_start": self.cpu_seconds / millions,
            "memory": self.peak_bytes / _MILLION,
            "memory_growth": self.memory_growth,
        }

    def _held(self, start: float, end: float) -> list[int]:
        return [held for at, held in self.memory if start <= at <= end]


def replay(
    stack: LocalStack,
    side: Side,
    load: Load,
    seen: Callable[[int], None],
    instances: int = 1,
    *,
    spread: bool = False,
    meanwhile: Callable[[Instance], AbstractContextManager[object]] = nullcontext,
) -> Replay:
    """Replay a load with new instances, and check the balances.

    Args:
        seen: called with the number of committed events.
        spread: measure from the moment when every instance has a partition.
        meanwhile: what happens to the first instance while it folds.

    Raises:
        BalanceServiceError: an instance makes no progress, or a balance is wrong.
    """
    with Cluster(stack, side, load, "replay", instances) as cluster, ExitStack() as meters:
        started = min([cluster.launch(instance) for instance in cluster.instances])
        watching = [meters.enter_context(Meter(instance.process)) for instance in cluster.instances]
        running = cluster.wait_running(spread=spread)
        meters.enter_context(meanwhile(cluster.instances[0]))
        before = cluster.committed()
        cpu_seconds_to_running = sum(meter.cpu_seconds() for meter in watching)
        applied: list[tuple[float, int]] = []

        def look(committed: int) -> None:
            if not applied or time.monotonic() - applied[-1][0] >= _LOOK_EVERY_SECONDS:
                applied.append((time.monotonic(), cluster.applied()))
            seen(committed)

        done = cluster.wait_committed(look)
        cpu_seconds = sum(meter.cpu_seconds() for meter in watching)
        meters.close()
        cluster.check_balances()
    return Replay(
        started,
        running,
        done,
        applied,
        load.events,
        cpu_seconds,
        cpu_seconds_to_running,
        max(meter.peak_bytes for meter in watching),
        watching[0].memory,
        before,
    )
