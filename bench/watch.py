"""Watches customers' balances: the times of successful answers, and the positions that the answers have reached."""

from __future__ import annotations

import http.client
import itertools
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

from bench.sides import PATH

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bench.sides import Instance

_ANSWER_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Gaps:
    """The longest times of a partition, in seconds."""

    silence: float
    """Between two successful answers."""
    stall: float
    """Between an answer and the next one that has further events."""


class Watch:
    """Asks for one customer of each partition, as a context manager. Has a thread for each instance and partition.

    `_seen` has, by partition, the time of each successful answer and its position, or 0 if the side tells none.
    """

    def __init__(self, instances: Sequence[Instance], customers: Mapping[int, str], every_seconds: float) -> None:
        """Args:
        customers: by partition.
        """
        self._every_seconds = every_seconds
        self._stop = threading.Event()
        self._seen: dict[int, list[tuple[float, int]]] = {p: [] for p in customers}
        self._threads = [
            threading.Thread(target=self._ask, args=(instance, partition, customer), daemon=True)
            for instance, (partition, customer) in itertools.product(instances, customers.items())
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def gaps(self, began: float, ended: float) -> dict[int, Gaps]:
        """Partition → the longest times between two moments."""
        return {
            partition: gaps_of([look for look in sorted(seen) if look[0] <= ended], began, ended)
            for partition, seen in self._seen.items()
        }

    def _ask(self, instance: Instance, partition: int, customer: str) -> None:
        connection: http.client.HTTPConnection | None = None
        while not self._stop.wait(self._every_seconds):
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
                    position = int(answer.getheader("Balance-Position", "0").rpartition(":")[2])
                    self._seen[partition].append((time.monotonic(), position))
            except (OSError, http.client.HTTPException):
                if connection is not None:
                    connection.close()
                connection = None


def gaps_of(looks: Sequence[tuple[float, int]], began: float, ended: float) -> Gaps:
    """The longest times without an answer, and without further events, between two moments.

    Args:
        looks: time and position of each answer, in order of time; those before `began` only tell the first position.
    """
    highest = max((position for at, position in looks if at < began), default=-1)
    answers, advances = [began], [began]
    for at, position in looks:
        if at >= began:
            answers.append(at)
            if position > highest:
                highest = position
                advances.append(at)
    return Gaps(_longest([*answers, ended]), _longest([*advances, ended]))


def _longest(times: Sequence[float]) -> float:
    return max(later - earlier for earlier, later in itertools.pairwise(times))
