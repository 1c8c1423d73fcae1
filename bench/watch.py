"""Watches customers' balances: the times of successful answers, their latency, the positions that they have reached."""

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
    """Asks for customers of each partition, as a context manager. Has a thread for each instance and partition.

    `_seen` has, by partition, the time of each successful answer and its position, or 0 if the side tells none.
    """

    def __init__(
        self, instances: Sequence[Instance], customers: Mapping[int, Sequence[str]], every_seconds: float
    ) -> None:
        """Args:
        customers: by partition; asked for in turn.
        """
        self._every_seconds = every_seconds
        self._stop = threading.Event()
        self._seen: dict[int, list[tuple[float, int]]] = {p: [] for p in customers}
        self._took: list[tuple[float, float]] = []
        self._refused: list[tuple[float, str]] = []
        self._threads = [
            threading.Thread(target=self._ask, args=(instance, partition, some), daemon=True)
            for instance, (partition, some) in itertools.product(instances, customers.items())
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

    def seconds(self, began: float, ended: float) -> list[float]:
        """The latency of each successful answer between two moments."""
        return [seconds for at, seconds in self._took if began <= at <= ended]

    def refused(self, began: float, ended: float) -> list[str]:
        """The status or error of each request between two moments that was not answered by a balance."""
        return [why for at, why in self._refused if began <= at <= ended]

    def _ask(self, instance: Instance, partition: int, customers: Sequence[str]) -> None:
        connection: http.client.HTTPConnection | None = None
        turns = itertools.cycle(customers)
        while not self._stop.wait(self._every_seconds):
            sent = time.monotonic()
            try:
                if connection is None:
                    address = urlsplit(instance.url)
                    connection = http.client.HTTPConnection(
                        str(address.hostname), address.port, timeout=_ANSWER_SECONDS
                    )
                connection.request("GET", f"{PATH}?customerId={next(turns)}")
                answer = connection.getresponse()
                body = answer.read()
                now = time.monotonic()
                if answer.status == http.client.OK:
                    position = int(answer.getheader("Balance-Position", "0").rpartition(":")[2])
                    self._seen[partition].append((now, position))
                    self._took.append((now, now - sent))
                else:
                    self._refused.append((now, f"{answer.status} {body.decode()}"))
            except (OSError, http.client.HTTPException) as error:
                self._refused.append((time.monotonic(), type(error).__name__))
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
