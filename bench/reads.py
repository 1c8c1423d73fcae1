"""Reads: requests per second and latency, from the owner and through a peer, with and without arriving events."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from balance_service.errors import BalanceServiceError
from bench.cluster import Cluster
from bench.load import arriving
from bench.plan import PROXIED, read_case
from bench.sides import PATH

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from balance_service.devtools.local.stack import LocalStack
    from bench.figures import Figures
    from bench.load import Load
    from bench.plan import Plan
    from bench.sides import Side

_CUSTOMERS_OF_A_PARTITION = 5_000
_WARM_UP_SECONDS = 3.0
_SETTLE_SECONDS = 3.0
_THREADS = 2
# Headers of ingress-nginx, of a browser or HTTP client, and of a trace.
INGRESS_HEADERS = {
    "User-Agent": "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/140.0.0.0",
    "Accept": "application/json, text/plain, */*",
    "Accept-Encoding": "gzip, deflate, br",
    "X-Request-ID": "3f0c8a3be1f44ab7a1c2d4e5f60718293",
    "X-Real-IP": "203.0.113.7",
    "X-Forwarded-For": "203.0.113.7, 10.42.0.1",
    "X-Forwarded-Host": "balances.example.com",
    "X-Forwarded-Port": "443",
    "X-Forwarded-Proto": "https",
    "X-Forwarded-Scheme": "https",
    "X-Scheme": "https",
    "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
}


@dataclass(frozen=True, slots=True)
class Reading:
    """The result of the load generator."""

    requests_per_second: float
    p50_ms: float
    p99_ms: float


def generator() -> str:
    """The name of the load generator, for the report."""
    return "wrk" if shutil.which("wrk") else "bench/requests.py (wrk is not installed)"


def measure_local_reads(stack: LocalStack, side: Side, load: Load, plan: Plan, figures: Figures) -> None:
    """Measure reads from one instance, which owns all partitions. Raises BalanceServiceError if requests fail."""
    with Cluster(stack, side, load, "reads") as cluster:
        (instance,) = cluster.instances
        cluster.launch(instance)
        cluster.wait_running()
        cluster.wait_committed()
        customers = [c for p in load.ends for c in load.customers_of(p, _CUSTOMERS_OF_A_PARTITION)]
        _read(stack, side, instance.url, customers, 16, _WARM_UP_SECONDS)
        for rate in plan.read_rates:
            with arriving(stack, load, rate) if rate else nullcontext():
                for count, headers in itertools.product(plan.connections, plan.headers):
                    given = INGRESS_HEADERS if headers else {}
                    reading = _read(stack, side, instance.url, customers, count, plan.read_seconds, given)
                    _record(figures, side, read_case("local", count, rate, headers=headers), reading)


def measure_proxied_reads(stack: LocalStack, side: Side, load: Load, plan: Plan, figures: Figures) -> None:
    """Measure reads from an instance that forwards them to the owner. Raises BalanceServiceError if requests fail."""
    with Cluster(stack, side, load, "proxied", 2) as cluster:
        for instance in cluster.instances:
            cluster.launch(instance)
        cluster.wait_running(spread=True)
        cluster.wait_committed()
        time.sleep(_SETTLE_SECONDS)
        asked = cluster.instances[0]
        elsewhere = load.partitions - cluster.running()[0]
        customers = [c for p in elsewhere for c in load.customers_of(p, _CUSTOMERS_OF_A_PARTITION)]
        _read(stack, side, asked.url, customers, 16, _WARM_UP_SECONDS)
        count = plan.connections[0]
        reading = _read(stack, side, asked.url, customers, count, plan.read_seconds)
        _record(figures, side, read_case(PROXIED, count, 0), reading)


def _record(figures: Figures, side: Side, case: str, reading: Reading) -> None:
    figures.add(side.name, "reads", case, requests=reading.requests_per_second, p50=reading.p50_ms, p99=reading.p99_ms)


def _read(
    stack: LocalStack,
    side: Side,
    url: str,
    customers: Sequence[str],
    connections: int,
    seconds: float,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> Reading:
    lines = [f"{name}: {value}" for name, value in headers.items()]
    ids = stack.data_dir / "customers.txt"
    ids.write_text("\n".join(customers) + "\n")
    if wrk := shutil.which("wrk"):
        script = str(Path(__file__).with_name("reads.lua"))
        counts = [f"-t{_THREADS}", f"-c{connections}", f"-d{max(1, round(seconds))}s", "--timeout", "10s"]
        given = [word for line in lines for word in ("-H", line)]
        command = [wrk, *counts, *given, "-s", script, url, "--", str(ids), PATH]
    else:
        command = [sys.executable, "-m", "bench.requests", url, str(ids), str(connections), str(seconds), *lines]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 60, check=False)
    if done.returncode:
        raise BalanceServiceError(f"the load generator failed: {done.stderr or done.stdout}")
    seen = json.loads(done.stdout.strip().splitlines()[-1])
    if seen["failed"]:
        raise BalanceServiceError(f"{side.name} did not answer {seen['failed']} of {seen['requests']} reads well")
    return Reading(seen["requests"] / seen["seconds"], seen["p50_ms"], seen["p99_ms"])
