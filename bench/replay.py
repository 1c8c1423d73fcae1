"""Replay: a topic from offset 0 to its end, and what that costs.

Done is when every event is durably committed in Kafka: by our side's positions, which move once the transaction that
holds them has been committed, and by the committed offsets of Kafka Streams' group, which are part of its transactions.
Both are looked at every 30 ms. Time counts three times: from the start of the process; from the moment at which the
stores of all partitions are open, so that reading and folding begin; and from the first commit that was seen.
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

    from balance_service.tools.local.stack import LocalStack
    from bench.figures import Figures
    from bench.load import Load
    from bench.sides import Side

_MILLION = 1e6
_TOGETHER_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Replay:
    """One run. Times are monotonic; `commits` are the first looks at which so many events were committed."""

    started: float
    running: float
    done: float
    commits: Sequence[tuple[float, int]]
    events: int
    cpu_seconds: float
    cpu_seconds_to_running: float
    peak_bytes: int
    memory: Sequence[tuple[float, int]]

    @property
    def rate(self) -> float:
        """Events a second from the moment at which all stores are open."""
        return self.events / (self.done - self.running)

    @property
    def rate_with_start(self) -> float:
        """Events a second, the start of the process included."""
        return self.events / (self.done - self.started)

    @property
    def rate_after_commit(self) -> float | None:
        """Events a second after the first commit; None if that was the last, too."""
        commits = _apart(self.commits)
        return _rate(commits[0], commits[-1])

    @property
    def evenness(self) -> float | None:
        """Rate of the second half of the history by that of the first, split at the commit that is nearest to it."""
        commits = _apart(self.commits)
        first, last = commits[0], commits[-1]
        middle = min(commits, key=lambda commit: abs(commit[1] - (first[1] + last[1]) / 2))
        before, after = _rate(first, middle), _rate(middle, last)
        return after / before if before and after else None

    @property
    def memory_growth(self) -> float | None:
        """Memory in the last quarter of the replay by that in the second, medians."""
        quarter = (self.done - self.running) / 4
        second = self._held(self.running + quarter, self.running + 2 * quarter)
        last = self._held(self.done - quarter, self.done)
        return statistics.median(last) / statistics.median(second) if second and last else None

    def _held(self, start: float, end: float) -> list[int]:
        return [held for at, held in self.memory if start <= at <= end]


def replay(stack: LocalStack, side: Side, load: Load, seen: Callable[[int], None], instances: int = 1) -> Replay:
    """Replay a load with fresh instances, and check what came of it.

    Args:
        seen: told how many events are committed.

    Raises:
        BalanceServiceError: it does not get on, or a balance is wrong.
    """
    with Cluster(stack, side, load, "replay", instances) as cluster, ExitStack() as meters:
        started = min([cluster.launch(instance) for instance in cluster.instances])
        watching = [meters.enter_context(Meter(instance.process)) for instance in cluster.instances]
        running = cluster.wait_running()
        cpu_seconds_to_running = sum(meter.cpu_seconds() for meter in watching)
        commits: list[tuple[float, int]] = []
        done = cluster.wait_committed(lambda committed: _note(commits, committed, seen))
        cpu_seconds = sum(meter.cpu_seconds() for meter in watching)
        meters.close()
        cluster.check_balances()
    return Replay(
        started,
        running,
        done,
        commits,
        load.events,
        cpu_seconds,
        cpu_seconds_to_running,
        max(meter.peak_bytes for meter in watching),
        watching[0].memory,
    )


def record(figures: Figures, side: str, case: str, run: Replay) -> None:
    """Add the figures of one run of one instance."""
    millions = run.events / _MILLION
    figures.add(
        side,
        "replay",
        case,
        rate=run.rate,
        rate_with_start=run.rate_with_start,
        rate_after_commit=run.rate_after_commit,
        evenness=run.evenness,
        cpu=(run.cpu_seconds - run.cpu_seconds_to_running) / millions,
        cpu_with_start=run.cpu_seconds / millions,
        memory=run.peak_bytes / _MILLION,
        memory_growth=run.memory_growth,
    )
    figures.add(side, "start", "clean, jars present", ready=run.running - run.started)


def _note(commits: list[tuple[float, int]], committed: int, seen: Callable[[int], None]) -> None:
    if committed and (not commits or committed > commits[-1][1]):
        commits.append((time.monotonic(), committed))
    seen(committed)


def _apart(commits: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """Those of the partitions of one batch, milliseconds from one another, as one: no rate can be had from them."""
    apart = [commits[0]]
    began = commits[0][0]
    for commit in commits[1:]:
        if commit[0] - began < _TOGETHER_SECONDS:
            apart[-1] = commit
        else:
            apart.append(commit)
            began = commit[0]
    return apart


def _rate(start: tuple[float, int], end: tuple[float, int]) -> float | None:
    return (end[1] - start[1]) / (end[0] - start[0]) if end[0] > start[0] else None
