"""The enquiry after each round: every instance must answer, from the present end on."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tests.chaos.checks import Violation
from tests.chaos.journal import unstolen_time
from tests.chaos.readers import Question
from tests.support.api import Connection

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Sequence

    from tests.chaos.readers import Answer, Readers
    from tests.chaos.workload import Customers

_CUSTOMERS = 40
_MAX_LAG = 5_000
_TIMEOUT_SECONDS = 3.5
_AGAIN_SECONDS = 0.1


class Enquiry:
    """Repeats queries until they are answered or the time limit, shared by all queries to one instance, expires."""

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
                    time.sleep(_AGAIN_SECONDS)
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
                time.sleep(_AGAIN_SECONDS)

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
