"""Generations: the cost of a read model that is built again while it answers, and of a switch. This service only.

Each figure is paired with the same one without the rebuild, in one run and in alternating order:

- `measure_rebuilds`: events per second of a rebuild in an instance that has nothing else to do, and of
  `rebuild --offline`.
- `measure_building`: freshness while another generation is built, at full speed and at a bounded rate; and the rate.
- `measure_comparison`: the time to compare two generations, and the latency of queries in that time.
- `measure_switches`: for keys of all partitions, the longest time without an answer, and without a further event in the
  answers, while another generation begins to serve, and the first one again.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from contextlib import ExitStack
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import httpx
import numpy as np

from balance_service.client import Client
from balance_service.errors import BalanceServiceError
from balance_service.model.stage import generation_name
from bench.cluster import LOOK_EVERY_SECONDS, Cluster
from bench.load import arriving
from bench.plan import GENERATIONS
from bench.probes import Prober
from bench.sides import OURS, PATH, OurInstance, OurSide
from bench.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from balance_service.devtools.local.stack import LocalStack
    from bench.figures import Figures
    from bench.load import Load
    from bench.plan import Plan

WITHOUT = "without a rebuild"
OFFLINE = "rebuild --offline"
CALM = "before"
_MODEL = "balance"
_ASK_EVERY_SECONDS = 0.002
_ASKED_OF_A_PARTITION = 5_000
_SETTLE_SECONDS = 2.0
_CALM_SECONDS = 5.0
_SWITCH_SECONDS = 3.0
_EVENTS_OF_A_KEY = 50
_PROBES_AT_ONCE = 4
_LEAST_ADVANCES = 8
# A generation that is nearly at the end is no longer built at full speed.
_NEARLY = 0.9
_PATIENCE_SECONDS = 300.0
_OFFLINE_RATE = re.compile(r"([\d,]+) records/s")


def rebuild_case(events: int) -> str:
    """The case of a rebuild with nothing else to do."""
    return f"rebuild, {events:,} events"


def building_case(rate: int, max_rate: int | None) -> str:
    """The case of events that arrive at a rate while another generation is built."""
    return f"freshness, {rate:,} events/s, {'at full speed' if max_rate is None else f'--max-rate {max_rate}'}"


def comparison_case(keys: int) -> str:
    """The case of a comparison of this number of keys."""
    return f"comparison, {keys:,} keys"


def switch_case(instances: int) -> str:
    """The case of a switch, and back."""
    return f"switch and back, {instances} instances"


class Generations:
    """The generations of the read model in a cluster. All its instances must run."""

    def __init__(self, cluster: Cluster) -> None:
        self.events = cluster.load.events
        self._cluster = cluster
        self._client = Client(cluster.launched[0].url, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def rebuild(self, max_rate: int | None = None) -> int:
        """Begin to build a generation; returns its number."""
        return _newest(self._client.rebuild(_MODEL, switch="never", max_rate=max_rate, reason="benchmark"))

    @property
    def newest(self) -> int:
        """The number of the generation that was begun last."""
        return _newest(self._client.generations(_MODEL))

    def position(self, generation: int) -> int:
        """The number of source offsets that the generation has applied, in all partitions."""
        return sum(max(0, position) for position in self._positions(generation).values())

    def wait_built(self, generation: int, partitions: int) -> float:
        """Wait until this number of partitions have applied the whole load; returns the monotonic time."""
        ends = self._cluster.load.ends

        def is_built() -> bool:
            positions = self._positions(generation)
            return sum(positions.get(p, 0) >= end for p, end in ends.items()) >= partitions

        return self._wait("catch up", is_built)

    def wait_compared(self) -> float:
        """Wait until the comparison is written; returns the monotonic time.

        Raises:
            BalanceServiceError: it shows a difference.
        """

        def counts() -> Mapping[str, int] | None:
            shown: Mapping[str, int] | None = self._client.generations(_MODEL)["comparison"]
            return shown

        at = self._wait("be compared", lambda: counts() is not None)
        found = counts() or {}
        if not found.get("equal") or any(count for name, count in found.items() if name != "equal"):
            raise BalanceServiceError(f"the two generations of {_MODEL} are not equal: {found}")
        return at

    def drop(self, generation: int) -> None:
        """Drop a generation, and wait until no instance has it."""
        self._client.drop(_MODEL, generation=generation, reason="benchmark")
        self._wait("end", lambda: not self._positions(generation))
        time.sleep(_SETTLE_SECONDS)

    def switch(self, generation: int) -> None:
        """Have a generation serve."""
        self._client.switch(_MODEL, to=generation, reason="benchmark")

    def require_serving(self, generation: int) -> None:
        """Raises BalanceServiceError: an instance answers from another generation."""
        for instance in self._cluster.launched:
            customer = self._cluster.load.customers_of(0, 1)[0]
            answer = httpx.get(instance.url + PATH, params={"customerId": customer}, trust_env=False)
            if answer.headers.get("Balance-Generation") != str(generation):
                raise BalanceServiceError(f"{instance.url} does not answer from generation {generation} after a switch")

    def _positions(self, generation: int) -> dict[int, int]:
        name = generation_name(_MODEL, generation)
        tasks = [
            task
            for instance in self._cluster.launched
            for task in httpx.get(f"{instance.url}/api/status", trust_env=False).json()["tasks"]
            if task["readModel"] == name and task["role"] == "active"
        ]
        return {int(task["partition"]): int(task["position"]) for task in tasks}

    @staticmethod
    def _wait(what: str, is_done: Callable[[], bool]) -> float:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not is_done():
            if time.monotonic() > deadline:
                raise BalanceServiceError(f"a generation of {_MODEL} did not {what} in {_PATIENCE_SECONDS:.0f} s")
            time.sleep(LOOK_EVERY_SECONDS)
        return time.monotonic()


def _newest(known: Mapping[str, Any]) -> int:
    return max(int(one["generation"]) for one in known["generations"])


def measure_rebuilds(stack: LocalStack, load: Load, plan: Plan, figures: Figures) -> None:
    """Rebuild in a running instance, and with none running, in turn.

    Each online rebuild is the first work of its process, as the offline one is, so that no JVM has compiled more.

    Raises:
        BalanceServiceError: a rebuild makes no progress, or a balance is wrong.
    """
    with Cluster(stack, OurSide(stack), load, "rebuilds") as cluster:
        (instance,) = (one for one in cluster.instances if isinstance(one, OurInstance))
        cluster.launch(instance)
        cluster.wait_running()
        cluster.wait_committed()
        cluster.end(instance)

        def online() -> None:
            cluster.launch(instance)
            cluster.wait_ready(instance)
            time.sleep(_SETTLE_SECONDS)
            cluster.check_balances()
            with Generations(cluster) as balance:
                began = time.monotonic()
                generation = balance.rebuild()
                seconds = balance.wait_built(generation, len(load.ends)) - began
                balance.wait_compared()
                balance.drop(generation)
            cluster.end(instance)
            figures.add(OURS, GENERATIONS, rebuild_case(load.events), rate=load.events / seconds)

        def offline() -> None:
            told = instance.run("rebuild", "--offline")
            rate = _OFFLINE_RATE.search(told)
            if rate is None:
                raise BalanceServiceError(f"the offline rebuild printed no rate: {told}")
            figures.add(OFFLINE, GENERATIONS, rebuild_case(load.events), rate=float(rate[1].replace(",", "")))

        for repetition in range(plan.builds):
            for measure in (offline, online) if repetition % 2 else (online, offline):
                measure()


def measure_building(stack: LocalStack, load: Load, plan: Plan, figures: Figures) -> None:
    """Probe freshness with and without a generation that is built, while events arrive. The load gets more events.

    Raises:
        BalanceServiceError: an event does not become visible, or a generation is built before it can be probed.
    """
    with Cluster(stack, OurSide(stack), load, "building") as cluster:
        (instance,) = cluster.instances
        cluster.launch(instance)
        cluster.wait_running()
        cluster.wait_committed()
        with (
            Generations(cluster) as balance,
            Prober(stack, load, instance) as prober,
            arriving(stack, load, plan.tried_rate),
        ):
            time.sleep(plan.warm_seconds)
            prober.take(plan.probes // 10)
            for max_rate, repetition in product((None, plan.max_rate), range(plan.builds)):
                case = building_case(plan.tried_rate, max_rate)
                for side in (WITHOUT, OURS) if repetition % 2 else (OURS, WITHOUT):
                    if side == WITHOUT:
                        waits = prober.take(plan.probes)
                    else:
                        waits, looks = _probe_building(balance, prober, plan.probes, max_rate)
                        if max_rate is not None:
                            rate = rate_of(looks, len(load.ends))
                            figures.add(OURS, GENERATIONS, case, of_most=None if rate is None else rate / max_rate)
                    figures.add(side, GENERATIONS, case, **_percentiles(waits))


def _probe_building(
    balance: Generations, prober: Prober, probes: int, max_rate: int | None
) -> tuple[list[float], list[Look]]:
    """Probe from the request for a generation on; returns the seconds of each probe, and the generation's progress."""
    generation = balance.rebuild(max_rate)
    waits: list[float] = []
    looks: list[Look] = []
    while len(waits) < probes or (max_rate is not None and len(_advances(looks)) < _LEAST_ADVANCES):
        some = prober.take(_PROBES_AT_ONCE)
        looks.append(Look(time.monotonic(), balance.position(generation)))
        if looks[-1].position > _NEARLY * balance.events:
            break
        waits += some
    balance.drop(generation)
    if not waits:
        raise BalanceServiceError("a generation was built before it could be probed: it needs more events")
    return waits, looks


