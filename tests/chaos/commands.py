"""A client that adds funds through whatever instance answers, and tries again with the same Idempotency-Key.

One thread. Each 202 is a promise: the event is in the source, at the position that the answer names.
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
    """What a 202 says."""

    customer: str
    cents: int
    partition: int
    position: int
    token: str | None
    """The Idempotency-Key."""


class Commands:
    """Posts until told to stop."""

    def __init__(self, addresses: Sequence[tuple[str, int]], customers: Customers, seed: int) -> None:
        self._addresses = addresses
        self._customers = customers
        self._chooser = random.Random(f"{seed}-commands")
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="commands")
        self.promises: list[Promise] = []
        self.statuses: Counter[int] = Counter()
        """Answers by status; 0: none."""
        self._refusals: list[str] = []
        self._accepted = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Post no more. Idempotent."""
        self._stopping.set()
        self._thread.join()

    def take_refusals(self) -> list[str]:
        """Answers that no client who asks properly should ever get; they are kept no longer."""
        taken, self._refusals = self._refusals, []
        return taken

    def take_accepted(self) -> int:
        """How many events were accepted since this was last asked."""
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
        """Until one answers 202; without a key only once, since nobody knows what became of the first try."""
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
