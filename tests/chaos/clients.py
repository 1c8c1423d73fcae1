"""The clients of the cluster: readers, a client that adds funds, an operator, and an enquiry after each round."""

from __future__ import annotations

import http.client
import itertools
import random
import threading
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import httpx

from tests.chaos.checks import Violation
from tests.chaos.report import unstolen_time
from tests.chaos.workload import HEALING
from tests.support.api import ADD_FUNDS, Connection, Reply, cents_of, query

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tests.chaos.cluster import Member
    from tests.chaos.workload import Customers


_THREADS_PER_INSTANCE = 4
_TIMEOUT_SECONDS = 3.5
_PATIENT_SECONDS = 20.0
_AFTER_SILENCE_SECONDS = 0.1
_UNAVAILABLE = 503
_HOT_SHARE = 0.3
_MAX_LAGS = (0, 2, 20, 200, 5_000)
_PAUSE_SECONDS = 0.2
_COMMAND_TIMEOUT_SECONDS = 5.0
_ATTEMPTS = 4
_ASK_SECONDS = 10.0
_REDRIVE_PAUSE_SECONDS = 0.5
_MOST_IDS = 500
_SHOWN = 3
_CUSTOMERS = 40
_MAX_LAG = 5_000
_ENQUIRY_PAUSE_SECONDS = 0.1


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
    generation: int
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
    """Query every instance continuously and keep every answer with the times of query and response.

    A few threads per instance, each with its own connection and random generator; shared lists are only appended to.
    Started and stopped by one thread; `connect_ahead` is thread-safe.
    """

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
        self._owners: dict[int, str] = {}
        """Partition → the owner that answered last, of those with the highest epoch of their generation."""
        self._epochs: dict[tuple[int, int], int] = {}
        """Generation and partition → the highest epoch of an owner's answer."""
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
        return {p for p, server in self._owners.copy().items() if server == address}

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
            int(headers.get("balance-generation", "-1")),
            int(partition),
            int(position),
            int(headers.get("balance-epoch", "-1")),
            None if lag is None else int(lag),
            cents_of(reply.body) if reply.status == 200 else None,
            "retry-after" in headers,
            "" if reply.status == 200 else reply.body.decode(errors="replace"),
        )
        self.answers.append(answer)
        place = answer.generation, answer.partition
        if answer.role == "active" and answer.epoch >= self._epochs.get(place, 0):
            self._epochs[place] = answer.epoch
            self._owners[answer.partition] = answer.server
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


class Promise(NamedTuple):
    """The content of a 202."""

    customer: str
    cents: int
    partition: int
    position: int
    token: str | None
    """The Idempotency-Key."""


