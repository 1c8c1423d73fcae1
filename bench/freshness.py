"""Freshness: from the acknowledgement of an event to the answer over HTTP that has it, while others arrive."""

from __future__ import annotations

import http.client
import random
import time
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

import numpy as np
from confluent_kafka import Producer

from balance_service.cluster.partitioner import partition_of
from balance_service.errors import BalanceServiceError
from bench.cluster import Cluster, amount_of
from bench.events import customer_id, encoded
from bench.load import PARTITIONS, PRODUCER, Background
from bench.sides import PATH
from bench.usage import cpu_seconds, tree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from balance_service.local.stack import LocalStack
    from bench.figures import Figures
    from bench.load import Load
    from bench.sides import Instance, Side

_IDLE_SECONDS = 10.0
_SETTLE_SECONDS = 5.0
_LOOK_EVERY_SECONDS = 0.001
_VISIBLE_SECONDS = 60.0
_PAUSE_SECONDS = 0.05
_PROBE_CENTS = 1


def measure_freshness(
    stack: LocalStack,
    side: Side,
    load: Load,
    rates: Sequence[int],
    probes: int,
    warm_seconds: float,
    figures: Figures,
) -> None:
    """At each rate in turn, with one instance.

    Args:
        warm_seconds: for how long events arrive at the first rate before it is measured: how fresh an instance is that
            runs, is asked here, and a JVM compiles for a while what runs a few times a second.

    Raises:
        BalanceServiceError: an event is not visible within a minute.
    """
    with Cluster(stack, side, load, "freshness") as cluster:
        (instance,) = cluster.instances
        cluster.launch(instance)
        cluster.wait_running()
        cluster.wait_committed()
        with _Prober(stack, load, instance) as prober:
            prober.take(probes // 10)
            time.sleep(_SETTLE_SECONDS)
            figures.add(side.name, "idle", "one instance", idle=_idle_percent(instance))
            with Background(stack, load, rates[0]):
                time.sleep(warm_seconds)
            for rate in rates:
                with Background(stack, load, rate) as background:
                    prober.take(probes // 10)
                    seconds = prober.take(probes)
                    came = background.rate()
                p50, p99 = (float(v) * 1000 for v in np.percentile(seconds, (50, 99)))
                figures.add(side.name, "freshness", f"{rate:,} events/s", p50=p50, p99=p99)
                if came < 0.95 * rate:
                    figures.notes.append(
                        f"freshness of {side.name}: of {rate:,} events/s only {came:,.0f} could be produced"
                    )


def _idle_percent(instance: Instance) -> float | None:
    root = instance.process()
    if root is None:
        return None
    before, began = cpu_seconds(tree(root)), time.monotonic()
    time.sleep(_IDLE_SECONDS)
    return 100 * (cpu_seconds(tree(root)) - before) / (time.monotonic() - began)


class _Prober:
    """Appends events for customers that nobody else adds to, one in each partition, and looks until they are there."""

    def __init__(self, stack: LocalStack, load: Load, instance: Instance) -> None:
        self._load = load
        address = urlsplit(instance.url)
        self._http = http.client.HTTPConnection(str(address.hostname), address.port, timeout=10)
        self._producer = Producer(
            {"bootstrap.servers": stack.bootstrap_servers, "log_level": 0, **PRODUCER, "linger.ms": 0}
        )
        # Numbers beyond those of the load.
        beyond = range(load.customers, load.customers + 1_000)
        self._customers = [
            next(n for n in beyond if partition_of(customer_id(n).encode(), PARTITIONS) == p) for p in range(PARTITIONS)
        ]
        self._acknowledged = 0.0
        self._added: dict[int, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def take(self, probes: int) -> list[float]:
        """Seconds from acknowledged to visible, of each probe."""
        return [self._probe(self._customers[n % len(self._customers)]) for n in range(probes)]

    def _probe(self, customer: int) -> float:
        # At no fixed phase of anyone's commit interval.
        time.sleep(random.uniform(0, 2 * _PAUSE_SECONDS))  # noqa: S311  (no secret)
        events = encoded(self._load.header, np.array([customer]), np.array([_PROBE_CENTS]))
        for key, frame in events:
            self._producer.produce(self._load.topic, frame, key, on_delivery=self._delivered)
        self._acknowledged = 0.0
        self._producer.flush(_VISIBLE_SECONDS)
        acknowledged = self._acknowledged
        if not acknowledged:
            raise BalanceServiceError("a probe was not acknowledged: is the broker still up?")
        self._added[customer] = self._added.get(customer, 0) + _PROBE_CENTS
        while self._cents(customer) != self._added[customer]:
            if time.monotonic() - acknowledged > _VISIBLE_SECONDS:
                raise BalanceServiceError(f"an event is not visible {_VISIBLE_SECONDS:.0f} s after it was acknowledged")
            time.sleep(_LOOK_EVERY_SECONDS)
        return time.monotonic() - acknowledged

    def _delivered(self, error: Any, _message: Any) -> None:
        if error is None:
            self._acknowledged = time.monotonic()

    def _cents(self, customer: int) -> int | None:
        try:
            answer, body = self._get(customer)
        except (OSError, http.client.HTTPException):
            # A server may close a connection that was idle for long.
            self._http.close()
            answer, body = self._get(customer)
        return int(amount_of(body).scaleb(2)) if answer.status == http.client.OK else None

    def _get(self, customer: int) -> tuple[http.client.HTTPResponse, bytes]:
        self._http.request("GET", f"{PATH}?customerId={customer_id(customer)}")
        answer = self._http.getresponse()
        return answer, answer.read()
