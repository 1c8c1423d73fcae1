"""A running application of a side: starts, polls, queries and stops its instances."""

from __future__ import annotations

import http.client
import itertools
import time
from contextlib import ExitStack, closing, suppress
from decimal import Decimal
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

import numpy as np

from balance_service.errors import BalanceServiceError
from bench.events import customer_id
from bench.sides import delete_internal_topics, new_application_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from balance_service.devtools.local.stack import LocalStack
    from bench.load import Load
    from bench.sides import Instance, Side

LOOK_EVERY_SECONDS = 0.03
_READY_LOOK_SECONDS = 0.01
_ANSWER_SECONDS = 2.0
_START_SECONDS = 300.0
_STANDSTILL_SECONDS = 120.0
_CHECKED_CUSTOMERS = 1_000
_SHOWN_SECONDS = 5.0


class Cluster:
    """A context manager; at its end, instances are stopped and their data deleted."""

    def __init__(self, stack: LocalStack, side: Side, load: Load, what: str, instances: int = 1) -> None:
        self.side = side
        self.load = load
        self._stack = stack
        self._application_id = new_application_id(what)
        self.instances = [side.instance(n + 1, load.topic, self._application_id) for n in range(instances)]
        self.launched: list[Instance] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as cleanup:
            cleanup.callback(delete_internal_topics, self._stack, self._application_id)
            for instance in self.instances:
                cleanup.callback(instance.wipe)
                cleanup.callback(instance.stop)

    def launch(self, instance: Instance) -> float:
        """Start an instance; returns the monotonic time before the start."""
        began = time.monotonic()
        instance.launch()
        if instance not in self.launched:
            self.launched.append(instance)
        return began

    def end(self, instance: Instance, *, kill: bool = False) -> None:
        self.launched.remove(instance)
        if kill:
            instance.kill()
        else:
            instance.stop()

    def running(self) -> list[frozenset[int]]:
        """The partitions whose stores are open, for each launched instance."""
        return [p.running if (p := i.progress()) is not None else frozenset() for i in self.launched]

    def wait_running(self, *, spread: bool = False) -> float:
        """Wait until the stores of all partitions are open; returns the monotonic time.

        Args:
            spread: also wait until every launched instance has a partition.
        """
        deadline = time.monotonic() + _START_SECONDS
        while True:
            owned = self.running()
            if frozenset().union(*owned) == self.load.partitions and (not spread or all(owned)):
                return time.monotonic()
            if time.monotonic() > deadline:
                raise BalanceServiceError(f"{self.side.name} did not open all partitions in {_START_SECONDS:.0f} s")
            time.sleep(LOOK_EVERY_SECONDS)

    def wait_ready(self, instance: Instance) -> float:
        """Wait until the readiness of an instance of this service is 200; returns the monotonic time.

        Raises:
            BalanceServiceError: it is not, for minutes.
        """
        deadline, address = time.monotonic() + _START_SECONDS, urlsplit(instance.url)
        while time.monotonic() < deadline:
            connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=_ANSWER_SECONDS)
            with closing(connection), suppress(OSError, http.client.HTTPException):
                connection.request("GET", "/health/ready")
                if connection.getresponse().status == http.client.OK:
                    return time.monotonic()
            time.sleep(_READY_LOOK_SECONDS)
        raise BalanceServiceError(f"{self.side.name} was not ready in {_START_SECONDS:.0f} s")

    def committed(self) -> int:
        """The number of durably committed events of all partitions."""
        return self._events(instance.committed() for instance in self.launched)

    def applied(self) -> int:
        """The number of folded events, committed or not."""
        said = (instance.progress() for instance in self.launched)
        return self._events(progress.applied for progress in said if progress is not None)

    def _events(self, positions: Iterable[Mapping[int, int]]) -> int:
        highest: dict[int, int] = {}
        for partition, position in itertools.chain.from_iterable(p.items() for p in positions):
            highest[partition] = max(position, highest.get(partition, 0))
        return sum(min(position, self.load.ends.get(p, 0)) for p, position in highest.items())

    def wait_committed(
        self, seen: Callable[[int], None] = lambda _: None, every_seconds: float = LOOK_EVERY_SECONDS
    ) -> float:
        """Wait until every event of the load is committed; returns the monotonic time.

        Args:
            seen: called with the number of committed events at each poll.
            every_seconds: between polls.

        Raises:
            BalanceServiceError: there is no progress for two minutes.
        """
        most, moved = -1, time.monotonic()
        while True:
            began = time.monotonic()
            committed = self.committed()
            now = time.monotonic()
            seen(committed)
            if committed == self.load.events:
                return now
            if committed > most:
                most, moved = committed, now
            if now - moved > _STANDSTILL_SECONDS:
                raise BalanceServiceError(f"{self.side.name} stands still at {most} of {self.load.events} events")
            time.sleep(max(0.0, every_seconds - (now - began)))

    def check_balances(self) -> None:
        """Compare a thousand balances with the generated load. Raises BalanceServiceError if one is wrong."""
        known = np.flatnonzero(self.load.cents)
        # A transactional store of Kafka Streams shows a commit a moment after its offsets.
        deadline = time.monotonic() + _SHOWN_SECONDS
        chosen = np.random.default_rng(1).choice(known, min(_CHECKED_CUSTOMERS, len(known)), replace=False)
        for number in chosen.tolist():
            customer, wanted = customer_id(number), Decimal(int(self.load.cents[number])).scaleb(-2)
            while (amount := self._amount(customer)) != wanted and time.monotonic() < deadline:
                time.sleep(LOOK_EVERY_SECONDS)
            if amount != wanted:
                raise BalanceServiceError(
                    f"{self.side.name} is wrong: {customer} has {wanted}, the answer was {amount}"
                )

    def _amount(self, customer: str) -> Decimal | None:
        amounts = (instance.amount(customer) for instance in self.launched)
        return next((a for a in amounts if a is not None), None)
