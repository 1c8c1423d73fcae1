"""Reads: requests a second and their latency, of the owner and through a peer, at rest and while events arrive."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from balance_service.errors import BalanceServiceError
from bench.cluster import Cluster
from bench.load import arriving
from bench.sides import EVERYTHING, PATH

if TYPE_CHECKING:
    from collections.abc import Sequence

    from balance_service.tools.local.stack import LocalStack
    from bench.figures import Figures
    from bench.load import Load
    from bench.sides import Side

_CUSTOMERS_OF_A_PARTITION = 5_000
_WARM_UP_SECONDS = 3.0
_SETTLE_SECONDS = 3.0
_THREADS = 2


@dataclass(frozen=True, slots=True)
class Reading:
    """What the load generator saw in one run."""

    requests_per_second: float
    p50_ms: float
    p99_ms: float


def generator() -> str:
    """By what the requests are made, for the report."""
    return "wrk" if shutil.which("wrk") else "bench/requests.py (wrk is not installed)"


def measure_local_reads(
    stack: LocalStack,
    side: Side,
    load: Load,
    connections: Sequence[int],
    rates: Sequence[int],
    seconds: float,
    figures: Figures,
) -> None:
    """One instance, which owns everything.

    Args:
        rates: events a second that arrive meanwhile; 0 for none.

    Raises:
        BalanceServiceError: some requests were not answered well.
    """
    with Cluster(stack, side, load, "reads") as cluster:
        (instance,) = cluster.instances
        cluster.launch(instance)
        cluster.wait_running()
        cluster.wait_committed()
        customers = [c for p in load.ends for c in load.customers_of(p, _CUSTOMERS_OF_A_PARTITION)]
        _read(stack, side, instance.url, customers, 16, _WARM_UP_SECONDS)
        for rate in rates:
            with arriving(stack, load, rate) if rate else nullcontext():
                for count in connections:
                    reading = _read(stack, side, instance.url, customers, count, seconds)
                    _record(figures, side, "local", count, rate, reading)


def measure_proxied_reads(
    stack: LocalStack, side: Side, load: Load, connections: Sequence[int], seconds: float, figures: Figures
) -> None:
    """Two instances; one is asked for what the other owns.

    Raises:
        BalanceServiceError: some requests were not answered well.
    """
    with Cluster(stack, side, load, "proxied", 2) as cluster:
        for instance in cluster.instances:
            cluster.launch(instance)
        cluster.wait_running(spread=True)
        cluster.wait_committed()
        time.sleep(_SETTLE_SECONDS)
        asked = cluster.instances[0]
        elsewhere = EVERYTHING - cluster.running()[0]
        customers = [c for p in elsewhere for c in load.customers_of(p, _CUSTOMERS_OF_A_PARTITION)]
        _read(stack, side, asked.url, customers, 16, _WARM_UP_SECONDS)
        for count in connections:
            reading = _read(stack, side, asked.url, customers, count, seconds)
            _record(figures, side, "proxied", count, 0, reading)


def _record(figures: Figures, side: Side, kind: str, connections: int, rate: int, reading: Reading) -> None:
    meanwhile = f"{rate:,} events/s" if rate else "at rest"
    case = f"{kind}, {connections} connections, {meanwhile}"
    figures.add(side.name, "reads", case, requests=reading.requests_per_second, p50=reading.p50_ms, p99=reading.p99_ms)


def _read(
    stack: LocalStack, side: Side, url: str, customers: Sequence[str], connections: int, seconds: float
) -> Reading:
    ids = stack.data_dir / "customers.txt"
    ids.write_text("\n".join(customers) + "\n")
    if wrk := shutil.which("wrk"):
        script = str(Path(__file__).with_name("reads.lua"))
        counts = [f"-t{_THREADS}", f"-c{connections}", f"-d{max(1, round(seconds))}s", "--timeout", "10s"]
        command = [wrk, *counts, "-s", script, url, "--", str(ids), PATH]
    else:
        command = [sys.executable, "-m", "bench.requests", url, str(ids), str(connections), str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 60, check=False)
    if done.returncode:
        raise BalanceServiceError(f"the load generator failed: {done.stderr or done.stdout}")
    seen = json.loads(done.stdout.strip().splitlines()[-1])
    if seen["failed"]:
        raise BalanceServiceError(f"{side.name} did not answer {seen['failed']} of {seen['requests']} reads well")
    return Reading(seen["requests"] / seen["seconds"], seen["p50_ms"], seen["p99_ms"])
