"""Tasks: how an instance starts with few and many of them, and what it costs. Measures this service only.

Events wait in the topic. Ready is the readiness of the instance; it is caught up when every task of every model has
committed them. CPU seconds are those of all its processes until then.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from bench.cluster import Cluster
from bench.usage import Meter, Span, threads, tree

if TYPE_CHECKING:
    from balance_service.devtools.local.stack import LocalStack
    from bench.figures import Figures
    from bench.load import Load
    from bench.sides import Side

MODELS = ("balance", "activity")
# A status of many tasks takes some milliseconds of the instance's processor time.
_LOOK_EVERY_SECONDS = 0.2
_SETTLE_SECONDS = 3.0
_MEGABYTE = 1e6


def tasks_case(tasks: int) -> str:
    """The case of this number of tasks."""
    return f"{tasks} tasks"


def measure_tasks(stack: LocalStack, side: Side, load: Load, tasks: int, idle_seconds: float, figures: Figures) -> None:
    """Start an instance, and let it catch up and rest.

    Raises:
        BalanceServiceError: the instance makes no progress, or a balance is wrong.
    """
    with Cluster(stack, side, load, "tasks") as cluster:
        (instance,) = cluster.instances
        started = cluster.launch(instance)
        with Meter(instance.process) as meter:
            ready = cluster.wait_ready(instance)
            caught_up = cluster.wait_committed(every_seconds=_LOOK_EVERY_SECONDS)
            cpu_seconds = meter.cpu_seconds()
        cluster.check_balances()
        time.sleep(_SETTLE_SECONDS)
        root = instance.process()
        span = Span(root)
        time.sleep(idle_seconds)
        figures.add(
            side.name,
            "tasks",
            tasks_case(tasks),
            ready=ready - started,
            caught_up=caught_up - started,
            cpu_start=cpu_seconds,
            idle=span.cpu_seconds_per(span.seconds / 100),
            memory=meter.peak_bytes / _MEGABYTE,
            threads=None if root is None else threads(tree(root)),
        )
