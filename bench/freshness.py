"""Freshness: the time from the acknowledgement of an event until an HTTP answer includes it, while events arrive.

CPU per event is measured in the same period, so it includes the answers to probes.
"""

from __future__ import annotations

import http.client
import random
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

import numpy as np

from balance_service.kafka.partitioner import partition_of
from bench.cluster import Cluster
from bench.events import customer_id, encoded
from bench.load import PARTITIONS, arriving
from bench.probes import Probes
from bench.sides import PATH, amount_of
from bench.usage import Span

if TYPE_CHECKING:
    from balance_service.devtools.local.stack import LocalStack
    from bench.figures import Figures
    from bench.load import Load
    from bench.plan import Plan
    from bench.sides import Instance, Side

_SETTLE_SECONDS = 3.0
_WARM_RATE = 1_000
_PAUSE_SECONDS = 0.05
_SECOND = 1.0 - _PAUSE_SECONDS
_PROBE_CENTS = 1
_MICROSECONDS = 1e6


def measure_freshness(stack: LocalStack, side: Side, load: Load, plan: Plan, figures: Figures) -> None:
    """Measure freshness at each rate, with one instance.

    A warm-up precedes: a JVM takes some seconds to compile code that runs only a few times per second.

    Raises:
        BalanceServiceError: an event is not visible within a minute.
    """
    with Cluster(stack, side, load, "freshness") as cluster:
        (instance,) = cluster.instances
        cluster.launch(instance)
        cluster.wait_running()
        cluster.wait_committed()
        with _Prober(stack, load, instance) as prober:
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
                figures.add(side.name, "freshness", case, p50=p50, p99=p99, cpu_event=cpu)
                if background and came < 0.95 * rate * took:
                    figures.notes.append(
                        f"freshness of {side.name}: of {case} only {came / took:,.0f} could be produced"
                    )


class _Prober:
    """Appends events for customers outside the load, one in each partition, and polls until they are visible."""

    def __init__(self, stack: LocalStack, load: Load, instance: Instance) -> None:
        self._load = load
        address = urlsplit(instance.url)
        self._http = http.client.HTTPConnection(str(address.hostname), address.port, timeout=10)
        self._probes = Probes(stack, load.topic)
        # Numbers outside the load.
        beyond = range(load.customers, load.customers + 1_000)
        self._customers = [
            next(n for n in beyond if partition_of(customer_id(n).encode(), PARTITIONS) == p) for p in range(PARTITIONS)
        ]
        self._added: dict[int, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def take(self, probes: int, pause: float = 0.0) -> list[float]:
        """Seconds from acknowledgement to visibility of each probe, with at least the pause between probes."""
        return [self._probe(self._customers[n % len(self._customers)], pause) for n in range(probes)]

    def _probe(self, customer: int, pause: float) -> float:
        # Random, so that probes have no fixed phase relative to commits.
        time.sleep(pause + random.uniform(0, 2 * _PAUSE_SECONDS))  # noqa: S311  (no secret)
        ((key, frame),) = encoded(self._load.header, np.array([customer]), np.array([_PROBE_CENTS]))
        self._added[customer] = added = self._added.get(customer, 0) + _PROBE_CENTS
        return self._probes.seconds(key, frame, lambda: self._cents(customer) == added)

    def _cents(self, customer: int) -> int | None:
        try:
            answer, body = self._get(customer)
        except (OSError, http.client.HTTPException):
            # The server can close an idle connection.
            self._http.close()
            answer, body = self._get(customer)
        return int(amount_of(body).scaleb(2)) if answer.status == http.client.OK else None

    def _get(self, customer: int) -> tuple[http.client.HTTPResponse, bytes]:
        self._http.request("GET", f"{PATH}?customerId={customer_id(customer)}")
        answer = self._http.getresponse()
        return answer, answer.read()