class Look(NamedTuple):
    """How many events a generation had applied at a moment."""

    at: float
    position: int


def rate_of(looks: Sequence[Look], partitions: int) -> float | None:
    """Events per second from one advance to another; None if there are not two.

    A commit advances by many events at once, so the first and the last look would count too few of them, or too many.
    The first commit of each partition does not count: no wait precedes it.
    """
    advances = _advances(looks)[partitions:]
    if len(advances) < 2:
        return None
    first, last = advances[0], advances[-1]
    return (last.position - first.position) / (last.at - first.at)


def _advances(looks: Sequence[Look]) -> list[Look]:
    return [later for earlier, later in pairwise(looks) if later.position > earlier.position]


def measure_comparison(stack: LocalStack, load: Load, plan: Plan, figures: Figures) -> None:
    """Ask for keys before and during a comparison. It begins when the first partition has caught up.

    Raises:
        BalanceServiceError: a generation makes no progress, or differs.
    """
    with Cluster(stack, OurSide(stack), load, "comparison") as cluster:
        (instance,) = cluster.instances
        cluster.launch(instance)
        cluster.wait_running()
        cluster.wait_committed()
        case = comparison_case(load.events)
        keys = {partition: load.customers_of(partition, _ASKED_OF_A_PARTITION) for partition in load.ends}
        with Generations(cluster) as balance, Watch(cluster.instances, keys, _ASK_EVERY_SECONDS) as watch:
            time.sleep(plan.warm_seconds)
            for _ in range(plan.builds):
                calm = time.monotonic()
                time.sleep(_CALM_SECONDS)
                figures.add(CALM, GENERATIONS, case, **_percentiles(watch.seconds(calm, time.monotonic())))
                generation = balance.rebuild()
                began = balance.wait_built(generation, partitions=1)
                ended = balance.wait_compared()
                taken = watch.seconds(began, ended)
                figures.add(OURS, GENERATIONS, case, compared=ended - began, **_percentiles(taken))
                balance.drop(generation)


