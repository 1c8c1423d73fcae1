"""Replay: a topic from offset 0 to its end, and what that costs.

Done is when every event is durably committed in Kafka: by our side's positions, which move once the transaction that
holds them has been committed, and by the committed offsets of the others' groups, which are part of their transactions.
Both are looked at every 30 ms. Time counts twice: from the start of the process, and from the moment at which the
stores of all partitions are open, so that reading and folding begin. The second half counts from the first look at
which half of the events are folded, committed or not, to that at which all are: no side waits for its last commit then.
"""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.cluster import Cluster
from bench.usage import Meter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from balance_service.devtools.local.stack import LocalStack
    from bench.load import Load
    from bench.sides import Side

_MILLION = 1e6
_LOOK_EVERY_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Replay:
    """One run. Times are monotonic; `applied` are looks at how many events were folded, committed or not."""

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
    """Events that were committed when all stores were open: some of several instances may have begun."""

    @property
    def rate(self) -> float:
        """Events a second from the moment at which all stores are open."""
        return (self.events - self.before) / (self.done - self.running)

    @property
    def rate_with_start(self) -> float:
        """Events a second, the start of the process included."""
        return self.events / (self.done - self.started)

    @property
    def second_half(self) -> float | None:
        """Events a second from the first look at which half of them are folded; None if then all are."""
        (middle, half), (end, every) = self._first_look(self.events / 2), self._first_look(self.events)
        return (every - half) / (end - middle) if end > middle else None

    @property
    def evenness(self) -> float | None:
        """Rate of the second half of the history by that of the first."""
        middle, half = self._first_look(self.events / 2)
        return self.second_half * (middle - self.running) / half if self.second_half else None

    @property
    def memory_growth(self) -> float | None:
        """Memory in the last quarter of the replay by that in the second, medians."""
        quarter = (self.done - self.running) / 4
        second = self._held(self.running + quarter, self.running + 2 * quarter)
        last = self._held(self.done - quarter, self.done)
        return statistics.median(last) / statistics.median(second) if second and last else None

    def _first_look(self, events: float) -> tuple[float, int]:
        """When so many or more were folded, and how many. Our side moves by whole batches: none may be cut."""
        looks = (*self.applied, (self.done, self.events))
        return next(look for look in looks if look[1] >= events)

    def figures(self) -> dict[str, float | None]:
        """Those of one instance, by name."""
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
) -> Replay:
    """Replay a load with fresh instances, and check what came of it.

    Args:
        seen: told how many events are committed.
        spread: time counts from the moment at which every instance has a partition.

    Raises:
        BalanceServiceError: it does not get on, or a balance is wrong.
    """
    with Cluster(stack, side, load, "replay", instances) as cluster, ExitStack() as meters:
        started = min([cluster.launch(instance) for instance in cluster.instances])
        watching = [meters.enter_context(Meter(instance.process)) for instance in cluster.instances]
        running = cluster.wait_running(spread=spread)
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
