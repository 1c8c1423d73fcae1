"""Somebody who asks for balances all the time, and finds every answer that no client should ever get."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Self

import httpx

from balance_service.kafka.partitioner import partition_of
from tests.support.api import GET_BALANCE
from tests.support.service import PARTITIONS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from balance_service.devtools.local.stack import LocalInstance


class Poller:
    """Asks for balances in the background, and keeps every answer that no client should ever get.

    A 503 with Retry-After is always allowed, and so is no answer from those of whom it is said that they may be away.
    """

    def __init__(
        self, instances: Sequence[LocalInstance], expected: Mapping[str, str], may_be_away: Sequence[LocalInstance] = ()
    ) -> None:
        """Args:
        expected: customer → the one right body of a 200.
        """
        self._instances = instances
        self._expected = dict(expected)
        self._may_be_away = may_be_away
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in instances]
        self.counts: Counter[tuple[str, int]] = Counter()
        self.wrong: list[str] = []
        self.silences: dict[tuple[str, int], float] = {}
        """Longest time without a 200 by instance and partition, in seconds."""

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _run(self, instance: LocalInstance) -> None:
        chooser, last = random.Random(1), dict.fromkeys(range(PARTITIONS), time.monotonic())
        with httpx.Client(base_url=instance.url, timeout=30, verify=False) as http:
            while not self._stopping.wait(0.01):
                customer = chooser.choice(list(self._expected))
                try:
                    answer = http.get(GET_BALANCE, params={"customerId": customer})
                except httpx.TransportError as error:
                    if instance not in self._may_be_away:
                        self.wrong.append(f"{instance.name} did not answer: {error!r}")
                    continue
                self._judge(instance, customer, answer, last)

    def _judge(self, instance: LocalInstance, customer: str, answer: httpx.Response, last: dict[int, float]) -> None:
        self.counts[instance.name, answer.status_code] += 1
        is_right = answer.status_code == 200 and answer.text == self._expected[customer]
        if not is_right and not (answer.status_code == 503 and "Retry-After" in answer.headers):
            self.wrong.append(f"{instance.name} about {customer}: {answer.status_code} {answer.text} {answer.headers}")
        if answer.status_code == 200:
            partition, now = partition_of(customer.encode(), PARTITIONS), time.monotonic()
            key = instance.name, partition
            self.silences[key] = max(self.silences.get(key, 0.0), now - last[partition])
            last[partition] = now