class Commands:
    """Adds funds through any instance until `stop`, in one thread; retries with the same Idempotency-Key.

    Each 202 promises that the event is in the source, at the position in the response.
    """

    def __init__(self, addresses: Sequence[tuple[str, int]], customers: Customers, seed: int) -> None:
        self._addresses = addresses
        self._customers = customers
        self._chooser = random.Random(f"{seed}-commands")
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="commands")
        self.promises: list[Promise] = []
        self.statuses: Counter[int] = Counter()
        """Responses by status; 0 stands for none."""
        self._refusals: list[str] = []
        self._accepted = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stops posting. Idempotent."""
        self._stopping.set()
        self._thread.join()

    def take_refusals(self) -> list[str]:
        """Returns and clears the unexpected responses."""
        taken, self._refusals = self._refusals, []
        return taken

    def take_accepted(self) -> int:
        """Returns the number of events accepted since the last call."""
        accepted = self.statuses[202] - self._accepted
        self._accepted += accepted
        return accepted

    def _run(self) -> None:
        count = 0
        while not self._stopping.wait(_PAUSE_SECONDS):
            count += 1
            customer, cents = self._chooser.choice(self._customers.early), self._chooser.randint(1, 10**6)
            token = f"command-{self._chooser.getrandbits(32):x}-{count}" if self._chooser.random() < 0.6 else None
            for _ in range(self._chooser.randint(1, 2) if token else 1):
                self._add(customer, cents, token)

    def _add(self, customer: str, cents: int, token: str | None) -> None:
        """Posts until a 202; without a key only once, because the outcome of a failed attempt is unknown."""
        for _ in range(_ATTEMPTS if token else 1):
            reply = self._post(customer, cents, token)
            if reply is not None and reply.status == 202:
                partition, _, position = reply.headers["balance-position"].partition(":")
                self.promises.append(Promise(customer, cents, int(partition), int(position), token))
                return
            if self._stopping.wait(0.3):
                return

    def _post(self, customer: str, cents: int, token: str | None) -> Reply | None:
        connection = Connection(*self._chooser.choice(self._addresses), _COMMAND_TIMEOUT_SECONDS)
        body = {"customerId": customer, "amount": f"{cents // 100}.{cents % 100:02}"}
        try:
            reply = connection.post(ADD_FUNDS, body, {} if token is None else {"Idempotency-Key": token})
        except (OSError, http.client.HTTPException):
            self.statuses[0] += 1
            return None
        finally:
            connection.close()
        self.statuses[reply.status] += 1
        if reply.status not in (202, 503):
            self._refusals.append(f"{reply.status} {reply.body!r}")
        return reply


def redrive_all(members: Sequence[Member], seconds: float) -> Iterator[Violation]:
    """Redrives all readable dead letters until none is open, or `seconds` have passed."""
    began = unstolen_time()
    with httpx.Client(timeout=_ASK_SECONDS) as client, ThreadPoolExecutor(2) as both:
        while True:
            found = _open_letters(client, members[0])
            if found == []:
                return
            if unstolen_time() - began > seconds:
                detail = (
                    "the list is unavailable" if found is None else f"{len(found)} are open, such as {found[:_SHOWN]}"
                )
                yield Violation("stuck", f"dead letters do not heal: {detail}")
                return
            ids = [letter["id"] for letter in found or ()]
            for some in (ids[at : at + _MOST_IDS] for at in range(0, len(ids), _MOST_IDS)):
                list(both.map(partial(_redrive, client, some), members[:2]))
            time.sleep(_REDRIVE_PAUSE_SECONDS)


def _open_letters(client: httpx.Client, member: Member) -> list[dict[str, Any]] | None:
    """Returns the open dead letters of valid events; None if the list is unavailable."""
    found: list[dict[str, Any]] = []
    parameters = {"cause": "schema-id-unknown", "limit": "100"}
    while True:
        try:
            answer = client.get(f"{member.instance.url}/api/deadLetters", params=parameters)
        except httpx.HTTPError:
            return None
        if not answer.is_success:
            return None
        page = answer.json()
        found += [
            letter
            for letter in page["deadLetters"]
            if letter["status"] in ("scheduled", "parked") and (letter["key"] or "").startswith(HEALING.decode())
        ]
        if page["next"] is None:
            return found
        parameters["after"] = page["next"]


def _redrive(client: httpx.Client, ids: Sequence[str], member: Member) -> None:
    body = {"ids": ids, "reason": "their schema is registered"}
    try:
        client.post(f"{member.instance.url}/api/deadLetters.redrive", json=body)
    except httpx.HTTPError:
        return


class Enquiry:
    """Checks after each round that every instance answers at the present end of the source.

    Repeats queries until they are answered or the time limit, shared by all queries to one instance, expires.
    """

    def __init__(
        self,
        addresses: Sequence[tuple[str, int]],
        readers: Readers,
        customers: Customers,
        ends: Sequence[int],
        seconds: float,
    ) -> None:
        """Args:
        ends: by partition, the offset that every owner has applied.
        """
        self._connections = {f"{host}:{port}": Connection(host, port, _TIMEOUT_SECONDS) for host, port in addresses}
        self._readers = readers
        self._customers = customers
        self._ends = ends
        self._seconds = seconds

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()

    def all_instances_answer(self, chooser: random.Random) -> Iterator[Violation]:
        """Checks that every instance answers for customers of every partition, with each kind of bound."""
        customers = chooser.sample(self._customers.early, _CUSTOMERS)
        for asked in self._connections:
            deadline = unstolen_time() + self._seconds
            for question in (question for customer in customers for question in self._questions(customer)):
                while (answer := self._ask(asked, question)) is None and unstolen_time() < deadline:
                    time.sleep(_ENQUIRY_PAUSE_SECONDS)
                if answer is None:
                    yield Violation("silent", f"{asked} does not answer {question} at {self._ends}")
                    break

    def standbys_answer(self) -> Iterator[Violation]:
        """Checks that a standby answers for every partition."""
        deadline = unstolen_time() + self._seconds
        for partition in range(len(self._ends)):
            customer = next(c for c in self._customers.early if self._customers.homes[c.encode()] == partition)
            while "standby" not in self._roles(Question(customer, _MAX_LAG)):
                if unstolen_time() > deadline:
                    yield Violation("silent", f"no standby answers for partition {partition}")
                    break
                time.sleep(_ENQUIRY_PAUSE_SECONDS)

    def _questions(self, customer: str) -> tuple[Question, ...]:
        home = self._customers.homes[customer.encode()]
        return Question(customer), Question(customer, None, (home, self._ends[home])), Question(customer, _MAX_LAG)

    def _roles(self, question: Question) -> set[str]:
        answers = [self._ask(asked, question) for asked in self._connections]
        return {answer.role for answer in answers if answer is not None}

    def _ask(self, asked: str, question: Question) -> Answer | None:
        """Returns an answer that is recent enough; None without one."""
        answer = self._readers.ask(self._connections[asked], asked, question)
        if answer is None or not answer.speaks:
            return None
        may_be_behind = question.max_lag or 0
        return answer if answer.position >= self._ends[answer.partition] - may_be_behind else None
