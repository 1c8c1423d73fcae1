"""Restore: a changelog with a million keys, one record each, is read into an empty store.

Keys per second count from the first poll at which some keys are restored until all stores are open.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import httpx

from balance_service.errors import BalanceServiceError
from bench.cluster import LOOK_EVERY_SECONDS, Cluster
from bench.sides import PATH

if TYPE_CHECKING:
    from balance_service.devtools.local.stack import LocalStack
    from bench.figures import Figures
    from bench.load import Load
    from bench.sides import Side

_PATIENCE_SECONDS = 300.0
_ANSWER_SECONDS = 2.0


def measure_restore(stack: LocalStack, side: Side, load: Load, figures: Figures) -> None:
    """Fold the load, stop, delete the state directory, and start again.

    Raises:
        BalanceServiceError: the instance makes no progress, or a balance is wrong.
    """
    with Cluster(stack, side, load, "restore") as cluster:
        (instance,) = cluster.instances
        cluster.launch(instance)
        cluster.wait_running()
        cluster.wait_committed()
        cluster.end(instance)
        instance.wipe()
        customers = [load.customers_of(p, 1)[0] for p in sorted(load.ends)]
        started = cluster.launch(instance)
        began: tuple[float, int] | None = None
        while True:
            now = time.monotonic()
            progress = instance.progress()
            if progress is not None and progress.restored and began is None:
                began = now, progress.restored
            if progress is not None and progress.running == load.partitions:
                break
            if now - started > _PATIENCE_SECONDS:
                raise BalanceServiceError(f"{side.name} did not restore its stores in {_PATIENCE_SECONDS:.0f} s")
            time.sleep(LOOK_EVERY_SECONDS)
        opened = time.monotonic()
        with httpx.Client(timeout=_ANSWER_SECONDS, trust_env=False) as client:
            while not all(
                client.get(instance.url + PATH, params={"customerId": c}).status_code == httpx.codes.OK
                for c in customers
            ):
                time.sleep(LOOK_EVERY_SECONDS)
        answered = time.monotonic()
        cluster.check_balances()
    # A restore that takes less than a poll has no rate.
    keys = (load.events - began[1]) / (opened - began[0]) if began is not None and began[1] < load.events else None
    figures.add(side.name, "restore", f"{load.events:,} keys", keys=keys, first_answer=answered - started)
