"""Readers that query every instance continuously and keep every answer with the times of query and response.

A few threads per instance, each with its own connection and random generator; shared lists are only appended to.
"""

from __future__ import annotations

import http.client
import itertools
import random
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from tests.support.api import Connection, Reply, cents_of, query

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.chaos.workload import Customers

_THREADS_PER_INSTANCE = 4
_TIMEOUT_SECONDS = 3.5
_PATIENT_SECONDS = 20.0
_AFTER_SILENCE_SECONDS = 0.1
_UNAVAILABLE = 503
_HOT_SHARE = 0.3
_MAX_LAGS = (0, 2, 20, 200, 5_000)


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer. Both times are monotonic; the bounds are those of the query."""

    sent: float
    received: float
    asked: str
    customer: str
    max_lag: int | None
    min_position: int | None
    status: int
    server: str
    role: str
    partition: int
    position: int
    epoch: int
    lag: int | None
    cents: int | None
    retry_after: bool
    detail: str

    @property
    def speaks(self) -> bool:
        """Whether the answer makes a statement about a customer."""
        return self.status in (200, 404) and self.position >= 0


@dataclass(frozen=True, slots=True)
class Question:
    """A query with its bounds."""

    customer: str
    max_lag: int | None = None
    min_position: tuple[int, int] | None = None

    @property
    def target(self) -> str:
        at = self.min_position
        return query(self.customer, self.max_lag, None if at is None else f"{at[0]}:{at[1]}")


class Readers:
    """All readers. Started and stopped by one thread; `connect_ahead` is thread-safe."""

    def __init__(
        self,
        addresses: Sequence[tuple[str, int]],
        customers: Customers,
        acked: Mapping[int, int],
        seed: int,
        rate: float,
    ) -> None:
        """Args:
        acked: partition → a position that the service will certainly reach.
        rate: queries per second of all readers together.
        """
        self._addresses = addresses
        self._customers = customers
        self._acked = acked
        self._seed = seed
        self._pause = len(addresses) * _THREADS_PER_INSTANCE / rate
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self.answers: list[Answer] = []
        self.owners: dict[int, tuple[int, str]] = {}
        """Partition → the highest epoch of an owner's answer, and that owner."""
        self.silences: Counter[str] = Counter()
        """Number of requests without a response, by address."""
        self.failures: list[str] = []

    def __enter__(self) -> Self:
        for host, port in self._addresses:
            for number in range(_THREADS_PER_INSTANCE):
                chooser = random.Random(f"{self._seed}-reader-{port}-{number}")
                self._threads.append(
                    threading.Thread(target=self._run, args=(host, port, chooser), name=f"reader-{port}-{number}")
                )
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def take(self) -> list[Answer]:
        """Returns and clears the answers."""
        taken, self.answers = self.answers, []
        return taken

    def owned_by(self, address: str) -> set[int]:
        """Returns the partitions that an instance was last seen to own."""
        return {p for p, (_, server) in self.owners.copy().items() if server == address}

    def connect_ahead(self, host: str, port: int, partitions: set[int], count: int = 12) -> QueuedQueries:
        """Opens connections to an instance before its pause, for `count` queries about each partition."""
        homes: dict[int, list[str]] = defaultdict(list)
        for name in self._customers.early:
            homes[self._customers.homes[name.encode()]].append(name)
        return QueuedQueries(self, host, port, {partition: homes[partition][:count] for partition in partitions})

    def ask(self, connection: Connection, asked: str, question: Question) -> Answer | None:
        """Sends a query and keeps the answer; returns None without one."""
        sent = time.monotonic()
        try:
            reply = connection.ask(question.target)
        except (OSError, http.client.HTTPException):
            self.silences[asked] += 1
            return None
        return self.note(asked, question, sent, reply)

    def note(self, asked: str, question: Question, sent: float, reply: Reply) -> Answer:
        """Keeps an answer."""
        headers = reply.headers
        partition, _, position = headers.get("balance-position", "-1:-1").partition(":")
        lag = headers.get("balance-lag")
        answer = Answer(
            sent,
            time.monotonic(),
            asked,
            question.customer,
            question.max_lag,
            question.min_position[1] if question.min_position is not None else None,
            reply.status,
            headers.get("balance-application-server", ""),
            headers.get("balance-role", ""),
            int(partition),
            int(position),
            int(headers.get("balance-epoch", "-1")),
            None if lag is None else int(lag),
            cents_of(reply.body) if reply.status == 200 else None,
            "retry-after" in headers,
            "" if reply.status == 200 else reply.body.decode(errors="replace"),
        )
        self.answers.append(answer)
        if answer.role == "active" and answer.epoch > self.owners.get(answer.partition, (0, ""))[0]:
            self.owners[answer.partition] = answer.epoch, answer.server
        return answer

    def _run(self, host: str, port: int, chooser: random.Random) -> None:
        address = f"{host}:{port}"
        connection = Connection(host, port, _TIMEOUT_SECONDS)
        everybody = self._customers.everybody
        try:
            while not self._stopping.wait(chooser.uniform(0.5, 1.5) * self._pause):
                answer = self.ask(connection, address, self._draw(chooser, everybody))
                if answer is None or answer.status == _UNAVAILABLE:
                    self._stopping.wait(_AFTER_SILENCE_SECONDS)
        except Exception as error:
            self.failures.append(f"{threading.current_thread().name}: {error!r}")
            raise
        finally:
            connection.close()

    def _draw(self, chooser: random.Random, everybody: Sequence[str]) -> Question:
        hot = self._customers.hot if chooser.random() < _HOT_SHARE else everybody
        customer, luck = chooser.choice(hot), chooser.random()
        if luck < 0.5:
            return Question(customer)
        if luck < 0.9:
            return Question(customer, chooser.choice(_MAX_LAGS))
        home = self._customers.homes.get(customer.encode())
        if home is None:
            return Question(customer)
        return Question(customer, None, (home, self._acked.get(home, 0)))


class QueuedQueries:
    """Plain queries that a paused instance finds in its sockets when it resumes. Used by one thread.

    Uses connections opened before: while the instance accepted new ones, it would learn that it lost its partitions.
    """

    def __init__(self, readers: Readers, host: str, port: int, customers: Mapping[int, Sequence[str]]) -> None:
        self._readers = readers
        self._asked = f"{host}:{port}"
        self._pending: list[tuple[Connection, Question, float]] = []
        self._connections = {
            partition: [(Connection(host, port, _PATIENT_SECONDS), Question(name)) for name in names]
            for partition, names in customers.items()
        }
        for connection, _ in itertools.chain.from_iterable(self._connections.values()):
            connection.open()

    def send(self, partitions: set[int]) -> None:
        """Queries customers of some partitions."""
        for partition in partitions:
            for connection, question in self._connections[partition]:
                sent = time.monotonic()
                connection.send(question.target)
                self._pending.append((connection, question, sent))

    def collect(self) -> None:
        """Waits for the answers and closes the connections."""
        for connection, question, sent in self._pending:
            try:
                self._readers.note(self._asked, question, sent, connection.receive())
            except (OSError, http.client.HTTPException):
                self._readers.silences[self._asked] += 1
        for connection, _ in itertools.chain.from_iterable(self._connections.values()):
            connection.close()
