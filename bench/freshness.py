"""Freshness: the time from the acknowledgement of an event until an HTTP answer includes it, while events arrive.

CPU per event is measured in the same period, so it includes the answers to probes.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import TYPE_CHECKING

import numpy as np

from bench.cluster import Cluster
from bench.load import arriving
from bench.probes import PAUSE_SECONDS, Prober
from bench.usage import Span

if TYPE_CHECKING:
    from balance_service.devtools.local.stack import LocalStack
    from bench.figures import Figures
    from bench.load import Load
    from bench.plan import Plan
    from bench.sides import Side

_SETTLE_SECONDS = 3.0
_WARM_RATE = 1_000
_SECOND = 1.0 - PAUSE_SECONDS
_MICROSECONDS = 1e6


def measure_freshness(
    stack: LocalStack, side: Side, load: Load, plan: Plan, figures: Figures, measure: str = "freshness"
) -> None:
    """Measure freshness at each rate, with one instance.

    A warm-up precedes: a JVM takes some seconds to compile code that runs only a few times per second.

    Raises:
        BalanceServiceError: an event is not visible within three minutes.
    """
    with Cluster(stack, side, load, "freshness") as cluster:
        (instance,) = cluster.instances
        cluster.launch(instance)
        cluster.wait_running()
        cluster.wait_committed()
        with Prober(stack, load, instance) as prober:
            prober.take(plan.probes // 10)
            if plan.idle_seconds:
                time.sleep(_SETTLE_SECONDS)
                span = Span(instance.process())
                time.sleep(plan.idle_seconds)
                figures.add(side.name, "idle", "one instance", idle=span.cpu_seconds_per(span.seconds / 100))
            with arriving(stack, load, _WARM_RATE):
                time.sleep(plan.warm_seconds)
            for rate in plan.rates:
                # At 1 event/s the probes are the only events.
                alone = rate == 1
                case = f"{rate:,} event{'' if alone else 's'}/s"
                probes, pause = (plan.lone_probes, _SECOND) if alone else (plan.probes, 0.0)
                with nullcontext() if alone else arriving(stack, load, rate) as background:
                    prober.take(probes // 10, pause)
                    span, before = Span(instance.process()), background.count if background else 0
                    waits = prober.take(probes, pause)
                    took, came = span.seconds, background.count - before if background else 0
                    cpu = span.cpu_seconds_per((came + probes) / _MICROSECONDS)
                p50, p99 = (float(v) * 1000 for v in np.percentile(waits, (50, 99)))
                figures.add(side.name, measure, case, p50=p50, p99=p99, cpu_event=cpu)
                if background and came < 0.95 * rate * took:
                    figures.notes.append(
                        f"{measure} of {side.name}: of {case} only {came / took:,.0f} could be produced"
                    )
