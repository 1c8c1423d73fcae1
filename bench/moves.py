"""Moves: how long a partition is unavailable when an instance joins, leaves or is killed.

Clients continuously query every instance for a customer of every partition. The silence of a partition is the longest
time between two successful answers of any instance.
"""

from __future__ import annotations

import http.client
import itertools
import threading
import time
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

from bench.cluster import Cluster
from bench.sides import PATH

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from balance_service.devtools.local.stack import LocalStack
    from bench.figures import Figures
    from bench.load import Load
    from bench.sides import Instance, Side

_ASK_EVERY_SECONDS = 0.02
_ANSWER_SECONDS = 1.0
_SETTLE_SECONDS = 5.0
# Longer than the session timeouts: the group has removed a dead instance, and the rebalance is over.
_WATCH_SECONDS = 20.0


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

        with _Askers(cluster.instances, load) as askers:
            time.sleep(_SETTLE_SECONDS)
            for case, move in (
                ("joins", join),
                ("leaves", lambda: end(kill=False)),
                ("joins", join),
                ("is killed", lambda: end(kill=True)),
            ):
                silence = askers.silence_while(move)
                figures.add(side.name, "moves", f"an instance {case}", silence=silence * 1000)


class _Askers:
    """A thread for each instance and partition; `_answered` has the times of successful answers by partition."""

    def __init__(self, instances: Sequence[Instance], load: Load) -> None:
        self._stop = threading.Event()
        self._answered: dict[int, list[float]] = {p: [] for p in load.ends}
        self._threads = [
            threading.Thread(target=self._ask, args=(i, p, load.customers_of(p, 1)[0]), daemon=True)
            for i, p in itertools.product(instances, load.ends)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def silence_while(self, move: Callable[[], None]) -> float:
        """The longest silence of any partition, in seconds."""
        began = time.monotonic()
        move()
        ended = time.monotonic()
        longest = 0.0
        for answers in self._answered.values():
            times = [began, *sorted(at for at in tuple(answers) if began <= at <= ended), ended]
            longest = max(longest, *(b - a for a, b in itertools.pairwise(times)))
        return longest

    def _ask(self, instance: Instance, partition: int, customer: str) -> None:
        connection: http.client.HTTPConnection | None = None
        while not self._stop.wait(_ASK_EVERY_SECONDS):
            try:
                if connection is None:
                    address = urlsplit(instance.url)
                    connection = http.client.HTTPConnection(
                        str(address.hostname), address.port, timeout=_ANSWER_SECONDS
                    )
                connection.request("GET", f"{PATH}?customerId={customer}")
                answer = connection.getresponse()
                answer.read()
                if answer.status == http.client.OK:
                    self._answered[partition].append(time.monotonic())
            except (OSError, http.client.HTTPException):
                if connection is not None:
                    connection.close()
                connection = None
