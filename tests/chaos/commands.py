"""A client that adds funds through any instance and retries with the same Idempotency-Key.

Uses one thread. Each 202 promises that the event is in the source, at the position in the response.
"""

from __future__ import annotations

import http.client
import random
import threading
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple, Self

from tests.support.api import ADD_FUNDS, Connection, Reply

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.chaos.workload import Customers

_PAUSE_SECONDS = 0.2
_TIMEOUT_SECONDS = 5.0
_ATTEMPTS = 4


class Promise(NamedTuple):
    """The content of a 202."""

    customer: str
    cents: int
    partition: int
    position: int
    token: str | None
    """The Idempotency-Key."""


class Commands:
    """Posts commands until `stop`."""

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
        connection = Connection(*self._chooser.choice(self._addresses), _TIMEOUT_SECONDS)
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
