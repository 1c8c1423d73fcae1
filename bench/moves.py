"""Moves: how long a partition is unavailable when an instance joins, leaves or is killed.

Clients continuously query for a customer of every partition; see `watch`. With many tasks, events arrive
during the move, and partitions that move and partitions that stay have figures of their own.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from balance_service.errors import BalanceServiceError
from bench.cluster import Cluster
from bench.load import arriving
from bench.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Callable

    from balance_service.devtools.local.stack import LocalStack
    from bench.figures import Figures
    from bench.load import Load
    from bench.sides import Side

_ASK_EVERY_SECONDS = 0.02
_SETTLE_SECONDS = 5.0
# Longer than the session timeouts: the group has removed a dead instance, and the rebalance is over.
_WATCH_SECONDS = 20.0
# With many tasks: each event is a transaction of each model, so that few partitions have some.
_WATCHED = 8
_EVENTS_A_SECOND = 10
_ENOUGH_SECONDS = 120.0


def measure_moves(stack: LocalStack, side: Side, load: Load, figures: Figures) -> None:
    """One instance runs; another joins, leaves, joins again and is killed.

    Raises:
        BalanceServiceError: an instance makes no progress.
    """
    with Cluster(stack, side, load, "moves", 2) as cluster:
        first, second = cluster.instances
        cluster.launch(first)
        cluster.wait_running()
        cluster.wait_committed()

        def join() -> None:
            cluster.launch(second)
            cluster.wait_running(spread=True)
            time.sleep(_SETTLE_SECONDS)

        def end(*, kill: bool) -> None:
            cluster.end(second, kill=kill)
            time.sleep(_WATCH_SECONDS)
            cluster.wait_running()
            time.sleep(_SETTLE_SECONDS)

        moves: tuple[tuple[str, Callable[[], None]], ...] = (
            ("joins", join),
            ("leaves", lambda: end(kill=False)),
            ("joins", join),
            ("is killed", lambda: end(kill=True)),
        )
        with Watch(cluster.instances, {p: load.customers_of(p, 1) for p in load.ends}, _ASK_EVERY_SECONDS) as watch:
            time.sleep(_SETTLE_SECONDS)
            for case, move in moves:
                began = time.monotonic()
                move()
                gaps = watch.gaps(began, time.monotonic()).values()
                figures.add(side.name, "moves", f"an instance {case}", silence=1000 * max(g.silence for g in gaps))


def measure_moves_of_many(stack: LocalStack, side: Side, load: Load, tasks: int, figures: Figures) -> None:
    """A second instance takes half of the partitions, while events arrive.

    Args:
        tasks: of all models, for the name of the case.

    Raises:
        BalanceServiceError: an instance makes no progress, or the watched partitions all move or all stay.
    """
    watched = sorted(load.ends)[:: max(1, len(load.ends) // _WATCHED)]
    numbers = [load.numbers_of(p, 1)[0] for p in watched]
    with Cluster(stack, side, load, "moves", 2) as cluster:
        first, second = cluster.instances
        cluster.launch(first)
        cluster.wait_running()
        cluster.wait_committed()
        with (
            arriving(stack, load, _EVENTS_A_SECOND * len(watched), numbers),
            # The first instance forwards queries for partitions that have moved.
            Watch([first], {p: load.customers_of(p, 1) for p in watched}, _ASK_EVERY_SECONDS) as watch,
        ):
            time.sleep(_SETTLE_SECONDS)
            began = cluster.launch(second)
            moved = _half(cluster)
            time.sleep(_SETTLE_SECONDS)
            gaps = watch.gaps(began, time.monotonic())
    for what, some in (
        ("moves", [g for p, g in gaps.items() if p in moved]),
        ("stays", [g for p, g in gaps.items() if p not in moved]),
    ):
        if not some:
            raise BalanceServiceError(f"none of the watched partitions {what}")
        silence, stall = max(g.silence for g in some), max(g.stall for g in some)
        figures.add(side.name, "moves", many_case(tasks, what), silence=1000 * silence, stall=1000 * stall)


def many_case(tasks: int, what: str) -> str:
    """The case of a key that `moves` or `stays`."""
    return f"an instance joins, {tasks} tasks, a key that {what}"


def _half(cluster: Cluster) -> frozenset[int]:
    """Wait until the second instance has half of the partitions, and every partition is open; returns them."""
    deadline = time.monotonic() + _ENOUGH_SECONDS
    while time.monotonic() < deadline:
        cluster.wait_running(spread=True)
        _, owned = cluster.running()
        if len(owned) >= len(cluster.load.ends) // 2:
            return owned
        time.sleep(_ASK_EVERY_SECONDS)
    raise BalanceServiceError(f"{cluster.side.name} did not divide the partitions in {_ENOUGH_SECONDS:.0f} s")
