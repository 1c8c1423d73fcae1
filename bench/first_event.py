"""First event: an event that is sent when a new instance is ready, and later events. Measures this service only.

The topic is empty, so that no waiting event has compiled the code that the first one needs.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

from bench.cluster import Cluster
from bench.probes import Prober

if TYPE_CHECKING:
    from balance_service.devtools.local.stack import LocalStack
    from bench.figures import Figures
    from bench.load import Load
    from bench.sides import Side

CASE = "clean start, no event waits"
_LATER = 20


def measure_first_event(stack: LocalStack, side: Side, load: Load, figures: Figures) -> None:
    """Start one instance, and send an event once it is ready.

    Args:
        load: an empty topic.

    Raises:
        BalanceServiceError: an event is not visible within three minutes.
    """
    with Cluster(stack, side, load, "first") as cluster:
        (instance,) = cluster.instances
        with Prober(stack, load, instance) as prober:
            started = cluster.launch(instance)
            ready = cluster.wait_ready(instance)
            first = prober.once()
            seen = time.monotonic()
            later = prober.take(_LATER)
    figures.add(
        side.name,
        "first",
        CASE,
        ready=ready - started,
        first_event=seen - started,
        after_ready=1000 * first,
        p50=1000 * statistics.median(later),
    )
