"""External traffic: events at a rate, and readers that query every ready replica continuously.

One thread appends, one checks readiness, a few query. Shared data is only appended to or replaced as a whole.
"""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, Self

from confluent_kafka import Producer

from balance_service.avro.registry import SchemaRegistry
from balance_service.read_models.add_funds import FundsAddedSerializer
from tests.compose.stack import HOST, Replica, Stack
from tests.support.api import Connection, query
from tests.support.recount import recount

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.compose.stack import Stack
    from tests.compose.story import Report

TOPIC = "balance"
_READERS = 4
_LOOK_SECONDS = 0.5
_ANSWER_SECONDS = 8.0
_PAUSE_SECONDS = 0.02
_FLUSH_SECONDS = 120.0


def customer(number: int) -> str:
    return f"customer-{number}"


class Events:
    """Appends events. Used by one thread at a time."""

    def __init__(self, stack: Stack) -> None:
        self._producer = Producer(
            {"bootstrap.servers": stack.bootstrap_servers, "linger.ms": 20, "partitioner": "murmur2_random"}
        )
        self._serialize = FundsAddedSerializer(SchemaRegistry(stack.registry_url), TOPIC)
        self.appended = 0

    def append(self, name: str, cents: int) -> None:
        """Appends an event; it is acknowledged once `flush` has returned."""
        self.append_raw(name, self._serialize(name, Decimal(cents).scaleb(-2)))

    def append_raw(self, name: str, frame: bytes) -> None:
        """Appends any record."""
        while True:
            try:
                self._producer.produce(TOPIC, frame, name.encode())
                break
            except BufferError:
                self._producer.poll(0.1)
        self._producer.poll(0)
        self.appended += 1

    def flush(self) -> None:
        """Waits until all records are acknowledged."""
        left = self._producer.flush(_FLUSH_SECONDS)
        assert left == 0, f"{left} events were not acknowledged"


@dataclass
class Findings:
    """The results of the readers."""

    answers: int = 0
    retry_later: int = 0
    """503 with Retry-After."""
    broken: int = 0
    """Connections that ended without a response."""
    wrong: Counter[str] = field(default_factory=Counter)
    """Other responses, with their number."""


class Traffic:
    """Load while the context is open."""

    def __init__(self, stack: Stack, customers: int, homes: Callable[[str], int], rate: float) -> None:
        """Args:
        customers: the number of customers with a balance.
        homes: customer → partition.
        rate: events per second.
        """
        self._stack = stack
        self._customers = customers
        self._homes = homes
        self._rate = rate
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._ready: Sequence[int] = ()
        self._last_answer: dict[int, float] = {}
        self.findings = Findings()
        self.longest_gaps: dict[int, float] = {}
        """Partition → the longest time without an answer of any replica, in seconds."""
        self._threads: list[threading.Thread] = []
        self.failures: list[str] = []

    def __enter__(self) -> Self:
        self._look()
        readers = [partial(self._ask, random.Random(number)) for number in range(_READERS)]
        for work in (self._append, self._watch, *readers):
            self._threads.append(threading.Thread(target=self._guarded, args=(work,), daemon=True))
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _guarded(self, target: Callable[[], None]) -> None:
        try:
            target()
        except Exception as error:
            self.failures.append(repr(error))
            raise

    def _append(self) -> None:
        events, chooser, began = Events(self._stack), random.Random(1), time.monotonic()
        while not self._stopping.wait(0.05):
            due = int((time.monotonic() - began) * self._rate) - events.appended
            for _ in range(due):
                events.append(customer(chooser.randrange(self._customers)), chooser.randrange(1, 10_000))
        events.flush()

    def _watch(self) -> None:
        while not self._stopping.wait(_LOOK_SECONDS):
            self._look()

    def _look(self) -> None:
        """Updates the ready replicas, as a load balancer does."""
        self._ready = [r.port for r in self._stack.replicas() if is_ready(r.port)]

    def _ask(self, chooser: random.Random) -> None:
        connections: dict[int, Connection] = {}
        while not self._stopping.wait(_PAUSE_SECONDS):
            ports = self._ready
            if not ports:
                continue
            port, name = chooser.choice(ports), customer(chooser.randrange(self._customers))
            connection = connections.setdefault(port, Connection(HOST, port, _ANSWER_SECONDS))
            try:
                reply = connection.ask(query(name))
            except (OSError, http.client.HTTPException):
                with self._lock:
                    self.findings.broken += 1
                continue
            with self._lock:
                self._note(self._homes(name), reply.status, "retry-after" in reply.headers)
        for connection in connections.values():
            connection.close()

    def _note(self, partition: int, status: int, retry_after: bool) -> None:
        now = time.monotonic()
        if status == 200:
            before = self._last_answer.get(partition, now)
            self.longest_gaps[partition] = max(self.longest_gaps.get(partition, 0.0), now - before)
            self._last_answer[partition] = now
            self.findings.answers += 1
        elif status == 503 and retry_after:
            self.findings.retry_later += 1
        else:
            self.findings.wrong[f"{status}, partition {partition}"] += 1


def is_ready(port: int) -> bool:
    """Whether a replica reports that it is ready."""
    connection = Connection(HOST, port, 2.0)
    try:
        return connection.ask("/health/ready").status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


_CATCH_UP_SECONDS = 900.0
_ASKED = 300


def check_recount(stack: Stack, report: Report, title: str, customers: int) -> None:
    """Queries each replica about a sample of customers and compares with the recount."""
    truth = recount(stack.bootstrap_servers, stack.registry_url, TOPIC)
    chooser = random.Random(title)
    asked = [customer(chooser.randrange(customers)) for _ in range(_ASKED)]
    replicas = stack.replicas()
    wrong: list[str] = []
    deadline = time.monotonic() + _CATCH_UP_SECONDS
    for replica in replicas:
        wrong += _differences(replica, asked, truth, deadline)
    report.expect(
        f"{title}: recounted",
        not wrong,
        f"{len(truth)} customers on the topic; {len(replicas)} replicas asked for {_ASKED} each, "
        + (f"{len(wrong)} wrong: {wrong[:3]}" if wrong else "all exact"),
    )


def _differences(replica: Replica, asked: Sequence[str], truth: dict[str, Decimal], deadline: float) -> list[str]:
    """Returns the answers that differ from the recount. Retries until the deadline while a replica catches up."""
    wrong = []
    connection = Connection(HOST, replica.port, 20.0)
    for name in asked:
        said = "nothing"
        while True:
            with suppress(OSError, http.client.HTTPException):
                reply = connection.ask(query(name))
                said = f"{reply.status} {reply.body.decode(errors='replace')}"
                if reply.status == 200 and json.loads(reply.body, parse_float=Decimal)["amount"] == truth[name]:
                    break
            if time.monotonic() > deadline:
                wrong.append(f"{name} at {replica.container[:12]}: {said}, not {truth[name]}")
                break
            time.sleep(0.2)
    connection.close()
    return wrong
