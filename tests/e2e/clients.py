"""Queries, commands and continuous queries against balances, as clients make them."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Self

import httpx

from balance_service.kafka.partitioner import partition_of
from tests.support.api import ADD_FUNDS, GET_BALANCE
from tests.support.service import PARTITIONS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from balance_service.devtools.local.stack import LocalInstance


def body_of(customer_id: str, amount: str) -> bytes:
    """Returns a command body; `amount` is a JSON literal."""
    return f'{{"customerId": {json.dumps(customer_id)}, "amount": {amount}}}'.encode()


def post(http: httpx.Client, body: bytes) -> httpx.Response:
    return http.post(ADD_FUNDS, content=body, headers={"Content-Type": "application/json"})


def add(http: httpx.Client, customer_id: str, amount: str) -> str:
    """Adds funds; returns the position at which they are visible."""
    answer = post(http, body_of(customer_id, amount))
    assert answer.status_code == 202, answer.text
    return answer.headers["Balance-Position"]


def read(http: httpx.Client, customer_id: str, position: str | None) -> httpx.Response:
    parameters = {"customerId": customer_id} | ({} if position is None else {"minPosition": position})
    return http.get(GET_BALANCE, params=parameters)


def assert_problem(answer: httpx.Response, status: int, detail: str = "") -> None:
    assert answer.status_code == status, answer.text
    assert answer.headers["Content-Type"].split(";")[0] == "application/problem+json"
    problem = answer.json()
    assert problem.keys() == {"type", "title", "status", "detail"}
    assert problem["status"] == status
    assert problem["title"]
    assert detail in problem["detail"]


class Poller:
    """Queries balances in the background, one thread per instance, and records every wrong answer.

    Accepts a 503 with Retry-After from all instances, and no response from those in `may_be_away`.
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
        """Longest time without a 200, by instance and partition, in seconds."""

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
