"""Listeners: the delay of change streams, and what they cost their instance. Measures this service only.

The delay is the time from the moment when an answer to a query includes an event to the moment when a listener has it.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote, urlsplit

import numpy as np

from balance_service.errors import BalanceServiceError
from bench.background import Background
from bench.cluster import Cluster
from bench.events import customer_id
from bench.load import arriving
from bench.probes import PAUSE_SECONDS, Prober
from bench.replay import replay
from bench.usage import resident_bytes, tree

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.synchronize import Event

    from balance_service.devtools.local.stack import LocalStack
    from bench.background import Count
    from bench.figures import Figures
    from bench.load import Load
    from bench.plan import Plan
    from bench.sides import Instance, Side

RATE = 1_000
_HEARD_SECONDS = 60.0
_SETTLE_SECONDS = 3.0
_KIB = 1024


def delay_case(listeners: int) -> str:
    """The case of the delay with a number of listeners."""
    return f"{listeners:,} listeners, {RATE:,} events/s"


def cost_case(listeners: int) -> str:
    """The case of a replay with a number of listeners."""
    return f"{listeners:,} listeners, a replay"


def measure_delay(stack: LocalStack, side: Side, load: Load, listeners: int, plan: Plan, figures: Figures) -> None:
    """Measure the delay of probes while events arrive for the keys of many listeners.

    Args:
        load: of as many customers as there are listeners.
    """
    with Cluster(stack, side, load, "listeners") as cluster:
        (instance,) = cluster.instances
        cluster.launch(instance)
        cluster.wait_running()
        cluster.wait_committed()
        with (
            Prober(stack, load, instance) as prober,
            Hearing(instance, prober.customers) as hearing,
            listening(instance, _keys(load, listeners)),
            arriving(stack, load, RATE),
        ):
            prober.take(plan.probes // 10)
            delays = []
            for number in range(plan.probes):
                time.sleep(np.random.default_rng(number).uniform(PAUSE_SECONDS, 3 * PAUSE_SECONDS))
                partition = number % len(prober.customers)
                prober.once(partition)
                visible = time.monotonic()
                delays.append(max(0.0, hearing.when(partition, prober.cents(partition)) - visible))
    p50, p99 = (float(v) * 1000 for v in np.percentile(delays, (50, 99)))
    figures.add(side.name, "listeners", delay_case(listeners), p50=p50, p99=p99)


def measure_cost(
    stack: LocalStack, side: Side, load: Load, listeners: int, figures: Figures, seen: Callable[[int], None]
) -> None:
    """Replay a load with and without listeners; then measure the memory of the listeners of an instance at rest."""
    keys = _keys(load, listeners)
    alone = replay(stack, side, load, seen)
    crowded = replay(stack, side, load, seen, meanwhile=lambda instance: listening(instance, keys))
    for case, run in ((cost_case(0), alone), (cost_case(listeners), crowded)):
        figures.add(side.name, "listeners", case, rate=run.rate, second_half=run.second_half)
    if alone.second_half and crowded.second_half:
        figures.add(side.name, "listeners", cost_case(listeners), of_none=crowded.second_half / alone.second_half)
    with Cluster(stack, side, load, "listeners") as cluster:
        (instance,) = cluster.instances
        cluster.launch(instance)
        cluster.wait_running()
        cluster.wait_committed()
        # What the first of them loads is not theirs.
        with listening(instance, keys[:1]):
            time.sleep(_SETTLE_SECONDS)
            before = _resident(instance)
            with listening(instance, keys[1:]):
                time.sleep(_SETTLE_SECONDS)
                each = (_resident(instance) - before) / (listeners - 1) / _KIB
    figures.add(side.name, "listeners", cost_case(listeners), each=each)


def listening(instance: Instance, keys: Sequence[str]) -> Background:
    """Listeners of keys, one connection each, in a process of their own, as a context manager."""
    return Background(_listen, instance.url, keys, from_count=len(keys))


class Hearing:
    """Listens to the keys of probes, as a context manager; notes when each amount arrives."""

    def __init__(self, instance: Instance, customers: Sequence[str]) -> None:
        self._instance = instance
        self._customers = customers
        self._heard: dict[tuple[int, int], float] = {}
        self._changed = threading.Condition()
        self._connections: list[http.client.HTTPConnection] = []

    def __enter__(self) -> Self:
        for partition, customer in enumerate(self._customers):
            address = urlsplit(self._instance.url)
            connection = http.client.HTTPConnection(str(address.hostname), address.port)
            connection.request("GET", _path(customer), headers={"Accept": "text/event-stream"})
            self._connections.append(connection)
            answer = connection.getresponse()
            threading.Thread(target=self._listen, args=(partition, answer), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._connections:
            connection.close()

    def when(self, partition: int, cents: int) -> float:
        """The monotonic time when an amount arrived. Raises BalanceServiceError: it does not arrive."""
        with self._changed:
            if not self._changed.wait_for(lambda: (partition, cents) in self._heard, _HEARD_SECONDS):
                raise BalanceServiceError("a listener missed an event that queries include")
            return self._heard[partition, cents]

    def _listen(self, partition: int, answer: http.client.HTTPResponse) -> None:
        try:
            for line in answer:
                now = time.monotonic()
                if line.startswith(b"data: "):
                    value: Any = json.loads(line[6:], parse_float=Decimal)["value"]
                    with self._changed:
                        self._heard[partition, 0 if value is None else int(value["amount"].scaleb(2))] = now
                        self._changed.notify_all()
        except (OSError, ValueError, AttributeError):
            # The connection was closed.
            return


def _keys(load: Load, listeners: int) -> list[str]:
    return [customer_id(number) for number in np.flatnonzero(load.cents)[:listeners].tolist()]


def _path(key: str) -> str:
    return f"/api/models/balance/keys/{quote(key, safe='')}"


def _resident(instance: Instance) -> int:
    process = instance.process()
    return 0 if process is None else resident_bytes(tree(process))


def _listen(url: str, keys: Sequence[str], stop: Event, count: Count) -> None:
    asyncio.run(_listen_all(url, keys, stop, count))


async def _listen_all(url: str, keys: Sequence[str], stop: Event, count: Count) -> None:
    """Counts the events of all listeners."""
    address = urlsplit(url)

    async def listen(key: str) -> None:
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        request = f"GET {_path(key)} HTTP/1.1\r\nHost: {address.netloc}\r\nAccept: text/event-stream\r\n\r\n"
        writer.write(request.encode())
        while read := await reader.read(1 << 16):
            count.value += read.count(b"event: state")

    listeners = [asyncio.create_task(listen(key)) for key in keys]
    while not stop.is_set():  # noqa: ASYNC110  # an event of processes
        await asyncio.sleep(0.1)
    for listener in listeners:
        listener.cancel()
    await asyncio.gather(*listeners, return_exceptions=True)