def measure_switches(stack: LocalStack, load: Load, instances: int, plan: Plan, figures: Figures) -> None:
    """Ask every instance for a key of each partition, which gets events, through a switch and back.

    Raises:
        BalanceServiceError: a generation makes no progress or differs, or an instance does not switch.
    """
    with Cluster(stack, OurSide(stack), load, "switches", instances) as cluster:
        for instance in cluster.instances:
            cluster.launch(instance)
        cluster.wait_running(spread=True)
        cluster.wait_committed()
        for instance in cluster.instances:
            cluster.wait_ready(instance)
        numbers = [load.numbers_of(partition, 1)[0] for partition in sorted(load.ends)]
        keys = {partition: load.customers_of(partition, 1) for partition in load.ends}
        with Generations(cluster) as balance:
            generation = balance.rebuild()
            balance.wait_compared()
            with ExitStack() as cleanup:
                cleanup.enter_context(arriving(stack, load, _EVENTS_OF_A_KEY * len(numbers), numbers))
                # One for each instance: a key that one of them does not answer for, another one may.
                watches = [
                    cleanup.enter_context(Watch([instance], keys, _ASK_EVERY_SECONDS)) for instance in cluster.instances
                ]
                time.sleep(plan.warm_seconds)
                for _ in range(plan.builds):
                    began = time.monotonic()
                    time.sleep(2 * _SWITCH_SECONDS)
                    _add_gaps(figures, CALM, watches, began)
                    began = time.monotonic()
                    for to in (generation, 1):
                        balance.switch(to)
                        time.sleep(_SWITCH_SECONDS)
                        balance.require_serving(to)
                    _add_gaps(figures, OURS, watches, began)


def _add_gaps(figures: Figures, side: str, watches: Sequence[Watch], began: float) -> None:
    ended = time.monotonic()
    gaps = [gap for watch in watches for gap in watch.gaps(began, ended).values()]
    case, refused = switch_case(len(watches)), [why for watch in watches for why in watch.refused(began, ended)]
    figures.notes += [f"{case}, {side}: {count}× {why}" for why, count in Counter(refused).items()]
    figures.add(
        side,
        GENERATIONS,
        case,
        silence=1000 * max(gap.silence for gap in gaps),
        stall=1000 * max(gap.stall for gap in gaps),
        refused=len(refused),
    )


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    p50, p99 = (float(value) * 1000 for value in np.percentile(seconds, (50, 99)))
    return {"p50": p50, "p99": p99}
